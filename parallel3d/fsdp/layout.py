"""How parameters are sharded and laid out in buckets: arithmetic on shapes and bytes.

This file imports no torch. The engine calculates its buffers with it, the planner their sizes.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache, reduce
from itertools import chain
from math import gcd, prod

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

# See ``default_dim``.
MOST_PADDING = 1 / 8
LEAST_ELEMENTS = 2**20

# See ``block_dim``: what shards of whole blocks may pad, of any parameter and of a vector.
MOST_BLOCK_PADDING = 1 / 200
VECTOR_PADDING = 2**16
# Optimizers keep ordinary state of smaller tensors: torchao's and bitsandbytes's.
LEAST_QUANTIZED = 4096


class PartialGrad(IntEnum):
    """Whether a parameter's gradient is partial over tp, so that its bucket sums it over tp."""

    NEVER = 0
    MAYBE = 1  # autograd decides in each backward, as with torch's own parallel styles
    ALWAYS = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """The properties of one parameter that determine where it lies in the buffers of its bucket."""

    ndim: int
    dim: int | None  # that is sharded; None: none is
    num_shards: int  # n, the number of ranks that it is sharded over; 1 if it is not sharded
    numel: int  # elements in one rank's shard, padding included; the same on every rank
    even: bool  # whether no rank's shard has padding
    fills: bool  # whether the parameter's tp-local shape is the same on all tp ranks
    partial: PartialGrad
    # For each mesh axis whether its ranks hold different parts of the parameter. Axes on which all parameters
    # of a bucket agree may be left out.
    is_cut: tuple[bool, ...]

    @property
    def can_be_zero_copy(self) -> bool:
        """Whether the all-gather can write the shards where the unsharded parameter lies: it is cut evenly
        along dim 0, and its gradient is not partial over tp, as such ones are summed in the packed part."""
        is_whole_rows = self.dim == 0 and self.even and self.numel > 0
        return is_whole_rows and self.num_shards > 1 and not self.partial

    @property
    def packs_as_chunks(self) -> bool:
        """Whether ``torch._chunk_cat`` of the gradient on dim 0, padded with zeros, gives the ranks'
        segments. (For shards of whole blocks the gradient is padded before.)"""
        on_first = self.dim == 0 or (self.num_shards == 1 and self.ndim > 0)
        return on_first and self.fills and self.numel > 0

    def is_small(self, itemsize: int, zero_copy_bytes: int) -> bool:
        """Whether copying the parameter takes less time than one more tensor in a coalesced call."""
        return self.num_shards * self.numel * itemsize < zero_copy_bytes


def are_zero_copy(segments: Sequence[Segment], itemsize: int, zero_copy_bytes: int) -> list[bool]:
    """Returns for each parameter whether it is zero-copy. If there is only one, it may be small."""
    if len(segments) == 1:
        return [segments[0].can_be_zero_copy]
    return [s.can_be_zero_copy and not s.is_small(itemsize, zero_copy_bytes) for s in segments]


def bucket_order(segments: Sequence[Segment], itemsize: int, zero_copy_bytes: int) -> list[int]:
    """Returns the order of a bucket's parameters, as indices into ``segments``: first zero-copy ones, then
    packed ones, last those whose gradient is partial over tp.

    The sum over tp is then one collective on the end of the buffer. Within each kind, parameters that are
    sharded by the same axes are consecutive, so that a gradient norm reads few contiguous ranges.
    """

    def key(index: int) -> tuple[object, ...]:
        segment = segments[index]
        large = segment.can_be_zero_copy and not segment.is_small(itemsize, zero_copy_bytes)
        # Reversed among the packed ones: the last zero-copy and the first packed one are cut alike, if any
        # two.
        return segment.partial, not large, [is_cut == large for is_cut in segment.is_cut]

    return sorted(range(len(segments)), key=key)


def coalesced(sizes: Sequence[int], kinds: Sequence[object]) -> list[list[int]]:
    """Groups consecutive buckets whose gradients are reduced by one all-reduce.

    Args:
        sizes: bytes of each bucket's gradients. One that is larger than a group may be gets its own group.
        kinds: for each bucket a key; only buckets with equal keys are grouped.

    Returns:
        For each group the indices of its buckets.
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


# Buffers at fixed addresses: which units share theirs, and which input of a reduction gets which.


def in_ring(sizes: Sequence[int], slots: int) -> list[bool]:
    """Returns for each unit whether it shares one of ``slots`` buffers in turn. Each of these is as large as
    the largest unit that shares them. The largest units get a buffer of their own, as many of them as makes
    the total of all buffers smallest."""
    largest = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    alone, least, best = 0, sum(sizes), len(sizes)
    for apart, index in enumerate(largest):
        if len(sizes) - apart > slots and alone + slots * sizes[index] < least:
            least, best = alone + slots * sizes[index], apart
        alone += sizes[index]
    shared = set(largest[best:])
    return [index in shared for index in range(len(sizes))]


@dataclass
class BufferPool:
    """Assigns buffers, by index, to requests. The same requests in the same order get the same buffers."""

    buffers: list[tuple[Hashable, int]] = field(default_factory=list)  # kind and size of each
    lent: set[int] = field(default_factory=set)  # indices of those that are lent

    def lend(self, kind: Hashable, size: int, largest: int = 0) -> int:
        """Returns the index of the smallest free buffer of ``kind`` for ``size``; adds one if there is none.

        Args:
            largest: the largest size that this kind will request, if all its buffers are to have that size:
                there are then as few as are lent at a time. 0: a buffer may be up to twice as large.
        """
        wanted = max(size, largest)
        fits = (
            (has, index)
            for index, (its_kind, has) in enumerate(self.buffers)
            if its_kind == kind and size <= has <= 2 * wanted and index not in self.lent
        )
        _, index = min(fits, default=(wanted, len(self.buffers)))
        if index == len(self.buffers):
            self.buffers.append((kind, wanted))
        self.lent.add(index)
        return index

    def give_back(self, indices: Collection[int]) -> None:
        self.lent.difference_update(indices)


def padded_shape(
    shape: Sequence[int], dim: int | None, num_shards: int, multiple: int = 1
) -> list[int]:
    """Returns ``shape`` with the size of ``dim`` rounded up to a multiple of ``num_shards * multiple``."""
    padded = list(shape)
    if dim is not None:
        padded[dim] = ceil_div(padded[dim], num_shards * multiple) * num_shards * multiple
    return padded


def default_dim(
    shape: Sequence[int], works: Sequence[int], cut: Collection[int], num_shards: int
) -> int | None:
    """Returns the dim to shard if the user gives none: the first of ``works`` (in torch always 0), or None.

    If that would add more than an eighth of padding to a large parameter (8 stacked experts on 32 ranks), it
    is the first dim in ``works`` that ``num_shards`` divides and no other axis shards, if there is one:
    padding costs memory and communication, more than the copies that another dim needs.

    Args:
        shape: shape of the largest part that the parameter's own axes (tp) leave on a rank.
        works: dims that the engine can shard; cut: dims that the own axes shard.
    """
    first = next(iter(works), None)
    whole, padded = (prod(padded_shape(shape, first, n)) for n in (1, num_shards))
    if whole < LEAST_ELEMENTS or padded <= whole * (1 + MOST_PADDING):
        return first
    even = (d for d in works if d not in cut and shape[d] % num_shards == 0)
    return next(even, first)


def block_rows(shape: Sequence[int], block: int) -> tuple[int, int] | None:
    """Returns where a tensor of ``shape`` can be cut between blocks of ``block`` consecutive elements.

    Returns:
        (dim, rows): each ``rows`` indices of ``dim``, with all later dims, are whole blocks; dim is the last
        one for which there is such a number. None: there is none, or the size is no multiple of ``block``.
    """
    inner = 1
    for dim in reversed(range(len(shape))):
        rows = block // gcd(block, inner)
        if shape[dim] and shape[dim] % rows == 0:
            return dim, rows
        inner *= shape[dim]
    return None


def block_dim(
    shape: Sequence[int],
    largest: Sequence[int],
    works: Sequence[int],
    cut: Collection[int],
    num_shards: int,
    block: int,
) -> tuple[int | None, int]:
    """Returns (the dim to shard so that shards are whole blocks, how many of its rows are not divided).

    The dim is ``default_dim``'s if its shards are whole blocks, else that dim with more rows per rank, else
    another dim. The number of rows is 1 where the chunks are ``torch.chunk``'s. Shards are not whole blocks,
    but as ``default_dim`` says, if whole blocks would add more padding than half a percent of the parameter
    (65,536 elements of a vector), if other axes divide the blocks, or if no optimizer quantizes the
    parameter: it has fewer than 4096 elements, or no multiple of ``block``.

    Args:
        shape: shape of the whole parameter. largest, works, cut: ``default_dim``'s shape, works, cut.
        block: elements of a block, consecutive in the flattened parameter.
    """
    default = default_dim(largest, works, cut, num_shards)
    found = None if prod(shape) < LEAST_QUANTIZED else block_rows(shape, block)
    if found is None or default is None or num_shards == 1:
        return default, 1
    last, rows = found
    if any(dim > last or (dim == last and largest[dim] % rows) for dim in cut):
        return default, 1
    chunk = ceil_div(largest[last], num_shards)
    whole = [dim for dim in works if dim < last or (dim == last and chunk % rows == 0)]
    if default in whole:
        return default, 1

    def added(dim: int, multiple: int) -> int:
        now, then = default, padded_shape(largest, dim, num_shards, multiple)
        return prod(then) - prod(padded_shape(largest, now, num_shards))

    most = VECTOR_PADDING if len(shape) == 1 else prod(largest) * MOST_BLOCK_PADDING
    if default == last and added(last, rows) <= most:
        return last, rows
    other = (dim for dim in whole if dim not in cut and added(dim, 1) <= most)
    return next(other, default), 1


@lru_cache(maxsize=4096)
def is_exact(size: int, outside: tuple[int, ...], inside: tuple[int, ...], parts: int) -> bool:
    """Whether a DTensor's placements express the engine's shards of a dim that own axes (tp) shard first.

    Every rank of the own axes must have shard chunks of equally many rows, so that all have equal segments;
    and the placements must give every rank the rows that the engine gives it. DTensor's own functions would
    tell, too, but take minutes for thousands of ranks.

    Args:
        size: rows of the dim.
        outside, inside: sizes of the own axes that shard it: those before and after shard in the mesh.
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
    """Returns the row ranges that are left when axes of ``sizes`` ranks chunk ``ranges``, one by one."""
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
    """Whether DTensor's ``_StridedShard`` gives every rank the same rows as the engine does.

    DTensor gives shard rank r the r-th part of each of ``prod(inside)`` chunks, concatenated, and then chunks
    the result over the inside axes.
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
    return -(-a // b)
