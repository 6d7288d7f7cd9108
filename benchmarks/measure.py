"""What the benchmarks share: alternating rounds of timed steps, claims, medians, tables and JSON."""

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "Claim",
    "Rounds",
    "alternate",
    "bytes_claim",
    "command_line",
    "cpu_seconds",
    "environment",
    "no_gc",
    "plain_claim",
    "print_claims",
    "print_rows",
    "print_table",
    "range_of",
    "write_json",
]

MIB = 2**20


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

    def chunks(self, number: int) -> "Rounds":
        """Medians of so many runs of neighbouring rounds, in place of the rounds."""
        size = len(next(iter(self.seconds.values()))) // number
        return Rounds(
            {
                name: [statistics.median(values[i * size : (i + 1) * size]) for i in range(number)]
                for name, values in self.seconds.items()
            }
        )

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


@dataclass(frozen=True)
class Claim:
    """One line of the table that ``all.py`` prints and docs/claims.md holds.

    Attributes:
        what: the claim, and its case: ``host time, (1, 64, 1) fp32``.
        ours, peer: medians, in ``unit``.
        against: who the peer is: ``FSDP2``, ``DDP``, ``plain``, or a fixed limit.
        bar, aim: what ``ratio`` (ours / peer) must not exceed, and what it should not.
        ratio: median of the rounds' ratios, where it isn't ours / peer.
        spread: the middle half of the rounds' ratios, as text.
    """

    what: str
    ours: float
    peer: float
    unit: str
    against: str
    bar: float
    aim: float | None = None
    ratio: float | None = None
    spread: str = ""

    @property
    def value(self) -> float:
        """Ours / the peer's."""
        return self.ours / self.peer if self.ratio is None else self.ratio

    @property
    def verdict(self) -> str:
        """Which of the two limits holds."""
        if self.aim is not None and self.value <= self.aim:
            return "aim"
        return "bar" if self.value <= self.bar else "MISSED"


def print_claims(claims: Sequence[Claim]) -> None:
    """The claims with what was to be shown."""
    head = ["claim", "ours", "peer", "unit", "against", "ratio", "middle half", "bar", "aim", "met"]
    rows = [
        [c.what, c.ours, c.peer, c.unit, c.against, c.value, c.spread, c.bar]
        + ["" if c.aim is None else c.aim, c.verdict]
        for c in claims
    ]
    print_table("what was to be shown: ours / peer", head, rows)


def print_rows(
    title: str,
    columns: Mapping[str, str],
    rows: Sequence[Mapping[str, Any]],
    missing: str = "",
) -> None:
    """``print_table`` of what was measured.

    Args:
        columns: heading -> the entry of a row.
        rows: one for each case. Entries whose name ends in ``bytes`` are shown in MiB.
        missing: what is shown for an entry that a row doesn't have.
    """

    def value(row: Mapping[str, Any], name: str) -> Any:
        found = row.get(name, missing)
        return found / MIB if name.endswith("bytes") else found

    table = [[value(row, name) for name in columns.values()] for row in rows]
    print_table(title, list(columns), table)


def bytes_claim(what: str, row: Mapping[str, Any], bar: float, aim: float) -> Claim:
    """Our bytes beside FSDP2's: a row's ``ours_bytes`` and ``torch_bytes``."""
    ours, peer = row["ours_bytes"] / MIB, row["torch_bytes"] / MIB
    return Claim(f"{what}, {row['policy']}", ours, peer, "MiB", "FSDP2", bar, aim)


def plain_claim(what: str, row: Mapping[str, Any], unit: str, bar: float) -> Claim:
    """Our time beside that of plain tensors: a row's ``case``, times in ``unit``, ``ratio`` and its range."""
    ours, peer = row[f"ours_{unit}"], row[f"plain_{unit}"]
    ratio, spread = row["ratio"], row["ratio_range"]
    return Claim(
        f"{what}, {row['case']}", ours, peer, unit, "plain tensors", bar, 1.0, ratio, spread
    )


def cpu_seconds(function: Callable[[], object]) -> Callable[[], float]:
    """A step for ``alternate``: the seconds of CPU time that one call of ``function`` takes."""

    def step() -> float:
        start = time.process_time()
        function()
        return time.process_time() - start

    return step


def command_line(
    doc: str | None, run: Callable[[bool], tuple[list[Claim], Mapping[str, Any]]]
) -> None:
    """The command line of a script: ``[--quick] [--json PATH]``.

    Args:
        doc: the script's docstring.
        run: quick? -> the claims, and all that was measured for the JSON file; prints its tables.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="also write the results there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    claims, results = run(options.quick)
    print_claims(claims)
    if options.json:
        listed = [asdict(c) | {"ratio": c.value} for c in claims]
        write_json(options.json, {"quick": options.quick, "claims": listed, **results})
