"""The reduction of an input's gradient, while the weights' gradients are computed.

Plain autograd computes both gradients of a linear layer in one node; the next node sums the input's
over ``tp``, and all wait for it. Here they are nodes of their own, and the order in which autograd runs
nodes that are ready does the rest. It runs those first that were made last, so nodes are numbered::

    finish   n      waits for the sum
    weights  n + 1  compute the gradients of the weights of all linears that read the input
    start    n + 2  starts the sum of the input's gradients that those linears gave
    linears  above  each computes its input's gradient, and leaves the rest to its ``weights``

Only for inputs so large that it pays. The sum is waited for at once in a backward that makes a graph
itself (``create_graph=True``) or looks at each node's result (``detect_anomaly``); linears that are
compiled, or cast by autocast, compute both gradients in one node as ever.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d._torch.autograd import backward_order, functorch_is_active, set_backward_order
from parallel3d._torch.groups import all_gather_single
from parallel3d._util import dry_run
from parallel3d.tp.collectives import (
    TpAxis,
    copy_to_tp,
    gather_sequence,
    reduce_scatter_sequence,
    reduced,
    start_all_reduce,
    start_reduce_scatter,
)

# Multiply-adds of a square layer on the input, from which on the further nodes (some 15 us a layer) are
# small beside what they hide.
WORTHWHILE = {"cpu": 2**24, "other": 2**32}


class Pending:
    """A sum between its start and its end.

    Attributes:
        order: where the gradients of the weights come.
        work: the collective, while it is under way.
    """

    __slots__ = ("order", "work")

    def __init__(self) -> None:
        self.order = 0
        self.work: Any = None


def pays(x: Tensor, rows: int = 1) -> bool:
    """Whether linears on ``rows`` times ``x`` are large enough."""
    work = x.numel() * x.shape[-1] * rows
    kind = x.device.type if dry_run.accelerator() is None else "other"
    least = WORTHWHILE.get(kind, WORTHWHILE["other"])
    return isinstance(work, int) and work >= least  # simulated ranks may have different sizes


def start_after(x: Tensor, pending: Pending) -> Tensor:
    """``x``; its gradient is waited for. What starts it is to be numbered by ``number_start``."""
    return _Finish.apply(x, pending)


def number_start(y: Tensor, pending: Pending) -> None:
    """Numbers the node that made ``y`` and starts the sum; the one that waits was made just before."""
    first = backward_order(y.grad_fn)
    pending.order = first
    set_backward_order(y.grad_fn, first + 1)


def may_wait() -> bool:
    """Whether the backward that runs now leaves gradients alone until they are used."""
    return not (torch.is_grad_enabled() or torch.is_anomaly_enabled())


def pending_of(x: Tensor) -> Pending | None:
    """Of the sum of the gradient of ``x``, if the node that made it starts one."""
    return getattr(x.grad_fn, "parallel3d_pending", None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``; where the sum of the input's gradient can be pending, in two nodes."""
    if torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    pending = pending_of(x)
    if pending is None or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    if not (weight.requires_grad or (bias is not None and bias.requires_grad)):
        return F.linear(x, weight, bias)
    left = _Left()
    token = _Weights.apply(weight, bias, left)
    if token.grad_fn is None:  # no_grad
        return F.linear(x, weight, bias)
    set_backward_order(token.grad_fn, pending.order)
    return _Linear.apply(x, token, (weight, bias), left)


class _Left:
    """What a linear's backward leaves to that of its weights."""

    __slots__ = ("grad", "x")

    grad: Tensor | None
    x: Tensor | None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending) -> Tensor:
        ctx.pending = pending
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        work, ctx.pending.work = ctx.pending.work, None
        if work is not None:
            work.wait()
        return grad, None


class _Weights(torch.autograd.Function):
    """Makes a token that ties a linear to the node that computes its weights' gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, left: _Left) -> Tensor:
        ctx.left = left
        ctx.set_materialize_grads(False)
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, nothing: None) -> tuple[Tensor | None, Tensor | None, None]:
        left = ctx.left
        assert left.grad is not None and left.x is not None
        grad = left.grad.reshape(-1, left.grad.shape[-1])
        x = left.x.reshape(-1, left.x.shape[-1])
        left.grad = left.x = None
        of_weight = grad.t() @ x if ctx.needs_input_grad[0] else None
        of_bias = grad.sum(0) if ctx.needs_input_grad[1] else None
        return of_weight, of_bias, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, token: Tensor, params: tuple[Tensor, Tensor | None], left: _Left
    ) -> Tensor:
        weight, bias = params
        ctx.left = left
        ctx.save_for_backward(x, weight)
        # With a bias it is a view of a matrix, which couldn't be changed in place, by an activation.
        return F.linear(x, weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.left.grad, ctx.left.x = grad, x
        return grad @ weight, None, None, None


# A linear layer on a gathered sequence, in chunks: one chunk is gathered while another is
# multiplied.
#
# For a layer that reads its input alone, such as a fused QKV or gate-up projection: modules that
# read one tensor share one all-gather instead (``shared_input``), which in chunks would be one
# each. It is plain asynchronous collectives, so it runs on every backend; it pays where they run
# beside a matmul, on NCCL.


def obstacle(x: Tensor, dim: int, global_size: int, axis: TpAxis) -> str:
    """Why :func:`gather_linear` can't do it, in words for the user; ``""``: it can."""
    if torch.compiler.is_compiling():
        return "torch.compile orders the collectives"
    if dim % x.dim() == x.dim() - 1:
        return "the sequence is the last dim of the input"
    if global_size == 0 or global_size % axis.size:
        return f"the sequence's length isn't divisible by the {axis.size} tp ranks"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    return "a transform of torch.func is active" if functorch_is_active() else ""


def gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, chunks: int, axis: TpAxis
) -> Tensor:
    """``F.linear`` of ``gather_sequence(x, dim, ...)``.

    Args:
        x: this rank's part; all ranks' are of one size. See :func:`obstacle`.
        chunks: how many all-gathers; no more than ``x`` has rows.
    """
    return _GatherLinear.apply(x, weight, bias, dim % x.dim(), chunks, axis)


class _GatherLinear(torch.autograd.Function):
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
        gathered, works = [], []
        for chunk in x.tensor_split(min(chunks, x.shape[dim]), dim):
            chunk = chunk.contiguous()
            stacked = chunk.new_empty((axis.size, *chunk.shape))
            works.append(
                all_gather_single(stacked.view(-1), chunk.view(-1), group=axis.group, async_op=True)
            )
            gathered.append(stacked)
        products = []
        for stacked, work in zip(gathered, works, strict=True):
            if work is not None:
                work.wait()
            products.append(F.linear(stacked, weight, bias))
        ctx.save_for_backward(x, weight, *gathered)
        # (tp, ..., rows of a rank, ...): the ranks' rows one after another. No view: an activation may
        # change it in place.
        return torch.cat(products, dim + 1).movedim(0, dim).flatten(dim, dim + 1).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *gathered = ctx.saved_tensors
        dim, axis = ctx.dim, ctx.axis
        of_x = work = of_weight = None
        if ctx.needs_input_grad[0]:
            whole = grad @ weight
            if may_wait():
                of_x, work = start_reduce_scatter(whole, dim, axis)
            else:
                of_x = reduce_scatter_sequence(whole, dim, axis)
        if ctx.needs_input_grad[1] and torch.is_grad_enabled():  # the chunks have no graph
            of_weight = _outer(grad, gather_sequence(x, dim, x.shape[dim] * axis.size, axis))
        elif ctx.needs_input_grad[1]:
            by_rank = grad.unflatten(dim, (axis.size, x.shape[dim])).movedim(dim, 0)
            pieces = by_rank.tensor_split(len(gathered), dim + 1)
            of_weight = _outer(pieces[0], gathered[0])
            for piece, stacked in zip(pieces[1:], gathered[1:], strict=True):
                of_weight += _outer(piece, stacked)
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        if work is not None:
            work.wait()
        return of_x, of_weight, of_bias, None, None, None


def _outer(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a weight: (..., out) and (..., in) -> (out, in)."""
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


# One copy or all-gather for all modules that read the same tensor: q, k and v; gate and up;
# experts.
#
# What a module took of its input is remembered with the input, and the next module that takes the
# same tensor *object*, unchanged and in the same way, gets the same result. Its backward is one
# node, to which autograd gives the sum of the readers' gradients: one reduction for all of them.
#
# The memory is short. The axis lists the inputs taken last, by weak references, with what was
# taken of them; that goes when its input dies, when its backward has run or when others were taken
# since. All three follow from the order of the program, so ranks agree on the collectives they
# issue. (What a weak reference to the *result* finds would depend on when a garbage collector
# runs, on each rank.)

# How many inputs are remembered. A copy takes no memory: four, because a decoder's layer that reads the
# encoder's output takes three other inputs before the next one does. A gathered sequence does.
_COPIES = 4
_GATHERED = 1


def share_copy(x: Tensor, axis: TpAxis, *, read_only: bool = False) -> Tensor:
    """``copy_to_tp``, once for all that take the same ``x``; ``x`` itself if it needs no gradient.

    Args:
        read_only: the caller doesn't change the result in place. Without it that is an error, as it is
            for ``copy_to_tp``: ``x`` would change, and autograd not know.
    """
    if axis.size == 1:
        return x
    if _not_shareable(x):
        return copy_to_tp(x, axis)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x  # nothing will be summed
    y = _share(x, (), axis.copies, _COPIES, lambda: _copy(x, axis))
    return y if read_only else _View.apply(y, pending_of(y))


def share_sequence(x: Tensor, dim: int, global_size: int, axis: TpAxis) -> Tensor:
    """``gather_sequence``, once for all that take the same ``x``; its arguments are described there."""
    if axis.size == 1:
        return x
    if _not_shareable(x):
        return gather_sequence(x, dim, global_size, axis)
    dim %= x.dim()
    how = (dim, global_size, x.requires_grad, torch.is_grad_enabled())
    return _share(x, how, axis.gathered, _GATHERED, lambda: _gather(x, dim, global_size, axis))


def _not_shareable(x: Tensor) -> bool:
    # A compiler would guard on the list, and finds equal collectives by itself; an inference tensor
    # doesn't count its changes.
    return torch.compiler.is_compiling() or functorch_is_active() or x.is_inference()


# ---- the memory ----


class _Taken(weakref.ref[Tensor]):
    """A weak reference to an input, and what was taken of it.

    ``made``: the input's node and storage. Versions don't tell of ``x.detach_()`` nor of ``x.data = ...``.
    """

    __slots__ = ("how", "made", "result", "versions")

    how: tuple[Any, ...]
    made: tuple[Any, ...]
    result: Tensor | None
    versions: tuple[int, int]


def _forget(taken: Any) -> None:
    taken.result, taken.made = None, ()


def _share(
    x: Tensor, how: tuple[Any, ...], recent: list[Any], kept: int, take: Callable[[], Tensor]
) -> Tensor:
    """What ``recent`` has of ``x``, or what ``take()`` makes, which it then has; the last is the newest."""
    for i, taken in enumerate(recent):
        y = taken.result
        if (
            y is not None
            and taken() is x
            and taken.how == how
            and taken.versions == (x._version, y._version)
            and taken.made[0] is x.grad_fn
            and taken.made[1] is x.untyped_storage()
        ):
            if i != len(recent) - 1:
                recent.append(recent.pop(i))
            return y
    y = take()
    taken = _Taken(x, _forget)
    taken.how, taken.result, taken.versions = how, y, (x._version, y._version)
    taken.made = (x.grad_fn, x.untyped_storage())
    recent.append(taken)  # beside one of ``x`` that is no longer right, as others may take it yet
    del recent[:-kept]
    return y


def _drop(node: Any, recent: list[Any]) -> None:
    """Forgets what ``node``, whose backward runs, had made: its graph is used up, and an input that is
    a leaf would be kept by it."""
    for taken in recent:
        if taken.result is not None and taken.result.grad_fn is node:
            _forget(taken)


# ---- the operations ----


def _copy(x: Tensor, axis: TpAxis) -> Tensor:
    if not pays(x):
        return _SharedCopy.apply(x, axis, None)
    pending = Pending()
    y = _SharedCopy.apply(start_after(x, pending), axis, pending)
    number_start(y, pending)
    return y


def _gather(x: Tensor, dim: int, size: int, axis: TpAxis) -> Tensor:
    if not (x.requires_grad and torch.is_grad_enabled() and pays(x, axis.size)):
        return _SharedGather.apply(x, dim, size, axis, None)
    pending = Pending()
    y = _SharedGather.apply(start_after(x, pending), dim, size, axis, pending)
    number_start(y, pending)
    return y


class _SharedCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TpAxis, pending: Pending | None) -> Tensor:
        ctx.axis, ctx.parallel3d_pending = axis, pending
        return x.detach()  # no view: that would keep ``x``, which keeps this in the list

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        axis, pending = ctx.axis, ctx.parallel3d_pending
        _drop(ctx, axis.copies)
        if pending is None or not may_wait():
            return reduced(grad, axis), None, None
        total, pending.work = start_all_reduce(grad, axis)
        return total, None, None


class _SharedGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, size: int, axis: TpAxis, pending: Pending | None
    ) -> Tensor:
        ctx.dim, ctx.axis, ctx.parallel3d_pending = dim, axis, pending
        return gather_sequence(x, dim, size, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        axis, pending = ctx.axis, ctx.parallel3d_pending
        _drop(ctx, axis.gathered)
        if pending is None or not may_wait():
            return reduce_scatter_sequence(grad, ctx.dim, axis), None, None, None, None
        own, pending.work = start_reduce_scatter(grad, ctx.dim, axis)
        return own, None, None, None, None


class _View(torch.autograd.Function):
    """A view that autograd lets nobody change."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending | None) -> Tensor:
        ctx.parallel3d_pending = pending
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
