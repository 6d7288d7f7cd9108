"""JsonLines: a file with one JSON object a line, that a kill leaves readable."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from parallel3d.errors import Parallel3dError

__all__ = ["JsonLines", "read_json_lines"]

_BLOCK = 1 << 16


class JsonLines:
    """Appends to a file: ``{"event": "start", ...}`` when a process begins, then an object a step.

    A line goes to the system in one write when its step ends, and nothing is held back. Where a kill has cut
    a line (the system may cut a write between two pages) the next process that opens the file removes it, and
    ``read_json_lines`` passes it over. Numbers that JSON lacks (NaN, infinity) are null. Steps that are done
    again after a crash are there again.

    Args:
        path: of the file; its folder is made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: int | None = None

    def start(self, about: Mapping[str, Any]) -> None:
        """Opens the file, and writes what is known of the run.

        Raises:
            Parallel3dError: there is such a file, with something else in it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, _BLOCK, 0).lstrip()[:1] not in (b"", b"{"):
            raise Parallel3dError(
                f"{self.path} is there already and is no file of JSON lines; give another one"
            )
        whole = _end_of_last_line(self._file)
        if whole < size:
            os.ftruncate(self._file, whole)
        self.write({"event": "start", **about})

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a line.

        Raises:
            OSError: the line could not be written, and is not in the file.
        """
        assert self._file is not None, "start comes first"
        text = json.dumps(_plain(record), allow_nan=False, separators=(", ", ": ")) + "\n"
        data = text.encode()
        before = os.fstat(self._file).st_size
        try:
            done = os.write(self._file, data)
            if done < len(data):
                raise OSError(f"{self.path}: only {done} of {len(data)} bytes could be written")
        except OSError:
            os.ftruncate(self._file, before)
            raise

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file of ``JsonLines``, also while it is written.

    Raises:
        Parallel3dError: a line, not the last, is no JSON.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return  # cut by a kill, or being written
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise Parallel3dError(f"{path}, line {number}: no JSON ({error})") from None


def _end_of_last_line(file: int) -> int:
    """How many bytes there are up to and with the last newline."""
    end = os.fstat(file).st_size
    while end > 0:
        begin = max(0, end - _BLOCK)
        found = os.pread(file, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):  # numpy's too
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value)
