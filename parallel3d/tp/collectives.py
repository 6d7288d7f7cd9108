"""Autograd collectives on local tensors over the ``tp`` axis.

Each is a linear map between two layouts of an activation, and its backward is the map back:

=========================== ============== ============== =========================================
operation                   forward        backward       from -> to
=========================== ============== ============== =========================================
``copy_to_tp``              nothing        all-reduce     whole -> one copy per rank
``reduce_from_tp``          all-reduce     nothing        partial sums -> whole
``gather_from_tp``          all-gather     own chunk      chunks -> whole
``split_to_tp``             own chunk      all-gather     whole -> chunks
``gather_sequence``         all-gather     reduce-scatter chunks -> one copy per rank
``scatter_sequence``        own chunk      all-gather     whole -> chunks (of the sequence)
``reduce_scatter_sequence`` reduce-scatter all-gather     partial sums -> chunks
=========================== ============== ============== =========================================

*Whole*: every rank has the same tensor and the same, complete gradient. *One copy per rank*: every
rank has the same tensor but computes something else from it, so the gradients must be summed.

Chunks are those of ``torch.chunk``: all have ``ceil(size / tp)`` rows but the last ones, which may be
shorter or empty. The size of the whole cannot be read off a chunk, so operations that need it take it as
an argument. Short chunks are padded for the collective and trimmed after it. On an axis of one rank every
operation returns its argument. Backwards are built from the same operations, so second derivatives are
right too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import DeviceMesh

from parallel3d._layout.packing import Packing
from parallel3d._layout.param_layout import local_chunk, smaller
from parallel3d._torch.groups import all_gather_single, reduce_scatter_single
from parallel3d._torch.v2_11 import for_compiled_function
from parallel3d._util.recompute import innermost, kept
from parallel3d.errors import StateError
from parallel3d.mesh.joined import MeshAxis


class TpAxis(MeshAxis):
    """The ``tp`` mesh axis.

    Attributes:
        mesh, size, rank, group: see ``MeshAxis``.
        copies, gathered: caches of ``overlap.py``: results of ``copy_to_tp`` and ``gather_sequence`` for the
            latest inputs, shared by modules that read the same tensor.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.copies: list[Any] = []
        self.gathered: list[Any] = []

    def chunk(self, size: int) -> int:
        """Returns the size of the largest of the tp ranks' chunks of a dim of ``size``."""
        return -(-size // self.size)

    def rows(self, size: int) -> int:
        """Returns the size of this rank's chunk of a dim of ``size``, a ``SymInt`` under simulated ranks."""
        chunk = self.chunk(size)
        return smaller(size - smaller(self.rank * chunk, size), chunk)


def copy_by_rank(x: Tensor, axis: TpAxis) -> Tensor:
    """Returns ``x``; under simulated ranks a copy of it for each rank, so that the ranks may compute
    different values from it."""
    if not isinstance(axis.rank, torch.SymInt):
        return x
    # A factory call makes one tensor per simulated rank.
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def copy_to_tp(x: Tensor, axis: TpAxis) -> Tensor:
    """Returns ``x``, equal on all ranks of ``axis``; in the backward its gradient is summed over them."""
    return _apply(x, "copy", axis)


def reduce_from_tp(x: Tensor, axis: TpAxis, *, in_place: bool = False) -> Tensor:
    """Returns the sum of ``x`` over ``tp``; the gradient of the sum is passed on unchanged as that of ``x``.

    Args:
        x: this rank's summand, of the same shape on all ranks of ``axis``.
        in_place: whether the sum may overwrite ``x``: neither other code nor a backward reads ``x``.
    """
    # A compiler decides by itself what may be overwritten.
    in_place = in_place and x.is_contiguous() and not torch.compiler.is_compiling()
    return _apply(x, "reduce_in_place" if in_place else "reduce", axis)


def gather_from_tp(x: Tensor, dim: int, global_size: int, axis: TpAxis) -> Tensor:
    """Concatenates the chunks of the ranks of ``axis`` along ``dim``. The gradient of ``x`` is this rank's
    chunk of the result's gradient.

    Args:
        x: this rank's chunk.
        global_size: size of ``dim`` in the result.
    """
    return _apply(x, "gather", axis, dim % x.dim(), global_size)


def split_to_tp(x: Tensor, dim: int, axis: TpAxis) -> Tensor:
    """Returns the chunk of ``x`` along ``dim`` that this rank of ``axis`` has; gradients are all-gathered."""
    return _apply(x, "split", axis, dim % x.dim(), x.shape[dim])


def gather_sequence(x: Tensor, dim: int, global_size: int, axis: TpAxis) -> Tensor:
    """As :func:`gather_from_tp`, with the same arguments (``x``, ``dim``, ``global_size``, ``axis``), but for
    ranks that compute different values from the result: its gradients are reduce-scattered, not cut."""
    return _apply(x, "gather_copies", axis, dim % x.dim(), global_size)


scatter_sequence = split_to_tp  # under the name that the others on a sequence have


def reduce_scatter_sequence(x: Tensor, dim: int, axis: TpAxis) -> Tensor:
    """Returns this rank's chunk along ``dim`` of the sum of ``x`` over the ranks of ``axis``; in the backward
    the chunks' gradients are all-gathered."""
    return _apply(x, "reduce_scatter", axis, dim % x.dim(), x.shape[dim])


def gather_packed(x: Tensor, packing: Packing, axis: TpAxis) -> Tensor:
    """All-gathers tensors of which ``packing`` says what rows each rank has, and returns them in the order of
    the whole tensor. The gradient of ``x`` is that of this rank's rows."""
    return _apply(x, "gather_packed", axis, packing)


def split_packed(x: Tensor, packing: Packing, axis: TpAxis) -> Tensor:
    """Returns the rows of ``x`` that ``packing`` gives this rank; in the backward the ranks' gradients are
    all-gathered."""
    return _apply(x, "split_packed", axis, packing)


# ---- the operations on tensors, without autograd ----


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Returns ``x`` padded with zeros to ``size`` along ``dim``. Ranks with nothing to add copy too, because
    simulated ranks must run the same code."""
    shape = list(x.shape)
    shape[dim] = size
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded


def _stack_ranks(x: Tensor, axis: TpAxis) -> Tensor:
    """Returns the all-gathered ``x`` as (tp, \\*x.shape); all ranks' ``x`` must have one shape."""
    x = x.contiguous()
    stacked = x.new_empty((axis.size, *x.shape))
    all_gather_single(stacked.view(-1), x.view(-1), group=axis.group)
    return stacked


def _all_gather(x: Tensor, axis: TpAxis, dim: int, size: int) -> Tensor:
    chunk = axis.chunk(size)
    uneven = chunk * axis.size != size
    stacked = _stack_ranks(_pad(x, dim, chunk) if uneven else x, axis)
    # One copy into a contiguous result, of which models' code takes views; none for dim 0 or a batch of one.
    if uneven and math.prod(x.shape[:dim]) > 1:
        rows = [max(0, min(chunk, size - rank * chunk)) for rank in range(axis.size)]
        return torch.cat([x.narrow(dim, 0, n) for x, n in zip(stacked, rows, strict=True)], dim)
    joined = stacked.movedim(0, dim).flatten(dim, dim + 1)
    # Not a view: an activation can't change a view that an autograd function returns in place.
    return for_compiled_function((joined.narrow(dim, 0, size) if uneven else joined).detach())


def _gather_packed(x: Tensor, axis: TpAxis, packing: Packing) -> Tensor:
    dim = packing.dim
    x = x if packing.is_even else _pad(x, dim, max(packing.lengths))
    stacked = _stack_ranks(x, axis)
    parts = [x.narrow(dim, 0, n) for x, n in zip(stacked, packing.lengths, strict=True)]
    return packing.join(parts)


def start_reduce_scatter(
    x: Tensor, dim: int, axis: TpAxis, *, wait: bool = False
) -> tuple[Tensor, Any]:
    """Starts a reduce-scatter of ``x`` along ``dim``. Returns this rank's chunk of the sum, and the work to
    ``wait()`` for before it is read; with ``wait`` it is complete, and the work is None."""
    size, chunk = x.shape[dim], axis.chunk(x.shape[dim])
    uneven = chunk * axis.size != size
    x = _pad(x, dim, chunk * axis.size) if uneven else x
    stacked = x.unflatten(dim, (axis.size, chunk)).movedim(dim, 0).contiguous()
    own = stacked.new_empty(stacked.shape[1:])
    work = reduce_scatter_single(
        own.view(-1), stacked.view(-1), group=axis.group, async_op=not wait
    )
    if uneven:
        own = own.narrow(dim, 0, axis.rows(size)).detach()
    return for_compiled_function(own), work


def _reduce_in_place(x: Tensor, axis: TpAxis) -> Tensor:
    dist.all_reduce(x, group=axis.group)
    return x


def start_all_reduce(x: Tensor, axis: TpAxis, *, wait: bool = False) -> tuple[Tensor, Any]:
    """Starts an all-reduce of a copy of ``x``. Returns the copy, and the work to ``wait()`` for before it is
    read; with ``wait`` it is complete, and the work is None."""
    # A copy: autograd may pass the same gradient to other consumers.
    total = x.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(total, group=axis.group, async_op=not wait)
    return for_compiled_function(total), work


# Operation -> its forward, a function of (x, axis, *how), and the operation that is its backward.
_OPERATIONS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "copy": (lambda x, axis: x.view_as(x), "reduce"),
    "reduce": (lambda x, axis: start_all_reduce(x, axis, wait=True)[0], "copy"),
    "reduce_in_place": (_reduce_in_place, "copy"),
    "gather": (_all_gather, "split"),
    "split": (lambda x, axis, dim, size: local_chunk(x, dim, axis.size, axis.rank), "gather"),
    "gather_copies": (_all_gather, "reduce_scatter"),
    "reduce_scatter": (
        lambda x, axis, dim, size: start_reduce_scatter(x, dim, axis, wait=True)[0],
        "gather_copies",
    ),
    "gather_packed": (_gather_packed, "split_packed"),
    "split_packed": (lambda x, axis, packing: packing.take(x, axis.rank), "gather_packed"),
}


_LOCAL = ("copy", "split", "split_packed")  # whose forward communicates nothing


def _apply(x: Tensor, operation: str, axis: TpAxis, *how: Any) -> Tensor:
    return x if axis.size == 1 else _Collective.apply(x, operation, axis, how)


def apply_in_backward(grad: Tensor, operation: str, axis: TpAxis, *how: Any) -> Tensor:
    """Runs the collective named ``operation`` on a gradient, within a backward, and returns the result. Its
    autograd function is used only under ``create_graph=True``, because ``apply`` takes as long as the
    backward of a small linear layer."""
    if torch.is_grad_enabled():
        return _Collective.apply(grad, operation, axis, how)
    return _OPERATIONS[operation][0](grad, axis, *how)


class _Collective(torch.autograd.Function):
    """The autograd function of all operations in ``_OPERATIONS``; ``how`` are arguments after ``axis``, of
    the forward and the backward operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operation: str, axis: TpAxis, how: tuple[Any, ...]) -> Tensor:
        forward, ctx.operation = _OPERATIONS[operation]
        ctx.axis, ctx.how = axis, how
        if operation in _LOCAL:
            return forward(x, axis, *how)
        if operation == "reduce_in_place":
            if innermost() is None:
                ctx.mark_dirty(x)
            else:  # what is returned is kept: not ``x``, but its memory
                return kept(operation, lambda: forward(x, axis).detach())
        return kept(operation, lambda: forward(x, axis, *how))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return apply_in_backward(grad, ctx.operation, ctx.axis, *ctx.how), None, None, None


@dataclass
class SequenceLength:
    """The global length of the sequence of which a model's sequence-parallel modules hold parts.

    The length of a part doesn't determine it (3 rows of 5 or of 6?), so a module that splits the sequence
    sets it in its forward, and a module that gathers reads it. A model holds one sequence at a time:
    splitting a second one of another length before the first is gathered is refused, and so is the
    recomputation of an earlier micro-batch of another length.
    """

    length: int | None = None

    def of(self, part: Tensor, dim: int, axis: TpAxis) -> int:
        """Returns the global length of the sequence of which ``part`` is this rank's chunk along ``dim``;
        StateError if no module has split a sequence yet, or the last one had another length."""
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
