"""Reductions that nobody waits for yet, and exceptions between the start of a collective and its end."""

import pytest
import torch
from _support.fsdp.beside_plain import Trial
from _support.fsdp.wrapped import shard_blocks
from torch import nn

from parallel3d import MeshLayout
from parallel3d.errors import StateError
from parallel3d.testing import local_world

FSDP, HSDP = MeshLayout(1, 2, 1), MeshLayout(2, 2, 1)


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
        trial.play("clear +sync 2")
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
