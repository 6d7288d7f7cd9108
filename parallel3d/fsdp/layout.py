"""How parameters are sharded and laid out in buckets: arithmetic on shapes and bytes.

This file imports no torch. The engine calculates its buffers with it, the planner their sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, reduce
from itertools import chain
from math import prod

# From how many unsharded bytes on a parameter is zero-copy: it is gathered into its place, and its gradient
# is reduced from where autograd has put it. Each such parameter is one more tensor in the bucket's call.
# gloo runs each tensor as a call of its own, which takes about as long as copying 1 MiB there and back.
CPU_BYTES = 2**20
# NCCL groups tensors into one launch, but lays each out on the host: seven take 260 us where one takes 44.
ACCELERATOR_BYTES = 16 * 2**20

# Buckets that are not sharded share an all-reduce: the first call sends up to 1 MiB, so that communication
# begins early, the others up to 25 MiB (the defaults of torch's ``DistributedDataParallel``:
# ``_DEFAULT_FIRST_BUCKET_BYTES``, ``bucket_cap_mb``).
FIRST_BYTES = 2**20
MOST_BYTES = 25 * 2**20


class PartialGrad(IntEnum):
    """Whether a parameter's gradient is partial over tp, so that its bucket sums it over tp."""

    NEVER = 0
    MAYBE = 1  # autograd decides in each backward, as with torch's own parallel styles
    ALWAYS = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter in the buffers of its bucket.

    Attributes:
        ndim: dims of the parameter.
        dim: the dim that is sharded; None: the parameter is not sharded.
        num_shards: n, the number of ranks that it is sharded over; 1 if it is not sharded.
        numel: elements in one rank's shard, padding included; the same on every rank.
        even: whether no rank's shard has padding.
        fills: whether the parameter's tp-local shape is the same on all tp ranks.
        partial: whether its gradient is partial over tp.
        is_cut: for each mesh axis whether its ranks hold different parts of the parameter. Axes on which all
            parameters of a bucket agree may be left out.
    """

    ndim: int
    dim: int | None
    num_shards: int
    numel: int
    even: bool
    fills: bool
    partial: PartialGrad
    is_cut: tuple[bool, ...]

    @property
    def can_be_zero_copy(self) -> bool:
        """Whether the unsharded parameter is the ranks' shards, one after another.

        A gradient that is partial over tp is summed in the packed part of the bucket.
        """
        is_whole_rows = self.dim == 0 and self.even and self.numel > 0
        return is_whole_rows and self.num_shards > 1 and not self.partial

    @property
    def packs_as_chunks(self) -> bool:
        """Whether the gradient, chunked on dim 0 and padded with zeros, is what the ranks' segments hold."""
        on_first = self.dim == 0 or (self.num_shards == 1 and self.ndim > 0)
        return on_first and self.fills and self.numel > 0

    def is_small(self, itemsize: int, zero_copy_bytes: int) -> bool:
        """Whether copying it takes less time than one more tensor in the call; ``itemsize``: at rest."""
        return self.num_shards * self.numel * itemsize < zero_copy_bytes


def are_zero_copy(segments: Sequence[Segment], itemsize: int, zero_copy_bytes: int) -> list[bool]:
    """Whether each parameter of a bucket is zero-copy. A lone one always is, if it can be."""
    if len(segments) == 1:
        return [segments[0].can_be_zero_copy]
    return [s.can_be_zero_copy and not s.is_small(itemsize, zero_copy_bytes) for s in segments]


def bucket_order(segments: Sequence[Segment], itemsize: int, zero_copy_bytes: int) -> list[int]:
    """Indices of ``segments`` in the order of a bucket: zero-copy, packed, and last those partial over tp.

    The sum of partial gradients over tp is then one collective on the end of the buffer. Within each of these
    three kinds, parameters that are cut by the same axes are consecutive, so that a gradient norm reads few
    contiguous ranges, in whatever order the modules are.
    """

    def key(index: int) -> tuple[object, ...]:
        segment = segments[index]
        large = segment.can_be_zero_copy and not segment.is_small(itemsize, zero_copy_bytes)
        # In reverse order among the packed ones: the last zero-copy one and the first packed one are then
        # cut by the same axes, if any two are.
        return segment.partial, not large, [is_cut == large for is_cut in segment.is_cut]

    return sorted(range(len(segments)), key=key)


def coalesced(sizes: Sequence[int], kinds: Sequence[object]) -> list[list[int]]:
    """Groups neighbours whose gradients share an all-reduce.

    Args:
        sizes: bytes of each. What is larger than a group may be is alone in its group.
        kinds: only equal kinds are grouped.

    Returns:
        Indices, group by group.
    """
    groups: list[list[int]] = []
    total = 0
    for index, size in enumerate(sizes):
        limit = FIRST_BYTES if len(groups) == 1 else MOST_BYTES
        differs = index > 0 and kinds[index] != kinds[index - 1]
        if not groups or differs or total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(index)
        total += size
    return groups


def padded_shape(shape: Sequence[int], dim: int | None, num_shards: int) -> list[int]:
    """``shape`` with the sharded ``dim`` rounded up to a multiple of ``num_shards``."""
    padded = list(shape)
    if dim is not None:
        padded[dim] = ceil_div(padded[dim], num_shards) * num_shards
    return padded


@lru_cache(maxsize=4096)
def is_exact(size: int, outside: tuple[int, ...], inside: tuple[int, ...], parts: int) -> bool:
    """Whether a dim can be cut by its own axes first and then over shard, as DTensor's placements tell it.

    Every rank of the own axes must have shard chunks of equally many rows, so that all have equal segments;
    and the placements must put every rank's rows where the engine does. DTensor's own functions would say
    so too, but take minutes for thousands of ranks.

    Args:
        size: rows of the dim.
        outside, inside: sizes of the own axes that cut it, before and after the shard axis in the mesh.
        parts: ranks of the shard axis.
    """
    own = outside + inside
    if not own or size % (parts * prod(own)) == 0:
        return True
    chunk = reduce(ceil_div, (*own, parts), size)
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
    """Whether DTensor's ``_StridedShard`` puts the same rows on every rank as the engine does.

    DTensor gives shard rank r the r-th part of each of ``prod(inside)`` chunks, one after another, and
    cuts the result over the inside axes.
    """
    if rows % prod(inside) == 0:
        return True  # equal cells, of which shard rank by rank equally many rows come one after another
    chunks = _cut_by([(start, rows)], [prod(inside)])
    for rank in range(parts):
        pieces = [range(first, first + n) for first, n in (_chunk(c, parts, rank) for c in chunks)]
        held = [*chain.from_iterable(pieces)]
        for cell, (first, length) in zip(cells, _cut_by([(0, len(held))], inside), strict=True):
            begin, wanted = _chunk(cell, parts, rank)
            if held[first : first + length] != [*range(begin, begin + wanted)]:
                return False
    return True


def ceil_div(a: int, b: int) -> int:
    """The least integer not below a / b."""
    return -(-a // b)
