"""The index of a checkpoint: which chunks of which tensors lie where, with their checksums. JSON.

Read from a file that anybody may have written, so nothing in it is believed before it is checked.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, Protocol

import torch

from parallel3d.checkpoint.format.safetensors_file import BLOCK, DTYPES, NAMES
from parallel3d.errors import CorruptCheckpointError

_FILE = re.compile(r"rank-[0-9]{5,9}\.safetensors")
_LARGEST = 1 << 62  # numbers are below
_MOST_DIMS = 64  # that torch's kernels take
_MOST_CUTS = 8  # dims that a tensor is cut in; a mesh has three axes


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
        _check_apart(index.tensors)
        index.objects = dict(_items(content, "objects"))
        return index


def loads(text: str | bytes, what: str) -> Any:
    """``json.loads``, whose errors are CorruptCheckpointErrors; so is a key that an object has twice."""
    try:
        text = text.decode() if isinstance(text, bytes) else text  # not another encoding than UTF-8
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{what} is no valid JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise ValueError(f"it has the key {twice[:80]!r} twice")
    return found


def _tensor(name: str, entry: Any, files: dict[str, int]) -> TensorEntry:
    _expect(isinstance(entry, dict), f"{name!r} is no tensor")
    kind = entry.get("dtype")
    _expect(isinstance(kind, str) and kind in DTYPES, f"{name!r} has the dtype {shown(kind)}")
    dtype, shape = DTYPES[kind], _numbers(entry.get("shape"), f"shape of {name!r}")
    _expect(len(shape) <= _MOST_DIMS, f"{name!r} has {len(shape)} dims")
    nbytes = prod(max(n, 1) for n in shape) * dtype.itemsize
    _expect(nbytes < _LARGEST, f"{name!r} has a shape of too many elements")
    chunks = entry.get("chunks")
    _expect(isinstance(chunks, list), f"{name!r} has no chunks")
    result = TensorEntry(dtype, shape)
    found = [_chunk(name, chunk, dtype, shape, files) for chunk in chunks]
    result.chunks = [chunk for chunk in found if prod(chunk.sizes)]
    _expect(tile(shape, result.chunks), f"the chunks of {name!r} overlap or leave parts out")
    return result


def _chunk(
    name: str, chunk: Any, dtype: torch.dtype, shape: tuple[int, ...], files: dict[str, int]
) -> Chunk:
    if (
        not isinstance(chunk, list) or len(chunk) != 5
    ):  # texts are made for errors alone: there are many
        _expect(False, f"a chunk of {name!r} has not 5 fields")
    offsets, sizes = (
        _numbers(chunk[0], "offsets in a chunk"),
        _numbers(chunk[1], "sizes in a chunk"),
    )
    if not len(offsets) == len(sizes) == len(shape):
        _expect(False, f"a chunk of {name!r} has other dims")
    if any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
        _expect(False, f"a chunk of {name!r} reaches beyond its shape {shape}")
    file, begin = chunk[2], _number(chunk[3], "begin of a chunk")
    if not isinstance(file, str) or file not in files:
        _expect(False, f"{name!r} lies in {shown(file)}, not listed")
    size = prod(sizes) * dtype.itemsize
    if begin + size > files[file]:
        _expect(False, f"a chunk of {name!r} reaches beyond the end of {file}")
    crc = _numbers(chunk[4], "checksums of a chunk")
    if len(crc) != -(-size // BLOCK):
        _expect(False, f"a chunk of {name!r} has {len(crc)} checksums")
    return Chunk(offsets, sizes, file, begin, crc)


class Boxed(Protocol):
    """A box of a tensor."""

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...


def tile(shape: tuple[int, ...], chunks: Sequence[Boxed]) -> bool:
    """Whether each element of a tensor is in exactly one of ``chunks``, in one pass.

    The differences of a box's indicator along all dims are +1 and -1 at its corners, by the parity of its
    upper ends, and 0 elsewhere; and they determine the indicator. So boxes tile the whole exactly if their
    corners add up to the whole's. Dims that no chunk is cut in add nothing.
    """
    cut = [d for d, n in enumerate(shape) if any(c.sizes[d] != n for c in chunks)]
    if len(cut) > _MOST_CUTS:
        return False
    strides, count = [], 1  # a corner's number, from its place in each dim
    for d in cut:
        strides.append((d, count))
        count *= shape[d] + 1
    corners: dict[int, int] = {}
    whole = Chunk((0,) * len(shape), shape, "", 0, ())
    both: list[tuple[int, Sequence[Boxed]]] = [(1, chunks), (-1, [whole] if prod(shape) else [])]
    for sign, boxes in both:
        for box in boxes:
            ends = [(sum(box.offsets[d] * stride for d, stride in strides), sign)]
            for d, stride in strides:
                ends += [(at + box.sizes[d] * stride, -parity) for at, parity in ends]
            for at, parity in ends:
                corners[at] = corners.get(at, 0) + parity
    return not any(corners.values())


def _check_apart(tensors: dict[str, TensorEntry]) -> None:
    """Raises if two chunks have a byte of a file in common."""
    by_file: dict[str, list[tuple[int, int, str]]] = {}
    for name, entry in tensors.items():
        for chunk in entry.chunks:
            end = chunk.begin + prod(chunk.sizes) * entry.dtype.itemsize
            by_file.setdefault(chunk.file, []).append((chunk.begin, end, name))
    for file, ranges in by_file.items():
        ranges.sort()
        for (_, end, name), (begin, _, other) in pairwise(ranges):
            if begin < end:
                _expect(False, f"{name!r} and {other!r} share bytes of {file}")


def _items(content: dict[str, Any], key: str) -> Any:
    found: Any = content.get(key)
    _expect(isinstance(found, dict), f"it has no {key!r}")
    return found.items()


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        _expect(False, f"the {what} is no list")
    return tuple([_number(item, what) for item in value])


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise CorruptCheckpointError(f"index.json is damaged: the {what} is {shown(value)}")
    return value


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise CorruptCheckpointError(f"index.json is damaged: {problem}")


def shown(value: Any) -> str:
    """A value for an error: of any size or depth, a short text."""
    return reprlib.repr(value)
