"""Rich consoles and tables in one style, for everything that the commands print."""

import os

from rich import box
from rich.console import Console
from rich.table import Table


def output(width: int = 120) -> Console:
    """Returns a console as wide as the terminal, or of ``width`` columns in a pipe or a file."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=width)


def titled_table(title: str, *columns: str, left: int = 1) -> Table:
    """Returns a table whose first ``left`` columns are text; the others are numbers, aligned right."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    return table
