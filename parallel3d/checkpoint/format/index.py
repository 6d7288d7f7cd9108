"""The index of a checkpoint: which chunks of which tensors are stored where, with their checksums. JSON.

Anybody may have written the file, so everything in it is checked before it is used.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from parallel3d.checkpoint.format.files import (
    BLOCK,
    check_disjoint,
    damaged_if,
    get_of,
    loads,
    numbers_of,
    shape_of,
    shown,
)
from parallel3d.checkpoint.format.safetensors_file import DTYPES, NAMES
from parallel3d.checkpoint.pieces import Boxed, check_tiles

_FILE = re.compile(r"rank-[0-9]{5,9}\.safetensors")


def file_name(rank: int) -> str:
    """Returns the name of the file that ``rank`` writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Chunk(Boxed):
    """A box of a tensor, stored contiguously."""

    file: str
    begin: int  # its first byte in the file
    crc: tuple[int, ...]  # CRC-32 of each of its blocks

    def nbytes(self, dtype: torch.dtype) -> int:
        return prod(self.sizes) * dtype.itemsize


@dataclass
class TensorEntry:
    """A stored tensor: its dtype, its global shape and the chunks it consists of."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class Index:
    """Everything that is stored."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)  # size in bytes
    objects: dict[str, Any] = field(default_factory=dict)  # JSON values that are not tensors

    def to_json(self) -> str:
        tensors = {
            name: {
                "dtype": NAMES[entry.dtype],
                "shape": entry.shape,
                "chunks": [[c.offsets, c.sizes, c.file, c.begin, c.crc] for c in entry.chunks],
            }
            for name, entry in self.tensors.items()
        }
        content = {"block": BLOCK, "files": self.files, "tensors": tensors, "objects": self.objects}
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes, what: str) -> Index:
        """Raises CorruptCheckpointError, about ``what``, unless ``text`` is as ``to_json`` writes it."""
        content, index = loads(text, what), cls()
        with damaged_if(f"{what} is damaged"):
            if content.get("block") != BLOCK:
                raise ValueError(f"its block size is not {BLOCK}")
            for name, size in get_of(content, "files", dict).items():
                if not _FILE.fullmatch(name):
                    raise ValueError(f"{name!r} is not the name of a checkpoint's file")
                (index.files[name],) = numbers_of([size], f"size of {name}")
            for name, entry in get_of(content, "tensors", dict).items():
                index.tensors[name] = _tensor(name, entry, index.files)
            check_disjoint(
                (chunk.file, chunk.begin, chunk.nbytes(entry.dtype), name)
                for name, entry in index.tensors.items()
                for chunk in entry.chunks
            )
            index.objects = get_of(content, "objects", dict)
            return index


def _tensor(name: str, entry: Any, files: dict[str, int]) -> TensorEntry:
    if not isinstance(entry, dict):
        raise ValueError(f"{name!r} is not a tensor")
    kind, chunks = entry.get("dtype"), entry.get("chunks")
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(f"{name!r} has the dtype {shown(kind)}")
    result = TensorEntry(DTYPES[kind], shape_of(entry.get("shape"), f"shape of {name!r}"))
    if not isinstance(chunks, list):
        raise ValueError(f"{name!r} has no chunks")
    parts = [_chunk(name, chunk, result, files) for chunk in chunks]
    check_tiles(name, result.shape, [part.box for part in parts])
    result.chunks = [chunk for chunk in parts if prod(chunk.sizes)]
    return result


def _chunk(name: str, chunk: Any, entry: TensorEntry, files: dict[str, int]) -> Chunk:
    if not isinstance(chunk, list) or len(chunk) != 5:
        raise ValueError(f"a chunk of {name!r} doesn't have 5 fields")
    offsets = numbers_of(chunk[0], "offsets of a chunk")
    sizes = numbers_of(chunk[1], "sizes of a chunk")
    file, (begin,) = chunk[2], numbers_of([chunk[3]], "begin of a chunk")
    if not isinstance(file, str) or file not in files:
        raise ValueError(f"{name!r} is stored in {shown(file)}, which is not listed")
    result = Chunk(offsets, sizes, file, begin, numbers_of(chunk[4], "checksums of a chunk"))
    size = result.nbytes(entry.dtype)
    if begin + size > files[file]:
        raise ValueError(f"a chunk of {name!r} exceeds the end of {file}")
    if len(result.crc) != -(-size // BLOCK):
        raise ValueError(f"a chunk of {name!r} has {len(result.crc)} checksums")
    return result
