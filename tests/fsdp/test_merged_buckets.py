"""Where nothing is sharded, units' buckets are reduced by few all-reduces; see ``options/merged``."""

from collections.abc import Callable

import pytest
import torch
from _support.fsdp.replicated_models import Model, batch, check, plain, wrapped
from _support.fsdp.wrapped import cpu_mesh

from parallel3d.fsdp import MixedPrecisionPolicy, fully_shard
from parallel3d.fsdp import layout as layouts
from parallel3d.testing import fake_world, local_world, record_collectives

Change = Callable[[Model], object]


def sizes(model: Model, change: Change | None = None, after: Change | None = None) -> list[int]:
    """Elements of each all-reduce in a step."""
    with record_collectives() as record:
        if change is not None:
            change(model)
        loss = model(batch().to(model.head.weight.dtype)).sum()
        if after is not None:
            after(model)
        loss.backward()
    assert record.count() == record.count("all_reduce")
    return [call.bytes // model.head.weight.to_local().itemsize for call in record.calls]


def numels(model: Model) -> list[int]:
    """Elements of the units, in the order of their backwards."""
    heads = sum(p.numel() for p in model.head.parameters())
    return [*(sum(p.numel() for p in b.parameters()) for b in reversed(model.blocks)), heads]


def test_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(0, 4):
        model = wrapped(4)
        block, head = numels(model)[0], numels(model)[-1]
        assert sizes(model) == [3 * block + head]
        monkeypatch.setattr(layouts, "FIRST_BYTES", 8 * block)
        monkeypatch.setattr(layouts, "MOST_BYTES", 8 * (2 * block + head))
        assert sizes(wrapped(4)) == [block, 2 * block + head]


DIFFERENT: dict[str, tuple[Change, list[list[int]]]] = {
    "another divisor": (
        lambda model: model.blocks[1].set_gradient_divide_factor(3.0),
        [[2], [1], [0, 3]],
    ),
    "a hook": (lambda model: model.blocks[2].set_all_reduce_hook(lambda _: None), [[2], [1, 0, 3]]),
    "without a gradient": (lambda model: model.blocks[2].requires_grad_(False), [[1, 0, 3]]),
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_what_is_not_like_its_neighbours(change: str) -> None:
    act, groups = DIFFERENT[change]
    with fake_world(0, 4):
        model = wrapped(4)
        by_block = numels(model)
        units = {2: by_block[0], 1: by_block[1], 0: by_block[2], 3: by_block[3]}
        sizes(model)  # planned before
        assert sizes(model, act) == [sum(units[i] for i in group) for group in groups]


def test_what_does_not_come_is_not_waited_for() -> None:
    """A block that the loss does not reach: the others are reduced one by one, and to the same values."""
    with local_world(2) as world:
        with world.paused():
            expected = plain()
            for rank in range(2):
                (expected(batch(rank), skip=True).sum() / 2).backward()
            batches = [batch(rank) for rank in range(2)]
        model = wrapped(2)
        for _ in range(2):
            model.zero_grad()
            with record_collectives() as record:
                model(world.map(lambda r: batches[r]), skip=True).sum().backward()
            assert record.count("all_reduce") == 3
        check(model, expected)


def test_settings_changed_within_a_step() -> None:
    def put_off(model: Model) -> None:
        model.blocks[0].set_requires_all_reduce(False)

    def within_the_backward(model: Model) -> None:
        model.blocks[0].seen.register_hook(lambda _: put_off(model))

    with fake_world(0, 4):
        model = wrapped(4)
        block, head = numels(model)[0], numels(model)[-1]
        assert sizes(model, after=put_off) == [2 * block + head]
        model.blocks[0].set_requires_all_reduce(True)
        assert sizes(model) == [block, 2 * block + head]  # what was put off comes by itself
        assert sizes(model) == [3 * block + head]
        assert sizes(model, after=within_the_backward) == [block, block, head]


def test_in_mixed_precision() -> None:
    with fake_world(0, 4):
        mesh = cpu_mesh(4, 1)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = plain().float()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        block, head = numels(model)[0], numels(model)[-1]
        assert sizes(model) == [3 * block + head]
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
