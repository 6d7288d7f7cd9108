"""Which dims can be sharded beside axes that a parameter brings: those that DTensor tells rightly."""

import itertools
import time
from math import prod

import pytest
from torch.distributed.tensor import Shard

from parallel3d._torch.dtensor import StridedShard, dtensor_shard_box
from parallel3d.fsdp.placement import ceil_div, chunk_length, is_exact

OUTSIDE = [(), (2,), (3,)]
INSIDE = [(), (2,), (4,), (2, 3)]


def told_by_dtensor(size: int, outside: tuple, inside: tuple, parts: int) -> bool:
    """Rank by rank: DTensor's box has the rows that "own axes first, then shard" gives."""
    own = outside + inside
    if not own:
        return True
    chunk = size
    for n in own:
        chunk = ceil_div(chunk, n)
    shard = StridedShard(0, split_factor=prod(inside)) if inside else Shard(0)
    placements = [Shard(0)] * len(outside) + [shard] + [Shard(0)] * len(inside)
    for coordinates in itertools.product(*map(range, own)):
        start, rows = 0, size
        for n, index in zip(own, coordinates, strict=True):
            start += min(index * ceil_div(rows, n), rows)
            rows = chunk_length(rows, n, index)
        if rows and ceil_div(rows, parts) != ceil_div(chunk, parts):
            return False
        for rank in range(parts):
            length = chunk_length(rows, parts, rank)
            where = (*coordinates[: len(outside)], rank, *coordinates[len(outside) :])
            box = dtensor_shard_box((size,), (*outside, parts, *inside), where, placements)
            begin = start + min(rank * ceil_div(rows, parts), rows)
            if box[0][0] != length or (length and box[1][0] != begin):
                return False
    return True


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_exact_is_what_dtensor_tells(parts: int) -> None:
    answers = []
    for outside, inside in itertools.product(OUTSIDE, INSIDE):
        for size in (0, 1, 2, 5, 7, 8, 9, 12, 17, 22, 24, 33):
            answers.append(is_exact(size, outside, inside, parts))
            assert answers[-1] == told_by_dtensor(size, outside, inside, parts), (
                size,
                outside,
                inside,
            )
    assert len(set(answers)) == 2


def test_thousands_of_ranks_take_no_time() -> None:
    start = time.perf_counter()
    assert is_exact(50257, (), (8,), 128)
    assert is_exact(50256, (), (8,), 1024)
    assert time.perf_counter() - start < 5.0  # DTensor's own functions: minutes
