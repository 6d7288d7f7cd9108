"""After an exception at any hook the next step is a fresh model's, with and without reset_iter_state."""

import copy

import pytest
import torch
from _support.fsdp.breakages import BACKWARD, FORWARD, Boom, Net, Place, loss_of
from _support.fsdp.wrapped import at_rest, shard_blocks
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d import MeshLayout, build_mesh
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.testing import Recorder, fake_world, record_collectives

HSDP = MeshLayout(2, 2, 1)
ALL = {f"forward: {name}": place for name, place in FORWARD.items()} | {
    f"backward: {name}": place for name, place in BACKWARD.items()
}


def step(model: nn.Module) -> None:
    loss_of(model).backward()


def break_at(place: Place, model: Net) -> None:
    """A step that ends there."""
    with place(model), pytest.raises((Boom, KeyboardInterrupt)):
        loss_of(model, 1).backward()


def change_weights(model: nn.Module) -> None:
    """As foreach and fused optimizers do: no version counter of a DTensor sees it."""
    with torch.no_grad():
        torch._foreach_mul_([get_local_tensor(p) for p in model.parameters()], 0.5)


def totals(recorder: Recorder) -> dict[tuple[str, str | None, str], int]:
    """Calls by kind, axis and unit. Over gloo our reduce-scatter is an all-to-all, a user's own is not."""
    kinds = {"all_to_all": "reduce_scatter"}
    keys = [(kinds.get(call.op, call.op), call.axis, call.unit) for call in recorder.calls]
    return {key: keys.count(key) for key in keys}


def check_next_steps(broken: nn.Module, fresh: nn.Module, mesh, *, reset: bool) -> None:
    """Two steps of both, new weights in between: same gradients to the bit, same collectives.

    Without a reset what the user has gathered by hand stays so: there may be fewer collectives.
    """
    for _ in range(2):
        counts = []
        for model in (fresh, broken):
            model.zero_grad()
            with record_collectives(mesh) as recorder:
                step(model)
            assert at_rest(model)
            counts.append(totals(recorder))
        assert counts[0] == counts[1] or not reset
        assert all(count <= counts[0].get(key, 0) for key, count in counts[1].items())
        for (name, p), q in zip(fresh.named_parameters(), broken.parameters(), strict=True):
            assert q.grad is not None, name
            assert q.grad.placements == p.grad.placements, name
            assert torch.equal(get_local_tensor(q.grad), get_local_tensor(p.grad)), name
        change_weights(fresh)
        change_weights(broken)


def recover_and_check(place: Place, mesh, *, reset: bool) -> None:
    """In the present world."""
    torch.manual_seed(0)
    plain = Net()
    fresh, broken = (shard_blocks(copy.deepcopy(plain), mesh) for _ in range(2))
    objects = [id(p) for p in broken.parameters()]
    for model in (fresh, broken):
        step(model)  # teaches the order, for prefetch
        model.zero_grad()
    break_at(place, broken)
    if reset:
        broken.reset_iter_state()
        assert at_rest(broken)
        assert not any(waits(p) for p in broken.parameters())
    broken.zero_grad()
    assert all(isinstance(p, DTensor) and p.grad is None for p in broken.parameters())
    assert [id(p) for p in broken.parameters()] == objects
    check_next_steps(broken, fresh, mesh, reset=reset)


def waits(param: nn.Parameter) -> bool:
    """Whether ``.grad`` is a sum that waits for its reduction."""
    return param.grad is not None and any(p.is_partial() for p in param.grad.placements)


def cases(places: dict[str, Place]) -> list:
    """With reset_iter_state, and without it."""
    return [
        pytest.param(place, reset, id=f"{where}, {'reset' if reset else 'no reset'}")
        for where, place in places.items()
        for reset in (True, False)
    ]


@pytest.mark.parity("reliability: exceptions at every hook")
@pytest.mark.parity("reliability: exception in forward, reset_iter_state")
@pytest.mark.parity("method: reset_iter_state")
@pytest.mark.parametrize(("place", "reset"), cases(FORWARD))
def test_in_forward(place: Place, reset: bool) -> None:
    with fake_world(0, 4):
        recover_and_check(place, build_mesh(HSDP, device_type="cpu"), reset=reset)


@pytest.mark.parity("reliability: exceptions at every hook")
@pytest.mark.parity("reliability: exception in backward, reset_iter_state")
@pytest.mark.parity("method: reset_iter_state")
@pytest.mark.parametrize(("place", "reset"), cases(BACKWARD))
def test_in_backward(place: Place, reset: bool) -> None:
    with fake_world(0, 4):
        recover_and_check(place, build_mesh(HSDP, device_type="cpu"), reset=reset)


ON_GLOO = [
    ("forward: inside an inner unit", True),
    ("forward: inside an inner unit", False),
    ("backward: full backward hook inside a unit", False),
    ("backward: all-gather in backward", True),
    ("backward: reduce-scatter", True),
    ("backward: sums that wait for the all-reduce", True),
]
MORE_ON_GLOO = [
    ("backward: full backward hook inside a unit", True),
    ("backward: recomputation", False),
    ("backward: all_reduce_hook", False),
    ("backward: post-accumulate-grad hook on a shard", False),
]
"""Where, and whether with a reset."""


def on_gloo(places: list[tuple[str, bool]]) -> None:
    mesh = build_mesh(HSDP, device_type="cpu")
    for where, reset in places:
        recover_and_check(ALL[where], mesh, reset=reset)


@pytest.mark.parity("reliability: exceptions at every hook")
@pytest.mark.parametrize(
    "places", [ON_GLOO, pytest.param(MORE_ON_GLOO, marks=pytest.mark.full)], ids=len
)
def test_on_real_ranks(gloo_pool, places) -> None:
    """With works of the broken step still under way, alike on all ranks."""
    gloo_pool.run(on_gloo, places, world_size=4, timeout=60.0)


@pytest.mark.parity("method: reset_iter_state")
class TestReset:
    """The method itself."""

    @pytest.fixture
    def model(self):
        with fake_world(0, 4):
            yield shard_blocks(Net(), build_mesh(HSDP, device_type="cpu"))

    def test_before_the_first_forward_and_at_rest(self, model) -> None:
        model.reset_iter_state()
        step(model)
        model.reset_iter_state()
        assert at_rest(model)

    @pytest.mark.parametrize("switch", ["set_requires_gradient_sync", "set_requires_all_reduce"])
    def test_drops_sums_that_wait(self, model, switch) -> None:
        getattr(model, switch)(False)
        step(model)
        assert all(waits(p) for p in model.parameters())
        model.reset_iter_state()
        assert all(p.grad is None for p in model.parameters())

    def test_leaves_reduced_gradients(self, model) -> None:
        step(model)
        before = [p.grad for p in model.parameters()]
        break_at(ALL["forward: inside an inner unit"], model)
        model.reset_iter_state()
        assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))

    def test_a_unit_that_ran_alone(self, model) -> None:
        """The outermost unit that has run is a root."""
        block = model.layers[1]
        with ALL["forward: inside an inner unit"](model), pytest.raises(Boom):
            block(torch.ones(2, 12))
        block.reset_iter_state()
        assert at_rest(block)
        step(model)
        assert at_rest(model)
