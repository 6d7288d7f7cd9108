"""Backwards of graphs from before a change, and of graphs that have outlived their model."""

import gc
from collections.abc import Callable

import pytest
import torch
from _support.fsdp.lifetimes import collector_off
from _support.fsdp.replicated_models import Model, batch, check
from _support.fsdp.replicated_pairs import pair

from parallel3d.fsdp import FSDPModule
from parallel3d.testing import fake_world


def _freeze(model: Model) -> None:
    model.blocks[1].up.bias.requires_grad_(False)


def _freeze_a_unit(model: Model) -> None:
    model.blocks[1].requires_grad_(False)


def _hook(model: Model) -> None:
    if isinstance(model, FSDPModule):
        model.blocks[1].set_all_reduce_hook(lambda _: None)


def _divide(model: Model) -> None:
    if isinstance(model, FSDPModule):
        model.blocks[1].set_gradient_divide_factor(0.5)
    else:
        for param in model.blocks[1].parameters():
            param.register_hook(lambda grad: 2 * grad)


def _remove(model: Model) -> None:
    del model.blocks[1]


CHANGES: dict[str, Callable[[Model], None]] = {
    "a parameter frozen": _freeze,
    "a unit frozen": _freeze_a_unit,
    "a unit with a hook": _hook,
    "a unit divided by another number": _divide,
    "a unit removed": _remove,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("together", [False, True])
def test_a_graph_from_before_a_change(change: str, together: bool) -> None:
    """Its nodes end in gates that others have been put in the place of since."""
    with fake_world(0, 1):
        expected, model = pair()
        for each in (expected, model):
            each(batch()).sum().backward()
            each.zero_grad()
            older = each(batch(1)).sum()
            CHANGES[change](each)
            newer = each(batch(2)).sum()
            (older + newer if together else older).backward()
        check(model, expected)


def test_a_model_that_is_gone() -> None:
    """Its Parameters get their gradients, as long as a graph is there."""
    with fake_world(0, 1), collector_off():
        expected, model = pair()
        params, losses = [], []
        for each in (expected, model):
            each(batch()).sum().backward()
            each.zero_grad()
            params.append(list(each.parameters()))
            losses.append(each(batch(1)).square().sum())
        del expected, model, each
        gc.collect()
        for loss in losses:
            loss.backward()
        for plain, param in zip(*params, strict=True):
            assert param.grad is not None
            torch.testing.assert_close(param.grad.to_local(), plain.grad)
