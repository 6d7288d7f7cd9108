"""What a root's forward does to a unit inside it, other than to call it; see ``test_replicated_units``."""

import copy
from collections.abc import Callable

import pytest
import torch
from _support.fsdp.replicated_models import WIDTH, Model, batch, check
from _support.fsdp.replicated_pairs import pair

from parallel3d.fsdp import FSDPModule
from parallel3d.fsdp.inspect import get_unit
from parallel3d.testing import fake_world


def _unshard_and_reshard(model: Model) -> None:
    if isinstance(model, FSDPModule):
        model.blocks[2].unshard()
        assert model.blocks[2].up(torch.ones(1, WIDTH, dtype=torch.float64)).requires_grad
        model.blocks[2].reshard()


def _reshard(model: Model) -> None:
    if isinstance(model, FSDPModule):
        model.blocks[1].reshard()


ACTS: dict[str, Callable[[Model], object]] = {
    "gathered and resharded": _unshard_and_reshard,
    "resharded": _reshard,
    "converted to what it is": lambda model: model.blocks[2].to("cpu"),
    "gradients cleared": lambda model: model.blocks[2].zero_grad(),
    "thawed again": lambda model: model.blocks[2].requires_grad_(True),
}


@pytest.mark.parametrize("act", ACTS)
def test_to_a_unit_that_runs_later(act: str) -> None:
    with fake_world(0, 1):
        expected, model = pair()
        for each in (expected, model):
            each(batch()).sum().backward()
            each.blocks[0].first = lambda each=each: ACTS[act](each)
            for index in range(2):
                each(batch(index)).sum().backward()
            each.blocks[0].first = lambda: None
            each(batch(2)).sum().backward()
        assert not get_unit(model.blocks[2]).group.is_registered
        check(model, expected)


def test_copies_of_a_module() -> None:
    """As a teacher that is made in the first forward; it has plain Parameters of its own."""
    with fake_world(0, 1):
        outputs, x = [], batch(3)
        for each in pair():
            each(batch()).sum().backward()
            made: list[torch.nn.Module] = []
            up = each.blocks[1].up
            each.blocks[1].first = lambda up=up, made=made: made.append(copy.deepcopy(up))
            each(batch(1)).sum().backward()
            (twin,) = made
            assert isinstance(twin.weight, torch.nn.Parameter) and twin.weight.is_leaf
            torch.nn.init.zeros_(twin.bias)
            outputs.append(twin(x))
        torch.testing.assert_close(outputs[0], outputs[1])
