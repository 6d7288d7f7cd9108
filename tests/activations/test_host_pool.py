"""HostPool: pieces do not overlap, gaps are joined, and what is given back is whole again."""

from __future__ import annotations

import random

import pytest
import torch

from parallel3d.activations.pool import ALIGNMENT, HostPool, PoolPiece

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(5))
def test_pieces_do_not_overlap_and_all_comes_back(seed: int) -> None:
    draw = random.Random(seed)
    pool = HostPool(64 * ALIGNMENT, CPU, pin=False)
    held: list[PoolPiece] = []
    refused = 0
    for _ in range(400):
        if held and draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
            continue
        size = draw.randrange(1, 12 * ALIGNMENT)
        piece = pool.take(size)
        if piece is None:
            refused += 1
            continue
        assert piece.size >= size and piece.start + piece.size <= pool.size
        assert all(
            piece.start + piece.size <= other.start or other.start + other.size <= piece.start
            for other in held
        )
        held.append(piece)
        del piece
        assert pool.used == sum(each.size for each in held) <= pool.most_used
    assert refused
    held.clear()
    whole = pool.take(pool.size)
    assert whole is not None and pool.take(1) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex128])
def test_a_piece_holds_any_dtype(dtype: torch.dtype) -> None:
    pool = HostPool(4096, CPU, pin=False)
    first, second = pool.take(100), pool.take(100)
    assert first is not None and second is not None
    one, other = (each.tensor(6, dtype) for each in (first, second))
    one.fill_(1)
    other.fill_(0)
    assert one.dtype == dtype and one.shape == (6,) and bool((one == 1).all())


def test_a_pool_of_nothing_has_no_room() -> None:
    assert HostPool(0, CPU, pin=False).take(1) is None
