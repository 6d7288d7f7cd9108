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

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d import _dry_run
from parallel3d._compat import backward_order, set_backward_order

__all__ = ["Pending", "linear", "may_wait", "number_start", "pays", "pending_of", "start_after"]

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
    kind = x.device.type if _dry_run.accelerator() is None else "other"
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
