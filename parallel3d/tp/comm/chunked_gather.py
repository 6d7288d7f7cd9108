"""A linear layer on a gathered sequence, in chunks: one chunk is gathered while another is multiplied.

For a layer that reads its input alone, such as a fused QKV or gate-up projection: modules that read one
tensor share one all-gather instead (``shared_input``), which in chunks would be one each. It is plain
asynchronous collectives, so it runs on every backend; it pays where they run beside a matmul, on NCCL.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d._compat import all_gather_single, functorch_is_active
from parallel3d.tp.collectives import (
    TpAxis,
    gather_sequence,
    reduce_scatter_sequence,
    start_reduce_scatter,
)
from parallel3d.tp.comm.linear_overlap import may_wait

__all__ = ["gather_linear", "obstacle"]


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
