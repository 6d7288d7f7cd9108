"""Autograd collectives on local tensors over the ``cp`` axis.

Each is a linear map between two layouts of tensors (batch, heads, positions, channels), several in one call,
and its backward is its transpose:

==================== ============== ============== ==========================================================
operation            forward        backward       from -> to
==================== ============== ============== ==========================================================
``to_heads``         all-to-all     all-to-all     this rank's positions of all heads -> all positions of its
``to_positions``     all-to-all     all-to-all     the way back
``gather_positions`` all-gather     reduce-scatter this rank's positions -> all, one copy per rank
==================== ============== ============== ==========================================================

All positions are in the sequence's order, this rank's in its own (``Sequence.parts``). Where ranks share a
head, ``to_heads`` sends it to each of them, and its backward sums their gradients. Backwards are built from
the same operations, so second derivatives are right too. ``Rotation`` is the ring's, without autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch import distributed as dist

from parallel3d._torch.groups import all_gather_single, reduce_scatter_single
from parallel3d._torch.kernels import foreach_copy_, views_like
from parallel3d._torch.simulated import LocalTensor, call_by_rank
from parallel3d._util.recompute import kept
from parallel3d._util.trace import issuing
from parallel3d.cp.sequence import CpAxis, Sequence

Heads = tuple[tuple[int, int], ...]
"""For each rank: its first head, and its number of heads."""
Splits = Callable[[int], list[int]]
"""A function of a rank: numbers of elements that it sends to each rank, or gets from each."""


@dataclass(frozen=True)
class HeadLayout:
    """How the tensors of one all-to-all are divided: ``sequence`` by positions; ``heads``: for each tensor,
    for each rank (first head, number of heads)."""

    sequence: Sequence
    heads: tuple[Heads, ...]


def to_heads(tensors: tuple[Tensor, ...], layout: HeadLayout, axis: CpAxis) -> tuple[Tensor, ...]:
    """Exchanges positions for heads by an all-to-all: from this rank's positions of all heads, (B, heads,
    rows, D_i), to all positions of this rank's heads, (B, this rank's heads, padded length, D_i), for each
    tensor."""
    return _apply("to_heads", layout, axis, tensors)


def to_positions(
    tensors: tuple[Tensor, ...], layout: HeadLayout, axis: CpAxis
) -> tuple[Tensor, ...]:
    """The way back from ``to_heads``: returns this rank's positions of all heads. Where ranks share a head,
    their values are summed."""
    return _apply("to_positions", layout, axis, tensors)


def gather_positions(
    tensors: tuple[Tensor, ...], sequence: Sequence, axis: CpAxis
) -> tuple[Tensor, ...]:
    """All-gathers ``tensors``, of one dtype, along the sequence: (B, heads, rows, D_i) each -> (B, heads,
    padded length, D_i). In the backward the ranks' gradients are summed, in one reduce-scatter."""
    return _apply("gather", sequence, axis, tensors)


def gather_flags(flags: Tensor, sequence: Sequence, axis: CpAxis) -> Tensor:
    """All-gathers ``flags``, (B, rows) bool, along the sequence: (B, padded length), without a gradient."""
    if axis.size == 1:
        return flags
    bytes_ = (flags[:, None, :, None].to(torch.uint8),)
    (whole,) = kept("gather_flags", lambda: _gather(bytes_, sequence, axis))
    return whole[:, 0, :, 0].bool()


class Rotation:
    """A step of the ring: this rank sends ``x`` to the next rank and receives the tensor of the previous one.
    The messages are issued at once; ``x``, of one size on all ranks, must not be written or freed before
    ``wait()``."""

    def __init__(self, x: Tensor, axis: CpAxis) -> None:
        n, size = x.numel(), axis.size

        def only(to: int) -> list[int]:
            return [n if rank == to % size else 0 for rank in range(size)]

        self._received, self._work, self._kept = _exchange(
            x.reshape(-1), (lambda r: only(r + 1), lambda r: only(r - 1)), axis, async_op=True
        )

    def wait(self) -> Tensor:
        """Waits, and returns the tensor that the previous rank has sent, flat."""
        if self._work is not None:
            self._work.wait()
        return self._received()


# ---- the operations on tensors, without autograd ----


def _apply(name: str, how: Any, axis: CpAxis, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tensors if axis.size == 1 else _AcrossRanks.apply(name, how, axis, *tensors)


class _AcrossRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, how: Any, axis: CpAxis, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        forward, ctx.backward_name = _OPERATIONS[name]
        ctx.how, ctx.axis = how, axis
        return kept(name, lambda: forward(tensors, how, axis))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        name, how, axis = ctx.backward_name, ctx.how, ctx.axis
        if torch.is_grad_enabled():  # a second derivative is wanted
            return None, None, None, *_apply(name, how, axis, grads)
        return None, None, None, *_OPERATIONS[name][0](grads, how, axis)


def _to_heads(tensors: tuple[Tensor, ...], layout: HeadLayout, axis: CpAxis) -> tuple[Tensor, ...]:
    sequence, size = layout.sequence, axis.size
    shapes = [(x.shape[0], x.shape[2], x.shape[3]) for x in tensors]

    def pack(*tensors: Tensor) -> Tensor:
        """Returns, flat, for each rank its heads of each tensor."""
        return _packed(
            [
                x.narrow(1, *heads[to])
                for to in range(size)
                for x, heads in zip(tensors, layout.heads, strict=True)
            ]
        )

    def unpack(flat: Tensor, rank: int) -> tuple[Tensor, ...]:
        mine = [heads[rank][1] for heads in layout.heads]
        sizes = [n * b * s * d for n, (b, s, d) in zip(mine, shapes, strict=True)]
        by_rank = flat.view(size, sum(sizes)).split(sizes, 1)
        return tuple(
            _from_ranks(part.reshape(size, b, n, s, d), sequence)
            for part, n, (b, s, d) in zip(by_rank, mine, shapes, strict=True)
        )

    splits = _splits(layout, shapes, size)
    received, _, _ = _exchange(call_by_rank(pack, *tensors), splits, axis)
    return call_by_rank(unpack, received(), axis.rank)


def _to_positions(
    tensors: tuple[Tensor, ...], layout: HeadLayout, axis: CpAxis
) -> tuple[Tensor, ...]:
    sequence, size = layout.sequence, axis.size
    shapes = [(x.shape[0], sequence.rows, x.shape[3]) for x in tensors]

    def unpack(flat: Tensor) -> tuple[Tensor, ...]:
        at = 0
        found: list[list[Tensor]] = [[] for _ in shapes]
        for source in range(size):
            for number, (b, s, d) in enumerate(shapes):
                n = layout.heads[number][source][1]
                found[number].append(flat.narrow(0, at, n * b * s * d).view(b, n, s, d))
                at += n * b * s * d
        return tuple(map(_join_heads, found, layout.heads))

    splits = _splits(layout, shapes, size)
    back = None if splits is None else (splits[1], splits[0])
    received, _, _ = _exchange(call_by_rank(_by_rank, sequence, *tensors), back, axis)
    return call_by_rank(unpack, received())


def _gather(tensors: tuple[Tensor, ...], sequence: Sequence, axis: CpAxis) -> tuple[Tensor, ...]:
    shapes = [tuple(x.shape) for x in tensors]
    flat = call_by_rank(_packed, list(tensors))
    stacked = flat.new_empty((axis.size, flat.shape[0]))
    all_gather_single(stacked.view(-1), flat, group=axis.group)
    sizes = [x.numel() for x in tensors]
    return tuple(
        _from_ranks(part.reshape(axis.size, *shape), sequence)
        for part, shape in zip(stacked.split(sizes, 1), shapes, strict=True)
    )


def _reduce(tensors: tuple[Tensor, ...], sequence: Sequence, axis: CpAxis) -> tuple[Tensor, ...]:
    flat = call_by_rank(_by_rank, sequence, *tensors)
    own = flat.new_empty(flat.shape[0] // axis.size)
    reduce_scatter_single(own, flat, group=axis.group)
    shapes = [(*x.shape[:2], sequence.rows, x.shape[3]) for x in tensors]
    pieces = own.split([math.prod(shape) for shape in shapes])
    return tuple(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))


# Operation -> its forward, a function of (tensors, how, axis), and the operation that is its backward.
_OPERATIONS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], str]] = {
    "to_heads": (_to_heads, "to_positions"),
    "to_positions": (_to_positions, "to_heads"),
    "gather": (_gather, "reduce"),
    "reduce": (_reduce, "gather"),
}


def _splits(
    layout: HeadLayout, shapes: list[tuple[int, int, int]], size: int
) -> tuple[Splits, Splits] | None:
    """Returns the numbers of elements that a rank sends to each rank in ``to_heads``, and gets from each;
    None: all are equal. ``shapes``: (B, rows, D) of each tensor."""
    elements = [
        sum(heads[to][1] * b * s * d for heads, (b, s, d) in zip(layout.heads, shapes, strict=True))
        for to in range(size)
    ]
    if len(set(elements)) == 1:
        return None
    return lambda rank: elements, lambda rank: [elements[rank]] * size


def _exchange(
    flat: Tensor, splits: tuple[Splits, Splits] | None, axis: CpAxis, *, async_op: bool = False
) -> tuple[Callable[[], Tensor], Any, Tensor]:
    """Issues an all-to-all of the elements of ``flat``. ``splits``: numbers of elements that a rank sends to
    each rank, and gets from each; None: equal parts.

    Returns:
        A function that returns what this rank got, one rank after another; the work to wait for before it is
        called (None if not ``async_op``); and the tensor that is sent, which must be kept until then.
    """
    group, size = axis.group, axis.size
    async_op = async_op and not torch.compiler.is_compiling()  # which would break the graph
    if splits is None:
        received = torch.empty_like(flat)
        work = dist.all_to_all_single(received, flat, group=group, async_op=async_op)
        return lambda: received, work, flat
    sends, takes = splits
    if not isinstance(flat, LocalTensor):
        taken = takes(axis.rank)
        received = flat.new_empty(sum(taken))
        work = dist.all_to_all_single(
            received, flat, taken, sends(axis.rank), group=group, async_op=async_op
        )
        return lambda: received, work, flat
    # torch's simulated ranks all have the same sizes: each message is padded to the longest.
    most = max(n for rank in range(size) for n in sends(rank))

    def pad(flat: Tensor, rank: int) -> Tensor:
        padded = flat.new_zeros(size, most)
        for row, part in zip(padded, flat.split(sends(rank)), strict=True):
            row[: part.shape[0]].copy_(part)
        return padded.view(-1)

    def trim(flat: Tensor, rank: int) -> Tensor:
        rows = zip(flat.view(size, most), takes(rank), strict=True)
        return torch.cat([row[:number] for row, number in rows])

    padded = call_by_rank(pad, flat, axis.rank)
    received = torch.empty_like(padded)
    total = max(sum(each(rank)) for each in (sends, takes) for rank in range(size))
    with issuing.messages_of("all_to_all", total * flat.element_size()):
        work = dist.all_to_all_single(received, padded, group=group, async_op=async_op)
    return lambda: call_by_rank(trim, received, axis.rank), work, padded


def _from_ranks(stacked: Tensor, sequence: Sequence) -> Tensor:
    """Returns the ranks' positions, (cp, B, H, rows, D), in the sequence's order: (B, H, padded, D)."""
    if not sequence.balanced:
        return rearrange(stacked, "cp b h rows d -> b h (cp rows) d")
    head, tail = rearrange(stacked, "cp b h (ends rows) d -> ends cp b h rows d", ends=2)
    return torch.cat([*head, *reversed(tail.unbind())], 2)


def _by_rank(sequence: Sequence, *tensors: Tensor) -> Tensor:
    """Returns, flat, for each rank its positions of each of ``tensors``, (B, H, padded, D) each."""
    size, ends = sequence.size, sequence.chunks // sequence.size
    sizes = [x.numel() // size for x in tensors]
    flat = tensors[0].new_empty(size * sum(sizes))
    for x, stacked in zip(tensors, flat.view(size, -1).split(sizes, 1), strict=True):
        b, h, _, d = x.shape
        chunks = rearrange(x, "b h (ends cp rows) d -> ends cp b h rows d", ends=ends, cp=size)
        target = stacked.view(size, b, h, ends, -1, d).movedim(3, 0)
        target[0].copy_(chunks[0])
        if sequence.balanced:
            target[1].copy_(chunks[1].flip(0))
    return flat


def _packed(tensors: list[Tensor]) -> Tensor:
    """Returns one flat tensor with the elements of all tensors, one after another."""
    flat = tensors[0].new_empty(sum(x.numel() for x in tensors))
    foreach_copy_(list(views_like(flat, tensors)), tensors)
    return flat


def _join_heads(parts: list[Tensor], heads: Heads) -> Tensor:
    """Returns all heads in one tensor from the ranks' ``parts``; a head of several ranks is their sum."""
    total = sum(heads[-1])  # the last rank has the last one
    if sum(number for _, number in heads) == total:
        return torch.cat(parts, 1)
    b, _, s, d = parts[0].shape
    whole = parts[0].new_zeros(b, total, s, d)
    for part, (first, number) in zip(parts, heads, strict=True):
        whole.narrow(1, first, number).add_(part)
    return whole
