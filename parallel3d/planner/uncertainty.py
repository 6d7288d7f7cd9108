"""Intervals around predictions, from the errors for published runs that the constants were not fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import erf, exp, log, sqrt
from typing import NamedTuple

from parallel3d.planner.arguments import own_data
from parallel3d.planner.cluster import Gpu
from parallel3d.planner.stacks import Stack

FAMILIARITY = {
    "measured": "the stack was fitted to measured steps on this GPU",
    "known": "published runs have this stack on this GPU",
    "apart": "published runs have this stack, and this family of GPUs with several others, but not together",
    "new": "no published run has this stack, or at most one other stack has this family of GPUs",
}


class Interval(NamedTuple):
    """A 10th and a 90th percentile: 8 of 10 runs are expected to lie between them."""

    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def around(self, value: float) -> Interval:
        """Returns ``value`` times exp of both ends: this is an interval of ln(true / predicted)."""
        return Interval(value * exp(self.low), value * exp(self.high))


@dataclass(frozen=True)
class Residuals:
    """The contents of residuals.toml: errors of predictions. Those for a (source, GPU) are made with
    constants that were fitted without its runs.

    Attributes:
        pairs: the (stack, GPU) for which there is a published run with a speed.
        speed: key of ``FAMILIARITY`` -> 10th and 90th percentile of ln(published / predicted tokens/s).
        memory: the same percentiles of ln(published / predicted) for reserved bytes.
        verdict: standard deviation of ln(needed / predicted bytes), from published runs that fit or ran out
            of memory.
        within: how far predictions of two runs of one source and GPU usually differ: 80th percentile of the
            difference of their ln(published / predicted).
    """

    pairs: frozenset[tuple[str, str]]
    speed: dict[str, Interval]
    memory: Interval
    verdict: float
    within: float

    def familiarity(self, stack: Stack, gpu: Gpu) -> str:
        """Returns the key of ``FAMILIARITY``: how near to this stack and GPU published runs are."""
        if stack.measured_on == gpu.name:
            return "measured"
        return familiarity(self.pairs, stack.name, gpu.name)


def familiarity(pairs: Iterable[tuple[str, str]], stack: str, gpu: str) -> str:
    """As ``Residuals.familiarity``, by names and without "measured"; ``pairs`` are the (stack, GPU) with
    published runs."""
    seen = set(pairs)
    if (stack, gpu) in seen:
        return "known"
    family = gpu.partition("-")[0]
    has_stack = any(name == stack for name, _ in seen)
    # Of one stack alone it isn't known what is the stack's and what the GPU's.
    on_family = {name for name, of in seen if of.partition("-")[0] == family}
    return "apart" if has_stack and len(on_family) > 1 else "new"


@lru_cache(maxsize=1)
def residuals() -> Residuals:
    """Reads residuals.toml."""
    data = own_data("residuals.toml")
    return Residuals(
        frozenset((stack, gpu) for stack, gpu in data["pairs"]),
        {name: Interval(*ends) for name, ends in data["speed"].items()},
        Interval(*data["memory"]),
        data["verdict"],
        data["within"],
    )


def fits_probability(needed: float, capacity: float) -> float:
    """Returns the probability that a run predicted to need ``needed`` bytes fits into ``capacity`` bytes; 0.5
    where they are equal."""
    return verdict_part(log(capacity / needed) / residuals().verdict) if needed > 0 else 1.0


# Of published verdicts: by what a row doesn't say, not by how near the limit it is.
_OTHERWISE = 0.06


def verdict_part(z: float) -> float:
    """Returns the fraction of runs that fit if ln(capacity / predicted need) is ``z`` standard deviations. It
    is never near 0 or 1, because some published runs aren't what their descriptions say."""
    return _OTHERWISE / 2 + (1 - _OTHERWISE) * (1 + erf(z / sqrt(2))) / 2


def count_close(speeds: Sequence[float]) -> int:
    """Returns how many of ``speeds``, sorted with the largest first, can't be told apart from the largest.

    The speeds are of one machine, model and stack, so their common error cancels. A difference counts if it
    is larger than ``Residuals.within``.
    """
    return sum(log(speeds[0] / speed) <= residuals().within for speed in speeds)
