"""optim.local where only some neighbours in a bucket can be stepped on as one tensor."""

import functools
import random

import pytest
import torch
from _support.optim.local_sides import Sides, everything
from torch import nn, optim

from parallel3d import MeshLayout, build_mesh
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import flat_gradient, units_of
from parallel3d.optim import local
from parallel3d.testing import fake_world, local_world


def disturb(model: nn.Module, seed: int) -> None:
    """Some gradients are gone, some are the user's, some of the reduced buffer stand where others did."""
    rng = random.Random(seed)
    params = list(model.parameters())
    for param in params:
        chance = rng.random()
        if chance < 0.2:
            param.grad = None
        elif chance < 0.3 and param.grad is not None:
            param.grad = param.grad * 2
    for number, param in enumerate(params):
        other = next((p for p in params[number + 1 :] if p.shape == param.shape), None)
        if other is not None and rng.random() < 0.2:
            param.grad, other.grad = other.grad, param.grad


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 3, 1), (1, 2, 2)], ids=str)
def test_any_gradients_at_any_step(sizes, seed) -> None:
    layout = MeshLayout(*sizes)
    with local_world(layout.world_size) as world:
        sides = Sides(world, layout, layers=2)
        sides.optimizers(
            everything,
            functools.partial(optim.AdamW, lr=1e-2),
            functools.partial(local, optim.AdamW, lr=1e-2),
        )
        for step in range(4):
            sides.backward(step)
            if step != 1:
                with world.paused():
                    disturb(sides.plain, 10 * seed + step)
                disturb(sides.model, 10 * seed + step)
            sides.step()
            sides.zero_grad()
            sides.check(moved=False)
        for p, q in zip(sides.plain.parameters(), sides.model.parameters(), strict=True):
            mine, theirs = sides.optimizer.state.get(q, {}), sides.plain_optimizer.state.get(p, {})
            assert mine.get("step") == theirs.get("step")


class Unit(nn.Module):
    """Three of one shape behind one of another."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(rows, 4))
        self.rest = nn.ParameterList(torch.randn(6, 4) for _ in range(3))

    def forward(self) -> torch.Tensor:
        return torch.stack([p.square().sum() for p in self.parameters()]).sum()


def test_gradients_of_another_unit_in_the_same_places() -> None:
    """There they lie elsewhere in the buffer."""
    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        model = nn.ModuleList([Unit(2), Unit(8)])
        for unit in model:
            fully_shard(unit, mesh=mesh)
        optimizer = local(optim.SGD, model, lr=0.1)
        for unit in model:
            unit().backward()
        for mine, other in zip(model[0].rest, model[1].rest, strict=True):
            mine.grad, other.grad = other.grad, mine.grad
        want = [get_local_tensor(p) - 0.1 * get_local_tensor(p.grad) for p in model.parameters()]
        optimizer.step()
        for p, wanted in zip(model.parameters(), want, strict=True):
            torch.testing.assert_close(get_local_tensor(p), wanted)


def test_number_of_tensors() -> None:
    """A missing gradient divides a buffer into runs; another step counts on in the same ones."""
    with fake_world(0, 2):
        model = Unit(6)
        model.rest.extend(nn.Parameter(torch.randn(6, 4)) for _ in range(4))
        fully_shard(model, mesh=build_mesh(MeshLayout(1, 2, 1), device_type="cpu"))
        optimizer = local(optim.AdamW, model, lr=1e-2)
        for _ in range(2):
            model().backward()
            model.rest[2].grad = None
            optimizer.step()
            optimizer.zero_grad()
            assert len(optimizer._local.by_group[0]) == 3
        numbers = [
            int(optimizer.state[p]["step"]) for p in model.parameters() if p is not model.rest[2]
        ]
        assert numbers == [2] * 7 and "step" not in optimizer.state.get(model.rest[2], {})
        # What was saved is stepped on in as few.
        other = local(optim.AdamW, model, lr=1e-2)
        other.load_state_dict(optimizer.state_dict())
        model().backward()
        other.step()
        assert len(other._local.by_group[0]) == 3
        assert int(other.state[model.rest[2]]["step"]) == 1


def test_no_flat_gradient_in_wrong_places() -> None:
    with fake_world(0, 2):
        model = Unit(6)
        fully_shard(model, mesh=build_mesh(MeshLayout(1, 2, 1), device_type="cpu"))
        model().backward()
        ((bucket,),) = (unit.group.buckets for unit in units_of(model, recurse=True))
        grads, sizes = [p.sharded.grad for p in bucket.params], bucket.layout.segment_sizes
        whole = flat_gradient(grads, sizes)
        assert whole is not None and whole.numel() == bucket.layout.numel
        assert flat_gradient(grads[1:3], sizes, 1) is whole
        assert flat_gradient(grads[1:3], sizes) is None
        assert flat_gradient(grads[::-1], sizes) is None
        assert flat_gradient([*grads[:3], None], sizes) is None
        assert flat_gradient([*grads[:3], grads[3] * 1], sizes) is None
        assert flat_gradient(grads, [*sizes[:-1], 1]) is None
