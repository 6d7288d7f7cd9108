"""DcpFolder: what a folder of ``torch.distributed.checkpoint`` holds, and where; nothing of it is run."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from parallel3d.checkpoint.format.index import tile
from parallel3d.checkpoint.torch_formats.archive import Archive, Entry
from parallel3d.checkpoint.torch_formats.pickled import (
    DCP_METADATA,
    PROTO,
    Record,
    SavedTensor,
    check_name,
    read_pickle,
    shape_of,
    sizes_of,
)
from parallel3d.errors import CheckpointError, CorruptCheckpointError

METADATA = ".metadata"
_MAX_METADATA = 1 << 31


@dataclass(frozen=True)
class StoredAt:
    """Bytes [offset, offset + length) of a file in the folder."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor, and where it is; ``at`` is None for what the folder has not."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: StoredAt | None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the folder. Each of its elements is in one of the chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class DcpFolder:
    """The folder's table of contents.

    Attributes:
        tensors, blobs: by their flat names, "model.layers.0.weight"; a blob is anything else than a tensor.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    blobs: Mapping[str, StoredAt]

    @classmethod
    def read(cls, path: Path, *, trusted: bool) -> DcpFolder:
        """Of the folder ``path``.

        Args:
            trusted: unpickle with ``pickle``, which runs what the file says.

        Raises:
            CheckpointError: no such folder, or names in it that such a file has no need of.
            CorruptCheckpointError: what it says can't be.
        """
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is no folder; load_dcp reads those that dcp.save has written"
            )
        file = path / METADATA
        if not os.path.lexists(file):
            raise CheckpointError(
                f"{path} has no {METADATA}: it is no checkpoint of torch.distributed.checkpoint, or one "
                "whose save didn't end"
            )
        what = str(file)
        size = file_within(path, METADATA).stat().st_size
        if size > _MAX_METADATA:
            raise CorruptCheckpointError(f"{what} has {size} bytes")
        with open(file, "rb") as opened:
            first = opened.read(len(PROTO))
            if not trusted and first != PROTO:
                raise CorruptCheckpointError(f"{what} is no whole pickle: it begins with {first!r}")
            data = first + opened.read(_MAX_METADATA)
        if trusted:
            content = _unpickled(data, what)
        else:
            content = read_pickle(data, DCP_METADATA, what=what, most_keys=len(data))
        try:
            return cls(path, *_contents(content))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CorruptCheckpointError(
                f"{what} is no table of contents of torch.distributed.checkpoint: {error}"
            ) from None


def file_within(folder: Path, name: str) -> Path:
    """The file that ``name``, from a table of contents, stands for.

    Raises:
        CheckpointError: it would be outside of ``folder``, or is no file.
    """
    pure, windows = PurePosixPath(name), PureWindowsPath(name)
    outside = (
        not name
        or "\0" in name
        or pure.is_absolute()
        or bool(windows.drive or windows.root)
        or ".." in (*pure.parts, *windows.parts)
    )
    if outside:
        raise CheckpointError(f"{folder}: it refers to the file {name[:200]!r}, which isn't in it")
    path = folder / name
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if not real.is_relative_to(home):
        raise CheckpointError(f"{folder}: {name[:200]!r} is a link to outside of it")
    try:
        mode = real.stat().st_mode
    except OSError:
        raise CorruptCheckpointError(f"{folder}: the file {name[:200]!r} is missing") from None
    if not stat.S_ISREG(mode):
        raise CorruptCheckpointError(f"{folder}: {name[:200]!r} is no file")
    return path


# -- the table of contents ---------------------------------------------------------------------------------


def _unpickled(data: bytes, what: str) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise CorruptCheckpointError(
            f"{what} is no whole pickle ({type(error).__name__}: {error})"
        ) from error


def _fields(value: Any, *kinds: str) -> dict[str, Any]:
    """What the object ``value``, a Record or of torch's class, has in it."""
    kind = value.kind if type(value) is Record else type(value).__name__
    if kind not in kinds:
        raise ValueError(f"a {kind} where a {' or '.join(kinds)} must be")
    state = value.state if type(value) is Record else vars(value)
    if kind == "TensorProperties":
        dtype = state[0] if type(value) is Record else state["dtype"]
        return {"dtype": dtype}
    if kind == "BytesStorageMetadata":
        return {}
    if not isinstance(state, dict):
        raise ValueError(f"a {kind} with nothing in it")
    return state


def _contents(value: Any) -> tuple[dict[str, StoredTensor], dict[str, StoredAt]]:
    found = _fields(value, "Metadata")
    described, places = found["state_dict_metadata"], found["storage_data"]
    if not isinstance(described, dict) or not isinstance(places, dict):
        raise ValueError("no lists of what is stored, and where")
    stored = dict(_place(index, at) for index, at in places.items())
    _check_apart(stored.values())
    listed = 0
    _check_paths(described, found.get("planner_data"))
    tensors: dict[str, StoredTensor] = {}
    blobs: dict[str, StoredAt] = {}
    for name, entry in described.items():
        if type(name) is not str:
            raise ValueError("a name that is no string")
        check_name(name)
        kind = entry.kind if type(entry) is Record else type(entry).__name__
        if kind == "TensorStorageMetadata":
            fields = _fields(entry, kind)
            listed += len(fields["chunks"])
            if listed > 2 * len(stored) + 1000:  # many tensors may refer to one list
                raise ValueError("more chunks are listed than stored")
            tensors[name] = _tensor(name, fields, stored)
            continue
        _fields(entry, "BytesStorageMetadata")
        at = stored.get(_key(name, None))
        if at is None:
            raise ValueError(f"{name} is listed and nowhere stored")
        blobs[name] = at
    return tensors, blobs


def _check_apart(places: Iterable[StoredAt]) -> None:
    """Raises if two values are said to be at one place: every one was written to its own."""
    ordered = sorted((at.path, at.offset, at.length) for at in places)
    for (path, start, length), (other, begin, _) in pairwise(ordered):
        if path == other and start + length > begin:
            raise ValueError(f"two values at bytes {begin} to {start + length} of {path!r:.100}")


def _check_paths(described: dict[Any, Any], planned: Any) -> None:
    """Raises if a name is not what torch's planner has made of the keys that led to the value."""
    if not isinstance(planned, dict):
        return  # of another planner
    for name, path in planned.items():
        whole = isinstance(path, (tuple, list)) and all(type(key) in (str, int) for key in path)
        if not whole or name not in described or ".".join(map(str, path)) != name:
            raise ValueError(f"the path to {name!r:.100} leads elsewhere")
    if len(planned) != len(described):
        raise ValueError("other paths than names")


def _key(name: str, offset: tuple[int, ...] | None) -> str:
    """For a dict: of tuples of numbers whoever chooses the numbers can have many with one hash."""
    return f"{offset} {name}"


def _place(index: Any, at: Any) -> tuple[str, StoredAt]:
    fields, place = _fields(index, "MetadataIndex"), _fields(at, "_StorageInfo")
    name, offset = fields["fqn"], fields.get("offset")
    path, start, length = place["relative_path"], place["offset"], place["length"]
    if type(name) is not str or type(path) is not str:
        raise ValueError("a name that is no string")
    if place.get("transform_descriptors"):
        raise CheckpointError(
            f"{name} was written through an extension (compressed, say), which is not undone here; write it "
            "without"
        )
    sizes_of((start, length))
    return _key(name, None if offset is None else sizes_of(offset)), StoredAt(path, start, length)


def _tensor(
    name: str,
    fields: dict[str, Any],
    stored: Mapping[str, StoredAt],
) -> StoredTensor:
    dtype = _fields(fields["properties"], "TensorProperties")["dtype"]
    if type(dtype) is not torch.dtype:
        raise ValueError(f"{name} has no dtype")
    shape = shape_of(fields["size"])
    chunks: dict[str, StoredChunk] = {}
    for each in fields["chunks"]:
        box = _fields(each, "ChunkStorageMetadata")
        offsets, sizes = sizes_of(box["offsets"]), sizes_of(box["sizes"])
        inside = len(offsets) == len(sizes) == len(shape) and all(
            o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"{name}, {shape}, has a chunk at {offsets} of {sizes}, outside of it")
        at = stored.get(_key(name, offsets))
        chunks[f"{offsets} {sizes}"] = StoredChunk(offsets, sizes, at)
    found = tuple(chunks.values())
    if not tile(shape, [chunk for chunk in found if prod(chunk.sizes)]):
        raise ValueError(f"the chunks of {name}, {shape}, overlap or don't cover it")
    return StoredTensor(dtype, shape, found)


# Sources: where the values of a stored tensor come from, box by box.

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a part of a tensor."""

_BLOCK = 1 << 26  # bytes copied at a time


@runtime_checkable
class Source(Protocol):
    """A stored tensor."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def entries(self, boxes: Iterable[Box]) -> list[Entry]:
        """The records that hold ``boxes``, to be verified; raises unless they hold all of these, once."""

    def take(self, name: str) -> None:
        """Raises a CorruptCheckpointError if ``name``, of its shape, would be more bytes than are stored."""

    def copy(self, box: Box, target: Tensor) -> None:
        """Copies ``box`` into ``target``, which is of its sizes."""


def whole(source: Source) -> Box:
    """The box that is all of it."""
    return (0,) * len(source.shape), tuple(source.shape)


@dataclass(frozen=True)
class Memory:
    """One that is in memory, of a file that was unpickled in full."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def entries(self, boxes: Iterable[Box]) -> list[Entry]:
        return []

    def take(self, name: str) -> None:
        held = self.tensor.untyped_storage().nbytes()
        if self.tensor.nbytes > held:
            raise CorruptCheckpointError(
                f"{name} would be {self.tensor.nbytes} bytes, {self.dtype} of shape {self.shape}, and {held} "
                "are stored of it; if it was expanded, save a .clone() of it"
            )

    def copy(self, box: Box, target: Tensor) -> None:
        target.copy_(self.tensor[_slices(*box)])


@dataclass(frozen=True)
class FileTensor:
    """One of an archive."""

    archive: Archive
    tensor: SavedTensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def entries(self, boxes: Iterable[Box]) -> list[Entry]:
        return [self.archive.checked(self.tensor)]

    def copy(self, box: Box, target: Tensor) -> None:
        for offsets, sizes in self._blocks(*box):
            start = tuple(o - base for o, base in zip(offsets, box[0], strict=True))
            part = self.archive.read(self.tensor, offsets, sizes)
            target[_slices(start, sizes)].copy_(part)

    def take(self, name: str) -> None:
        self.archive.take(self.tensor, name)

    def _blocks(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterable[Box]:
        """The box in parts whose bytes lie within about 64 MiB of the file each."""
        first, last = self.tensor.span(offsets, sizes)
        if (last - first) * self.dtype.itemsize <= _BLOCK or max(sizes, default=1) == 1:
            yield offsets, sizes
            return
        steps = [(n - 1) * stride for n, stride in zip(sizes, self.tensor.stride, strict=True)]
        dim = steps.index(max(steps))
        # Rows whose begins lie close enough; half of them if one alone is too large.
        within = _BLOCK // (self.dtype.itemsize * self.tensor.stride[dim])
        rows = min(max(1, within), (sizes[dim] + 1) // 2)
        for start in range(0, sizes[dim], rows):
            at, count = list(offsets), list(sizes)
            at[dim], count[dim] = offsets[dim] + start, min(rows, sizes[dim] - start)
            yield from self._blocks(tuple(at), tuple(count))


@dataclass
class DcpTensor:
    """One of a DCP folder, in chunks that are archives each.

    Attributes:
        checksums: whether those of the chunks are compared.
    """

    name: str
    folder: DcpFolder
    stored: StoredTensor
    checksums: bool = True
    _opened: dict[Box, FileTensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def entries(self, boxes: Iterable[Box]) -> list[Entry]:
        found: list[Entry] = []
        for box in boxes:
            common = list(self._common(box))
            if sum(prod(sizes) for _, (_, sizes) in common) != prod(box[1]):
                raise CorruptCheckpointError(
                    f"{self.folder.path}: the chunks of {self.name}, {self.shape}, overlap or don't cover it"
                )
            for chunk, _ in common:
                key = chunk.offsets, chunk.sizes
                if key not in self._opened:
                    source = self._opened[key] = self._open(chunk)
                    found += source.entries([whole(source)])
        return found

    def copy(self, box: Box, target: Tensor) -> None:
        for chunk, (offsets, sizes) in self._common(box):
            source = self._opened[chunk.offsets, chunk.sizes]
            within = tuple(o - c for o, c in zip(offsets, chunk.offsets, strict=True))
            there = tuple(o - b for o, b in zip(offsets, box[0], strict=True))
            source.copy((within, sizes), target[_slices(there, sizes)])

    def take(self, name: str) -> None:
        stored = sum(chunk.at.length for chunk in self.stored.chunks if chunk.at is not None)
        nbytes = prod(self.shape) * self.dtype.itemsize
        if nbytes > stored:
            raise CorruptCheckpointError(
                f"{self.folder.path}: {name} would be {nbytes} bytes, {self.dtype} of shape {self.shape}, "
                f"and {stored} are stored of it"
            )

    def _common(self, box: Box) -> Iterable[tuple[StoredChunk, Box]]:
        """The chunks that hold something of ``box``, and what."""
        for chunk in self.stored.chunks:
            part = _intersection(box, (chunk.offsets, chunk.sizes))
            if part is not None:
                yield chunk, part

    def _open(self, chunk: StoredChunk) -> FileTensor:
        what = f"{self.folder.path}: {self.name} at {chunk.offsets}"
        if chunk.at is None:
            raise CorruptCheckpointError(f"{what} is listed and nowhere stored")
        archive = archive_at(self.folder, chunk.at, what, checksums=self.checksums)
        value = archive.value
        if not isinstance(value, SavedTensor):
            raise CorruptCheckpointError(f"{what} is no tensor")
        source = FileTensor(archive, value)
        if source.dtype != self.dtype or source.shape != chunk.sizes:
            raise CorruptCheckpointError(
                f"{what} is of {source.dtype} and {source.shape}; the table of contents says {self.dtype} "
                f"and {chunk.sizes}"
            )
        return source


def small(source: Source, name: str) -> Tensor:
    """All of it, verified, if it takes no more memory than is stored of it."""
    entries = source.entries([whole(source)])
    source.take(name)
    for entry in entries:
        entry.verify()
    found = torch.empty(source.shape, dtype=source.dtype)
    source.copy(whole(source), found)
    return found


def archive_at(folder: DcpFolder, at: StoredAt, what: str, *, checksums: bool = True) -> Archive:
    """The archive of the folder at ``at``."""
    path = file_within(folder.path, at.path)
    size = path.stat().st_size
    if at.offset + at.length > size:
        raise CorruptCheckpointError(
            f"{what}: bytes {at.offset} to {at.offset + at.length} of {path.name}, which has {size}"
        )
    return Archive(path, at.offset, at.length, what=what, checksums=checksums)


def blob_of(archive: Archive) -> Any:
    """The small value that ``archive`` is, its tensors read and verified."""
    return blob_in(archive, archive.value)


def blob_in(archive: Archive, value: Any) -> Any:
    """``value``, a part of what ``archive`` is, with its tensors read and verified."""
    try:
        return archive.with_tensors(value)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CorruptCheckpointError(f"{archive.what} has {error}") from None


# -- boxes -------------------------------------------------------------------------------------------------


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))


def _intersection(a: Box, b: Box) -> Box | None:
    """What is in both; None if nothing is."""
    offsets = tuple(map(max, a[0], b[0]))
    ends = [min(o + n, p + m) for o, n, p, m in zip(a[0], a[1], b[0], b[1], strict=True)]
    sizes = tuple(end - o for end, o in zip(ends, offsets, strict=True))
    return (offsets, sizes) if all(n > 0 for n in sizes) else None
