"""Whole buckets, or runs in them, as one tensor in steps and norms: padding, and gradients apart from it."""

import functools
import gc
import math
import random
import weakref

import pytest
import torch
from _support.models import Lm, lm_loss, tokens
from _support.optim.local_sides import Sides, everything
from _support.side_by_side import same_batch
from torch import nn, optim

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import flat_gradient, units_of
from parallel3d.optim import clip_grad_norm_, local
from parallel3d.optim.pieces import padding_of
from parallel3d.testing import fake_world, local_world


class Drifting(optim.SGD):
    """Moves where there is no gradient, and takes none that is not finite."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            p.add_(0.01)
            assert p.grad is None or p.grad.isfinite().all()
        return loss


def buckets(model: nn.Module) -> list:
    return [b for unit in units_of(model, recurse=True) for b in unit.group.buckets]


def padding_in(bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat.narrow(0, start, length) for start, length in padding_of(bucket)]


def spoil_padding(model: nn.Module) -> None:
    """What pads gradients may hold anything."""
    for bucket in buckets(model):
        flat = flat_gradient([p.sharded.grad for p in bucket.params], bucket.layout.segment_sizes)
        for padding in padding_in(bucket, flat):
            padding.fill_(math.nan)


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 3, 1), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("cls", [optim.AdamW, Drifting])
def test_padded_buckets_are_one_tensor(sizes, cls) -> None:
    """Padding changes neither a step nor a norm, and stays zero in the weights."""
    layout = MeshLayout(*sizes)
    with local_world(layout.world_size) as world:
        sides = Sides(world, layout)
        sides.optimizers(
            everything,
            functools.partial(cls, lr=1e-2),
            functools.partial(local, cls, elementwise=True, lr=1e-2),
        )
        assert any(padding_in(bucket, bucket.flat) for bucket in buckets(sides.model))
        for step in range(2):
            sides.backward(step)
            spoil_padding(sides.model)
            with world.paused():
                want = nn.utils.clip_grad_norm_(sides.plain.parameters(), 0.5)
            for value in world.per_rank(clip_grad_norm_(sides.model, 0.5)):
                torch.testing.assert_close(value, want)
            spoil_padding(sides.model)
            sides.step()
            sides.zero_grad()
        sides.check()
        assert len(sides.optimizer._local.by_group[0]) == len(buckets(sides.model))
        for bucket in buckets(sides.model):
            for padding in padding_in(bucket, bucket.flat):
                assert all((p == 0).all() for p in world.per_rank(padding))


def test_a_bucket_is_taken_apart_in_place() -> None:
    """A gradient that is missing, or the user's, costs no copy of the state, and no other bucket."""
    with fake_world(0, 2):
        torch.manual_seed(0)
        model = parallelize(
            Lm(vocab=20, layers=2), build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
        )
        optimizer = local(optim.AdamW, model, lr=1e-2)
        lm_loss(model, tokens(0)).backward()
        optimizer.step()
        before = [len(optimizer._local.by_group[0]), optimizer._local]
        moments = {p: get_local_tensor(optimizer.state[p]["exp_avg"]) for p in model.parameters()}
        addresses = {p: m.data_ptr() for p, m in moments.items()}
        model.layers[0].up.bias.grad = None
        optimizer.step()
        more = len(optimizer._local.by_group[0]) - before[0]
        assert 1 <= more <= 2  # itself, and the neighbours on one or both sides
        assert optimizer._local is before[1]
        lm_loss(model, tokens(1)).backward()
        optimizer.step()
        for p in model.parameters():
            assert get_local_tensor(optimizer.state[p]["exp_avg"]).data_ptr() == addresses[p]
            late = p is model.layers[0].up.bias
            assert optimizer.state[p]["step"] == (2 if late else 3)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_norm_of_flat_missing_and_own_gradients(norm_type) -> None:
    """Each is taken in another way; the norm is the plain model's."""
    with same_batch((1, 2, 2), layers=2) as (plain, model, world):
        for each in (plain, model):
            each.layers[0].norm.bias.grad = None
            each.layers[1].up.weight.grad = each.layers[1].up.weight.grad * 2
        for _ in range(2):  # found, and remembered
            with world.paused():
                want = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
            for value in world.per_rank(clip_grad_norm_(model.parameters(), 0.1, norm_type)):
                torch.testing.assert_close(value, want)


def test_norm_loses_no_digits_over_a_long_buffer() -> None:
    """Squares summed one after another in float32 would: 2e-3 of three million equal ones."""
    with fake_world(0, 2):
        model = nn.Linear(3000, 2000)
        fully_shard(model, mesh=build_mesh(MeshLayout(1, 2, 1), device_type="cpu"))
        model(torch.ones(1, 3000)).sum().backward()
        for p in model.parameters():
            get_local_tensor(p.grad).fill_(0.01)
        (bucket,) = buckets(model)
        flat = flat_gradient([p.sharded.grad for p in bucket.params], bucket.layout.segment_sizes)
        want = flat.double().norm()
        assert abs(clip_grad_norm_(model, 1.0) - want) <= 2e-5 * want
        torch.testing.assert_close(flat.double().norm(), want.new_ones(()), rtol=1e-4, atol=0)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows(value, norm_type) -> None:
    with fake_world(0, 2):
        model = nn.Linear(100, 200)
        fully_shard(model, mesh=build_mesh(MeshLayout(1, 2, 1), device_type="cpu"))
        model(torch.ones(1, 100)).sum().backward()
        get_local_tensor(model.weight.grad)[50, 3] = value
        got = clip_grad_norm_(model, 1.0, norm_type)
        assert got.isnan() if math.isnan(value) else got.isinf()


def test_a_plan_keeps_no_model_alive() -> None:
    with fake_world(0, 2):
        model = parallelize(Lm(vocab=20), build_mesh(MeshLayout(1, 2, 1), device_type="cpu"))
        lm_loss(model, tokens(0)).backward()
        clip_grad_norm_(model, 1.0)

        dead = [weakref.ref(p) for p in model.parameters()]
        del model
        gc.collect()
        assert all(ref() is None for ref in dead)


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
