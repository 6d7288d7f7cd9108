"""read_whole: a stored tensor, all of it, verified."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

import torch

from parallel3d.checkpoint.format.blocks import BLOCK, BlockCheck, bytes_of, read_into
from parallel3d.checkpoint.format.index import Index
from parallel3d.checkpoint.format.opening import opened

__all__ = ["read_whole"]


def read_whole(folder: Path, index: Index, name: str) -> torch.Tensor:
    """The tensor ``name``, on the CPU.

    Raises:
        CorruptCheckpointError: its bytes are not those that were saved.
    """
    entry = index.tensors[name]
    check = BlockCheck()
    for chunk in entry.chunks:  # before there is memory for it
        path = folder / chunk.file
        size = prod(chunk.sizes) * entry.dtype.itemsize
        with opened(path) as file:
            for number, crc in enumerate(chunk.crc):
                begin = number * BLOCK
                at, count = chunk.begin + begin, min(BLOCK, size - begin)
                check.verify(file, at, count, crc, f"{path}, of {name!r:.200}")
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for chunk in entry.chunks:
        box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        target = whole[box]
        part = target if target.is_contiguous() else torch.empty(chunk.sizes, dtype=entry.dtype)
        data, path = bytes_of(part), folder / chunk.file
        with opened(path) as file:
            read_into(file, data, chunk.begin, os.fspath(path))
        if part is not target:
            target.copy_(part)
    return whole
