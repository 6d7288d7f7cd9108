"""The dim that is sharded by default: another than the first where padding would be much."""

import functools
from pathlib import Path

import pytest
import torch
from _support.ep.models import Mixture, Transposed, batch, loss
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard

import parallel3d as p3d
from parallel3d import Checks, MeshLayout, Sharding, build_mesh, parallelize
from parallel3d.fsdp import layout as layouts
from parallel3d.fsdp.layout import default_dim
from parallel3d.testing import GlooPool, assert_parity, fake_world

MANY = 2**20


@pytest.mark.parametrize(
    ("shape", "works", "cut", "ranks", "dim"),
    [
        ((8, 14336, 4096), (0, 1, 2), (), 32, 1),  # eight experts
        ((8, 14336, 4096), (0, 1, 2), (1,), 32, 2),  # whose rows tp cuts
        ((8, 14335, 4096), (0, 1, 2), (), 32, 2),
        ((8, 14336, 4096), (0, 1, 2), (), 8, 0),
        ((8, 14335, 4095), (0, 1, 2), (), 32, 0),  # nothing divides the others
        ((64, 1408, 2048), (0, 1, 2), (), 60, 0),  # 60 divides nothing
        ((60, 1408, 2048), (0, 1, 2), (), 64, 0),  # 7 %
        ((40, 1408, 2048), (0, 1, 2), (), 64, 1),  # 60 %
        ((1024, 16384), (0, 1), (), 2048, 1),  # keys of 405B on 2,048 ranks
        ((50257, 768), (0, 1), (), 64, 0),  # 0.1 %
        ((8, 1024), (0, 1), (), 32, 0),  # small: not worth a difference from torch
        ((8, 14336, 4096), (), (), 32, None),
        ((8, 14336, 4096), (0, 1, 2), (), 1, 0),
    ],
)
def test_which(shape, works, cut, ranks, dim) -> None:
    assert default_dim(shape, works, cut, ranks) == dim


def placements(model: nn.Module, layout: MeshLayout) -> dict[str, int]:
    """The dim of each parameter that the shard axis shards."""
    with fake_world(0, layout.world_size):
        mesh = build_mesh(layout, device_type="cpu")
        model = parallelize(model, mesh, checks=Checks(audit=False))
        found = {}
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            (found[name],) = [p.dim for p in param.placements if isinstance(p, Shard)]
        return found


def test_of_torch_but_for_large_parameters_with_much_padding(monkeypatch) -> None:
    layout = MeshLayout(1, 8, 1)
    assert set(placements(Mixture(), layout).values()) == {0}
    monkeypatch.setattr(layouts, "LEAST_ELEMENTS", 0)
    found = placements(Mixture(), layout)
    other = {name for name, dim in found.items() if dim != 0}
    # 4 experts of 12 x 8, 8 x 12 and 8; the router's 4 rows. 17 rows of the vocabulary are 24 on 8 ranks.
    inside = {
        f"layers.{n}.{p}" for n in (0, 1) for p in ("experts.down", "experts.bias", "router.weight")
    }
    assert other == inside | {f"layers.{n}.experts.up" for n in (0, 1)} | {
        "embed.weight",
        "head.weight",
    }
    assert found["layers.0.experts.up"] == 2 and found["layers.0.experts.down"] == 1


@pytest.mark.parametrize(
    "layout",
    [
        {"shard": 8},
        {"replicate": 2, "shard": 6},
        {"shard": 4, "tp": 2},
        {"replicate": 3, "shard": 5},
    ],
    ids=str,
)
def test_as_the_plain_model(layout, monkeypatch) -> None:
    """Also where nothing divides a dim (5 ranks), and beside tp."""
    monkeypatch.setattr(layouts, "LEAST_ELEMENTS", 0)
    found = check(layout, functools.partial(Mixture, experts=3))
    assert found.grads["float64"] < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"fsdp": Sharding(reshard_after_forward=False)},
        {"activation_checkpointing": True},
        {"micro_batches": 3},
        {"micro_batches": 3, "defer": "sync"},
    ],
    ids=str,
)
def test_options(options, monkeypatch) -> None:
    monkeypatch.setattr(layouts, "LEAST_ELEMENTS", 0)
    build = functools.partial(Mixture, Transposed, 3)
    assert check({"shard": 4}, build, steps=2, fp32=False, **options)


def check(layout, build, **options):
    layout = MeshLayout(**layout)
    plan = {"layers.*.shared": "colwise_gather_output"} if layout.tp > 1 else None
    checks = Checks(audit=False)
    return assert_parity(build, batch, layout, loss=loss, tp_plan=plan, checks=checks, **options)


def trained(least: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose parameters of ``least`` elements are sharded so, after some steps."""
    layouts.LEAST_ELEMENTS = least
    try:
        torch.manual_seed(0)
        mesh = build_mesh(MeshLayout(1, dist.get_world_size(), 1), device_type="cpu")
        model = parallelize(Mixture(experts=3), mesh, checks=Checks(audit=False))
    finally:
        layouts.LEAST_ELEMENTS = MANY
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        loss(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [
        optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")
    ]
    return [t.full_tensor() for t in (*model.parameters(), *states)]


def old_into_new(path: str) -> None:
    """What was saved with Shard(0) is loaded where it is another dim, and the reverse."""
    for number, (before, after) in enumerate(((MANY, 0), (0, MANY))):
        model, optimizer = trained(before, 2)
        other, fresh = trained(after, 1)
        key = "layers.0.experts.down"
        placed = [dict(m.named_parameters())[key].placements for m in (model, other)]
        assert sum(p == Shard(1) for each in placed for p in each) == 1
        expected = whole(model, optimizer)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{path}/dcp{number}")
        p3d.checkpoint.save(f"{path}/own{number}", model, optimizer, step=2)
        weights, state = get_state_dict(other, fresh)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{path}/dcp{number}")
        set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
        assert all(map(torch.equal, whole(other, fresh), expected))
        other, fresh = trained(after, 1)
        p3d.checkpoint.load(f"{path}/own{number}", other, fresh)
        assert all(map(torch.equal, whole(other, fresh), expected))
        for found, step in ((model, optimizer), (other, fresh)):
            loss(found, batch(7)).backward()
            step.step()
        for a, b in zip(whole(other, fresh), whole(model, optimizer), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_checkpoints_of_the_other_dim(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(old_into_new, str(tmp_path), world_size=4)
