"""Stored: the tensors that checkpoint.json's values name."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path

from torch import Tensor

from parallel3d.checkpoint.format.index import Index, TensorEntry
from parallel3d.checkpoint.format.reader import read_whole
from parallel3d.errors import CheckpointError, CorruptCheckpointError

_MOST = 1 << 30  # bytes


class Stored:
    """A checkpoint's tensors, for values that name them: each in its own place alone, and once.

    Without that a value could name a parameter, which would then be read in the value's place.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._taken: set[str] = set()
        self._left = _MOST

    def take(self, name: str, where: str) -> TensorEntry:
        """The entry of a tensor that a value of ``where`` names.

        Raises:
            CorruptCheckpointError: it isn't stored, belongs elsewhere, or has been taken.
        """
        entry = self.index.tensors.get(name)
        if entry is None:
            problem = "which isn't stored"
        elif not name.startswith(where):
            problem = f"which isn't {where}'s"
        elif name in self._taken:
            problem = "which has been named before"
        else:
            self._taken.add(name)
            return entry
        raise CorruptCheckpointError(
            f"{self.folder}: checkpoint.json names the tensor {name!r:.80}, {problem}"
        )

    def reader(self, where: str) -> Callable[[str], Tensor]:
        """For ``decode``: reads tensors that values of ``where`` name, whole, to the CPU.

        What it returns raises a CheckpointError before all that is so read would be more than a GiB.
        """

        def read(name: str) -> Tensor:
            entry = self.take(name, where)
            self._left -= prod(entry.shape) * entry.dtype.itemsize
            if self._left < 0:
                raise CheckpointError(
                    f"{self.folder}: {name!r:.200}, {entry.dtype} of shape {entry.shape}, is not read whole "
                    f"by every rank: what has no place to be read into may have {_MOST >> 30} GiB in all; "
                    "if it is of extra, give load a tensor for it: extra={...}, in the structure saved"
                )
            return read_whole(self.folder, self.index, name)

        return read
