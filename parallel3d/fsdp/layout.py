"""How parameters are cut and lie in buckets.

Plain arithmetic, which needs no torch; the planner uses it too.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

# From how many unsharded bytes on a parameter travels in place: it is gathered into its place, and its
# gradient reduced from where autograd has put it. Each such tensor is a member more of the bucket's call.
# gloo runs a member as a call of its own, which takes about as long as copying 1 MiB there and back.
CPU_BYTES = 2**20
# NCCL groups members into one launch, but lays each out on the host: seven take 260 us where one takes 44.
ACCELERATOR_BYTES = 16 * 2**20

# Buckets that nothing shards share an all-reduce: up to 1 MiB the first, so that communication begins early,
# then up to 25 MiB (the defaults of torch's ``DistributedDataParallel``: ``_DEFAULT_FIRST_BUCKET_BYTES``,
# ``bucket_cap_mb``).
FIRST_BYTES = 2**20
MOST_BYTES = 25 * 2**20
NODE_BYTES = 2**20
"""Of these, buckets whose gradients may wait for each other before they are copied together."""


def can_be_zero_copy(
    *, parts: int, dim: int | None, even: bool, slot_numel: int, partial: bool
) -> bool:
    """Whether a parameter's unsharded region is what the ranks' shards are, one after another.

    Args:
        parts: ranks that it is cut over, along ``dim``; None: it isn't.
        even: whether no rank's slot has padding.
        slot_numel: elements of a slot.
        partial: whether its gradient is, or may be, partial over tp, which is summed in the packed part.
    """
    return parts > 1 and dim == 0 and even and slot_numel > 0 and not partial


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
