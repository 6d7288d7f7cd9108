"""The table of residuals that the planner's intervals come from, and how many runs they cover.

``write`` makes parallel3d/planner/residuals.toml from what was predicted of each source without it. In every
number here all sources weigh the same, however many runs they have.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

from planner_fit import LeftOut, Row, groups_of, speed

from parallel3d.planner.prediction import Prediction
from parallel3d.planner.uncertainty import Interval, familiarity, verdict_part

TABLE = Path(__file__).parents[1] / "parallel3d" / "planner" / "residuals.toml"
_ENDS = (0.1, 0.9)


@dataclass(frozen=True)
class Residual:
    """One run of a source that was left out.

    Attributes:
        level: how familiar the other sources make its stack and GPU.
        value: ln(published / predicted) tokens/s/GPU.
    """

    source: str
    gpu: str
    level: str
    value: float


def pair_of(prediction: Prediction) -> tuple[str, str]:
    """(stack, GPU)."""
    return prediction.workload.profile.name, prediction.cluster.gpu.name


def residuals_of(rows: Sequence[Row], left: Mapping[str, LeftOut]) -> list[Residual]:
    """Of all rows with a speed."""
    found = []
    groups = groups_of([row for row in rows if speed(row)])
    for source, mine in groups.items():
        others = {
            pair_of(left[other].predictions[row["id"]])
            for other, theirs in groups.items()
            if other != source
            for row in theirs
        }
        for row in mine:
            prediction = left[source].predictions[row["id"]]
            error = log(speed(row) / prediction.tokens_per_second_per_gpu)
            level = familiarity(others, *pair_of(prediction))
            found.append(Residual(source, row["gpu"], level, error))
    return found


def weighted(values: Sequence[tuple[str, float]], part: float) -> float:
    """The quantile ``part`` of (source, value), each source with the same weight."""
    counts: dict[str, int] = {}
    for source, _ in values:
        counts[source] = counts.get(source, 0) + 1
    left = part * len(counts)
    ordered = sorted(values, key=lambda each: each[1])
    for source, value in ordered:
        left -= 1 / counts[source]
        if left <= 1e-9:
            return value
    return ordered[-1][1]


def ends_of(residuals: Sequence[Residual]) -> Interval:
    """10th and 90th percentile."""
    values = [(each.source, each.value) for each in residuals]
    return Interval(*(weighted(values, part) for part in _ENDS))


def table_of(residuals: Sequence[Residual]) -> dict[str, Interval]:
    """The ends by familiarity; a level of fewer than three sources has those of all runs."""
    found: dict[str, Interval] = {}
    for level in ("known", "apart", "new"):
        mine = [each for each in residuals if each.level == level]
        ends = ends_of(mine if len({each.source for each in mine}) > 2 else residuals)
        # A level that is less familiar is not narrower.
        if found:
            last = list(found.values())[-1]
            ends = Interval(min(ends.low, last.low), max(ends.high, last.high))
        found[level] = ends
    return found


def within(residuals: Sequence[Residual]) -> float:
    """How far two runs of one source and GPU differ, 8 of 10 times: median over those of at least four."""
    groups: dict[tuple[str, str], list[float]] = {}
    for each in residuals:
        groups.setdefault((each.source, each.gpu), []).append(each.value)
    found = []
    for values in groups.values():
        apart = sorted(abs(a - b) for i, a in enumerate(values) for b in values[:i])
        if len(values) >= 4:
            found.append(apart[int(0.8 * len(apart))])
    return statistics.median(found)


def verdict(rows: Sequence[Row], left: Mapping[str, LeftOut]) -> float:
    """The standard deviation that makes the published verdicts most probable."""
    predictions = {name: p for each in left.values() for name, p in each.predictions.items()}
    told = {source: [r for r in mine if r["fits"]] for source, mine in groups_of(rows).items()}
    known = [
        (log(m.capacity / m.needed), row["fits"] == "1", 1 / len(mine))
        for mine in told.values()
        for row in mine
        for m in [predictions[row["id"]].memory]
    ]

    def likelihood(spread: float) -> float:
        return sum(by * log(verdict_part((z if fits else -z) / spread)) for z, fits, by in known)

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
        "# Errors of predictions of published sources that were left out of all fits, each source with the",
        "# same weight: 10th and 90th percentile of ln(published / predicted). Written by",
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
