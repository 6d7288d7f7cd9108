"""Stored: the tensors that values in checkpoint.json refer to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from parallel3d.checkpoint.format.index import Index, TensorEntry
from parallel3d.checkpoint.format.reader import read_whole
from parallel3d.errors import CheckpointError, CorruptCheckpointError

_LIMIT = 1 << 30  # bytes


class Stored:
    """Resolves the names of tensors in values: each may be used once, and only where it belongs.

    Otherwise a value could name a parameter, which would then be read in the value's place.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._taken: set[str] = set()
        self._left = _LIMIT

    def take(self, name: str, where: str) -> TensorEntry:
        """Returns the entry of the tensor ``name``, which a value of ``where`` refers to.

        Raises CorruptCheckpointError if it is not stored, belongs elsewhere, or has been taken.
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
        """Returns the ``tensor`` argument of ``decode`` for values of ``where``: reads whole tensors to the
        CPU.

        It raises a CheckpointError when all tensors read in this way would exceed 1 GiB.
        """

        def read(name: str) -> Tensor:
            entry = self.take(name, where)
            self._left -= entry.nbytes
            if self._left < 0:
                raise CheckpointError(
                    f"{self.folder}: {name!r:.200}, {entry.dtype} of shape {entry.shape}, is not read whole "
                    f"by every rank: tensors without a target to read into may have {_LIMIT >> 30} GiB in "
                    "all; if it is of extra, give load a tensor for it: extra={...}, in the structure saved"
                )
            return read_whole(self.folder, self.index, name)

        return read
