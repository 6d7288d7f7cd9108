"""What the benchmarks share: alternating rounds of timed steps, medians, tables and JSON."""

import gc
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["Rounds", "alternate", "environment", "no_gc", "print_table", "range_of", "write_json"]


@contextmanager
def no_gc() -> Iterator[None]:
    """Collects garbage now and none in the body, so that no variant pays for another's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass
class Rounds:
    """Timings of several variants, taken in turns.

    Attributes:
        seconds: variant -> its median step in each round; round i of all variants was taken within
            the same moment, so what disturbs the machine for longer disturbs all alike.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Median over rounds, seconds."""
        return statistics.median(self.seconds[name])

    def above(self, base: str) -> "Rounds":
        """The same rounds with ``base``'s step subtracted from each other variant's."""
        floor = self.seconds[base]
        return Rounds(
            {
                name: [a - b for a, b in zip(values, floor, strict=True)]
                for name, values in self.seconds.items()
                if name != base
            }
        )

    def ratios(self, name: str, to: str) -> list[float]:
        """``name`` / ``to``, round by round."""
        return [a / b for a, b in zip(self.seconds[name], self.seconds[to], strict=True)]


def alternate(
    steps: Mapping[str, Callable[[], float]], *, rounds: int, steps_per_round: int, warmup: int
) -> Rounds:
    """Runs the variants in turns, the order turned around each round.

    Args:
        steps: variant -> a function that runs one step and returns its seconds.
        rounds: how many rounds.
        steps_per_round: steps of each variant in a round; with more than one, the first, which finds
            the other variant's data in the caches, is not counted.
        warmup: steps of each variant before the first round.
    """
    for step in steps.values():
        for _ in range(warmup):
            step()
    result = Rounds({name: [] for name in steps})
    order = list(steps)
    gc.freeze()  # what is there by now stays; looking through it each round takes longer than a step
    for _ in range(rounds):
        for name in order:
            with no_gc():
                seconds = [steps[name]() for _ in range(steps_per_round)]
            result.seconds[name].append(statistics.median(seconds[1:] or seconds))
        order.reverse()
    gc.unfreeze()
    return result


def range_of(values: Sequence[float]) -> str:
    """The middle half of ``values``, as text: how much a median is to be trusted."""
    if len(values) < 4:
        return f"{min(values):.2f}..{max(values):.2f}"
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.2f}..{high:.2f}"


def environment() -> dict[str, Any]:
    """What a reader of the numbers must know of the machine."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table in plain text: the first column to the left, the others to the right."""
    cells = [list(head)] + [[_text(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    print(f"\n{title}")
    for number, row in enumerate(cells):
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]).rstrip())
        if number == 0:
            print("-" * (sum(widths) + 2 * (len(widths) - 1)))
    print(flush=True)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 10 else f"{value:,.0f}"
    return str(value)


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Results with the environment they were taken in."""
    path.write_text(json.dumps({"environment": environment(), **results}, indent=2) + "\n")
