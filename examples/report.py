"""What a training run shows: a live line on a terminal, otherwise a line now and then."""

import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Report"]

WINDOW = 20
"""Steps over which loss and speed are smoothed, and between two lines."""


class Report:
    """Takes the results of each step and shows them, unless it is ``quiet``.

    Use it as a context manager around the steps: it owns the live line. ``go_on_from`` says where a run
    that is resumed begins.
    """

    def __init__(self, steps: int, tokens_per_step: int, *, quiet: bool) -> None:
        self.steps, self.tokens_per_step, self.done = steps, tokens_per_step, 0
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.seconds: deque[float] = deque(maxlen=WINDOW)
        self.start = time.perf_counter()
        self.console = Console(quiet=quiet, highlight=False, markup=False, soft_wrap=True)
        columns = (
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
        )
        self.live = self.console.is_terminal and not quiet
        self.progress = Progress(*columns, console=self.console, disable=not self.live)
        self.task = self.progress.add_task("", total=steps)

    def __enter__(self) -> "Report":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def go_on_from(self, step: int) -> None:
        self.done = step
        self.progress.update(self.task, completed=step)

    def print(self, line: object) -> None:
        self.console.print(str(line))

    def step(self, loss: float, norm: float, seconds: float) -> None:
        """Takes one step's results; shows them if it is time to."""
        self.done += 1
        self.losses.append(loss)
        self.seconds.append(seconds)
        line = f"loss {loss:.4f}  grad norm {norm:.3f}  {self.tokens_per_second:,.0f} tokens/s"
        self.progress.update(self.task, completed=self.done, description=line)
        if not self.live and (self.done % WINDOW == 0 or self.done in (1, self.steps)):
            self.print(f"step {self.done:4d}/{self.steps}  {line}")

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step * len(self.seconds) / sum(self.seconds)

    @property
    def result(self) -> str:
        """Easy to parse: name=value, separated by blanks."""
        smoothed = sum(self.losses) / len(self.losses)
        return (
            f"steps={self.done} loss={self.losses[-1]:.6f} smoothed_loss={smoothed:.6f} "
            f"tokens_per_second={self.tokens_per_second:.0f} "
            f"seconds={time.perf_counter() - self.start:.1f}"
        )
