"""Progress: shows a training run as a live line on a terminal, otherwise as a line from time to time."""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from parallel3d._util.dry_run import active

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column
except ImportError:  # rich comes with the extra cli; without it there is no live line
    Bar = None  # type: ignore[assignment, misc]
else:

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            _give_up("nobody reads standard output")


WINDOW = 20  # steps over which loss and speed are averaged, and between two lines
SHOWN_STRAGGLERS = 4  # lines per step
RUNNING = 3  # samples in which the same part of the mesh must be slow
WIDE = 100  # least columns of a terminal for a bar
SPEED_PERIOD = 600  # seconds of past steps from which the remaining time is estimated


def _give_up(why: object) -> None:
    """Redirects standard output to nowhere, as its reader has ended (like ``head``) or its disk is full."""
    with suppress(OSError):  # else Python writes again when it ends, and fails
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    warnings.warn(f"progress is shown no more: {why}", stacklevel=3)


class Progress:
    """A sink that shows steps: a live line if rich is installed and stdout is a terminal, else a line now and
    then.

    ``Metrics`` starts and ends the live line; use it as a context manager to show the line for longer than
    the steps. It shows the values logged as ``loss`` and ``grad_norm``, and names a part of the mesh that is
    slow once, in the third sample running; never on CPUs with more ranks than cores.

    Args:
        steps: number of steps of the whole run.
        quiet: show nothing; for all ranks but one.
    """

    in_dry_runs = True

    def __init__(self, steps: int, *, quiet: bool = False) -> None:
        self.steps, self.done = steps, 0
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.speeds: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # (tokens, seconds)
        self.began = time.perf_counter()
        self.quiet = quiet
        self.bar = None if quiet or Bar is None else self._live_line()
        self._total_memory: int | None = None
        self._exposed: list[str] = []
        self._slow: dict[tuple[Any, ...], int] = {}  # coordinates -> times running
        self._shares_cores = False  # with other ranks, which makes one of them slow at any time

    def _live_line(self) -> Bar | None:
        console = _Console(highlight=False, markup=False, soft_wrap=True)
        if not console.is_terminal or console.is_dumb_terminal:
            return None
        # The text gets the width that is left and is cut; by default it would displace other columns.
        rest = Column(no_wrap=True, ratio=1)
        bar = Bar(
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            *((BarColumn(20),) if console.width >= WIDE else ()),
            TextColumn("{task.description}", markup=False, table_column=rest),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
            speed_estimate_period=SPEED_PERIOD,
        )
        bar.add_task("", total=self.steps)
        return bar

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def go_on_from(self, step: int) -> None:
        """Sets the number of steps done, for a run that is resumed after ``step`` steps."""
        self.done = step
        self._update()

    def _update(self, **fields: Any) -> None:
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done, **fields)

    def print(self, line: object) -> None:
        """Prints ``line`` above the live line."""
        try:
            if self.bar is not None:
                self.bar.console.print(str(line))
            elif not self.quiet:
                print(line, flush=True)
        except OSError as error:
            self.quiet = True
            _give_up(
                "nobody reads standard output" if isinstance(error, BrokenPipeError) else error
            )

    def __repr__(self) -> str:
        return f"Progress({self.steps})"

    def start(self, about: Mapping[str, Any]) -> None:
        self._total_memory = about.get("memory_total")
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._shares_cores = about.get("device") == "cpu" and ranks > (os.cpu_count() or 1)
        self.__enter__()

    def write(self, record: Mapping[str, Any]) -> None:
        """Updates the live line, or prints a line for every ``WINDOW``-th step."""
        self.done += 1
        if "loss" in record:
            self.losses.append(record["loss"])
        seconds = record["step_seconds"]
        first = not self.speeds  # the first step of this process
        self.speeds.append((record["tokens_per_second"] * seconds, seconds))
        if "exposed_seconds" in record:
            self._exposed = _shares(record["exposed_seconds"], seconds)
        line = self._line(record)
        self._update(description=line)
        regular = first or self.done % WINDOW == 0 or self.done == self.steps
        lines = [line] if regular and self.bar is None else []
        slow = self._slow_again(record["stragglers"]) if "stragglers" in record else []
        lines += slow[:SHOWN_STRAGGLERS]
        if len(slow) > SHOWN_STRAGGLERS:
            lines.append(f"and {len(slow) - SHOWN_STRAGGLERS} more parts of the mesh are slow")
        for text in lines:
            self.print(f"{self._step()}  {text}")

    def _slow_again(self, stragglers: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns the texts of those stragglers that have been slow in exactly three samples running."""
        found = {tuple(each["axes"].items()): each["text"] for each in stragglers}
        self._slow = {place: self._slow.get(place, 0) + 1 for place in found}
        return (
            [] if self._shares_cores else [found[p] for p, n in self._slow.items() if n == RUNNING]
        )

    def _line(self, record: Mapping[str, Any]) -> str:
        parts = []
        if "loss" in record:
            parts.append(f"loss {record['loss']:.4f}")
        norm = f"grad norm {record['grad_norm']:.3f}" if "grad_norm" in record else ""
        if active():  # speed and memory of a dry run are not the program's
            return "  ".join(filter(None, [*parts, norm]))
        parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if "mfu" in record:
            # Averaged over the same steps as the speed.
            mfu = record["mfu"] / record["tokens_per_second"] * self.tokens_per_second
            parts.append(f"MFU {mfu:.1%}")
        parts += self._exposed
        if "memory_peak" in record:
            total = self._total_memory
            share = f" ({record['memory_peak'] / total:.0%})" if total else ""
            parts.append(f"{record['memory_peak'] / 2**30:.2f} GiB{share}")
        # The first of them stay where the screen is narrow; 16 columns have the steps and the time left.
        room = shutil.get_terminal_size().columns - max(16, len(self._step()) + 2)
        shown: list[str] = []
        for part in filter(None, [*parts, norm]):
            if sum(map(len, shown)) + 2 * len(shown) + len(part) > room:
                break
            shown.append(part)
        return "  ".join(shown)

    def _step(self) -> str:
        return f"step {self.done:4d}/{self.steps}"

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, averaged over the last ``WINDOW`` steps."""
        seconds = sum(seconds for _, seconds in self.speeds)
        return sum(tokens for tokens, _ in self.speeds) / max(seconds, 1e-9)

    @property
    def result(self) -> dict[str, float]:
        """Figures of the run: steps, last loss, its mean over the last steps, tokens per second, seconds."""
        values: dict[str, float] = {"steps": self.done}
        if self.losses:
            values["loss"] = self.losses[-1]
            values["smoothed_loss"] = sum(self.losses) / len(self.losses)
        seconds = time.perf_counter() - self.began
        return {**values, "tokens_per_second": self.tokens_per_second, "seconds": seconds}


def _shares(exposed: Mapping[str, float], seconds: float) -> list[str]:
    """Returns texts such as ``waits tp 12%``, ``shard 4%``: waits from 0.5% of a step on, largest first."""
    shares = {axis: waited / seconds for axis, waited in exposed.items() if seconds}
    shown = sorted(
        (axis for axis in shares if shares[axis] >= 0.005), key=lambda axis: -shares[axis]
    )
    return [f"{'waits ' * (not n)}{axis} {shares[axis]:.0%}" for n, axis in enumerate(shown)]
