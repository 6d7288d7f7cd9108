"""Exchanges of rows over ``ep``: all-to-alls of messages whose lengths differ, and their transposes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from parallel3d._util.recompute import kept


class EpAxis:
    """The ``ep`` axis of the experts' view, and this rank's place on it.

    Attributes:
        mesh: the one-axis DeviceMesh.
        size: the number of ranks.
        rank: this rank's coordinate; under simulated ranks a ``SymInt`` that differs by rank.
        group: its process group.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.group: ProcessGroup = mesh.get_group()

    def __deepcopy__(self, memo: dict[int, Any]) -> EpAxis:
        return self  # a copied model runs on the same ranks; process groups can't be copied


@dataclass(frozen=True)
class Lengths:
    """Numbers of rows in the messages that this rank sends to each rank, and receives from each rank.

    Attributes:
        equal: whether all messages of all ranks have the same number of rows, unused ones included.
    """

    sent: list[int]
    taken: list[int]
    equal: bool = False

    @property
    def swapped(self) -> Lengths:
        """Those of the way back."""
        return Lengths(self.taken, self.sent, self.equal)


def exchange(x: Tensor, lengths: Lengths, axis: EpAxis, what: str) -> Tensor:
    """Exchanges rows by an all-to-all. Returns the rows that this rank receives, message by message.

    Args:
        x: (rows sent, ...), message by message.
        what: a name for what is exchanged; a selective recomputation keeps it, see ``_util.recompute``.
    """
    return kept(f"ep {what}", lambda: _exchange(x.contiguous(), lengths, axis))


def _exchange(x: Tensor, lengths: Lengths, axis: EpAxis) -> Tensor:
    received = x.new_empty((sum(lengths.taken), *x.shape[1:]))
    if lengths.equal:
        dist.all_to_all_single(received.view(-1), x.view(-1), group=axis.group)
    else:
        dist.all_to_all_single(received, x, lengths.taken, lengths.sent, group=axis.group)
    return received


def exchange_counts(counts: Tensor, axis: EpAxis) -> Tensor:
    """Returns (ranks, n), what each rank has for this one of ``counts``, (ranks, n)."""

    def start() -> Tensor:
        received = torch.empty_like(counts)
        dist.all_to_all_single(received.view(-1), counts.view(-1), group=axis.group)
        return received

    return kept("ep counts", start)


class Dispatch(torch.autograd.Function):
    """Sends rows and the routing weights of pairs to the ranks of their experts.

    Both exchanges are one autograd function, so that their backwards are issued in the same order on all
    ranks. As two functions, autograd could run them in another order on a rank that has no tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, by_row: Lengths, by_pair: Lengths, axis: EpAxis
    ) -> tuple[Tensor, Tensor]:
        ctx.by_row, ctx.by_pair, ctx.axis = by_row, by_pair, axis
        ctx.set_materialize_grads(True)
        return (
            exchange(rows, by_row, axis, "rows"),
            exchange(weights, by_pair, axis, "weights"),
        )

    @staticmethod
    def backward(ctx: Any, rows: Tensor, weights: Tensor) -> Any:
        axis = ctx.axis
        return (
            _transposed(rows, ctx.by_row, axis) if ctx.needs_input_grad[0] else None,
            _transposed(weights, ctx.by_pair, axis) if ctx.needs_input_grad[1] else None,
            None,
            None,
            None,
        )


class Combine(torch.autograd.Function):
    """Sends the experts' outputs back to the ranks that the rows came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, by_row: Lengths, axis: EpAxis) -> Tensor:
        ctx.by_row, ctx.axis = by_row, axis
        return exchange(rows, by_row.swapped, axis, "outputs")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _transposed(grad, ctx.by_row.swapped, ctx.axis), None, None


def _transposed(grad: Tensor, lengths: Lengths, axis: EpAxis) -> Tensor:
    if torch.is_grad_enabled():  # a second derivative is wanted
        return Combine.apply(grad, lengths, axis)
    return _exchange(grad.contiguous(), lengths.swapped, axis)


class Untouched(torch.autograd.Function):
    """The output of experts that got no token: no rows, and a gradient of zeros for each of ``params``, so
    that this rank takes part in their reduction as the others do."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, *params: Tensor) -> Tensor:
        ctx.like = [torch.empty_like(each, device="meta") for each in (rows, weights, *params)]
        ctx.save_for_backward(rows, weights, *params)
        return rows.new_zeros(rows.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            # A second derivative is wanted: zeros that depend on all that the other ranks' gradients depend
            # on, so that this rank issues the same collectives in its backward.
            inputs = ctx.saved_tensors
            given = zip(inputs, ctx.needs_input_grad, strict=True)
            return tuple(
                Untouched.apply(x, grad, *inputs) if wanted else None for x, wanted in given
            )
        needed = zip(ctx.like, ctx.needs_input_grad, strict=True)
        return tuple(
            torch.zeros_like(like, device=grad.device) if wanted else None
            for like, wanted in needed
        )
