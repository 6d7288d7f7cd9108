"""How sure a prediction is: intervals from the errors of runs that the constants weren't fitted to."""

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
    """The 10th and the 90th percentile: 8 of 10 runs are expected to lie within."""

    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high


@dataclass(frozen=True)
class Residuals:
    """The contents of residuals.toml: errors of predictions, each for a (source, GPU) left out of the fits.

    Attributes:
        pairs: (stack, GPU) of the published runs with a speed.
        speed: familiarity -> 10th and 90th percentile of ln(published / predicted).
        memory: the same percentiles for the reserved bytes.
        verdict: standard deviation of ln(needed / predicted bytes), from published runs that fit or didn't.
        within: 80th percentile of the difference in ln(published / predicted) between two runs of one source
            and GPU.
    """

    pairs: frozenset[tuple[str, str]]
    speed: dict[str, Interval]
    memory: Interval
    verdict: float
    within: float

    def familiarity(self, stack: Stack, gpu: Gpu) -> str:
        """A key of ``FAMILIARITY``."""
        if stack.measured_on == gpu.name:
            return "measured"
        return familiarity(self.pairs, stack.name, gpu.name)


def familiarity(pairs: Iterable[tuple[str, str]], stack: str, gpu: str) -> str:
    """A key of ``FAMILIARITY`` but "measured", if ``pairs`` are the (stack, GPU) that were seen."""
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
    """The table of residuals.toml."""
    data = own_data("residuals.toml")
    return Residuals(
        frozenset((stack, gpu) for stack, gpu in data["pairs"]),
        {name: Interval(*ends) for name, ends in data["speed"].items()},
        Interval(*data["memory"]),
        data["verdict"],
        data["within"],
    )


def speed_interval(speed: float, stack: Stack, gpu: Gpu) -> Interval:
    """Returns the interval around a predicted speed, in the unit of ``speed``."""
    low, high = residuals().speed[residuals().familiarity(stack, gpu)]
    return Interval(speed * exp(low), speed * exp(high))


def memory_interval(reserved: float) -> Interval:
    """Returns the interval, in bytes, around a prediction of the bytes that the allocator reserves."""
    low, high = residuals().memory
    return Interval(reserved * exp(low), reserved * exp(high))


def fits_probability(needed: float, capacity: float) -> float:
    """That a run predicted to need ``needed`` bytes fits into ``capacity``: 0.5 where they are equal."""
    return verdict_part(log(capacity / needed) / residuals().verdict) if needed > 0 else 1.0


_OTHERWISE = (
    0.06  # of published verdicts: by what a row doesn't say, not by how near the limit it is
)


def verdict_part(z: float) -> float:
    """The part of runs that fit, if ``z`` standard deviations are left; some fit, or don't, otherwise."""
    return _OTHERWISE / 2 + (1 - _OTHERWISE) * (1 + erf(z / sqrt(2))) / 2


def count_close(speeds: Sequence[float]) -> int:
    """Returns how many of a plan's speeds, the fastest first, don't differ significantly from the first.

    The speeds are of one machine, model and stack, so their common error cancels. A difference is significant
    if it is larger than ``Residuals.within``.
    """
    return sum(log(speeds[0] / speed) <= residuals().within for speed in speeds)
