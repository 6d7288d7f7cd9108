"""Rich consoles and tables in one style, for everything that the commands print."""

import os
import sys
from collections.abc import Sequence
from textwrap import TextWrapper
from typing import Any, Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement, measure_renderables
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text


def output(width: int | None = None) -> Console:
    """Returns a console as wide as the terminal; for a pipe or file of ``width`` columns, or 80."""
    console = Console()
    if width is None or console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=width)


def wrapped(text: str, width: int, indent: str = "  ", end: str = "") -> str:
    """Returns ``text`` in lines of at most ``width`` columns; a longer word, such as a path, is not broken.

    All lines but the first begin with ``indent``; all but the last end with ``end``.
    """
    wrapper = TextWrapper(
        width - len(end), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return f"{end}\n".join(wrapper.wrap(text))


def say(text: str) -> None:
    """Prints ``text`` on stderr: wrapped on a terminal, unchanged in a pipe or a file."""
    console = Console(stderr=True)
    if console.is_terminal:
        text = "\n".join(wrapped(line, console.width, "    ") for line in text.splitlines())
    print(text, file=sys.stderr)


class Busy:
    """Shows on stderr what is being done, and for how long, on the first rank's terminal."""

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
        """Shows ``text`` from now on; starts again after ``stop``."""
        self._progress.update(self._task, description=text)
        self._progress.start()

    def stop(self) -> None:
        """Removes the line, so that something else can be printed."""
        self._progress.stop()


class FittedTable(Table):
    """A table that breaks no word: if it is too wide it drops columns, then prints paragraphs.

    ``droppable``: groups of column headers; a group is left out if there is no room, the first one first.
    """

    def __init__(self, heading: str, droppable: Sequence[Sequence[str]] = ()) -> None:
        super().__init__()
        self.heading, self.droppable, self.heading_style = heading, droppable, "bold"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.heading, self.heading_style)
        shown = list(self.columns)
        for group in ((), *self.droppable):
            shown = [column for column in shown if column.header not in group]
            room = options.max_width - 2 * (len(shown) - 1)
            sizes = [self._size(console, options, column) for column in shown]
            if sum(size.minimum for size in sizes) <= room:
                yield self._table(shown, _widths(sizes, room))
                yield ""
                return
        for _, cells in self._cells(shown):
            parts = [
                f"{column.header} {cell}".strip()
                for column, cell in zip(shown, cells, strict=True)
                if str(cell)
            ]
            yield Text(", ".join(parts) + "\n")

    def _size(self, console: Console, options: ConsoleOptions, column: Column) -> Measurement:
        cells = [_renderable(each) for each in (column.header, *column.cells)]
        least, most = measure_renderables(console, options, cells)
        return Measurement(min(least, _LONGEST), most)

    def _table(self, shown: Sequence[Column], widths: Sequence[int]) -> Table:
        columns = [
            Column(c.header, justify=c.justify, overflow="fold", width=width)
            for c, width in zip(shown, widths, strict=True)
        ]
        look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}
        table = Table(*columns, pad_edge=False, leading=self.leading, **look)
        for row, cells in self._cells(shown):
            table.add_row(*map(_renderable, cells), style=row.style, end_section=row.end_section)
        return table

    def _cells(self, shown: Sequence[Column]) -> list[tuple[Any, tuple[Any, ...]]]:
        every = zip(*(column.cells for column in shown), strict=True)
        return list(zip(self.rows, every, strict=True))


_LONGEST = 32  # columns of a word, such as a module's name, beyond which a table folds it


def _renderable(cell: Any) -> Any:
    return Text(cell) if isinstance(cell, str) else cell


def _widths(sizes: Sequence[Measurement], room: int) -> list[int]:
    """Returns each column's width, together ``room``: its longest word and a fair part of the rest."""
    widths = [size.minimum for size in sizes]
    left = room - sum(widths)
    by_need = sorted(range(len(sizes)), key=lambda i: sizes[i].span)
    for place, i in enumerate(by_need):
        more = min(sizes[i].span, left // (len(sizes) - place))
        widths[i] += more
        left -= more
    return widths


def titled_table(
    title: str, *columns: str, left: int = 1, droppable: Sequence[Sequence[str]] = ()
) -> FittedTable:
    """Returns a table whose first ``left`` columns are text; the others are numbers, aligned right."""
    table = FittedTable(title, droppable)
    for i, name in enumerate(columns):
        side: Literal["left", "right"] = "left" if i < left else "right"
        table.add_column(name, justify=side)
    return table
