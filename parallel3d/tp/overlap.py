"""Overlap of tensor-parallel collectives with matmuls, and inputs that several modules share.

Plain autograd computes both gradients of a linear layer in one node; the next node sums the input's gradient
over ``tp``, and the backward waits for it. Here they are separate nodes. Autograd always runs the ready node
with the largest sequence number, so the sequence numbers determine the order::

    finish   n      waits for the sum
    weights  n + 1  compute the weights' gradients of all linears that read the input
    start    n + 2  starts the sum of the input gradients from those linears
    linears  above  each computes its input's gradient, and leaves the rest to its ``weights``

This is done only for inputs that are large enough. A backward that makes a graph itself
(``create_graph=True``) or inspects each node's result (``detect_anomaly``) waits for the sum at once;
linears under ``torch.compile`` or autocast compute both gradients in one node.
"""

import weakref
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d._torch.autograd import backward_order, functorch_is_active, set_backward_order
from parallel3d._torch.groups import all_gather_single
from parallel3d._util import dry_run
from parallel3d._util.recompute import innermost, kept
from parallel3d.tp.collectives import (
    TpAxis,
    apply_in_backward,
    copy_to_tp,
    gather_sequence,
    reduce_scatter_sequence,
    start_all_reduce,
    start_reduce_scatter,
)

# From so many multiply-adds of a square layer on the input, the additional nodes (some 15 us a layer) cost
# little beside the communication that they hide.
WORTHWHILE = {"cpu": 2**24, "other": 2**32}


@dataclass(slots=True)
class Pending:
    """The sum over ``tp`` of an input's gradient, which a backward starts before the weights' gradients are
    computed.

    Attributes:
        order: the autograd sequence number of the nodes that compute the weights' gradients.
        work: the collective while it is under way.
    """

    order: int = 0
    work: Any = None

    def wait(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.wait()


def pays(x: Tensor, rows: int = 1) -> bool:
    """Whether the linears that read ``x`` (``rows``: by how much it grows when it is gathered) have enough
    work to make the overlap faster."""
    work = x.numel() * x.shape[-1] * rows
    kind = x.device.type if dry_run.played is None else "other"
    least = WORTHWHILE.get(kind, WORTHWHILE["other"])
    return isinstance(work, int) and work >= least  # simulated ranks may have different sizes


def may_wait() -> bool:
    """Whether a gradient may be returned before its sum is complete: not with ``create_graph`` or anomaly
    detection, which read it at once."""
    return not (torch.is_grad_enabled() or torch.is_anomaly_enabled())


def pending_of(x: Tensor) -> Pending | None:
    """Returns the ``Pending`` of the gradient of ``x``; None if the node that made ``x`` starts none."""
    return getattr(x.grad_fn, "parallel3d_pending", None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns ``F.linear(x, weight, bias)``. If the gradient of ``x`` has a ``Pending``, the gradients of
    input and weight are computed by two autograd nodes, the weight's while the sum is under way."""
    pending = None if torch.compiler.is_compiling() else pending_of(x)
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if pending is None or not trained or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    deferred: list[Tensor] = []
    token = _Weights.apply(weight, bias, deferred)
    if token.grad_fn is None:  # no_grad
        return F.linear(x, weight, bias)
    set_backward_order(token.grad_fn, pending.order)
    return _Linear.apply(x, token, (weight, bias), deferred)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending) -> Tensor:
        ctx.pending = pending
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.pending.wait()
        return grad, None


class _Weights(torch.autograd.Function):
    """Computes the gradients of weight and bias in a node of its own, from the output gradient and the input
    that the backward of ``_Linear`` puts into ``deferred``. Its output is empty: it only connects the two
    nodes."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, deferred: list[Tensor]) -> Tensor:
        ctx.deferred = deferred
        ctx.set_materialize_grads(False)
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, nothing: None) -> tuple[Tensor | None, Tensor | None, None]:
        grad, x = ctx.deferred
        ctx.deferred.clear()
        weight_grad = _weight_gradient(grad, x) if ctx.needs_input_grad[0] else None
        bias_grad = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return weight_grad, bias_grad, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        token: Tensor,
        params: tuple[Tensor, Tensor | None],
        deferred: list[Tensor],
    ) -> Tensor:
        weight, bias = params
        ctx.deferred = deferred
        ctx.save_for_backward(x, weight)
        # With a bias it is a view of a matrix, which an activation couldn't change in place.
        return F.linear(x, weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.deferred[:] = grad, x
        return grad @ weight, None, None, None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Returns the weight's gradient, (out, in), for an output gradient (..., out) and an input (..., in)."""
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


# A linear layer on a gathered sequence, in chunks: one chunk is gathered while another is multiplied. For a
# layer that alone reads its input, such as a fused QKV projection: modules that read one tensor share one
# all-gather instead. It runs on every backend, and is faster where collectives run beside a matmul, on NCCL.


def obstacle(x: Tensor, dim: int, global_size: int, axis: TpAxis) -> str:
    """Returns why :class:`GatherLinear` can't be used here, for a warning, or ``""`` if it can."""
    if torch.compiler.is_compiling():
        return "torch.compile orders the collectives"
    if dim % x.dim() == x.dim() - 1:
        return "the sequence is the last dim of the input"
    if global_size == 0 or global_size % axis.size:
        return f"the sequence's length isn't divisible by the {axis.size} tp ranks"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    return "a transform of torch.func is active" if functorch_is_active() else ""


class GatherLinear(torch.autograd.Function):
    """``F.linear`` of ``gather_sequence(x, dim, ...)``, with the sequence gathered in up to ``chunks``
    pieces, each while the one before is multiplied. ``x`` is this rank's part of the sequence, of one size on
    all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dim: int,
        chunks: int,
        axis: TpAxis,
    ) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        works = []

        def start() -> list[Tensor]:
            gathered = []
            for chunk in x.tensor_split(min(chunks, x.shape[dim]), dim):
                chunk = chunk.contiguous()
                stacked = chunk.new_empty((axis.size, *chunk.shape))
                flat = stacked.view(-1), chunk.view(-1)
                works.append(all_gather_single(*flat, group=axis.group, async_op=True))
                gathered.append(stacked)
            return gathered

        gathered = kept("gather_chunks", start)
        products = []
        for stacked, work in zip_longest(gathered, works):
            if work is not None:
                work.wait()
            products.append(F.linear(stacked, weight, bias))
        ctx.save_for_backward(x, weight, *gathered)
        # (tp, ..., rows of a rank, ...) -> the ranks' rows one after another. Detached: an activation may
        # change it in place.
        return torch.cat(products, dim + 1).movedim(0, dim).flatten(dim, dim + 1).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *gathered = ctx.saved_tensors
        dim, axis = ctx.dim, ctx.axis
        x_grad = work = weight_grad = None
        if ctx.needs_input_grad[0] and may_wait():
            x_grad, work = start_reduce_scatter(grad @ weight, dim, axis)
        elif ctx.needs_input_grad[0]:
            x_grad = reduce_scatter_sequence(grad @ weight, dim, axis)
        if ctx.needs_input_grad[1] and torch.is_grad_enabled():  # the chunks have no graph
            whole_x = gather_sequence(x, dim, x.shape[dim] * axis.size, axis)
            weight_grad = _weight_gradient(grad, whole_x)
        elif ctx.needs_input_grad[1]:
            by_rank = grad.unflatten(dim, (axis.size, x.shape[dim])).movedim(dim, 0)
            pieces = by_rank.tensor_split(len(gathered), dim + 1)
            weight_grad = _weight_gradient(pieces[0], gathered[0])
            for piece, stacked in zip(pieces[1:], gathered[1:], strict=True):
                weight_grad += _weight_gradient(piece, stacked)
        bias_grad = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        if work is not None:
            work.wait()
        return x_grad, weight_grad, bias_grad, None, None, None


# One copy or all-gather for all modules that read the same tensor: q, k and v; gate and up; experts.
#
# The next module that takes the same tensor *object*, unchanged and in the same way, gets the same result.
# Its backward is one node, to which autograd gives the sum of the readers' gradients: one reduction for all.
# The axis lists the latest inputs, by weak references, with the results. An entry is dropped when its input
# dies, when its backward has run or when newer inputs take its place. All three follow from the order of
# the program, so ranks agree on the collectives that they issue. (A weak reference to the *result* would
# depend on when a garbage collector runs on each rank.)

# How many inputs are kept. A copy takes no memory: four, because a decoder's layer that reads the encoder's
# output takes three other inputs before the next layer does. A gathered sequence takes memory.
_COPIES = 4
_GATHERED = 1


def share_copy(x: Tensor, axis: TpAxis, *, read_only: bool = False) -> Tensor:
    """Returns ``copy_to_tp(x)``, the same result for all callers with the same ``x``, so that its gradient is
    summed over tp once; ``x`` itself if it needs no gradient.

    Args:
        read_only: the caller doesn't change the result in place. Without it autograd raises for such a
            change, which would change ``x`` without autograd's knowledge.
    """
    if axis.size == 1:
        return x
    if _not_shareable(x):
        return copy_to_tp(x, axis)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x  # there is no gradient to sum
    y = _share(x, axis, ())
    return y if read_only else _View.apply(y, pending_of(y))


def share_sequence(x: Tensor, dim: int, global_size: int, axis: TpAxis) -> Tensor:
    """Returns ``gather_sequence`` of these arguments, one result for all callers with the same ``x``."""
    if axis.size == 1:
        return x
    if _not_shareable(x):
        return gather_sequence(x, dim, global_size, axis)
    return _share(x, axis, (dim % x.dim(), global_size))


def _not_shareable(x: Tensor) -> bool:
    # A compiler would guard on the list, and finds equal collectives by itself; an inference tensor
    # has no version counter.
    return torch.compiler.is_compiling() or functorch_is_active() or x.is_inference()


class _Entry(weakref.ref[Tensor]):
    """A cached result, and a weak reference to the input that it was computed from. It is valid while
    ``state`` still holds for the input: the arguments, and its autograd node, storage and version
    (``x.detach_()`` and ``x.data = ...`` don't change the version)."""

    __slots__ = ("result", "result_version", "state")

    result: Tensor | None
    result_version: int
    state: tuple[Any, ...]


def _forget(entry: Any) -> None:
    entry.result, entry.state = None, ()


def _share(x: Tensor, axis: TpAxis, gather: tuple[Any, ...]) -> Tensor:
    """Returns the cached result for ``x``, or computes and caches it: the gathered sequence if ``gather`` is
    (dim, global size), a copy if it is empty."""
    recent = axis.gathered if gather else axis.copies
    # A recomputation, which gives another object, must share what its forward did: nothing from before it.
    how = (*gather, x.requires_grad, torch.is_grad_enabled(), innermost())
    for i, entry in enumerate(recent):
        y = entry.result
        if y is None or entry() is not x or y._version != entry.result_version:
            continue
        node, storage, *rest = entry.state
        if node is x.grad_fn and storage is x.untyped_storage() and rest == [x._version, *how]:
            if i != len(recent) - 1:
                recent.append(recent.pop(i))
            return y
    y = _make_shared(x, axis, gather)
    entry = _Entry(x, _forget)
    entry.result, entry.result_version = y, y._version
    entry.state = (x.grad_fn, x.untyped_storage(), x._version, *how)
    # An entry of ``x`` that is out of date stays: others may still use its result.
    recent.append(entry)
    del recent[: -_GATHERED if gather else -_COPIES]
    return y


def _make_shared(x: Tensor, axis: TpAxis, gather: tuple[Any, ...]) -> Tensor:
    trained = x.requires_grad and torch.is_grad_enabled()
    if not (trained and pays(x, axis.size if gather else 1)):
        return _Shared.apply(x, axis, gather, None)
    pending = Pending()
    y = _Shared.apply(_Finish.apply(x, pending), axis, gather, pending)
    # The node that finishes the sum was made just before this one, which starts it.
    pending.order = backward_order(y.grad_fn)
    set_backward_order(y.grad_fn, pending.order + 1)
    return y


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: TpAxis, gather: tuple[Any, ...], pending: Pending | None
    ) -> Tensor:
        ctx.axis, ctx.gather, ctx.parallel3d_pending = axis, gather, pending
        if gather:
            dim, size = gather
            return gather_sequence(x, dim, size, axis)
        return x.detach()  # no view: that would keep ``x``, which keeps this in the list

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        axis, gather, pending = ctx.axis, ctx.gather, ctx.parallel3d_pending
        for entry in axis.gathered if gather else axis.copies:
            # Its graph is used up; it would also keep an input that is a leaf.
            if entry.result is not None and entry.result.grad_fn is ctx:
                _forget(entry)
        if pending is None or not may_wait():
            operation = "reduce_scatter" if gather else "reduce"
            total = apply_in_backward(grad, operation, axis, *gather)
        elif gather:
            total, pending.work = start_reduce_scatter(grad, gather[0], axis)
        else:
            total, pending.work = start_all_reduce(grad, axis)
        return total, None, None, None


class _View(torch.autograd.Function):
    """Returns a view of its input that raises when it is changed in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending | None) -> Tensor:
        ctx.parallel3d_pending = pending
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
