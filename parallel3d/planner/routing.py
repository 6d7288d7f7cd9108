"""Routing: how many more tokens than the average the fullest rank of ep gets. Step time and memory depend on
it."""

from __future__ import annotations

from functools import lru_cache
from math import exp, inf
from random import Random
from statistics import median
from typing import NamedTuple

from parallel3d.ep.division import Division, reach
from parallel3d.errors import PlanningError

_PLACEMENTS = 65  # of experts on ranks, of which the median is taken


class PeakLoad(NamedTuple):
    """What the rank of ep with most tokens receives and computes.

    Attributes:
        rows: tokens that it receives, for each token that a rank sends.
        pairs: (token, expert) pairs that it computes, over the average of all ranks; 1 if all have as many.
    """

    rows: float
    pairs: float


def popularity(routing: str) -> float:
    """Returns the exponent of a routing "zipf:EXPONENT"; 0 for "uniform", infinite for "hot".

    Raises:
        PlanningError: it is none of these.
    """
    name, _, exponent = routing.partition(":") if isinstance(routing, str) else ("", "", "")
    if routing in ("uniform", "hot"):
        return 0.0 if routing == "uniform" else inf
    try:
        value = float(exponent) if name == "zipf" else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value < inf:
        raise PlanningError(
            f"routing is {routing!r}; it must be 'uniform', 'hot' (one expert that every token goes to) or "
            "'zipf:1.2' (the n-th most popular expert is n^-1.2 times as popular as the first)"
        )
    return value


@lru_cache(maxsize=4096)
def peak(routing: str, experts: int, top_k: int, ep: int) -> PeakLoad:
    """Returns the fullest rank's load if ``ep`` ranks divide ``experts``, ``top_k`` of them for each token.

    With "uniform" routing equally many tokens go to every expert. For the others it is not known which ranks
    have the popular experts: the median over random placements counts.
    """
    if ep == 1:
        return PeakLoad(1.0, 1.0)
    held, exponent = Division(experts, ep).chunk, popularity(routing)
    if not exponent:
        return PeakLoad(ep * reach(experts, held, top_k), ep * held / experts)
    if exponent == inf:
        others = (top_k - 1) * (held - 1) / max(experts - 1, 1)
        return PeakLoad(float(ep), ep * (1 + others) / top_k)
    weights = [(n + 1) ** -exponent for n in range(experts)]
    rate = _rate(weights, top_k)
    found, draw = [], Random(0)
    for _ in range(_PLACEMENTS):
        draw.shuffle(weights)
        ranks = [weights[at : at + held] for at in range(0, experts, held)]
        fullest = max(ranks, key=lambda own: _chosen(own, rate))
        found.append((_chosen(fullest, rate), 1 - exp(-rate * sum(fullest))))
    return PeakLoad(
        ep * median(rows for _, rows in found), ep * median(p for p, _ in found) / top_k
    )


def _chosen(weights: list[float], rate: float) -> float:
    """Returns to how many of these experts a token goes on average, at the drawing rate of ``_rate``."""
    return sum(1 - exp(-rate * weight) for weight in weights)


def _rate(weights: list[float], top_k: int) -> float:
    """Returns the rate for which ``_chosen`` of all experts is ``top_k``. An expert with weight w is chosen
    with probability 1 - exp(-rate * w), which approximates drawing ``top_k`` experts without repetition."""
    low, high = 0.0, 1.0
    while _chosen(weights, high) < top_k * (1 - 1e-9) and high < 1e12:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _chosen(weights, middle) < top_k else (low, middle)
    return high
