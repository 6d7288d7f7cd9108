"""How sequences lie on the ranks."""

import pytest
import torch
from _support.cp.reference import axis_of

from parallel3d.cp import Sequence
from parallel3d.errors import Parallel3dError, WrongTypeError
from parallel3d.testing.worlds import fake_world, local_world


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(("length", "size"), [(8, 2), (13, 4), (1, 3), (24, 3)])
def test_ranks_hold_the_whole(length: int, size: int, balanced: bool) -> None:
    sequence = Sequence(length, size, balanced)
    assert sequence.padded % (2 * size if balanced else size) == 0
    assert 0 <= sequence.padded - length < sequence.chunks
    x = torch.arange(2 * length, dtype=torch.float64).view(2, length)
    with local_world(size) as world:
        axis = axis_of(size)
        parts = world.per_rank(sequence.cut(x, 1, axis, fill=-1))
        at = world.per_rank(sequence.positions(axis))
    padded = sequence.pad(x, 1, -1)
    for rank in range(size):
        assert torch.equal(parts[rank], padded[:, at[rank]])
        assert at[rank].tolist() == [
            p for _, first, rows in sequence.parts(rank) for p in range(first, first + rows)
        ]
    rows = torch.cat(parts, 1)
    assert torch.equal(rows[:, sequence.inverse()], padded)
    assert torch.equal(padded[:, sequence.order()], rows)


def test_head_and_tail() -> None:
    assert Sequence(16, 2, True).order().tolist() == [
        *range(4), *range(12, 16), *range(4, 12)
    ]  # fmt: skip


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_many(rank: int) -> None:
    with fake_world(rank, 4):
        axis = axis_of(4)
        at = Sequence(16, 4, True).positions(axis).tolist()
    assert at == [2 * rank, 2 * rank + 1, 14 - 2 * rank, 15 - 2 * rank]


def test_the_gradient_of_a_cut() -> None:
    with local_world(2) as world:
        x = world.map(lambda rank: torch.ones(1, 6)).requires_grad_()
        part = Sequence(6, 2, True).cut(x, 1, axis_of(2))
        part.sum().backward()
        grads = world.per_rank(x.grad)
    assert grads[0].tolist() == [[1, 1, 0, 0, 0, 0]]  # the tail is padding
    assert grads[1].tolist() == [[0, 0, 1, 1, 1, 1]]


def test_errors() -> None:
    with pytest.raises(WrongTypeError, match="length=0: must be a positive integer"):
        Sequence(0, 2)
    with pytest.raises(WrongTypeError, match="size=True"):
        Sequence(4, True)
    with pytest.raises(Parallel3dError, match=r"documents .* \(batch, 8\)"):
        Sequence(7, 4, documents=torch.zeros(2, 7, dtype=torch.int64))
    with pytest.raises(Parallel3dError, match="must be integers"):
        Sequence(8, 4, documents=torch.zeros(2, 8))
    with pytest.raises(Parallel3dError, match="has 5 positions along dim 1; the sequence has 7"):
        Sequence(7, 4).pad(torch.zeros(2, 5), 1)
