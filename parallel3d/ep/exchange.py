"""Exchanges over ``ep``: to which ranks the tokens of a call are sent and where results are added; the
all-to-alls of messages whose lengths differ, and their backwards.

A *pair* is a token and one of the experts that it was given to. A *row* is a token's vector in a message: a
token goes to a rank once, however many of its experts are there, and the pairs say which experts compute it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch import distributed as dist

from parallel3d._util.recompute import kept
from parallel3d.ep.division import Division
from parallel3d.mesh.joined import MeshAxis

# ---- where tokens go: index arithmetic only ----


def destinations(index: Tensor, division: Division) -> tuple[Tensor, Tensor]:
    """Returns which of T tokens go to each rank, (ranks, T) bool, and which of the T x K pairs, (ranks, T *
    K) bool. ``index``: (T, K), the experts of each token; numbers below 0 or too large are ignored."""
    valid = (index >= 0) & (index < division.experts)
    to = torch.where(valid, index // division.chunk, division.ranks)
    ranks = torch.arange(division.ranks, device=index.device)
    pairs = rearrange(to, "t k -> 1 t k") == rearrange(ranks, "r -> r 1 1")
    return pairs.any(-1), rearrange(pairs, "r t k -> r (t k)")


class Routes(NamedTuple):
    """Indices of the rows and pairs in the messages of one rank, message by message. Messages may have unused
    places.

    Attributes:
        token_of_row: (rows,), the token of each row; 0 in unused rows, to which no pair refers.
        pair_of: (pairs,), the position of each pair in the flattened (T, K).
        filled: (pairs,) int32, 1 for pairs, 0 for unused places.
        expert, row: (pairs,) int32: the expert's number on its rank, and the token's row in the message.
        dropped: scalar, the number of pairs for which there was no place.
    """

    token_of_row: Tensor
    pair_of: Tensor
    filled: Tensor
    expert: Tensor
    row: Tensor
    dropped: Tensor


def routes(
    index: Tensor,
    division: Division,
    sizes: tuple[int, int],
    starts: tuple[Tensor, Tensor],
    room: tuple[int, int],
) -> Routes:
    """Returns which rows and pairs this rank sends, and at which place in which message.

    Args:
        index: (T, K), the experts of each token.
        sizes: numbers of rows and of pairs in all messages together.
        starts: (ranks,) each: where the message to each rank begins, in rows and in pairs.
        room: largest numbers of rows and of pairs in a message.
    """
    tokens, top_k = index.shape
    by_token, by_pair = destinations(index, division)
    at_row, at_pair = by_token.cumsum(1) - 1, by_pair.cumsum(1) - 1
    has_row = by_token & (at_row < room[0])
    has_pair = by_pair & (at_pair < room[1]) & repeat(has_row, "r t -> r (t k)", k=top_k)

    def places(has: Tensor, at: Tensor, start: Tensor, size: int) -> Tensor:
        return torch.where(has, start[:, None] + at, size)  # size: a place to throw away

    def scattered(place: Tensor, values: Tensor, size: int) -> Tensor:
        """Returns a tensor of ``size`` with ``values`` at their places ``place``; 0 elsewhere."""
        every = repeat(values, "n -> (r n)", r=division.ranks)
        target = values.new_zeros(size + 1)
        return target.scatter_(0, place.flatten(), every)[:-1]

    row_place = places(has_row, at_row, starts[0], sizes[0])
    pair_place = places(has_pair, at_pair, starts[1], sizes[1])
    numbers = torch.arange(tokens * top_k, device=index.device)
    token_of_row = scattered(row_place, numbers[:tokens], sizes[0])
    pair_of = scattered(pair_place, numbers, sizes[1])
    filled = scattered(pair_place, torch.ones_like(numbers), sizes[1])
    every_pair = torch.arange(sizes[1], device=index.device)
    rank_of = torch.bucketize(every_pair, starts[1].contiguous(), right=True).sub_(1)
    token_of = pair_of // top_k
    row = at_row[rank_of, token_of] * filled
    expert = (index.flatten()[pair_of] - rank_of * division.chunk) * filled
    filled, expert, row = (each.to(torch.int32) for each in (filled, expert, row))
    return Routes(token_of_row, pair_of, filled, expert, row, by_pair.sum() - has_pair.sum())


# ---- exchanges ----


@dataclass(frozen=True)
class Lengths:
    """Numbers of rows in the messages of this rank: ``sent`` to each rank, and ``taken`` (received) from
    each. ``equal``: all messages of all ranks have the same number, unused rows included."""

    sent: list[int]
    taken: list[int]
    equal: bool = False

    @property
    def swapped(self) -> Lengths:
        """The lengths when every message is answered: sent and received are exchanged."""
        return Lengths(self.taken, self.sent, self.equal)


def exchange(x: Tensor, lengths: Lengths, axis: MeshAxis, what: str) -> Tensor:
    """Sends the rows of ``x``, message by message, by an all-to-all; returns those that this rank receives.
    ``what``: a name, under which a selective recomputation keeps the result (``_util.recompute``)."""
    return kept(f"ep {what}", lambda: _exchange(x.contiguous(), lengths, axis))


def _exchange(x: Tensor, lengths: Lengths, axis: MeshAxis) -> Tensor:
    received = x.new_empty((sum(lengths.taken), *x.shape[1:]))
    if lengths.equal:
        dist.all_to_all_single(received.view(-1), x.view(-1), group=axis.group)
    else:
        dist.all_to_all_single(received, x, lengths.taken, lengths.sent, group=axis.group)
    return received


class Dispatch(torch.autograd.Function):
    """Sends the tokens' rows, and the routing weights of the pairs, to the ranks of their experts. One
    autograd function does both, so that their backwards are issued in the same order on all ranks, also on
    one that has no tokens."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, by_row: Lengths, by_pair: Lengths, axis: MeshAxis
    ) -> tuple[Tensor, Tensor]:
        ctx.by_row, ctx.by_pair, ctx.axis = by_row, by_pair, axis
        ctx.set_materialize_grads(True)
        received = exchange(rows, by_row, axis, "rows")
        return received, exchange(weights, by_pair, axis, "weights")

    @staticmethod
    def backward(ctx: Any, rows: Tensor, weights: Tensor) -> Any:
        of_rows, of_weights, *_ = ctx.needs_input_grad
        to_rows = _transposed(rows, ctx.by_row, ctx.axis) if of_rows else None
        to_weights = _transposed(weights, ctx.by_pair, ctx.axis) if of_weights else None
        return to_rows, to_weights, None, None, None


class Combine(torch.autograd.Function):
    """Sends the experts' outputs, one for each received row, back to the ranks that the rows came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, by_row: Lengths, axis: MeshAxis) -> Tensor:
        ctx.by_row, ctx.axis = by_row, axis
        return exchange(rows, by_row.swapped, axis, "outputs")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _transposed(grad, ctx.by_row.swapped, ctx.axis), None, None


def _transposed(grad: Tensor, lengths: Lengths, axis: MeshAxis) -> Tensor:
    if torch.is_grad_enabled():  # a second derivative is wanted
        return Combine.apply(grad, lengths, axis)
    return _exchange(grad.contiguous(), lengths.swapped, axis)


class Untouched(torch.autograd.Function):
    """The output of experts on a rank that got no token: no rows. Its backward gives zeros as the gradient of
    each of ``params``, so that this rank takes part in their reduction as the others do."""

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
