"""Progress: what a training run shows: a live line on a terminal, otherwise a line now and then."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from parallel3d._util.dry_run import active

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column
except ImportError:  # of the extra cli: without it lines now and then, and no live one
    from parallel3d.observability.plain_lines import Bar, Console  # type: ignore[assignment]

    BarColumn = MofNCompleteColumn = TextColumn = TimeRemainingColumn = Column = Bar  # type: ignore


WINDOW = 20
"""Steps over which loss and speed are smoothed, and between two lines."""
SHOWN_STRAGGLERS = 4  # lines for one step
WIDE = 100  # columns of a terminal, from which on there is a bar
SPEED_PERIOD = 600  # seconds behind the time that remains: several steps, also of slow ones


class _Console(Console):
    """One whose reader may leave, as ``head`` does, or whose disk be full: that doesn't end a training."""

    def on_broken_pipe(self) -> None:
        self.give_up("nobody reads standard output")

    def give_up(self, why: object) -> None:
        """Shows nothing from now on."""
        self.quiet = True
        with suppress(OSError):  # or Python, as it ends, tries once more and fails
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        warnings.warn(f"progress is shown no more: {why}", stacklevel=2)


class Progress:
    """Shows the records of each step: a live line, for which it needs the package rich and a terminal; else a
    line now and then.

    ``Metrics`` starts and ends the live line; as a context manager around more than the steps it is there
    for longer. The loss must be logged as ``loss``; ``grad_norm`` is shown if it is.

    Args:
        steps: of the whole run.
        quiet: shows nothing, as on all ranks but one.
    """

    in_dry_runs = True

    def __init__(self, steps: int, *, quiet: bool = False) -> None:
        self.steps, self.done = steps, 0
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.speeds: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # (tokens, seconds)
        self.began = time.perf_counter()
        self.console = _Console(quiet=quiet, highlight=False, markup=False, soft_wrap=True)
        # The text takes what the others leave, and is cut; by default it would push them all out of the line.
        rest = Column(no_wrap=True, ratio=1)
        columns = (
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            *((BarColumn(20),) if self.console.width >= WIDE else ()),
            TextColumn("{task.description}", markup=False, table_column=rest),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
        )
        able = self.console.is_terminal and not self.console.is_dumb_terminal
        self.live = able and not quiet
        self.bar = Bar(
            *columns,
            console=self.console,
            disable=not self.live,
            expand=True,
            speed_estimate_period=SPEED_PERIOD,
        )
        self.task = self.bar.add_task("", total=steps)
        self._total_memory: int | None = None
        self._exposed = ""

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def go_on_from(self, step: int) -> None:
        """So many steps were done before."""
        self.done = step
        self.bar.update(self.task, completed=step)

    def print(self, line: object) -> None:
        """A line of its own."""
        try:
            self.console.print(str(line))
        except OSError as error:
            self.console.give_up(error)

    def __repr__(self) -> str:
        return f"Progress({self.steps})"

    def start(self, about: Mapping[str, Any]) -> None:
        """What is known of the run."""
        self._total_memory = about.get("memory_total")
        self.bar.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Takes one step's record; shows it if it is time to."""
        self.done += 1
        if "loss" in record:
            self.losses.append(record["loss"])
        seconds = record["step_seconds"]
        first = not self.speeds  # of this process, which may go on from others' steps
        self.speeds.append((record["tokens_per_second"] * seconds, seconds))
        if "exposed_seconds" in record:
            self._exposed = _shares(record["exposed_seconds"], seconds)
        line = self._line(record)
        self.bar.update(self.task, completed=self.done, description=line)
        if not self.live and (first or self.done % WINDOW == 0 or self.done == self.steps):
            self.print(f"step {self.done:4d}/{self.steps}  {line}")
        slow = record.get("stragglers", ())
        for straggler in slow[:SHOWN_STRAGGLERS]:
            self.print(f"step {self.done:4d}/{self.steps}  {straggler['text']}")
        if len(slow) > SHOWN_STRAGGLERS:
            more = len(slow) - SHOWN_STRAGGLERS
            self.print(
                f"step {self.done:4d}/{self.steps}  and {more} more parts of the mesh are slow"
            )

    def _line(self, record: Mapping[str, Any]) -> str:
        parts = []
        if "loss" in record:
            parts.append(f"loss {record['loss']:.4f}")
        if "grad_norm" in record:
            parts.append(f"grad norm {record['grad_norm']:.3f}")
        if active():  # a dry run, whose speed and memory are not the program's
            return "  ".join(parts)
        parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if "mfu" in record:
            # Of the same steps as the speed beside it.
            mfu = record["mfu"] / record["tokens_per_second"] * self.tokens_per_second
            parts.append(f"MFU {mfu:.1%}")
        if "memory_peak" in record:
            total = self._total_memory
            share = f" ({record['memory_peak'] / total:.0%})" if total else ""
            parts.append(f"{record['memory_peak'] / 2**30:.2f} GiB{share}")
        if self._exposed:
            parts.append(self._exposed)
        return "  ".join(parts)

    def close(self) -> None:
        """Ends the live line."""
        self.bar.stop()

    @property
    def tokens_per_second(self) -> float:
        """Over the last steps."""
        seconds = sum(seconds for _, seconds in self.speeds)
        return sum(tokens for tokens, _ in self.speeds) / max(seconds, 1e-9)

    @property
    def result(self) -> str:
        """Easy to parse: name=value, separated by blanks."""
        values = {"steps": f"{self.done}"}
        if self.losses:
            smoothed = sum(self.losses) / len(self.losses)
            values |= {"loss": f"{self.losses[-1]:.6f}", "smoothed_loss": f"{smoothed:.6f}"}
        values["tokens_per_second"] = f"{self.tokens_per_second:.0f}"
        values["seconds"] = f"{time.perf_counter() - self.began:.1f}"
        return " ".join(f"{name}={value}" for name, value in values.items())


def _shares(exposed: Mapping[str, float], seconds: float) -> str:
    """``waits: shard 4%, tp 12%`` of the step; what is below half a percent is left out."""
    shares = {axis: waited / seconds for axis, waited in exposed.items() if seconds}
    shown = [f"{axis} {share:.0%}" for axis, share in shares.items() if share >= 0.005]
    return f"waits: {', '.join(shown)}" if shown else ""
