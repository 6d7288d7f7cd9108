"""Routes: to which ranks the tokens of a call are sent, and where results are added. Index arithmetic only.

A *pair* is a token and one of the experts that it was given to. A *row* is a token's vector in a message: a
token goes to a rank once, however many of its experts are there, and the pairs say which experts compute it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor

from parallel3d.ep.division import Division


def destinations(index: Tensor, division: Division) -> tuple[Tensor, Tensor]:
    """Returns which tokens, and which pairs, go to which rank.

    Args:
        index: (T, K), the experts of each token; a number that is no expert's is ignored.

    Returns: (ranks, T) and (ranks, T * K), bool: whether the token, or the pair, goes to the rank.
    """
    valid = (index >= 0) & (index < division.experts)
    to = torch.where(valid, index // division.chunk, division.ranks)
    ranks = torch.arange(division.ranks, device=index.device)
    pairs = rearrange(to, "t k -> 1 t k") == rearrange(ranks, "r -> r 1 1")
    return pairs.any(-1), rearrange(pairs, "r t k -> r (t k)")


class Routes(NamedTuple):
    """Indices of the tokens and pairs that a rank sends.

    Attributes:
        token_of_row: (rows,), the token of each row, message by message. Unused room has token 0; no pair
            refers to it.
        pair_of: (pairs,), of each pair sent its position in the flattened (T, K).
        filled: (pairs,), 1 for those in use, 0 for unused room, in int32.
        expert, row: (pairs,) int32: the expert's number on its rank, and the row in its message.
        dropped: the number of pairs that found no room, ().
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
    """Returns the indices of the tokens and pairs that this rank sends.

    Args:
        index: (T, K), the experts of each token.
        sizes: rows and pairs in all messages.
        starts: (ranks,) each: where the message to each rank begins, in rows and in pairs.
        room: largest numbers of rows and of pairs in a message.
    """
    tokens, top_k = index.shape
    by_token, by_pair = destinations(index, division)
    at_row, at_pair = by_token.cumsum(1) - 1, by_pair.cumsum(1) - 1
    has_row = by_token & (at_row < room[0])
    has_pair = by_pair & (at_pair < room[1]) & repeat(has_row, "r t -> r (t k)", k=top_k)

    def places(has: Tensor, at: Tensor, start: Tensor, size: int) -> Tensor:
        return torch.where(
            has, rearrange(start, "r -> r 1") + at, size
        )  # size: a place to throw away

    def scattered(place: Tensor, values: Tensor, size: int) -> Tensor:
        """What each place gets; 0 where it gets nothing."""
        every = repeat(values, "n -> (r n)", r=division.ranks)
        target = values.new_zeros(size + 1)
        return target.scatter_(0, place.flatten(), every)[:-1]

    row_place = places(has_row, at_row, starts[0], sizes[0])
    pair_place = places(has_pair, at_pair, starts[1], sizes[1])
    numbers = torch.arange(tokens * top_k, device=index.device)
    token_of_row = scattered(row_place, numbers[:tokens], sizes[0])
    pair_of = scattered(pair_place, numbers, sizes[1])
    filled = scattered(pair_place, torch.ones_like(numbers), sizes[1])
    rank_of = torch.bucketize(
        torch.arange(sizes[1], device=index.device), starts[1].contiguous(), right=True
    ).sub_(1)
    token_of = pair_of // top_k
    row = at_row[rank_of, token_of] * filled
    expert = (index.flatten()[pair_of] - rank_of * division.chunk) * filled
    dropped = by_pair.sum() - has_pair.sum()
    int32 = torch.int32
    filled, expert, row = (each.to(int32) for each in (filled, expert, row))
    return Routes(token_of_row, pair_of, filled, expert, row, dropped)
