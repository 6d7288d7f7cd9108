"""Backwards that an exception has ended, and what comes after them without ``reset_iter_state``."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from _support.fsdp.replicated_models import Model, batch, check, plain, wrapped
from _support.fsdp.replicated_pairs import pair
from torch import nn

from parallel3d.fsdp.inspect import get_unit
from parallel3d.testing import fake_world


class Broken(Exception): ...


def fail(*_: object) -> None:
    raise Broken


def break_a_backward(model: Model) -> None:
    loss = model(batch()).sum()
    handle = model.blocks[1].seen.register_hook(fail)
    with pytest.raises(Broken):
        loss.backward()
    handle.remove()


USES: dict[str, Callable[[Model], torch.Tensor]] = {
    "all": lambda model: model(batch(1)).sum(),
    "a unit alone": lambda model: model.blocks[2](batch(1)).sum(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "make", [pair, lambda: (plain(), wrapped(1))], ids=["simple", "recomputes"]
)
def test_the_step_after_it(make: Callable[[], tuple[Model, Model]], use: str) -> None:
    with fake_world(0, 1):
        expected, model = make()
        for each in (expected, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(2):
                break_a_backward(each)
                optimizer.zero_grad()
                USES[use](each).backward()
        assert not get_unit(model).group.is_registered
        check(model, expected)


def test_one_within_a_forward() -> None:
    """The forward goes on, and its backward brings all gradients."""

    def swallow(model: Model, params: list[nn.Parameter]) -> None:
        x = batch().requires_grad_() * 1
        x.register_hook(fail)  # after the parameters' gradients
        with pytest.raises(Broken):
            model.blocks[0].up(x).sum().backward()
        for param in params:  # which have come in the plain model only
            param.grad = None

    with fake_world(0, 1):
        expected, model = pair()
        for each in (expected, model):
            each(batch()).sum().backward()
            each.zero_grad()
            each.blocks[1].first = partial(swallow, each, list(each.parameters()))
            loss = each(batch(1)).sum()
            each.blocks[1].first = lambda: None
            loss.backward()
            each(batch(2)).sum().backward()
        check(model, expected)
