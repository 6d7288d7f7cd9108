"""Units whose root registers their parameters, and forward hooks: nobody's are taken off."""

import pytest
from _support.fsdp.replicated_models import USES, Model, batch, check
from _support.fsdp.replicated_pairs import pair

from parallel3d.fsdp.inspect import get_unit
from parallel3d.testing import fake_world


def hooks_within(model: Model) -> list[int]:
    """How many forward hooks of either kind the second block has while the model runs."""
    block, counts = model.blocks[1], []
    block.first = lambda: counts.append(len(block._forward_hooks) + len(block._forward_pre_hooks))
    model(batch()).sum().backward()
    block.first = lambda: None
    model.zero_grad()
    return counts


@pytest.mark.parametrize("use", USES)
def test_gradients(use: str) -> None:
    with fake_world(0, 1):
        expected, model = pair()
        for again in range(4):
            for each in (expected, model):
                each.zero_grad()
                USES[use](each, batch(again)).backward()
            check(model, expected)
            assert not get_unit(model.blocks[0]).group.is_registered
        assert hooks_within(model) == [2]
        assert [len(block._forward_hooks) for block in model.blocks] == [1, 1, 1]


def test_hooks_of_others_stay() -> None:
    with fake_world(0, 1):
        _, model = pair()
        model(batch()).sum().backward()
        seen = []
        handle = model.blocks[1].register_forward_hook(lambda *_: seen.append("before"))
        assert hooks_within(model) == [3] and seen == ["before"]
        handle.remove()
        assert hooks_within(model) == [2] and seen == ["before"]


@pytest.mark.parametrize("before", [True, False])
def test_a_hook_that_comes_within_the_forward(before: bool) -> None:
    with fake_world(0, 1):
        expected, model = pair()
        for each in (expected, model):
            each(batch()).sum().backward()
        seen, handles, target = [], [], model.blocks[2]
        register = target.register_forward_pre_hook if before else target.register_forward_hook
        model.blocks[0].first = lambda: handles.append(register(lambda *_: seen.append(1)))
        model(batch(1)).sum().backward()
        model.blocks[0].first = lambda: None
        hooks = target._forward_pre_hooks if before else target._forward_hooks
        ours, _ = get_unit(target).members.hook_ids(target)[:2]
        assert seen == [1] and len(hooks) == 2
        assert not before or next(iter(hooks)) == ours
        target(batch(2)).sum().backward()
        assert seen == [1, 1]
        handles[0].remove()
        assert len(hooks) == 1
        for each in (expected, model):
            each.zero_grad()
            each(batch(3)).sum().backward()
        check(model, expected)
        assert seen == [1, 1] and hooks_within(model) == [2]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_after_an_exception(kind: type[BaseException]) -> None:
    def explode() -> None:
        raise kind

    with fake_world(0, 1):
        expected, model = pair()
        for each in (expected, model):
            each(batch()).sum().backward()
            each.blocks[1].first = explode
            with pytest.raises(kind):
                each(batch(1))
            if kind is KeyboardInterrupt and each is model:  # no hook sees it
                model.reset_iter_state()
            each.blocks[1].first = lambda: None
            each.zero_grad()
            each(batch(2)).sum().backward()
        check(model, expected)
        assert [len(block._forward_hooks) for block in model.blocks] == [1, 1, 1]
        for each in (expected, model):
            each.blocks[0](batch(3)).sum().backward()
        check(model, expected)


def test_checkpoint() -> None:
    with fake_world(0, 1):
        expected, model = pair()
        for each in (expected, model):
            each(batch()).sum().backward()
            for block in each.blocks:
                block.recomputes = True
            each(batch(1)).sum().backward()
            each.zero_grad()
            each(batch(2))
            each.blocks[1].seen.sum().backward()  # nothing reaches the root's outputs
        check(model, expected)
        assert hooks_within(model) == [2]
