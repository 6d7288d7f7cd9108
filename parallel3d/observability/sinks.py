"""JsonLines: a file with one JSON object a line, that a kill leaves readable."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from parallel3d._util.arguments import as_count
from parallel3d.errors import Parallel3dError

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


# TensorBoard: the records as curves, through torch.utils.tensorboard.


class TensorBoard:
    """Writes each number of a record as a scalar of its name: ``loss``, ``exposed_seconds/shard``.

    Needs the package tensorboard.

    Args:
        folder: for the event files.
        every: steps between two that are written to the disk.

    Raises:
        Parallel3dError: ``every`` is not a number of steps.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int = 10) -> None:
        self.folder, self.every = os.fspath(folder), as_count("TensorBoard: every", every, 1)
        self._writer: Any = None
        self._count = 0

    def start(self, about: Mapping[str, Any]) -> None:
        """Opens an event file.

        Raises:
            Parallel3dError: tensorboard is not there.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise Parallel3dError(
                f"TensorBoard({self.folder!r}) needs the package tensorboard ({error}): pip install "
                "tensorboard, or use JsonLines"
            ) from error
        self._writer = SummaryWriter(self.folder)
        text = "\n".join(f"    {name}: {value}" for name, value in about.items())
        self._writer.add_text("run", text)

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds a point to each curve."""
        step, time = record["step"], record["time"]
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, step, walltime=time)
        self._count += 1
        if self._count % self.every == 0:
            self._writer.flush()

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def __repr__(self) -> str:
        return f"TensorBoard({self.folder!r})"


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a record and in what is nested in it; of a list, its length."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            yield f"{prefix}{name}", len(value)
        elif isinstance(value, Real) and name not in ("step", "time"):
            yield f"{prefix}{name}", float(value)
