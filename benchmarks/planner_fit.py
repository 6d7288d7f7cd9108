"""The fitted constants of the planner, and what it predicts of runs that it was not fitted to.

A constant with ``moved_by`` was fitted to published speeds. ``left_out`` leaves out one source at a time,
with all its GPUs and models, fits those constants to all other sources, each with the same weight, and
predicts the rows left out. A constant that no remaining source moves gets its value from before any run:
that of ``BEFORE``, for a stack's own the default's.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import exp, log

from planner_runs import Models, predict_run

from parallel3d.planner import constants, kernels
from parallel3d.planner.constants import Constant
from parallel3d.planner.prediction import Prediction
from parallel3d.planner.stacks import stacks

Row = Mapping[str, str]

# Of a constant that is all sources': its value before any run was looked at.
BEFORE = {
    "gemm_sustained": 0.92,
    "gemm_hopper": 1.0,
    "gemm_amd": 1.0,
    "attention_triton": 0.40,  # its paper's, without the layouts around it
    "tp_wait": 1.0,
    "straggler": 0.0,
}
_STEPS = (-0.3, -0.15, -0.08, -0.04, 0.0, 0.04, 0.08, 0.15, 0.3)  # of a value's logarithm
_MOST = 0.25  # of an error's logarithm: a run further off is one that something else slowed
_PRIOR = 0.001  # what an e-fold from before costs, beside the mean of the groups' squared errors


def source_of(row: Row) -> str:
    """Short: the repository or page, without commit and file."""
    name = row["source"].partition("@")[0].partition("#")[0]
    for mark in (":_posts", ":docs", ":doc", ":benchmarks", ":extensions", ":torchao", " Table"):
        name = name.partition(mark)[0]
    return name


def groups_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each source."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(source_of(row), []).append(row)
    return found


def speed(row: Row) -> float:
    """Published tokens/s/GPU; 0 if it is blank."""
    return float(row["tokens_per_s_per_gpu"] or 0)


@dataclass(frozen=True)
class Free:
    """A fitted constant, in all the places that share its value and its sources.

    Attributes:
        title: its name, with the first stack that has it if it is a stack's own.
        tables: those that have it: ``CONSTANTS``, or a stack's own.
        before: its value before any run.
    """

    name: str
    tables: tuple[dict[str, Constant], ...]
    before: float
    moved_by: tuple[str, ...]
    title: str

    @property
    def value(self) -> float:
        return self.tables[0][self.name].value

    def distance(self, value: float) -> float:
        """How far ``value`` is from before, in logarithms; of 0, which has none, 1 at most."""
        if min(value, self.before) <= 0:
            return float(value != self.before)
        return abs(log(value / self.before))

    def set(self, value: float) -> None:
        """Forgets what was computed with the value before."""
        for table in self.tables:
            table[self.name] = replace(table[self.name], value=value)
        kernels.kernels_of.cache_clear()
        kernels.gemm_time.cache_clear()


def free_constants() -> list[Free]:
    """All constants with ``moved_by``."""
    found: dict[tuple[str, tuple[str, ...]], list[dict[str, Constant]]] = {}
    tables: list[dict[str, Constant]] = [constants.CONSTANTS]
    tables += [stack.own for stack in stacks().values()]  # type: ignore[misc]
    owners = {id(stack.own): name for name, stack in stacks().items()}
    for table in tables:
        for name, each in table.items():
            if each.moved_by:
                found.setdefault((name, each.moved_by), []).append(table)
    return [
        Free(
            name,
            tuple(where),
            BEFORE[name] if where[0] is tables[0] else before_of_stack(name),
            moved_by,
            name if where[0] is tables[0] else f"{name} of {owners[id(where[0])]}",
        )
        for (name, moved_by), where in found.items()
    ]


def before_of_stack(name: str) -> float:
    """Of a stack's own constant: the default's before any run, or the default's."""
    return BEFORE.get(name, constants.CONSTANTS[name].value)


@contextmanager
def kept(free: Sequence[Free]) -> Iterator[None]:
    """Puts the constants' values back."""
    values = [each.value for each in free]
    try:
        yield
    finally:
        for each, value in zip(free, values, strict=True):
            each.set(value)


class Sensitivities:
    """ln(predicted / published) of all rows, and how it changes with each constant alone.

    The changes are added up where several constants change at once, so that a fit predicts nothing anew.
    """

    def __init__(self, rows: Sequence[Row], models: Models) -> None:
        self.rows, self.free = [row for row in rows if speed(row)], free_constants()
        self.now = self._errors(models)
        self.values: dict[str, list[float]] = {}
        self.changes: list[list[list[float]]] = []  # of each constant, value and row
        self.grids = []
        for each in self.free:
            centre = each.value
            steps = {centre * exp(step) for step in _STEPS}
            grid = sorted(steps | {each.before, (centre + each.before) / 2})
            changes = []
            with kept([each]):
                for value in grid:
                    each.set(value)
                    found = self._errors(models)
                    changes.append([a - b for a, b in zip(found, self.now, strict=True)])
            self.grids.append(grid)
            self.changes.append(changes)

    def _errors(self, models: Models) -> list[float]:
        predicted = (predict_run(row, models).tokens_per_second_per_gpu for row in self.rows)
        return [log(found / speed(row)) for found, row in zip(predicted, self.rows, strict=True)]

    def fit(self, without: str | None = None) -> list[float]:
        """A value for each constant: the least mean, over the sources, of the mean squared error."""
        used = [i for i, row in enumerate(self.rows) if source_of(row) != without]
        groups: dict[str, list[int]] = {}
        for i in used:
            groups.setdefault(source_of(self.rows[i]), []).append(i)
        chosen = [grid.index(each.before) for grid, each in zip(self.grids, self.free, strict=True)]
        moving = [
            n
            for n, each in enumerate(self.free)
            if any(
                source_of(self.rows[i]) in each.moved_by and abs(change[i]) > 1e-6
                for i in used
                for change in (self.changes[n][0], self.changes[n][-1])
            )
        ]

        def loss() -> float:
            found = self.now[:]
            for n, at in enumerate(chosen):
                found = [a + b for a, b in zip(found, self.changes[n][at], strict=True)]
            squares = [min(abs(error), _MOST) ** 2 for error in found]
            each = [statistics.fmean(squares[i] for i in rows) for rows in groups.values()]
            far = sum(self.free[n].distance(self.grids[n][at]) for n, at in enumerate(chosen))
            return statistics.fmean(each) + _PRIOR * far

        best = loss()
        for _ in range(3):
            for n in moving:
                before = chosen[n]
                for at in range(len(self.grids[n])):
                    chosen[n] = at
                    if (found := loss()) < best - 1e-9:
                        best, before = found, at
                chosen[n] = before
        return [grid[at] for grid, at in zip(self.grids, chosen, strict=True)]


@dataclass(frozen=True)
class LeftOut:
    """What was predicted of a source without it.

    Attributes:
        constants: as fitted to the others.
        predictions: by the row's id, also of rows without a speed.
    """

    constants: dict[str, float]
    predictions: dict[str, Prediction]


def left_out(rows: Sequence[Row], models: Models) -> dict[str, LeftOut]:
    """Each source as predicted without it."""
    sensitivities = Sensitivities(rows, models)
    free, result = sensitivities.free, {}
    for group, mine in groups_of(rows).items():
        values = sensitivities.fit(without=group)
        with kept(free):
            for each, value in zip(free, values, strict=True):
                each.set(value)
            predictions = {row["id"]: predict_run(row, models) for row in mine}
            for made in predictions.values():  # they are computed when they are asked for
                made.as_dict()
        names = [each.title for each in free]
        result[group] = LeftOut(dict(zip(names, values, strict=True)), predictions)
    return result
