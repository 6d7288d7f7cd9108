"""A script as a program that ``record`` can call."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from pathlib import Path
from unittest.mock import patch

from parallel3d.errors import DryRunError

__all__ = ["script"]


def script(path: str | PathLike[str], arguments: Sequence[str] = ()) -> Callable[[], None]:
    """``python path arguments...`` as a function: its own folder comes first on the path for imports.

    Raises:
        DryRunError: there is no such file; when called, that the script ended with an error of its own.
    """
    file = Path(path)
    if not file.is_file():
        raise DryRunError(f"there is no script {fspath(path)!r}; give the path of a .py file")

    def run() -> None:
        with (
            patch.object(sys, "argv", [fspath(path), *arguments]),
            patch.object(sys, "path", [str(file.resolve().parent), *sys.path]),
        ):
            try:
                runpy.run_path(fspath(path), run_name="__main__")
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise DryRunError(f"{fspath(path)} ended with {end.code}") from end

    return run
