"""Optimizers on local tensors, on real processes: training, and checkpoints that go to other meshes."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn, optim
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.optim import clip_grad_norm_, local
from parallel3d.testing import shards_of

Make = Callable[[nn.Module], optim.Optimizer]


def plain_model() -> Lm:
    torch.manual_seed(0)
    return Lm().double()


def train(model: nn.Module, optimizer: optim.Optimizer, layout: MeshLayout, steps: range) -> None:
    """The plain model reads what all data ranks do."""
    parallel = isinstance(next(model.parameters()), DTensor)
    ranks = [layout.data_rank(dist.get_rank())] if parallel else range(layout.data_size)
    for step in steps:
        for rank in ranks:
            (lm_loss(model, tokens(10 * step + rank)) / len(ranks)).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def compare(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        for _, box, part in shards_of(q.detach()):
            torch.testing.assert_close(part, p.detach()[box], rtol=0, atol=1e-11, msg=name)


FIRST, SECOND = MeshLayout(1, 2, 2), MeshLayout(2, 2, 1)


def save_and_go_on(path: str, plainly: Make, before: Make, after: Make) -> None:
    """Two steps on one mesh by ``before``; the rest on another by ``after``, against ``plainly``."""
    model = parallelize(plain_model(), build_mesh(FIRST, device_type="cpu"), LM_PLAN)
    optimizer = before(model)
    train(model, optimizer, FIRST, range(2))
    plain = plain_model()
    plain_optimizer = plainly(plain)
    train(plain, plain_optimizer, FIRST, range(2))
    compare(model, plain)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)

    model = parallelize(plain_model(), build_mesh(SECOND, device_type="cpu"))
    optimizer = after(model)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, SECOND, range(2, 4))
    train(plain, plain_optimizer, SECOND, range(2, 4))
    compare(model, plain)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        for key, want in plain_optimizer.state.get(p, {}).items():
            for _, box, part in shards_of(optimizer.state[q][key]):
                torch.testing.assert_close(part, want[box], rtol=0, atol=1e-11, msg=key)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def adamw(make: Callable, model: nn.Module) -> optim.Optimizer:
    """Two groups, which cut across the buckets; the blocks' are whole in the first."""
    head = list(model.head.parameters())
    rest = [p for p in model.parameters() if all(p is not h for h in head)]
    return make([{"params": rest}, {"params": head, "weight_decay": 0.0}], lr=1e-2)


def on_matrices(make: Callable, model: nn.Module) -> optim.Optimizer:
    return make(matrices(model), lr=1e-2)


DIRECT = functools.partial(adamw, optim.AdamW)
OURS = functools.partial(adamw, functools.partial(local, optim.AdamW))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(OURS, DIRECT, id="to torch"),
        pytest.param(OURS, OURS, id="local", marks=pytest.mark.slow),
        pytest.param(DIRECT, OURS, id="from torch", marks=pytest.mark.slow),
    ],
)
def test_training_and_checkpoints(gloo_pool, tmp_path: Path, before: Make, after: Make) -> None:
    gloo_pool.run(save_and_go_on, str(tmp_path), DIRECT, before, after, world_size=4)


@pytest.mark.parametrize("cls", [optim.Muon, pytest.param(optim.Adafactor, marks=pytest.mark.slow)])
def test_optimizers_of_matrices(gloo_pool, tmp_path: Path, cls: Callable) -> None:
    ours = functools.partial(on_matrices, functools.partial(local, cls))
    plainly = functools.partial(on_matrices, cls)
    gloo_pool.run(save_and_go_on, str(tmp_path), plainly, ours, ours, world_size=4)
