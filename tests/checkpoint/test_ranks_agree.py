"""Ranks that call save or load with different arguments, and a process group that goes during a save."""

import os
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

import parallel3d as p3d
from parallel3d import MeshLayout
from parallel3d.checkpoint import latest, load, save
from parallel3d.errors import CheckpointError
from parallel3d.testing import GlooPool


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    mesh = p3d.build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
    return p3d.parallelize(model, mesh)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def different_arguments(path: str) -> None:
    rank = dist.get_rank()
    model, run = build(), f"{path}/run"
    optimizer = adamw(model)
    save(run, model, optimizer, step=1)
    with pytest.raises(
        CheckpointError, match=r"save: step differs: 2 on rank 0, 3 on rank 1; give"
    ):
        save(run, model, step=2 + rank)
    with pytest.raises(CheckpointError, match=r"save: only differs"):
        save(run, model, step=2, only="trainable" if rank else None)
    with pytest.raises(
        CheckpointError, match=r"save: optimizers differs: 1 on rank 0, 0 on rank 1"
    ):
        save(run, model, None if rank else optimizer, step=2)
    with pytest.raises(CheckpointError, match=r"save: step differs"):
        save(run, model, step=2 + rank, async_=True).result()
    other = build(1)
    before = [p.detach().to_local().clone() for p in other.parameters()]
    fresh = adamw(other)
    with pytest.raises(
        CheckpointError, match=r"load: optimizers differs: 1 on rank 0, 0 on rank 1"
    ):
        load(run, other, None if rank else fresh)
    after = [p.detach().to_local() for p in other.parameters()]
    assert all(map(torch.equal, before, after))
    assert not fresh.state
    assert os.listdir(run) == ["step-00000001"]


def test_different_arguments(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(different_arguments, str(tmp_path), world_size=2)


def group_destroyed(path: str) -> None:
    model, run = build(), f"{path}/run"
    save(run, model, step=1, keep=1)
    under_way = save(run, model, step=2, keep=1, async_=True)
    dist.destroy_process_group()
    saved = under_way.exception(60) is None  # it was faster than that
    dist.init_process_group(
        "gloo", init_method=f"file://{path}/again", rank=int(os.environ["RANK"]), world_size=2
    )
    told = [False, False]
    dist.all_gather_object(told, saved)
    step = load(run, model).step
    assert step == 2 or (step == 1 and not any(told))
    found = latest(run)
    assert found is not None
    assert found.name == f"step-0000000{step}"


def test_group_destroyed_during_a_save(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """What is there stays, and nobody is told that the new one was written."""
    gloo_pool.run(group_destroyed, str(tmp_path), world_size=2)
