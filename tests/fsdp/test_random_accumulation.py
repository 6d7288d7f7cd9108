"""Random sequences of backwards, switches and edits of ``.grad`` end in the plain model's gradient."""

import copy
import random

import pytest
import torch
from _support.models import Block
from torch import nn

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.testing import local_world, shards_of

LAYOUTS = [MeshLayout(2, 2, 1), MeshLayout(3, 1, 1), MeshLayout(1, 3, 1), MeshLayout(2, 1, 2)]
BACKWARDS = ["reduced", "all-reduce put off", "sync put off"]
EDITS = ["set to None", "zero", "scale", "one to None", "nothing", "nothing"]
PLAN = {"0.up": "colwise", "0.down": "rowwise"}


def sequence(seed: int) -> list[tuple[str, str]]:
    """(backward, edit after it), the last one reduced and unedited."""
    chance = random.Random(seed)
    steps = [(chance.choice(BACKWARDS), chance.choice(EDITS)) for _ in range(chance.randint(2, 5))]
    return [*steps, ("reduced", "nothing")]


def edit(model: nn.Module, what: str) -> None:
    """What a user does to gradients between backwards."""
    if what == "set to None":
        model.zero_grad()
    elif what == "zero":
        model.zero_grad(set_to_none=False)
    elif what == "scale":
        for p in model.parameters():
            p.grad.mul_(0.5)
    elif what == "one to None":
        next(model.parameters()).grad = None


def run(seed: int) -> None:
    layout = LAYOUTS[seed % len(LAYOUTS)]
    torch.manual_seed(seed)
    plain = nn.Sequential(Block(6, 5)).double()
    model = copy.deepcopy(plain)
    data = layout.data_size
    steps = sequence(seed)
    with local_world(layout.world_size) as world:
        mesh = build_mesh(layout, device_type="cpu")
        parallelize(model, mesh, PLAN, units=["0"])
        for backward, change in steps:
            with world.paused():
                inputs = [torch.randn(2, 6, dtype=torch.float64) for _ in range(data)]
                for x in inputs:
                    (plain(x).square().mean() / data).backward()
                edit(plain, change)
            model.set_requires_gradient_sync(backward != "sync put off")
            model.set_requires_all_reduce(backward != "all-reduce put off")
            x = world.map(lambda r, inputs=inputs: inputs[layout.data_rank(r)])
            model(x).square().mean().backward()
            edit(model, change)
        with world.paused():
            for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
                for rank, box, local in shards_of(q.grad):
                    message = f"seed {seed}, {layout}: {name} on rank {rank} after {steps}"
                    torch.testing.assert_close(local, p.grad[box], msg=message)


@pytest.mark.parametrize("seed", range(12))
def test_few(seed: int) -> None:
    run(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 400))
def test_many(seed: int) -> None:
    run(seed)
