"""What the user changes between steps of a model whose units are replicated units."""

from collections.abc import Callable

import pytest
import torch
from _support.fsdp.replicated_models import WIDTH, Model, batch, check, plain, wrapped
from torch import nn

from parallel3d.fsdp.group import Retain
from parallel3d.fsdp.inspect import get_unit
from parallel3d.testing import fake_world


def step(model: Model, index: int) -> None:
    model.zero_grad()
    model(batch(index)).sum().backward()


def _replace(model: Model) -> None:
    model.blocks[1].up.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.5, dtype=torch.float64))


def _replace_with_gradient(model: Model) -> None:
    new = nn.Parameter(torch.full((WIDTH, WIDTH), 0.5, dtype=torch.float64))
    new.grad = torch.full_like(new, 2.0)
    model.blocks[1].up.weight = new


def _load(model: Model) -> None:
    state = model.state_dict()
    model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)


CHANGES: dict[str, Callable[[Model], object]] = {
    "a parameter frozen": lambda model: model.blocks[1].up.bias.requires_grad_(False),
    "a parameter replaced": _replace,
    "parameters loaded by assignment": _load,
    "converted and back": lambda model: model.float().double(),
    "evaluated": lambda model: model.eval() and model(batch()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_both_can_do(change: str) -> None:
    with fake_world(0, 1):
        expected, model = plain(), wrapped(1)
        for index in range(2):
            for each in (expected, model):
                step(each, index)
        for each in (expected, model):
            CHANGES[change](each)
        for index in range(2, 4):
            for each in (expected, model):
                step(each, index)
            check(model, expected)


def _hook(model: Model) -> None:
    def double(buffer: torch.Tensor) -> None:
        buffer.mul_(2)

    model.blocks[1].set_all_reduce_hook(double)


SETTINGS: dict[str, tuple[Callable[[Model], object], dict[int, float]]] = {
    # By block what its gradients are multiplied by.
    "the divisor": (lambda model: model.blocks[1].set_gradient_divide_factor(4.0), {1: 0.25}),
    "a hook": (_hook, {1: 2.0}),
    "the sync": (
        lambda model: model.blocks[1].set_requires_gradient_sync(False, recurse=False),
        {},
    ),
    "gathered by the user": (lambda model: model.blocks[1].unshard(), {}),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("after_forward", [False, True])
def test_settings(setting: str, after_forward: bool) -> None:
    change, factors = SETTINGS[setting]
    with fake_world(0, 1):
        expected, model = plain(), wrapped(1)
        for each in (expected, model):
            step(each, 0)
            each.zero_grad()
        step(expected, 1)
        if not after_forward:
            change(model)
        loss = model(batch(1)).sum()
        if after_forward:
            change(model)
        loss.backward()
        for index, block in enumerate(expected.blocks):
            for param in block.parameters():
                param.grad.mul_(factors.get(index, 1.0))
        if get_unit(model.blocks[1]).group.retain is Retain.USER:
            model.blocks[1].reshard()
        check(model, expected)


@pytest.mark.parametrize("replace", [_replace, _replace_with_gradient])
def test_a_parameter_that_replaces_another_brings_its_gradient(replace: Callable) -> None:
    with fake_world(0, 1):
        expected, model = plain(), wrapped(1)
        for each in (expected, model):
            each(batch()).sum().backward()
            replace(each)
            each(batch(1)).sum().backward()
        check(model, expected)


@pytest.mark.parametrize("accumulates", [False, True])
def test_frozen_between_forward_and_backward(accumulates: bool) -> None:
    with fake_world(0, 1):
        expected, model = plain(), wrapped(1)
        for each in (expected, model):
            step(each, 0)
            if not accumulates:
                each.zero_grad()
            loss = each(batch(1)).sum()
            each.blocks[1].up.bias.requires_grad_(False)
            loss.backward()
        check(model, expected)
