"""Division: how experts lie on the ranks of ep, and how much is sent. This file imports no torch.

The engine calculates its messages with it, the planner their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Division:
    """How ``experts`` lie on the ``ranks`` of ep, as ``torch.chunk`` divides them."""

    experts: int
    ranks: int

    @property
    def chunk(self) -> int:
        """The largest number of experts on a rank; the last ranks may have fewer, or none."""
        return -(-self.experts // self.ranks)

    @property
    def by_rank(self) -> tuple[int, ...]:
        """The number of experts on each rank."""
        chunk = self.chunk
        return tuple(max(min(chunk, self.experts - r * chunk), 0) for r in range(self.ranks))


def reach(experts: int, held: float, top_k: int) -> float:
    """Returns the fraction of tokens that have at least one of ``held`` experts among their ``top_k``, if
    these are drawn uniformly and without repetition: 1 - C(E - held, k) / C(E, k)."""
    missed, others = 1.0, experts - held
    for drawn in range(top_k):
        missed *= max(others - drawn, 0.0) / (experts - drawn)
    return 1.0 - missed


def rows_a_pair(experts: int, ranks: int, top_k: int) -> float:
    """Returns the number of rows (tokens' vectors) sent per (token, expert) pair if experts are drawn
    uniformly.

    That is the fraction of the tokens sent to a rank, ``reach``, divided by k / R, the pairs per token that
    go to it.

    >>> [round(rows_a_pair(128, ranks, 8), 2) for ranks in (2, 4, 8, 16)]
    [0.25, 0.45, 0.67, 0.82]
    """
    return reach(experts, experts / ranks, top_k) / (top_k / ranks)


def capacities(tokens: int, top_k: int, division: Division, factor: float) -> tuple[int, int]:
    """Returns the largest numbers of rows and of (token, expert) pairs in a message to one rank, for
    ``tokens`` on each rank: ``factor`` times those with uniform routing."""
    pairs = tokens * top_k / division.ranks
    rows = pairs * rows_a_pair(division.experts, division.ranks, top_k)
    return min(tokens, ceil(factor * rows)), min(tokens * top_k, ceil(factor * pairs))


def shard_dim(shape: Sequence[int], ep: int, ranks: int) -> int | None:
    """Returns the dim over which the ``ranks`` of the axis efsdp shard a parameter with the experts of one ep
    rank: the first that is divisible, so that nothing is padded, the experts' dim first. None: the engine's
    default. ``shape``: with the experts of all ``ep`` ranks."""
    experts, *sizes = shape
    if experts % (ep * ranks) == 0:
        return 0
    return next((dim for dim, size in enumerate(sizes, 1) if size % ranks == 0), None)
