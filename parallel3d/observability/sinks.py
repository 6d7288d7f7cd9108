"""Sinks: JsonLines, one JSON object per line, and TensorBoard."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from mmap import MAP_PRIVATE, PROT_READ, mmap
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from parallel3d._util.arguments import as_count
from parallel3d.errors import Parallel3dError

_BLOCK = 1 << 16


class JsonLines:
    """Appends to a file: ``{"event": "start", ...}`` when a process begins, then one object per step.

    A line is written in one call when its step ends, without buffering. If a kill has cut a line (the system
    may cut a write between two pages), the next process that opens the file removes it, and
    ``read_json_lines`` ignores it. NaN and infinity are written as null. A step repeated after a crash is
    written again.

    Args:
        path: path of the file; its folder is created.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: int | None = None

    def start(self, about: Mapping[str, Any]) -> None:
        """Opens the file and writes the start line.

        Raises:
            Parallel3dError: the file exists and is not one of JSON lines.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if os.fstat(self._file).st_size:
            with mmap(self._file, 0, flags=MAP_PRIVATE, prot=PROT_READ) as text:
                is_ours, complete = text[:_BLOCK].lstrip()[:1] in (b"", b"{"), text.rfind(b"\n") + 1
            if not is_ours:
                raise Parallel3dError(
                    f"{self.path} is there already and is no file of JSON lines; give another one"
                )
            os.ftruncate(self._file, complete)
        self.write({"event": "start", **about})

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a line.

        Raises:
            OSError: the line could not be written; the file is unchanged.
        """
        assert self._file is not None, "start comes first"
        data = (json.dumps(_plain(record), allow_nan=False) + "\n").encode()
        before = os.fstat(self._file).st_size
        try:
            done = os.write(self._file, data)
            if done < len(data):
                raise OSError(f"{self.path}: only {done} of {len(data)} bytes could be written")
        except OSError:
            os.ftruncate(self._file, before)
            raise

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of ``JsonLines``, also while it is written.

    Args:
        path: the file.

    Raises:
        Parallel3dError: a line, other than an incomplete last one, is not JSON.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return  # cut by a kill, or being written
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise Parallel3dError(f"{path}, line {number}: no JSON ({error})") from None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):  # numpy's too
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


class TensorBoard:
    """Writes each number of a record as a scalar with its name: ``loss``, ``exposed_seconds/shard``.

    Needs the package tensorboard.

    Args:
        folder: for the event files.
        every: number of steps after which they are flushed to the disk.

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
            Parallel3dError: tensorboard is not installed.
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
        step, time = record["step"], record["time"]
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, step, walltime=time)
        self._count += 1
        if self._count % self.every == 0:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __repr__(self) -> str:
        return f"TensorBoard({self.folder!r})"


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields (name, number) of the numbers in a record, ``outer/inner`` if nested, and lengths of lists."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            yield f"{prefix}{name}", len(value)
        elif isinstance(value, Real) and name not in ("step", "time"):
            yield f"{prefix}{name}", float(value)
