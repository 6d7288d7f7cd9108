"""``MixedPrecisionPolicy.wire_dtype``: gradients sent in one dtype and summed in another, in rank order."""

import importlib
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from _support.ep.models import Mixture
from _support.ep.models import batch as experts_batch
from _support.ep.models import loss as experts_loss
from _support.fsdp.noted_streams import Device, find, happens_before
from _support.fsdp.wrapped import buckets
from _support.models import LM_PLAN, SEQUENCE_PLAN, Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel3d import (
    MeshLayout,
    MixedPrecisionPolicy,
    Parallel3dError,
    StateError,
    build_mesh,
    parallelize,
)
from parallel3d.fsdp import CommHookState, fully_shard, param, reduce_scatter_hook
from parallel3d.fsdp.collectives import ScatterWork
from parallel3d.parallelize import Checks, Sharding
from parallel3d.testing import assert_parity, fake_world, local_world, record_collectives, shards_of

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
WIRE = MixedPrecisionPolicy(BF16, FP32, wire_dtype=BF16)

# ---- the sum, by hand ----

SHAPES = {"even": (12, 4), "odd": (7, 3), "few": (2, 5), "bias": (5,)}
"""``even`` is sent from where autograd has put it; the last rank has no row of ``few`` on 3 or 4 ranks."""


class Terms(nn.Module):
    """A sum of products, so that a parameter's gradient is the factor that is passed: no rounding."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, *factors: torch.Tensor) -> torch.Tensor:
        """Several sets of factors: each recomputed by itself, so that as many gradients arrive."""
        if len(factors) == len(SHAPES):
            return self.products(torch.ones(()), *factors)
        one = torch.ones((), requires_grad=True)
        sets = zip(*[iter(factors)] * len(SHAPES), strict=True)
        return sum(checkpoint(self.products, one, *each, use_reentrant=True) for each in sets)

    def products(self, one: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        return one * sum((p * f).sum() for p, f in zip(self.parameters(), factors, strict=True))


def factors(sample: int) -> list[torch.Tensor]:
    """Of sizes that differ, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(sample)
    return [
        (torch.randn(shape, generator=generator) * 2.0 ** (sample % 5)).to(BF16)
        for shape in SHAPES.values()
    ]


class Sums(NamedTuple):
    """How a step sums: ``times`` micro-batches, and what all but the last leave out."""

    times: int = 1
    off: str = ""
    hfsdp: bool = False
    wire: torch.dtype = BF16
    compute: torch.dtype = BF16


def in_order(terms: list[torch.Tensor]) -> torch.Tensor:
    """Their sum in fp32, from the first to the last."""
    total = torch.zeros_like(terms[0], dtype=FP32)
    for term in terms:
        total = total + term.float()
    return total


def by_hand(layout: MeshLayout, how: Sums, scattered_twice: set[str]) -> dict[str, torch.Tensor]:
    """The gradients: nothing but sums of two tensors, and casts.

    Args:
        scattered_twice: names of what HFSDP shards over replicate too, whose sums are not gathered.
    """
    result = {}
    for at, name in enumerate(SHAPES):
        copies = []
        for replica in range(layout.replicate):
            ranks = range(replica * layout.shard, (replica + 1) * layout.shard)
            micros = [[factors(100 * m + rank)[at] for rank in ranks] for m in range(how.times)]
            if how.off == "one backward":  # the last ones come first
                micros.reverse()
            if how.off != "set_requires_all_reduce":  # this rank's own gradients are added first
                micros = [[in_order(list(own)) for own in zip(*micros, strict=True)]]
            scattered = []
            for sent in micros:
                wired = [g.to(how.wire) for g in sent] if layout.shard > 1 else sent
                scattered.append(in_order(wired).mul_(1 / layout.data_size))
            copies.append(in_order(scattered))
        total = copies[0]
        if layout.replicate > 1:
            total = in_order([copy.to(how.wire) for copy in copies])
            total = total if name in scattered_twice else total.to(how.wire).float()
        result[name] = total
    return result


def compare_with_hand(world, sizes: tuple[int, int], how: Sums) -> int:
    """Every bit of every rank's gradients; returns how many numbers were compared."""
    layout = MeshLayout(*sizes)
    mesh = build_mesh(layout, device_type="cpu")
    policy = MixedPrecisionPolicy(how.compute, FP32, wire_dtype=how.wire)
    model = fully_shard(
        Terms(), mesh=mesh, mp_policy=policy, shard_optimizer_over_replicate=how.hfsdp
    )
    given: list[torch.Tensor] = []
    for micro in range(how.times):
        if how.off in ("set_requires_gradient_sync", "set_requires_all_reduce"):
            getattr(model, how.off)(micro == how.times - 1)

        def sample(rank: int, at: int, micro: int = micro) -> torch.Tensor:
            return factors(100 * micro + layout.data_rank(rank))[at]

        given += [
            sample(dist.get_rank(), at)
            if world is None
            else world.map(lambda rank, at=at: sample(rank, at))
            for at in range(len(SHAPES))
        ]
        if how.off != "one backward" or micro == how.times - 1:
            model(*given).backward()
            given = []
    compared = 0
    with nullcontext() if world is None else world.paused():
        twice = {n for n, p in model.named_parameters() if not p.placements[0].is_replicate()}
        want = by_hand(layout, how, twice if how.hfsdp else set())
        for name, parameter in model.named_parameters():
            for rank, box, part in shards_of(parameter.grad):
                assert part.dtype is FP32
                assert torch.equal(part, want[name][box]), (name, rank)
                compared += part.numel()
    return compared


NUMEL = 12 * 4 + 7 * 3 + 2 * 5 + 5
WAYS = {
    "once": Sums(),
    "fp32 gradients": Sums(compute=FP32),
    "no_sync": Sums(3, "set_requires_gradient_sync"),
    "all-reduce off": Sums(3, "set_requires_all_reduce"),
    "three in one backward": Sums(3, "one backward"),
    "HFSDP": Sums(hfsdp=True),
    "HFSDP, all-reduce off": Sums(2, "set_requires_all_reduce", hfsdp=True),
    "fp32 wire": Sums(2, "set_requires_gradient_sync", wire=FP32),
}
MESHES = [(1, 4), (2, 2), (4, 1), (1, 3), (3, 1), (3, 2), (2, 3)]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_sum_is_in_rank_order_bit_for_bit(way: str, sizes: tuple[int, int], monkeypatch):
    monkeypatch.setattr(param, "CPU_BYTES", 4)  # ``even`` is zero-copy
    how = WAYS[way]
    if sizes[0] == 1 and (how.hfsdp or how.off == "set_requires_all_reduce"):
        how = how._replace(hfsdp=False, off="")._replace(times=1)
    with local_world(sizes[0] * sizes[1]) as world:
        copies = 1 if how.hfsdp else sizes[0]
        assert compare_with_hand(world, sizes, how) >= copies * NUMEL


def on_gloo(sizes: tuple[int, int], how: Sums) -> int:
    return compare_with_hand(None, sizes, how)


@pytest.mark.parametrize(
    ("way", "sizes"),
    [("once", (1, 4)), ("all-reduce off", (2, 2)), ("no_sync", (4, 1)), ("HFSDP", (2, 2))],
    ids=str,
)
def test_on_processes(gloo_pool, way: str, sizes: tuple[int, int]) -> None:
    assert all(gloo_pool.run(on_gloo, sizes, WAYS[way], world_size=4))


def test_of_more_ranks_too():
    """torch.sum has another order for them."""
    rows = torch.randn(40, 4099, generator=torch.Generator().manual_seed(0)).to(BF16)
    assert not torch.equal(rows.sum(dim=0, dtype=FP32), in_order(list(rows)))
    halves = [rows[:, :1000].contiguous(), rows[:, 1000:].contiguous()]
    assert torch.equal(ScatterWork(None, None, halves, dtype=FP32).wait(), in_order(list(rows)))


# ---- meshes with tp, experts, odd sizes ----

HALVED = MixedPrecisionPolicy(FP64, FP64, wire_dtype=FP32)
"""Of float64 as bf16 is of fp32: what is lost is 2**-24 of a summand, and of a sum over replicate."""


@pytest.mark.parametrize(
    ("layout", "plan", "options"),
    [
        (MeshLayout(1, 4, 1), None, {}),
        (MeshLayout(2, 2, 1), None, {}),
        (MeshLayout(1, 2, 2), LM_PLAN, {}),
        (MeshLayout(2, 1, 2), LM_PLAN, {}),
        (MeshLayout(2, 2, 2), SEQUENCE_PLAN, {}),
        (MeshLayout(1, 3, 2), LM_PLAN, {}),
        (MeshLayout(3, 1, 1), None, {"micro_batches": 2}),
        (MeshLayout(2, 2, 1), None, {"micro_batches": 2, "defer": "sync"}),
        (MeshLayout(2, 3, 1), None, {"fsdp": Sharding(shard_optimizer_over_replicate=True)}),
    ],
    ids=str,
)
def test_trains_as_the_plain_model(layout, plan, options):
    """Within the wire's rounding; rows of 7, 11 and 19."""

    def build():
        return Lm(dim=8, hidden=12, vocab=20) if plan is SEQUENCE_PLAN else Lm(7, 11, vocab=19)

    def loss(model, ids):
        return lm_loss(model, ids)

    def batch(index):
        return tokens(index, length=4)

    result = assert_parity(
        *(build, batch, layout),
        loss=loss,
        steps=2,
        fp32=False,
        tolerance=2e-7,
        tp_plan=plan,
        mp_policy=HALVED,
        **options,
    )
    assert result.grads["float64"] > 1e-12  # it was sent in fp32


@pytest.mark.parametrize("layout", [MeshLayout(2, 2, 1, ep=2), MeshLayout(1, 4, 1, ep=2)], ids=str)
def test_experts(layout):
    """Whose gradients are reduced over efsdp."""
    result = assert_parity(
        *(Mixture, experts_batch, layout),
        loss=experts_loss,
        steps=2,
        fp32=False,
        tolerance=2e-7,
        mp_policy=HALVED,
    )
    assert result.grads["float64"] > 1e-12


def audited_step(wire: torch.dtype) -> None:
    """The first step is compared with the plain computation, within the rounding of the dtypes."""
    policy = MixedPrecisionPolicy(None, FP32, wire_dtype=wire)
    mesh = build_mesh(MeshLayout(2, 2, 1), device_type="cpu")
    model = parallelize(Lm(), mesh, mp_policy=policy, checks=Checks(audit=True))
    lm_loss(model, tokens(dist.get_rank())).backward()


@pytest.mark.parametrize("wire", [BF16, FP32], ids=str)
def test_the_audit_allows_for_it(gloo_pool, wire):
    gloo_pool.run(audited_step, wire, world_size=4)


@pytest.mark.parametrize("layout", [MeshLayout(1, 4, 1), MeshLayout(1, 2, 2)], ids=str)
def test_gradients_in_the_dtype_of_the_wire_lose_nothing(layout):
    """bf16 gradients of one micro-batch, over shard: what fp32 sums of them are, at half the bytes."""
    grads = []
    for policy in (MixedPrecisionPolicy(BF16, FP32), WIRE):
        with local_world(4) as world:
            torch.manual_seed(0)
            plan = LM_PLAN if layout.tp > 1 else None
            mesh = build_mesh(layout, device_type="cpu")
            model = parallelize(Lm(), mesh, plan, mp_policy=policy)
            lm_loss(model, world.map(lambda rank: tokens(layout.data_rank(rank)))).backward()
            with world.paused():
                grads.append([s for p in model.parameters() for _, _, s in shards_of(p.grad)])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-7)


def test_errors_as_the_page_says(monkeypatch):
    """benchmarks/wire_error.py, on 8 ranks: docs/engine.md has its table."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    wire_error = importlib.import_module("wire_error")
    page = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    want = wire_error.exact(8, BF16)
    for sizes in ((1, 8), (8, 1)):
        cells = []
        for dtypes in wire_error.WAYS.values():
            with local_world(8) as world:
                policy = MixedPrecisionPolicy(param_dtype=BF16, **dtypes)
                found, _ = wire_error.reduced(world, MeshLayout(*sizes), policy)
            cells.append(wire_error.error(found, want))
        in_bf16, in_fp32, wired = cells
        assert in_fp32 < 1e-8 and wired == (
            in_fp32 if sizes[0] == 1 else pytest.approx(1.7e-3, 0.1)
        )
        assert in_bf16 == pytest.approx(3.6e-3, 0.1)
        row = next(
            line
            for line in page.splitlines()
            if line.startswith(f"| {sizes[0]} x {sizes[1]} | bf16")
        )
        shown = [float(cell) for cell in row.split("|")[3:6]]
        assert shown[::2] == pytest.approx(cells[::2], rel=0.1)


# ---- bytes, refusals, precision of its own ----


def sums_of(layout: MeshLayout, policy: MixedPrecisionPolicy) -> list[tuple[str, str, int]]:
    with fake_world(0, layout.world_size):
        mesh = build_mesh(layout, device_type="cpu")
        model = parallelize(Lm(dim=16, hidden=32, vocab=32), mesh, mp_policy=policy)
        lm_loss(model, tokens(0)).backward()
        model.zero_grad()
        loss = lm_loss(model, tokens(0))
        with record_collectives(mesh) as recorder:
            loss.backward()
    kinds = ("reduce_scatter", "all_reduce", "all_to_all")
    return [
        (call.op, str(call.axis), call.bytes)
        for call in recorder.calls
        if call.op in kinds or (call.op, call.axis) == ("all_gather", "replicate")
    ]


def test_half_the_bytes_are_sent():
    """An all-reduce of fp32 sends each number twice; so do the all-to-all and the all-gather of bf16."""
    layout = MeshLayout(2, 4, 1)
    usual = sums_of(layout, MixedPrecisionPolicy(BF16, FP32))
    wired = sums_of(layout, WIRE)
    assert {call[:2] for call in usual} == {
        ("reduce_scatter", "shard"),
        ("all_reduce", "replicate"),
    }
    for axis, ops in (("shard", ["all_to_all"]), ("replicate", ["all_to_all", "all_gather"])):
        sizes = [size for _, over, size in usual if over == axis]
        for op in ops:
            sent = [size for kind, over, size in wired if (kind, over) == (op, axis)]
            assert sent == [size // 2 for size in sizes]


def test_units_with_and_without_it_are_not_reduced_together():
    with fake_world(0, 4):
        mesh = build_mesh(MeshLayout(4, 1, 1), device_type="cpu")
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        for at, layer in enumerate(model):
            fully_shard(
                layer, mesh=mesh, mp_policy=WIRE if at < 2 else replace(WIRE, wire_dtype=None)
            )
        fully_shard(model, mesh=mesh)
        loss = model(torch.ones(2, 4)).sum()
        with record_collectives(mesh) as recorder:
            loss.backward()
    sent = [(call.op, call.bytes) for call in recorder.calls]
    assert sent == [("all_reduce", 160), ("all_to_all", 80), ("all_gather", 80)]


def test_values_that_no_policy_takes():
    for wire, reduced, match in [
        (torch.float16, FP32, "wire_dtype is torch.float16; it must be torch.bfloat16 or"),
        ("bf16", FP32, "wire_dtype is 'bf16'; it must be torch.bfloat16 or"),
        (BF16, None, "reduce_dtype, which is None; give reduce_dtype=torch.float32"),
        (FP32, BF16, "no wider than reduce_dtype, which is torch.bfloat16"),
        (BF16, torch.float16, "no wider than reduce_dtype, which is torch.float16"),
    ]:
        with pytest.raises(Parallel3dError, match=match):
            MixedPrecisionPolicy(reduce_dtype=reduced, wire_dtype=wire)


class Comm:
    """A collective of the user's, which is never called."""

    def allocate(self, size, *, dtype, device):
        raise NotImplementedError

    __call__ = allocate


def test_other_collectives_on_gradients_are_refused():
    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        model = fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=WIRE)
        for method, arguments in (
            ("register_comm_hook", (CommHookState(), reduce_scatter_hook)),
            ("set_custom_reduce_scatter", (Comm(),)),
        ):
            with pytest.raises(StateError, match=f"{method}: .*wire_dtype=.*leave wire_dtype out"):
                getattr(model, method)(*arguments)
        model.set_custom_all_gather(Comm())  # which is of parameters


def test_what_computes_in_its_own_dtype_is_sent_in_it():
    """Full-precision modules, chosen parameters, and units in ``eval()``."""
    policy = MixedPrecisionPolicy(
        *(BF16, FP32),
        full_precision_modules=(nn.LayerNorm,),
        full_precision_in_eval=True,
        wire_dtype=BF16,
    )
    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for training, ops in (
            (True, ["all_to_all", "reduce_scatter"]),
            (False, ["reduce_scatter"] * 2),
        ):
            model.train(training)
            loss = model(torch.ones(2, 4)).sum()
            with record_collectives(mesh) as recorder:
                loss.backward()
            reductions = [call.op for call in recorder.calls if call.op != "all_gather"]
            assert sorted(reductions) == ops
            sent = ["sent in bfloat16" in str(bucket) for bucket in buckets(model)]
            assert sent == [training, False]


# ---- on an accelerator ----


def test_streams(device: Device):
    """The all-to-all and its sum are on the reduce-scatters' stream, the other pair on the all-reduces'."""
    with fake_world(0, 4):
        mesh = build_mesh(MeshLayout(2, 2, 1), device_type="cpu")
        model = parallelize(Lm(layers=3), mesh, mp_policy=WIRE)
        for _ in range(2):
            device.log.clear()
            lm_loss(model, tokens(0)).backward()
            device.compute.put("optimizer")
    log = device.log
    (optimizer,) = find(log, "optimizer")
    for unit in ("layers.2", "layers.1", "layers.0"):
        scatter, second = find(log, f"reduce_scatter {unit}")
        (reduce,), gather = find(log, f"all_reduce {unit}"), find(log, f"all_gather {unit}")[-1]
        steps = [scatter, reduce, second, gather]
        assert [stream for _, stream, _ in steps] == ["scatter", *["replicate"] * 3]
        assert all(happens_before(a, b) for a, b in pairwise([*steps, optimizer]))
    (last,), following = find(log, "all_reduce layers.2"), find(log, "reduce_scatter layers.1")[0]
    assert not happens_before(last, following)  # the next one goes on beside it
