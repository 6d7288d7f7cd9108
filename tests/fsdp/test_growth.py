"""No memory grows over 200 steps."""

import contextlib
import gc

import pytest
import torch
from _support.fsdp.lifetimes import NewStorages, collector_off
from _support.fsdp.wrapped import at_rest, shard_blocks
from torch import nn

from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh
from parallel3d.optim import accumulate
from parallel3d.testing import fake_world

HSDP = MeshLayout(2, 2, 1)
FSDP = MeshLayout(1, 4, 1)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STEPS = 200


class Boom(Exception):
    pass


def explode(*_: object) -> None:
    raise Boom


class Small(nn.Module):
    """Two blocks of one linear: two hundred steps of it take a second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def small_loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(1, 4)).sum()


def step_with_evaluation(model: nn.Module, index: int) -> None:
    """Also forwards that no backward follows."""
    with torch.no_grad():
        small_loss(model)
    with torch.inference_mode():
        model.layers[0](torch.zeros(1, 4))
    small_loss(model)
    small_loss(model).backward()


def accumulating_step(model: nn.Module, index: int) -> None:
    for _ in accumulate(model, range(2)):
        small_loss(model).backward()


def unsynced_step(model: nn.Module, index: int) -> None:
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        small_loss(model).backward()


def unsharding_step(model: nn.Module, index: int) -> None:
    handle = model.layers[0].unshard(async_op=True)
    small_loss(model).backward()
    handle.wait()
    model.layers[0].reshard()


def small_exception(model: nn.Module, index: int) -> None:
    """In forward and backward by turns."""
    hooked = model.layers[1][0]
    register = hooked.register_forward_hook if index % 2 else hooked.register_full_backward_pre_hook
    handle = register(explode)
    with contextlib.suppress(Boom):
        small_loss(model).backward()
        pytest.fail("nothing was raised")
    handle.remove()


def step_after_exceptions(model: nn.Module, index: int) -> None:
    small_exception(model, index)
    model.reset_iter_state()
    small_loss(model).backward()


def step_after_exceptions_without_reset(model: nn.Module, index: int) -> None:
    small_exception(model, index)
    model.zero_grad()
    small_loss(model).backward()


GROWTH = {
    "FSDP, evaluation in between": (FSDP, step_with_evaluation, {"mp_policy": MIXED}),
    "FSDP, unshard by hand": (FSDP, unsharding_step, {"reshard_after_forward": False}),
    "HSDP, accumulation": (HSDP, accumulating_step, {}),
    "HSDP, accumulation without sync": (HSDP, unsynced_step, {}),
    "exceptions in between": (HSDP, step_after_exceptions, {}),
    "exceptions in between, without reset_iter_state": (
        HSDP,
        step_after_exceptions_without_reset,
        {},
    ),
}


@pytest.mark.parity("reliability: no memory growth over 200 steps")
@pytest.mark.parametrize("name", GROWTH)
def test_no_growth(name: str) -> None:
    """Neither objects, collector off, nor storages: none made in a step outlives it."""
    layout, step, options = GROWTH[name]
    with fake_world(0, 4):
        model = shard_blocks(Small(), build_mesh(layout, device_type="cpu"), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def steps(count: int) -> None:
            for index in range(count):
                step(model, index)
                optimizer.step()
                optimizer.zero_grad()

        steps(4)
        with collector_off():
            before = len(gc.get_objects())
            steps(STEPS)
            grown = len(gc.get_objects()) - before
            with NewStorages() as storages:
                steps(2)
            assert storages.alive() == 0
            assert at_rest(model)
        assert grown < STEPS // 10  # far less than one a step
