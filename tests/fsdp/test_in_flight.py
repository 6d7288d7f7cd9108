"""Reductions that nobody waits for yet, and exceptions between the start of a collective and its end."""

import pytest
import torch
from _support.fsdp.beside_plain import Net, Trial
from _support.fsdp.wrapped import shard_blocks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from parallel3d import MeshLayout, build_mesh
from parallel3d._torch.groups import all_gather_single, reduce_scatter_single
from parallel3d.errors import StateError
from parallel3d.fsdp.inspect import get_unit, units_of
from parallel3d.fsdp.options import offload as offload_module
from parallel3d.testing import local_world

parity = pytest.mark.parity
FSDP, HSDP = MeshLayout(1, 2, 1), MeshLayout(2, 2, 1)


def in_flight(model) -> int:
    comm = get_unit(model).context.comm
    return len(comm.holding) + len(comm.reducing)


class TestNotTheLastBackward:
    """``set_is_last_backward(False)`` beside the other switches."""

    @parity("method: set_is_last_backward")
    @pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
    def test_with_sums_that_wait(self, offload, monkeypatch):
        """The order of a reduced, a partial and a whole sum is that of the backwards, not of their ends."""
        if offload:
            cpu = torch.device("cpu")
            places = (torch.device("cpu", 0), cpu, False)
            monkeypatch.setattr(offload_module.CpuOffload, "places", lambda *_: places)
        with local_world(4) as world:
            trial = Trial(
                world,
                HSDP,
                lambda m, mesh: shard_blocks(m, mesh, offload_policy=CPUOffloadPolicy()),
            )
            model = trial.model
            model.set_is_last_backward(False)
            trial.backward(0)
            model.set_requires_all_reduce(False)
            trial.backward(1)
            model.set_requires_gradient_sync(False)
            trial.backward(2)
            model.set_requires_gradient_sync(True)
            trial.backward(3)
            model.set_is_last_backward(True)
            trial.backward(4)
            trial.check([0, 1, 2, 3, 4])


class Raising:
    """A collective of the user's that raises at the n-th call, and only there."""

    def __init__(self, collective, at: int) -> None:
        self.collective, self.at, self.calls = collective, at, 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False, **options):
        self.calls += 1
        if self.calls == self.at:
            raise KeyError("the user's own")
        return self.collective(
            output_tensor, input_tensor, group=group, async_op=async_op, **options
        )


def break_gather(model: nn.Module, at: int) -> None:
    comm = Raising(all_gather_single, at)
    for unit in (*model.layers, model):
        unit.set_custom_all_gather(comm)


def break_scatter(model: nn.Module, at: int) -> None:
    comm = Raising(reduce_scatter_single, at)
    for unit in (*model.layers, model):
        unit.set_custom_reduce_scatter(comm)


def break_hook(model: nn.Module, at: int) -> None:
    calls = []

    def hook(grad: torch.Tensor) -> None:
        calls.append(grad)
        if len(calls) == at:
            raise KeyError("the user's own")

    for unit in (*model.layers, model):
        unit.set_all_reduce_hook(hook)


BREAK = {"gather": break_gather, "scatter": break_scatter, "hook": break_hook}
PLACES = [("gather", 1, FSDP), ("gather", 2, FSDP), ("gather", 4, FSDP), ("scatter", 1, FSDP)]
PLACES += [("scatter", 2, HSDP), ("hook", 2, FSDP), ("hook", 2, HSDP)]


@parity("reliability: exceptions at every hook")
@pytest.mark.parametrize(("where", "at", "layout"), PLACES, ids=str)
def test_an_exception_in_a_collective_leaves_a_usable_model(where, at, layout):
    """In forward, backward or at its end: what is in flight is waited for, its result dropped."""
    with local_world(layout.world_size) as world:
        trial = Trial(world, layout, shard_blocks)
        BREAK[where](trial.model, at)
        with pytest.raises(KeyError, match="the user's own"):
            trial.backward(0)
        trial.model.reset_iter_state()
        assert in_flight(trial.model) == 0
        assert all(
            bucket.gathering is None
            for unit in units_of(trial.model, True)
            for bucket in unit.group.buckets
        )
        trial.model.zero_grad()
        trial.backward(1, 2)
        trial.check([1, 2])


def broken_on_gloo(where: str, at: int) -> bool:
    """Whether the gradients after an exception, raised on every rank, are those of a fresh model."""
    mesh = build_mesh(FSDP, device_type="cpu")
    grads = []
    for broken in (True, False):
        torch.manual_seed(0)
        model = shard_blocks(Net(), mesh)
        x = torch.randn(2, 6) + torch.distributed.get_rank()
        if broken:
            BREAK[where](model, at)
            try:
                model(x).sum().backward()
            except KeyError:
                model.reset_iter_state()
                model.zero_grad()
        model(x).square().mean().backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@parity("reliability: exceptions at every hook")
@pytest.mark.parametrize(("where", "at"), [("gather", 3), ("scatter", 2), ("hook", 3)])
def test_on_processes(gloo_pool, where, at):
    assert gloo_pool.run(broken_on_gloo, where, at, world_size=2, timeout=30.0) == [True, True]


def test_waiting_sums_are_dropped_by_reset_and_reduced_ones_stay():
    with local_world(4) as world:
        trial = Trial(world, HSDP, shard_blocks)
        trial.backward(0)
        before = {n: p.grad for n, p in trial.model.named_parameters()}
        trial.model.layers[0].set_requires_gradient_sync(False)
        trial.model.layers[1].set_requires_all_reduce(False)
        trial.backward(1)
        trial.model.reset_iter_state()
        after = {n: p.grad for n, p in trial.model.named_parameters()}
        assert all(g is None for n, g in after.items() if n.startswith("layers"))
        assert after["head.weight"] is before["head.weight"]
        trial.model.zero_grad()
        trial.model.set_requires_gradient_sync(True)
        trial.backward(2)
        trial.check([2])


def to_float_and_back(model: nn.Module) -> None:
    model.float().double()  # DTensor keeps a sum as it is


def clone_all(model: nn.Module) -> None:
    model._apply(torch.clone)  # DTensor sums what is partial


@pytest.mark.slow
@pytest.mark.parametrize("convert", [to_float_and_back, clone_all])
@pytest.mark.parametrize(
    "switch",
    ["set_requires_gradient_sync", "set_requires_all_reduce"],
)
def test_sums_that_wait_survive_a_conversion(switch, convert):
    """It makes new buffers and new ``.grad`` objects, which are still what they were."""
    with local_world(4) as world:
        trial = Trial(world, HSDP, shard_blocks)
        model = trial.model
        for unit in (*model.layers, model):
            unit.set_gradient_divide_factor(5)
        trial.backward(0)
        getattr(model, switch)(False)
        trial.backward(1)
        convert(model)
        if (switch, convert) == ("set_requires_gradient_sync", to_float_and_back):
            with pytest.raises(StateError, match="already divided by 5"):
                model.set_gradient_divide_factor(3)
        getattr(model, switch)(True)
        trial.backward(2)
        trial.check([0, 1, 2], factor=5, tolerance=1e-5)  # of float32
        model.zero_grad()
        getattr(model, switch)(False)
        trial.backward(3)
        model.zero_grad()
        convert(model)
        getattr(model, switch)(True)
        trial.backward(4)
        trial.check([4], factor=5, tolerance=1e-5)
