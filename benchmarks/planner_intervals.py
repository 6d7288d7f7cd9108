"""The table of residuals that the planner's intervals come from, and how many runs they cover.

``write`` makes parallel3d/planner/residuals.toml from what was predicted of each (source, GPU) without it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

from planner_fit import Group, LeftOut, Row, groups_of, speed

from parallel3d.planner.prediction import Prediction
from parallel3d.planner.uncertainty import Interval, familiarity, verdict_part

WIDER = 2.0  # "new": the next stack or GPU may be further from all others than those left out were
TABLE = Path(__file__).parents[1] / "parallel3d" / "planner" / "residuals.toml"
_ENDS = (0.1, 0.9)


@dataclass(frozen=True)
class Residual:
    """One run of a group that was left out.

    Attributes:
        level: how familiar the other groups make its stack and GPU.
        value: ln(published / predicted) tokens/s/GPU.
    """

    group: Group
    level: str
    value: float


def pair_of(prediction: Prediction) -> tuple[str, str]:
    """(stack, GPU)."""
    return prediction.workload.profile.name, prediction.cluster.gpu.name


def residuals_of(rows: Sequence[Row], left: Mapping[Group, LeftOut]) -> list[Residual]:
    """Of all rows with a speed."""
    found = []
    groups = groups_of([row for row in rows if speed(row)])
    for group, mine in groups.items():
        others = {
            pair_of(left[other].predictions[row["id"]])
            for other, theirs in groups.items()
            if other != group
            for row in theirs
        }
        for row in mine:
            prediction = left[group].predictions[row["id"]]
            error = log(speed(row) / prediction.tokens_per_second_per_gpu)
            found.append(Residual(group, familiarity(others, *pair_of(prediction)), error))
    return found


def ends_of(residuals: Sequence[Residual]) -> Interval:
    """10th and 90th percentile."""
    ordered = sorted(each.value for each in residuals)
    last = len(ordered) - 1
    return Interval(*(ordered[min(int(part * len(ordered)), last)] for part in _ENDS))


def table_of(residuals: Sequence[Residual]) -> dict[str, Interval]:
    """The ends by familiarity; a level of fewer than two groups has those of all runs."""
    found: dict[str, Interval] = {}
    for level in ("known", "apart", "new"):
        mine = [each for each in residuals if each.level == level]
        ends = ends_of(mine if len({each.group for each in mine}) > 1 else residuals)
        # A level that is less familiar is not narrower.
        if found:
            last = list(found.values())[-1]
            ends = Interval(min(ends.low, last.low), max(ends.high, last.high))
        found[level] = ends
    low, high = found["new"]
    middle, half = (low + high) / 2, (high - low) / 2
    found["new"] = Interval(middle - WIDER * half, middle + WIDER * half)
    return found


def coverage(residuals: Sequence[Residual]) -> float:
    """The part of the runs within the interval that the other groups' residuals give."""
    inside = 0
    for group in {each.group for each in residuals}:
        table = table_of([each for each in residuals if each.group != group])
        inside += sum(each.value in table[each.level] for each in residuals if each.group == group)
    return inside / len(residuals)


def within(residuals: Sequence[Residual]) -> float:
    """How far two runs of one group differ, 8 of 10 times: mean over the groups of at least four."""
    groups: dict[Group, list[float]] = {}
    for each in residuals:
        groups.setdefault(each.group, []).append(each.value)
    found = []
    for values in groups.values():
        apart = sorted(abs(a - b) for i, a in enumerate(values) for b in values[:i])
        if len(values) >= 4:
            found.append(apart[int(0.8 * len(apart))])
    return statistics.fmean(found)


def verdict(rows: Sequence[Row], left: Mapping[Group, LeftOut]) -> float:
    """The standard deviation that makes the published verdicts most probable."""
    predictions = {name: p for each in left.values() for name, p in each.predictions.items()}
    known = [
        (log(m.capacity / m.needed), row["fits"] == "1")
        for row in rows
        if row["fits"]
        for m in [predictions[row["id"]].memory]
    ]

    def likelihood(spread: float) -> float:
        return sum(log(verdict_part((z if fits else -z) / spread)) for z, fits in known)

    return max((n / 100 for n in range(2, 41)), key=likelihood)


def write(
    residuals: Sequence[Residual],
    pairs: set[tuple[str, str]],
    memory: Interval,
    spread: float,
    measured: Interval,
    command: str,
) -> None:
    """Writes residuals.toml.

    Args:
        memory: ends of ln(published / predicted) of what is reserved.
        spread: of the verdicts.
        measured: ends of the residuals after one step was measured.
    """
    speeds = {"measured": measured, **table_of(residuals)}
    lines = [
        "# Errors of predictions of published (source, GPU) pairs that were left out of all fits: 10th and",
        "# 90th percentile of ln(published / predicted). Written by",
        f"#   {command}",
        f"verdict = {spread:.3f}",
        f"within = {within(residuals):.3f}",
        f"memory = [{memory.low:.3f}, {memory.high:.3f}]",
        "pairs = [",
        *(f'    ["{stack}", "{gpu}"],' for stack, gpu in sorted(pairs)),
        "]",
        "",
        "[speed]",
        *(f"{name} = [{ends.low:.3f}, {ends.high:.3f}]" for name, ends in speeds.items()),
    ]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
