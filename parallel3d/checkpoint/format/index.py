"""The index of a checkpoint: which chunks of which tensors lie where, with their checksums. JSON.

Read from a file that anybody may have written, so nothing in it is believed before it is checked.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from parallel3d.checkpoint.format.blocks import BLOCK
from parallel3d.checkpoint.format.dtypes import DTYPES, NAMES
from parallel3d.errors import CorruptCheckpointError

__all__ = ["Chunk", "Index", "TensorEntry", "file_name", "loads"]

_FILE = re.compile(r"rank-\d{5,9}\.safetensors")


def file_name(rank: int) -> str:
    """The file that ``rank`` writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, stored contiguously.

    Attributes:
        offsets, sizes: where it is in the whole tensor, by dim.
        file: the name of the file.
        begin: its first byte there.
        crc: CRC-32 of each of its blocks.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    crc: tuple[int, ...]


@dataclass
class TensorEntry:
    """A stored tensor: its dtype, the whole's shape, and the chunks that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class Index:
    """All that is stored.

    Attributes:
        tensors: by name.
        files: size in bytes of each file.
        objects: what is stored that is no tensor: name -> JSON value.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)

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

    @staticmethod
    def from_json(text: str | bytes) -> Index:
        """Raises CorruptCheckpointError unless all of ``text`` is as ``to_json`` makes it."""
        content = loads(text, "index.json")
        _expect(isinstance(content, dict), "it is no JSON object")
        _expect(content.get("block") == BLOCK, f"its block size isn't {BLOCK}")
        index = Index()
        for name, size in _items(content, "files"):
            _expect(bool(_FILE.fullmatch(name)), f"{name!r} is no name of a checkpoint's file")
            index.files[name] = _number(size, f"size of {name}")
        for name, entry in _items(content, "tensors"):
            index.tensors[name] = _tensor(name, entry, index.files)
        index.objects = dict(_items(content, "objects"))
        return index


def loads(text: str | bytes, what: str) -> Any:
    """``json.loads``, whose errors are CorruptCheckpointErrors."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{what} is no valid JSON: {error}") from None


def _tensor(name: str, entry: Any, files: dict[str, int]) -> TensorEntry:
    _expect(isinstance(entry, dict), f"{name!r} is no tensor")
    _expect(entry.get("dtype") in DTYPES, f"{name!r} has the unknown dtype {entry.get('dtype')!r}")
    dtype, shape = DTYPES[entry["dtype"]], _numbers(entry.get("shape"), f"shape of {name!r}")
    chunks = entry.get("chunks")
    _expect(isinstance(chunks, list), f"{name!r} has no chunks")
    result = TensorEntry(dtype, shape)
    for chunk in chunks:
        result.chunks.append(_chunk(name, chunk, dtype, shape, files))
    _expect(_tile(shape, result.chunks), f"the chunks of {name!r} overlap or leave parts out")
    return result


def _chunk(
    name: str, chunk: Any, dtype: torch.dtype, shape: tuple[int, ...], files: dict[str, int]
) -> Chunk:
    _expect(isinstance(chunk, list) and len(chunk) == 5, f"a chunk of {name!r} has not 5 fields")
    offsets = _numbers(chunk[0], f"offsets in {name!r}")
    sizes = _numbers(chunk[1], f"sizes in {name!r}")
    _expect(len(offsets) == len(sizes) == len(shape), f"a chunk of {name!r} has other dims")
    inside = all(o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True))
    _expect(inside, f"a chunk of {name!r} reaches beyond its shape {shape}")
    file, begin = chunk[2], _number(chunk[3], f"begin in {name!r}")
    _expect(isinstance(file, str) and file in files, f"{name!r} lies in {file!r}, not listed")
    size = prod(sizes) * dtype.itemsize
    _expect(begin + size <= files[file], f"a chunk of {name!r} reaches beyond the end of {file}")
    crc = _numbers(chunk[4], f"checksums in {name!r}")
    _expect(len(crc) == -(-size // BLOCK), f"a chunk of {name!r} has {len(crc)} checksums")
    return Chunk(offsets, sizes, file, begin, crc)


def _tile(shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    """Whether each element of a tensor is in exactly one chunk."""
    held = [chunk for chunk in chunks if prod(chunk.sizes)]
    return sum(prod(c.sizes) for c in held) == prod(shape) and _disjoint(held, 0)


def _disjoint(chunks: list[Chunk], dim: int) -> bool:
    """Whether no two chunks, which overlap in the dims before ``dim``, have an element in common.

    Those whose intervals in ``dim`` meet are looked at together in the next; ranks cut alike, so that is
    one pass for each dim.
    """
    if len(chunks) < 2:
        return True
    if dim == len(chunks[0].sizes):
        return False
    ordered = sorted(chunks, key=lambda chunk: chunk.offsets[dim])
    group: list[Chunk] = []
    end = -1
    mixed = False
    for chunk in ordered:
        start, stop = chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]
        if group and start >= end:
            if not _group_disjoint(group, dim, mixed):
                return False
            group, mixed = [], False
        elif group and (start, stop) != (group[0].offsets[dim], end):
            mixed = True
        end = max(end, stop) if group else stop
        group.append(chunk)
    return _group_disjoint(group, dim, mixed)


def _group_disjoint(group: list[Chunk], dim: int, mixed: bool) -> bool:
    if not mixed:  # all have the same interval
        return _disjoint(group, dim + 1)
    return not any(_meet(a, b) for i, a in enumerate(group) for b in group[:i])


def _meet(a: Chunk, b: Chunk) -> bool:
    return all(
        max(p, q) < min(p + n, q + m)
        for p, n, q, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


def _items(content: dict[str, Any], key: str) -> Any:
    found: Any = content.get(key)
    _expect(isinstance(found, dict), f"it has no {key!r}")
    return found.items()


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    _expect(isinstance(value, list) and len(value) <= 1 << 24, f"the {what} is no list")
    return tuple(_number(item, what) for item in value)


def _number(value: Any, what: str) -> int:
    _expect(type(value) is int and 0 <= value < 1 << 62, f"the {what} is {value!r:.40}")
    return int(value)


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise CorruptCheckpointError(f"index.json is damaged: {problem}")
