"""One copy or all-gather for all modules that read the same tensor: q, k and v; gate and up; experts.

What a module took of its input is remembered with the input, and the next module that takes the same
tensor *object*, unchanged and in the same way, gets the same result. Its backward is one node, to which
autograd gives the sum of the readers' gradients: one reduction for all of them.

The memory is short. The axis lists the inputs taken last, by weak references, with what was taken of
them; that goes when its input dies, when its backward has run or when others were taken since. All
three follow from the order of the program, so ranks agree on the collectives they issue. (What a weak
reference to the *result* finds would depend on when a garbage collector runs, on each rank.)
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel3d._compat import functorch_is_active
from parallel3d.tp.collectives import (
    TpAxis,
    copy_to_tp,
    gather_sequence,
    reduce_scatter_sequence,
    reduced,
    start_all_reduce,
    start_reduce_scatter,
)
from parallel3d.tp.comm.linear_overlap import (
    Pending,
    may_wait,
    number_start,
    pays,
    pending_of,
    start_after,
)

__all__ = ["share_copy", "share_sequence"]

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
