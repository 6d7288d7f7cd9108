"""The classes of rich that Progress uses, for when rich is not installed: they print lines only."""

from __future__ import annotations

from typing import Any


class Console:
    """Prints lines."""

    is_terminal = is_dumb_terminal = False
    width = 80

    def __init__(self, *, quiet: bool = False, **options: Any) -> None:
        self.quiet = quiet

    def print(self, line: object) -> None:
        """Raises OSError if the line can't be written."""
        if not self.quiet:
            try:
                print(line, flush=True)
            except BrokenPipeError:
                self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        raise SystemExit(1)


class Bar:
    """Shows nothing. It also takes the place of rich's columns."""

    def __init__(self, *columns: Any, **options: Any) -> None: ...

    def add_task(self, *args: Any, **options: Any) -> int:
        return 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update(self, task: int, **fields: Any) -> None: ...
