"""GradScaler: an infinity on one rank's shard alone, and every rank does what the plain scaler does."""

import functools

import pytest
import torch
from _support.models import Lm, lm_loss, tokens
from _support.side_by_side import Sides, side_by_side
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh

from parallel3d import (
    MeshError,
    MeshLayout,
    MixedPrecisionPolicy,
    StateError,
    build_mesh,
    optim,
    parallelize,
)
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.fsdp import fully_shard
from parallel3d.testing import fake_world, record_collectives

TINY = functools.partial(Lm, layers=1)


def spoil(sides: Sides, rank: int) -> None:
    """Puts an infinity into one gradient, on ``rank`` alone."""

    def of(each: int) -> torch.Tensor:
        return torch.tensor(float("inf") if each == rank else 0.0, dtype=torch.float64)

    added = of(dist.get_rank()) if sides.world is None else sides.world.map(of)
    get_local_tensor(sides.model.layers[0].up.weight.grad).add_(added)


def check(sizes: tuple[int, int, int], kind: str = "", ignore: bool = False) -> None:
    """Four steps, one of them with an infinity; unscaled by hand in some."""

    def apply(model: nn.Module, mesh) -> nn.Module:
        if not ignore:
            return parallelize(model, mesh, {"layers.*.up": "colwise", "layers.*.down": "rowwise"})
        ignored = {model.norm.weight}  # plain: same batch everywhere, so its gradient is right
        return fully_shard(model, mesh=mesh, ignored_params=ignored)

    options = {"fused": True} if kind == "fused" else {"foreach": kind == "foreach"}
    with side_by_side(sizes, TINY, apply) as sides:
        plain = torch.optim.AdamW(sides.plain.parameters(), lr=1e-2)
        ours = torch.optim.AdamW(sides.model.parameters(), lr=1e-2, **options)
        settings = {"init_scale": 2.0**6, "growth_interval": 2}
        with sides.outside():
            theirs = torch.amp.GradScaler("cpu", **settings)
        scaler = optim.GradScaler("cpu", **settings)
        for step in range(4):
            same = ignore  # one sample for all
            with sides.outside():
                loss = lm_loss(sides.plain, tokens(step)) if same else sides.plain_loss(step)
                theirs.scale(loss).backward()
                if step == 1:
                    next(sides.plain.parameters()).grad[0] = float("inf")
                theirs.step(plain)
                theirs.update()
                plain.zero_grad()
            loss = (
                lm_loss(sides.model, sides.mine(lambda _, s=step: tokens(s)))
                if same
                else sides.loss(step)
            )
            scaler.scale(loss).backward()
            if step == 1:
                spoil(sides, sides.layout.world_size - 1)
            if step > 1:
                scaler.unscale_(ours)
            scaler.step(ours)
            scaler.update()
            ours.zero_grad()
            assert scaler.get_scale() == theirs.get_scale()
            sides.check()
        assert theirs.get_scale() == 2.0**6


@pytest.mark.parametrize(
    ("sizes", "kind"), [((2, 2, 1), "foreach"), ((1, 2, 2), ""), ((1, 4, 1), "foreach")], ids=str
)
def test_as_the_plain_scaler(sizes, kind) -> None:
    check(sizes, kind)


def rank_alone() -> list[float]:
    """An infinity on rank 1 of four: what each finds, over several meshes' ranks."""
    mesh = build_mesh(MeshLayout(2, 2, 1), device_type="cpu")
    found = []
    for over in (None, mesh, mesh["shard"], mesh["replicate"], mesh["shard", "tp"]):
        param = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler = optim.GradScaler("cpu", mesh=over)
        loss = param.sum() * (float("inf") if dist.get_rank() == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale() / 2.0**16)
    return found


def on_processes() -> list[float]:
    check((1, 2, 2), "fused")
    check((2, 2, 1), ignore=True)
    return rank_alone()


def test_on_processes(gloo_pool) -> None:
    """Also the step of a fused optimizer, which unscales by itself; and ignored parameters."""
    found = gloo_pool.run(on_processes, world_size=4)
    shard = [0.5, 0.5, 1.0, 1.0]
    by_mesh = [list(each) for each in zip(*found, strict=True)]
    assert by_mesh == [[0.5] * 4, [0.5] * 4, shard, [1.0, 0.5, 1.0, 0.5], shard]


def test_one_small_collective() -> None:
    """For each ``unscale_``; also on a rank without any gradient."""
    with fake_world(0, 4):
        mesh = build_mesh(MeshLayout(2, 2, 1), device_type="cpu")
        model = parallelize(Lm(layers=1), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = optim.GradScaler("cpu")
        scaler.scale(lm_loss(model, tokens(0))).backward()
        for _ in range(2):
            with record_collectives(mesh) as recorder:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            assert [(c.op, c.bytes, c.group_size) for c in recorder.calls] == [("all_reduce", 4, 4)]
            optimizer.zero_grad()


def test_sums_that_wait() -> None:
    with fake_world(0, 4):
        mesh = build_mesh(MeshLayout(2, 2, 1), device_type="cpu")
        model = parallelize(Lm(layers=1), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = optim.GradScaler("cpu")
        model.set_requires_all_reduce(False)
        scaler.scale(lm_loss(model, tokens(0))).backward()
        before = get_local_tensor(model.norm.weight.grad).clone()
        with pytest.raises(StateError, match="last micro-batch"):
            scaler.unscale_(optimizer)
        assert torch.equal(get_local_tensor(model.norm.weight.grad), before)


def test_float16() -> None:
    """Computed and reduced in float16: what overflows there is skipped; and float16 parameters."""
    with fake_world(0, 1):
        mesh = build_mesh(MeshLayout(1, 1, 1), device_type="cpu")
        policy = MixedPrecisionPolicy(param_dtype=torch.float16)
        model = parallelize(Lm(layers=1), mesh, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = optim.GradScaler("cpu", init_scale=2.0**30)
        before = get_local_tensor(model.head.weight).clone()
        scales = []
        while torch.equal(before, get_local_tensor(model.head.weight)):
            scaler.scale(lm_loss(model, tokens(0)).float()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert len(scales) > 5 and scales[-1] == scales[-2]

        half = nn.Parameter(torch.ones(3, dtype=torch.float16))
        scaler = optim.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD([half], lr=0.5)
        scaler.scale(half.sum()).backward()
        scaler.step(optimizer)
        assert half.tolist() == [0.5] * 3


def test_sparse_gradients_and_several_outputs() -> None:
    plain = nn.Embedding(5, 2, sparse=True)
    scaler = optim.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    before = plain.weight.detach().clone()
    first, second = scaler.scale([plain(torch.tensor([1, 1])).sum(), plain(torch.tensor(1)).sum()])
    (first + second).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(
        before - plain.weight, torch.tensor([[0.0], [3], [0], [0], [0]]).expand(5, 2)
    )


def test_its_state_is_torchs() -> None:
    scaler = optim.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    other.scale(torch.ones(()))
    assert other.get_scale() == 8.0


def test_no_mesh() -> None:
    with pytest.raises(MeshError, match="must be a DeviceMesh"):
        optim.GradScaler("cpu", mesh="all")
    with fake_world(0, 8):
        with pytest.raises(MeshError, match="without names"):
            optim.GradScaler("cpu", mesh=DeviceMesh("cpu", [[0, 1], [2, 3]]))
        with pytest.raises(MeshError, match="not in"):
            optim.GradScaler("cpu", mesh=DeviceMesh("cpu", [4, 5, 6, 7]))
