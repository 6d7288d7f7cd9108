"""Which dims the shard axis can cut behind other axes. Plain arithmetic, which needs no torch."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

__all__ = ["ceil_div", "is_exact"]


@lru_cache(maxsize=4096)
def is_exact(size: int, outside: tuple[int, ...], inside: tuple[int, ...], parts: int) -> bool:
    """Whether "own axes first, then shard" can be cut alike on all their ranks and told to DTensor.

    Alike: the shard chunk has the same number of rows on every rank of the own axes, so that slots agree.
    Told: DTensor's placements, of ``outside`` axes, shard and ``inside`` axes, put every rank's rows where
    we do. Its own functions would say so too, but take minutes for thousands of ranks.
    """
    own = outside + inside
    if not own or size % (parts * prod(own)) == 0:
        return True
    chunk = size
    for n in own:
        chunk = ceil_div(chunk, n)
    chunk = ceil_div(chunk, parts)
    for start, rows in _cut_by([(0, size)], outside):
        cells = _cut_by([(start, rows)], inside)
        if any(length and ceil_div(length, parts) != chunk for _, length in cells):
            return False
        if inside and not _strided_is_exact(start, rows, cells, inside, parts):
            return False
    return True


_Rows = tuple[int, int]  # (first, number)


def _cut_by(ranges: list[_Rows], sizes: Sequence[int]) -> list[_Rows]:
    """``ranges`` cut into chunks by one axis after the other."""
    for n in sizes:
        ranges = [_chunk(rows, n, i) for rows in ranges for i in range(n)]
    return ranges


def _chunk(rows: _Rows, n: int, index: int) -> _Rows:
    start, size = rows
    chunk = -(-size // n)
    before = min(index * chunk, size)
    return start + before, min(size - before, chunk)


def _strided_is_exact(
    start: int, rows: int, cells: list[_Rows], inside: Sequence[int], parts: int
) -> bool:
    """Whether shard rank by rank DTensor gives each of the ``inside`` ranks its part of its cell.

    DTensor gives shard rank r the r-th part of each of ``prod(inside)`` chunks, one after another, and
    cuts that by the inside axes.
    """
    if rows % prod(inside) == 0:
        return True  # equal cells, of which shard rank by rank equally many rows come one after another
    chunks = _cut_by([(start, rows)], [prod(inside)])
    for rank in range(parts):
        pieces = [_chunk(each, parts, rank) for each in chunks]
        total = sum(length for _, length in pieces)
        at = iter(pieces)
        first, left = next(at)
        for cell, (_, length) in zip(cells, _cut_by([(0, total)], inside), strict=True):
            begin, wanted = _chunk(cell, parts, rank)
            if length != wanted:
                return False
            while not left and length:
                first, left = next(at)
            if length and (first != begin or length > left):
                return False
            first, left = first + length, left - length
    return True


def ceil_div(a: int, b: int) -> int:
    """The least integer not below a / b."""
    return -(-a // b)
