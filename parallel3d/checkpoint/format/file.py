"""Writes one rank's file: the safetensors layout, a checksum of every block on the way.

The library itself takes a whole file's bytes at once, which would be a second copy of what a rank holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from parallel3d.checkpoint.format.blocks import bytes_of, crcs_of, write_all
from parallel3d.checkpoint.format.index import Chunk
from parallel3d.checkpoint.format.safetensors_file import header_of
from parallel3d.errors import CheckpointError

__all__ = ["Stored", "write_file"]


@dataclass(frozen=True)
class Stored:
    """A box of a tensor that is to be written.

    Attributes:
        name: of the tensor.
        dtype, shape: the whole's.
        offsets, sizes: the box.
        values: gives them, on any device; called when their turn comes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize

    @property
    def key(self) -> str:
        """Its name in the file."""
        if self.sizes == self.shape:
            return self.name
        return f"{self.name}@{','.join(map(str, self.offsets))}"


def write_file(path: Path, items: Sequence[Stored]) -> tuple[list[Chunk], int]:
    """Writes ``items`` to a new file and on to the disk.

    Returns:
        (where each of them lies, the file's size).
    """
    # Larger elements first, so that each tensor begins at a multiple of its element's size.
    order = sorted(range(len(items)), key=lambda i: -items[i].dtype.itemsize)
    header = header_of({items[i].key: (items[i].dtype, items[i].sizes) for i in order})
    chunks: dict[int, Chunk] = {}
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(file, memoryview(header))
        at = len(header)
        for i in order:
            item = items[i]
            values = item.values().detach().to("cpu").resolve_conj().resolve_neg().contiguous()
            if values.dtype != item.dtype or tuple(values.shape) != item.sizes:
                raise CheckpointError(
                    f"{item.name}: {values.dtype} of {tuple(values.shape)} was to be stored as "
                    f"{item.dtype} of {item.sizes}"
                )
            data = bytes_of(values)
            chunks[i] = Chunk(item.offsets, item.sizes, path.name, at, tuple(crcs_of(data)))
            write_all(file, data)
            at += len(data)
        os.fsync(file)
    finally:
        os.close(file)
    return [chunks[i] for i in range(len(items))], at
