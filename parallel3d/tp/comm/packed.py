"""Collectives on activations whose features are cut by a :class:`~parallel3d._packing.Packing`."""

from typing import Any

import torch
from torch import Tensor

from parallel3d._compat import all_gather_single
from parallel3d._packing import Packing
from parallel3d.tp.collectives import TpAxis

__all__ = ["gather_packed", "split_packed"]


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
