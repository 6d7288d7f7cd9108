"""TensorBoard: the records as curves, through torch.utils.tensorboard."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from parallel3d._arguments import as_count
from parallel3d.errors import Parallel3dError

__all__ = ["TensorBoard"]


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
