"""Rich consoles and tables in one style, for everything that the commands print."""

import os
from typing import Literal

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


def output(width: int = 120) -> Console:
    """Returns a console as wide as the terminal, or of ``width`` columns in a pipe or a file."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=width)


class Busy:
    """Shows on stderr what is going on and for how long, if that is a terminal and this is the first rank."""

    def __init__(self, text: str) -> None:
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
        console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or rank != "0",
        )
        self._task = self._progress.add_task(text, total=None)

    def __enter__(self) -> "Busy":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def say(self, text: str) -> None:
        """Shows ``text`` from now on, also after ``stop``."""
        self._progress.update(self._task, description=text)
        self._progress.start()

    def stop(self) -> None:
        """Removes it, for what is printed next."""
        self._progress.stop()


def titled_table(title: str, *columns: str, left: int = 1) -> Table:
    """Returns a table whose first ``left`` columns are text; the others are numbers, aligned right."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for i, name in enumerate(columns):
        widest = max(map(len, name.split()), default=0)  # a header's words are never broken
        side: Literal["left", "right"] = "left" if i < left else "right"
        table.add_column(name, justify=side, overflow="fold", min_width=widest)
    return table
