"""Units whose unsharded parameters are the shards: nothing is gathered or freed, and few all-reduces."""

import copy

import pytest
import torch
from _support.fsdp.replicated_models import USES, batch, check, plain, wrapped

from parallel3d.errors import StateError
from parallel3d.fsdp.inspect import get_unit
from parallel3d.testing import fake_world, local_world, record_collectives


@pytest.mark.parametrize("use", USES)
def test_gradients(use: str) -> None:
    with fake_world(0, 1):
        expected, model = plain(), wrapped(1)
        for again in range(3):
            for each in (expected, model):
                USES[use](each, batch(again)).backward()
                names = {type(p).__name__ for p in model.parameters()}
                assert names == {"DTensor"} and not get_unit(model).group.is_registered
            check(model, expected)
            if again != 1:  # then it adds to what is there
                expected.zero_grad()
                model.zero_grad()


@pytest.mark.parametrize("use", ["all", "a block left out", "a block twice"])
def test_average_over_ranks(use: str) -> None:
    with local_world(4) as world:
        with world.paused():
            expected = plain()
            for rank in range(4):
                (USES[use](expected, batch(rank)) / 4).backward()
            batches = [batch(rank) for rank in range(4)]
        model = wrapped(4)
        for _ in range(2):
            model.zero_grad()
            USES[use](model, world.map(lambda r: batches[r])).backward()
        check(model, expected)


def test_one_all_reduce_for_small_units() -> None:
    with fake_world(0, 4):
        model = wrapped(4)
        for _ in range(2):
            with record_collectives() as record:
                model(batch()).sum().backward()
            assert record.count() == record.count("all_reduce") == 1


def test_accumulation() -> None:
    with fake_world(0, 1):
        expected, model = plain(), wrapped(1)
        for each in (expected, model):
            each(batch(0)).sum().backward()
        with model.no_sync():
            model(batch(1)).sum().backward()
        loss = model(batch(2)).sum()
        with model.no_sync():
            loss.backward()
        model(batch(3)).sum().backward()
        for sample in (1, 2, 3):
            expected(batch(sample)).sum().backward()
        check(model, expected)


def test_frozen_and_thawed() -> None:
    with fake_world(0, 1):
        expected, model = plain(), wrapped(1)
        for wanted in (False, True):
            for each in (expected, model):
                each.zero_grad()
                each.blocks[1].up.weight.requires_grad_(wanted)
                each(batch()).sum().backward()
            check(model, expected)


def test_after_exceptions() -> None:
    def fail(*_: object) -> None:
        raise ValueError("here")

    with fake_world(0, 1):
        expected, model = plain(), wrapped(1)
        handle = model.blocks[1].up.register_forward_hook(fail)
        with pytest.raises(ValueError, match="here"):
            model(batch())
        handle.remove()
        assert not get_unit(model.blocks[0]).group.is_registered
        loss = model(batch())
        model.blocks[1].seen.register_hook(fail)
        with pytest.raises(ValueError, match="here"):
            loss.sum().backward()
        model.reset_iter_state()
        model.zero_grad()
        for each in (expected, model):
            each(batch()).sum().backward()
        check(model, expected)


def test_a_gradient_with_a_graph_is_an_error() -> None:
    with fake_world(0, 1):
        model = wrapped(1)
        with pytest.raises(StateError, match="create_graph"):
            model(batch()).square().sum().backward(create_graph=True)


def test_copies_and_held_gradients() -> None:
    with fake_world(0, 1):
        expected, model = plain(), wrapped(1)
        model(batch(0)).sum().backward()
        kept = [param.grad for param in model.parameters()]
        values = [grad.to_local().clone() for grad in kept]
        model.zero_grad()
        for block in model.blocks:
            block.seen = None
        twin = copy.deepcopy(model)
        for each in (expected, model, twin):
            each(batch(1)).sum().backward()
        check(model, expected)
        check(twin, expected)
        for grad, value in zip(kept, values, strict=True):
            assert torch.equal(grad.to_local(), value)  # a step later it is what it was
