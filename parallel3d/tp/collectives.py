"""Autograd collectives on local tensors over the ``tp`` axis.

Each is a linear map between two ways of holding an activation, and its backward is the map back:

=========================== ============== ============== =========================================
operation                   forward        backward       from -> to
=========================== ============== ============== =========================================
``copy_to_tp``              nothing        all-reduce     whole -> one copy per rank
``reduce_from_tp``          all-reduce     nothing        parts to be summed -> whole
``gather_from_tp``          all-gather     own chunk      chunks -> whole
``split_to_tp``             own chunk      all-gather     whole -> chunks
``gather_sequence``         all-gather     reduce-scatter chunks -> one copy per rank
``scatter_sequence``        own chunk      all-gather     whole -> chunks (of the sequence)
``reduce_scatter_sequence`` reduce-scatter all-gather     parts to be summed -> chunks
=========================== ============== ============== =========================================

*Whole*: the same tensor on every rank, and the same, complete gradient. *One copy per rank*: the
same tensor, but each rank computes something else from it, so gradients are parts to be summed.

Chunks are those of ``torch.chunk``: all of ``ceil(size / tp)`` but the last ones, which may be
shorter or empty. A chunk doesn't know the global size, so operations that need it take it. Buffers
of a collective are equal on all ranks: short chunks are padded to the ceil and trimmed after.
On an axis of one rank every operation returns its argument.

Backwards are built from the same operations, so second derivatives are right too.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from parallel3d._layout.packing import Packing
from parallel3d._layout.param_layout import local_chunk, smaller
from parallel3d._torch.autograd import for_compiled_function
from parallel3d._torch.groups import all_gather_single, reduce_scatter_single
from parallel3d.errors import StateError


class TpAxis:
    """The ``tp`` axis seen from this rank.

    Attributes:
        mesh: the one-axis DeviceMesh.
        size: how many ranks it has.
        rank: this rank's coordinate; under simulated ranks a ``SymInt`` that differs by rank.
        group: its process group.
        copies, gathered: what ``shared_input`` remembers.
    """

    mesh: DeviceMesh
    size: int
    rank: int
    group: ProcessGroup
    copies: list[Any]
    gathered: list[Any]

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.group = mesh.get_group()
        self.copies, self.gathered = [], []

    def __deepcopy__(self, memo: dict[int, Any]) -> "TpAxis":
        return self  # a copied model runs on the same ranks; process groups can't be copied

    def chunk(self, size: int) -> int:
        """Rows of the largest chunk of a dim of ``size``: what a collective carries per rank."""
        return -(-size // self.size)

    def rows(self, size: int) -> int:
        """Rows of this rank's chunk of a dim of ``size``; under simulated ranks a ``SymInt``."""
        chunk = self.chunk(size)
        return smaller(size - smaller(self.rank * chunk, size), chunk)


def copy_to_tp(x: Tensor, axis: TpAxis) -> Tensor:
    """``x`` unchanged; its gradient is summed over ``tp``."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from_tp(x: Tensor, axis: TpAxis, *, in_place: bool = False) -> Tensor:
    """The sum of ``x`` over ``tp``; its gradient is passed on unchanged.

    Args:
        in_place: the sum may overwrite ``x``: nobody else reads it, nor does its backward.
    """
    if axis.size == 1:
        return x
    # A compiler finds out by itself what may be overwritten.
    if in_place and x.is_contiguous() and not torch.compiler.is_compiling():
        return _ReduceInPlace.apply(x, axis)
    return _Reduce.apply(x, axis)


def gather_from_tp(x: Tensor, dim: int, global_size: int, axis: TpAxis) -> Tensor:
    """The ranks' chunks joined along ``dim``; the gradient of each is its chunk of the whole's.

    Args:
        x: this rank's chunk.
        global_size: size of ``dim`` in the result.
    """
    return x if axis.size == 1 else _Gather.apply(x, dim % x.dim(), global_size, axis)


def split_to_tp(x: Tensor, dim: int, axis: TpAxis) -> Tensor:
    """This rank's chunk of ``x`` along ``dim``; the gradient is the chunks' gradients joined."""
    return x if axis.size == 1 else _Split.apply(x, dim % x.dim(), axis)


def gather_sequence(x: Tensor, dim: int, global_size: int, axis: TpAxis) -> Tensor:
    """The ranks' chunks joined along ``dim``; the gradients of the joined copies are summed and
    each rank keeps its chunk.

    Args:
        x: this rank's chunk.
        global_size: size of ``dim`` in the result.
    """
    return x if axis.size == 1 else _GatherCopies.apply(x, dim % x.dim(), global_size, axis)


def scatter_sequence(x: Tensor, dim: int, axis: TpAxis) -> Tensor:
    """This rank's chunk of ``x`` along ``dim``; the gradient is the chunks' gradients joined."""
    return split_to_tp(x, dim, axis)


def reduce_scatter_sequence(x: Tensor, dim: int, axis: TpAxis) -> Tensor:
    """This rank's chunk along ``dim`` of the sum of ``x`` over ``tp``; the gradient is the chunks'
    gradients joined."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, dim % x.dim(), axis)


# ---- what the collectives do to tensors, without autograd ----


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` with zeros after it up to ``size`` along ``dim``. Called alike on every rank, also on
    those with nothing to add: their sizes may differ, their code may not."""
    shape = list(x.shape)
    shape[dim] = size
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded


def _all_gather(x: Tensor, dim: int, size: int, axis: TpAxis) -> Tensor:
    chunk = axis.chunk(size)
    uneven = chunk * axis.size != size
    x = _pad(x, dim, chunk) if uneven else x.contiguous()
    stacked = x.new_empty((axis.size, *x.shape))
    all_gather_single(stacked.view(-1), x.view(-1), group=axis.group)
    # One copy into the layout the next matmul wants; none for dim 0 or a batch of one. Contiguous, as
    # what a module puts out is: models' code takes views of it.
    if uneven and math.prod(x.shape[:dim]) > 1:
        rows = [max(0, min(chunk, size - rank * chunk)) for rank in range(axis.size)]
        return torch.cat([x.narrow(dim, 0, n) for x, n in zip(stacked, rows, strict=True)], dim)
    joined = stacked.movedim(0, dim).flatten(dim, dim + 1)
    # No view: what an autograd function gives as one can't be changed in place, by an activation.
    return for_compiled_function((joined.narrow(dim, 0, size) if uneven else joined).detach())


def _reduce_scatter(x: Tensor, dim: int, axis: TpAxis) -> Tensor:
    return start_reduce_scatter(x, dim, axis, wait=True)[0]


def start_reduce_scatter(
    x: Tensor, dim: int, axis: TpAxis, *, wait: bool = False
) -> tuple[Tensor, Any]:
    """This rank's chunk along ``dim`` of the sum, and what to ``wait()`` for before it is read; None
    if ``wait``."""
    size = x.shape[dim]
    chunk = axis.chunk(size)
    uneven = chunk * axis.size != size
    if uneven:
        x = _pad(x, dim, chunk * axis.size)
    stacked = x.unflatten(dim, (axis.size, chunk)).movedim(dim, 0).contiguous()
    own = stacked.new_empty(stacked.shape[1:])
    work = reduce_scatter_single(
        own.view(-1), stacked.view(-1), group=axis.group, async_op=not wait
    )
    if uneven:
        own = own.narrow(dim, 0, axis.rows(size)).detach()
    return for_compiled_function(own), work


def _all_reduce(x: Tensor, axis: TpAxis) -> Tensor:
    return start_all_reduce(x, axis, wait=True)[0]


def start_all_reduce(x: Tensor, axis: TpAxis, *, wait: bool = False) -> tuple[Tensor, Any]:
    """The sum, and what to ``wait()`` for before it is read; None if ``wait``."""
    # A copy: autograd may hand the same gradient to other consumers.
    total = x.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(total, group=axis.group, async_op=not wait)
    return for_compiled_function(total), work


# ---- the pairs ----
#
# A backward is built of these functions too, so that it has a derivative. An ordinary one makes no graph,
# and a function's ``apply`` costs as much as a small linear's own backward.


def reduced(x: Tensor, axis: TpAxis) -> Tensor:
    """``reduce_from_tp`` in a backward, on an axis of more than one rank."""
    return _Reduce.apply(x, axis) if torch.is_grad_enabled() else _all_reduce(x, axis)


def _copied(x: Tensor, axis: TpAxis) -> Tensor:
    return _Copy.apply(x, axis) if torch.is_grad_enabled() else x


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TpAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduced(grad, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TpAxis) -> Tensor:
        ctx.axis = axis
        return _all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _copied(grad, ctx.axis), None


class _ReduceInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TpAxis) -> Tensor:
        ctx.axis = axis
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=axis.group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _copied(grad, ctx.axis), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, axis: TpAxis) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return _all_gather(x, dim, size, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Split.apply(grad, ctx.dim, ctx.axis), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: TpAxis) -> Tensor:
        ctx.dim, ctx.size, ctx.axis = dim, x.shape[dim], axis
        return local_chunk(x, dim, axis.size, axis.rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Gather.apply(grad, ctx.dim, ctx.size, ctx.axis), None, None


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, axis: TpAxis) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return _all_gather(x, dim, size, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _ReduceScatter.apply(grad, ctx.dim, ctx.axis), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: TpAxis) -> Tensor:
        ctx.dim, ctx.size, ctx.axis = dim, x.shape[dim], axis
        return _reduce_scatter(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _GatherCopies.apply(grad, ctx.dim, ctx.size, ctx.axis), None, None


# Collectives on activations whose features are cut by a
# :class:`~parallel3d._layout.packing.Packing`.


def gather_packed(x: Tensor, packing: Packing, axis: TpAxis) -> Tensor:
    """The ranks' rows of ``packing`` joined in the order of the whole; the gradient of each is its rows.

    Args:
        x: this rank's rows along ``packing.dim``.
    """
    return x if axis.size == 1 else _GatherPacked.apply(x, packing, axis)


def split_packed(x: Tensor, packing: Packing, axis: TpAxis) -> Tensor:
    """This rank's rows of ``x``; the gradient is the ranks' gradients joined."""
    return x if axis.size == 1 else _SplitPacked.apply(x, packing, axis)


def _gather(x: Tensor, packing: Packing, axis: TpAxis) -> Tensor:
    dim, most = packing.dim, max(packing.lengths)
    shape = list(x.shape)
    shape[dim] = most
    if packing.is_even:
        sent = x.contiguous()
    else:
        sent = x.new_zeros(shape)
        sent.narrow(dim, 0, x.shape[dim]).copy_(x)
    stacked = sent.new_empty((axis.size, *shape))
    all_gather_single(stacked.view(-1), sent.view(-1), group=axis.group)
    joined = stacked.movedim(0, dim).flatten(dim, dim + 1)
    # In the order of the whole: one narrow for each interval.
    places = []
    for rank, held in enumerate(packing.rows):
        at = rank * most
        for first, number in held:
            places.append((first, at, number))
            at += number
    return torch.cat([joined.narrow(dim, at, number) for _, at, number in sorted(places)], dim)


class _GatherPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packing: Packing, axis: TpAxis) -> Tensor:
        ctx.packing, ctx.axis = packing, axis
        return _gather(x, packing, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _SplitPacked.apply(grad, ctx.packing, ctx.axis), None, None


class _SplitPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packing: Packing, axis: TpAxis) -> Tensor:
        ctx.packing, ctx.axis = packing, axis
        return packing.take(x, axis.rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _GatherPacked.apply(grad, ctx.packing, ctx.axis), None, None


class SequenceLength:
    """The global length of the sequence that sequence-parallel modules of one model hold parts of.

    A part doesn't tell it (3 rows of 5 or of 6?), so whatever splits the sequence notes it here in
    its forward and whatever gathers reads it. One model holds one sequence at a time: one that
    splits a second of another length before it is done with the first is refused, and so is the
    recomputation of an earlier micro-batch of another length.
    """

    def __init__(self) -> None:
        self.length: int | None = None

    def of(self, part: Tensor, dim: int, axis: TpAxis) -> int:
        """Global length of the sequence of which ``part`` is this rank's chunk along ``dim``.

        Raises:
            StateError: nothing has split a sequence yet, or it was one of another length.
        """
        if axis.size == 1:
            return part.shape[dim]
        if self.length is None:
            raise StateError(
                f"a module got the part {tuple(part.shape)} of a sequence, but nothing has split a "
                "sequence in this forward. Start sequence parallelism with "
                'VocabParallel(output="sequence"), Rowwise(output="sequence") or '
                'SequenceParallel(input="replicate").'
            )
        if isinstance(axis.rank, int):  # simulated ranks can't be compared with a number
            rows = axis.rows(self.length)
            if part.shape[dim] != rows:
                raise StateError(
                    f"a module got {part.shape[dim]} rows along dim {dim}, but the sequence split "
                    f"last has {self.length}, of which tp rank {axis.rank} of {axis.size} holds "
                    f"{rows}. Is the input a sequence part, and is sequence_dim right?"
                )
        return self.length
