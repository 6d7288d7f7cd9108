"""What torch has written: archives of ``torch.save``, DCP folders of them, and their tensors, read by boxes.

An archive is a zip file of uncompressed records: ``data.pkl`` describes the values, ``data/N`` are the bytes
of storages. torch stores a CRC-32 of each record and does not check it when it loads.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel3d.checkpoint.format.files import (
    check_disjoint,
    crc_of,
    damaged_if,
    file_in,
    read_into,
    read_strided,
    shape_of,
)
from parallel3d.checkpoint.pieces import (
    Box,
    Boxed,
    intersection,
    pieces_of,
    slices_of,
    tile,
    whole_box,
)
from parallel3d.checkpoint.torch_formats.pickled import (
    DCP_METADATA,
    PROTO,
    SAVED_VALUES,
    Record,
    SavedTensor,
    StorageId,
    check_name,
    read_pickle,
    sizes_of,
)
from parallel3d.errors import CheckpointError, CorruptCheckpointError

_LOCAL_HEADER = 30
_MAX_VALUES = 1_000_000
_MAX_DEPTH = 50
_MAX_PICKLE = _MAX_DIRECTORY = 1 << 28


@dataclass(frozen=True)
class Entry:
    """A record of an archive: bytes of a file, named ``what`` in errors, and their CRC-32 if verified."""

    path: Path
    offset: int
    size: int
    crc: int | None
    what: str

    def verify(self) -> None:
        if self.crc is None:
            return
        with open(self.path, "rb") as file:
            crc = crc_of(file.fileno(), self.offset, self.size, self.what)
        if crc != self.crc:
            raise CorruptCheckpointError(
                f"{self.what} has the checksum {crc:08x}, and had {self.crc:08x} when it was written "
                "(files written under torch.serialization.set_crc32_options(False) have none, which "
                "checksums=False reads)"
            )

    def read(self, start: int, stop: int) -> bytearray:
        """Returns its bytes [start, stop)."""
        buffer = bytearray(stop - start)
        with open(self.path, "rb") as file:
            read_into(file.fileno(), memoryview(buffer), self.offset + start, self.what)
        return buffer


class Archive:
    """An archive at [offset, offset + length) of a file.

    Its tensors may be expanded or overlap, so a small file can describe large ones. Tensors that are not read
    into existing memory may take as much memory, in all, as the archive has bytes.
    """

    def __init__(
        self, path: Path, offset: int, length: int, *, what: str, checksums: bool = True
    ) -> None:
        self.path, self.offset, self.length = path, offset, length
        self.what, self.checksums = what, checksums
        self.bytes_left = length
        self._values_left = _MAX_VALUES
        self._copies: dict[int, tuple[Any, Any, int]] = {}  # id -> (the value, its copy, count)
        self._verified: set[Entry] = set()

    def raw(self) -> bytes:
        whole = Entry(self.path, self.offset, self.length, None, self.what)
        return bytes(whole.read(0, self.length))

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The records by name, without the folder that all are in."""
        with self._errors(), open(self.path, "rb") as file:
            window = _Window(file, self.offset, self.length)
            with zipfile.ZipFile(window) as archive:
                infos = archive.infolist()
            if len({info.filename.split("/", 1)[0] for info in infos}) != 1:
                raise zipfile.BadZipFile("records that are not in one folder")
            entries: dict[str, Entry] = {}
            for info in infos:
                name = info.filename.split("/", 1)[1]
                if name in entries:
                    raise zipfile.BadZipFile(f"two records {name}")
                entries[name] = self._entry(info, name, window)
            check_disjoint(("", e.offset, e.size, name) for name, e in entries.items())
            return entries

    def _entry(self, info: zipfile.ZipInfo, name: str, window: _Window) -> Entry:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise zipfile.BadZipFile(f"{info.filename} is compressed or encrypted")
        window.seek(info.header_offset)
        header = window.read(_LOCAL_HEADER)
        if len(header) != _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise zipfile.BadZipFile(f"{info.filename} isn't where the directory says")
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = info.header_offset + _LOCAL_HEADER + lengths
        if info.file_size != info.compress_size or start + info.file_size > self.length:
            raise zipfile.BadZipFile(f"{info.filename} exceeds the end")
        crc = info.CRC if self.checksums else None
        what = f"{self.what}, record {name},"
        return Entry(self.path, self.offset + start, info.file_size, crc, what)

    @cached_property
    def value(self) -> Any:
        """The saved value, with a SavedTensor for each tensor."""
        with self._errors():
            pickled = self.entries["data.pkl"]
            if pickled.size > _MAX_PICKLE:
                raise zipfile.BadZipFile(f"a description of {pickled.size} bytes")
            order = self.entries.get("byteorder")
            for entry in (pickled, order):
                if entry is not None:
                    entry.verify()
            if order is not None and order.read(0, min(order.size, 16)) != b"little":
                raise CheckpointError(f"{self.what} was written on a machine of another byte order")
            data = bytes(pickled.read(0, pickled.size))
            if len(data) < 2 or not data.startswith(PROTO):
                raise zipfile.BadZipFile("a description that doesn't begin as a pickle")

        def storage(value: Any) -> StorageId:
            self.record_of(found := StorageId.of(value))
            return found

        return read_pickle(data, SAVED_VALUES, what=self.what, persistent=storage)

    def record_of(self, storage: StorageId) -> Entry:
        """Returns the record of ``storage`` after checking its size."""
        entry = self.entries.get(f"data/{storage.key}")
        itemsize = 1 if storage.dtype is None else storage.dtype.itemsize
        if entry is None or entry.size != storage.elements * itemsize:
            state = "is not there" if entry is None else f"has {entry.size} bytes"
            raise CorruptCheckpointError(
                f"{self.what}: the record of a storage of {storage.elements} x {itemsize} bytes {state}"
            )
        return entry

    def with_tensors(self, value: Any) -> Any:
        """Returns a copy of ``value``, a part of ``self.value``, with its tensors read and verified. As a
        tree, and with all that was copied before, it may have a million values."""
        result, count = self._copied(value, 0)
        self._values_left -= count
        if self._values_left < 0:
            raise CorruptCheckpointError(f"{self.what} has a value that is nested without end")
        return result

    def _copied(self, value: Any, depth: int) -> tuple[Any, int]:
        """Returns (the copy, how many values are in it); a value in several places is copied once."""
        if isinstance(value, SavedTensor):
            source = FileTensor(self, value)
            source.take(f"{self.what}: a tensor")
            if source.entry not in self._verified:
                source.entry.verify()
                self._verified.add(source.entry)
            return source.whole(), 1
        if not isinstance(value, (dict, list, tuple)):
            return value, 1
        if id(value) in self._copies:
            return self._copies[id(value)][1:]
        if depth > _MAX_DEPTH:
            raise CorruptCheckpointError(f"{self.what} has a value that is nested without end")
        items = value.values() if isinstance(value, dict) else value
        parts = [self._copied(item, depth + 1) for item in items]
        copied: Any = [copy for copy, _ in parts]
        count = 1 + sum(n for _, n in parts)
        if isinstance(value, tuple):
            copied = tuple(copied)
        elif isinstance(value, dict):
            copied = dict(zip(value, copied, strict=True))
        self._copies[id(value)] = value, copied, count
        return copied, count

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Converts errors of zipfile and of the file system to CheckpointErrors."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # zipfile raises many types for invalid files
            if isinstance(error, OSError) and error.errno is not None:
                raise CheckpointError(f"{self.what} can't be read: {error}") from error
            raise CorruptCheckpointError(
                f"{self.what} is not a complete file of torch.save ({type(error).__name__}: {error})"
            ) from None


class _Window:
    """Bytes [offset, offset + length) of a file, as the file that zipfile reads a directory from."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._at = 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(f"a seek to {base + offset}")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size < 0 else min(size, left)
        if size > _MAX_DIRECTORY:  # zipfile reads it in one call
            raise zipfile.BadZipFile(f"a directory of {size} bytes")
        self._file.seek(self._offset + self._at)
        data: bytes = self._file.read(size)
        self._at += len(data)
        return data


METADATA = ".metadata"
_MAX_METADATA = 1 << 31


@dataclass(frozen=True)
class StoredAt:
    """Bytes [offset, offset + length) of a file in ``folder``."""

    folder: Path
    name: str
    offset: int
    length: int

    def archive(self, what: str, *, checksums: bool) -> Archive:
        """Returns the archive that is stored there."""
        path, end = file_in(self.folder, self.name), self.offset + self.length
        size = path.stat().st_size
        if end > size:
            raise CorruptCheckpointError(
                f"{what}: bytes {self.offset} to {end} of {path.name}, which has {size}"
            )
        return Archive(path, self.offset, self.length, what=what, checksums=checksums)


@dataclass(frozen=True)
class StoredChunk(Boxed):
    """A box of a tensor, and where it is stored; ``at`` is None if it is listed but not stored."""

    at: StoredAt | None


def read_folder(
    path: Path, *, trusted: bool, checksums: bool = True
) -> dict[str, DcpTensor | StoredAt]:
    """Returns the contents of a folder by flat names, such as "model.layers.0.weight"; what is no tensor as a
    StoredAt. ``trusted``: read its ``.metadata`` by ``pickle``, which runs code in it."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; load_dcp reads those of dcp.save")
    file = path / METADATA
    if not os.path.lexists(file):
        raise CheckpointError(
            f"{path} has no {METADATA}: it is not a checkpoint of torch.distributed.checkpoint, or its save "
            "didn't complete"
        )
    what = str(file)
    size = file_in(path, METADATA).stat().st_size
    if size > _MAX_METADATA:
        raise CorruptCheckpointError(f"{what} has {size} bytes")
    with open(file, "rb") as opened:
        first = opened.read(len(PROTO))
        if not trusted and first != PROTO:
            raise CorruptCheckpointError(
                f"{what} is not a complete pickle: it begins with {first!r}"
            )
        data = first + opened.read(_MAX_METADATA)
    if trusted:
        with damaged_if(f"{what} is not a complete pickle", (Exception,)):
            content = pickle.loads(data)
    else:
        content = read_pickle(data, DCP_METADATA, what=what, max_keys=len(data))
    invalid = f"{what} is not valid metadata of torch.distributed.checkpoint"
    with damaged_if(invalid, (ValueError, KeyError, TypeError, AttributeError)):
        return _contents(path, content, checksums)


# -- metadata ----------------------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    return value.kind if type(value) is Record else type(value).__name__


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """Returns the attributes of ``value``, a Record or an object of torch's class of this name."""
    if _kind(value) != kind:
        raise ValueError(f"a {_kind(value)} instead of a {kind}")
    fields = value.state if type(value) is Record else vars(value)
    if kind == "TensorProperties" and type(value) is Record:
        return {"dtype": fields[0]}  # a tuple, by its __getstate__
    if not isinstance(fields, dict):
        raise ValueError(f"a {kind} without attributes")
    return fields


def _contents(path: Path, value: Any, checksums: bool) -> dict[str, DcpTensor | StoredAt]:
    metadata = _fields(value, "Metadata")
    described, places = metadata["state_dict_metadata"], metadata["storage_data"]
    if not isinstance(described, dict) or not isinstance(places, dict):
        raise ValueError("no state_dict_metadata or no storage_data")
    stored = dict(_place(path, index, at) for index, at in places.items())
    check_disjoint((at.name, at.offset, at.length, key) for key, at in stored.items())
    _check_paths(described, metadata.get("planner_data"))
    listed = 0
    contents: dict[str, DcpTensor | StoredAt] = {}
    for name, entry in described.items():
        check_name(name)
        if _kind(entry) == "TensorStorageMetadata":
            fields = _fields(entry, "TensorStorageMetadata")
            listed += len(fields["chunks"])
            if listed > 2 * len(stored) + 1000:  # many tensors may refer to one list
                raise ValueError("more chunks are listed than stored")
            dtype, shape, chunks = _tensor(name, fields, stored)
            contents[name] = DcpTensor(f"{path}: {name}", dtype, shape, chunks, checksums)
        elif _kind(entry) != "BytesStorageMetadata":
            raise ValueError(f"a {_kind(entry)} as the description of a value")
        elif (at := stored.get(_key(name, None))) is None:
            raise ValueError(f"{name} is listed but not stored")
        else:
            contents[name] = at
    return contents


def _check_paths(described: dict[Any, Any], planned: Any) -> None:
    """Raises ValueError if torch's planner has not made the names of the paths in its data."""
    if not isinstance(planned, dict):
        return  # of another planner
    for name, path in planned.items():
        whole = isinstance(path, (tuple, list)) and all(type(key) in (str, int) for key in path)
        if not whole or name not in described or ".".join(map(str, path)) != name:
            raise ValueError(f"the path to {name!r:.100} leads elsewhere")
    if len(planned) != len(described):
        raise ValueError("another number of paths than of names")


def _key(name: str, offset: tuple[int, ...] | None) -> str:
    """Returns a dict key; a tuple of numbers could be chosen to have the hash of many others."""
    return f"{offset} {name}"


def _place(folder: Path, index: Any, at: Any) -> tuple[str, StoredAt]:
    fields, place = _fields(index, "MetadataIndex"), _fields(at, "_StorageInfo")
    name, offset = fields["fqn"], fields.get("offset")
    path, start, length = place["relative_path"], place["offset"], place["length"]
    if type(name) is not str or type(path) is not str:
        raise ValueError("a name that is not a string")
    if place.get("transform_descriptors"):
        raise CheckpointError(
            f"{name} was written through an extension, such as compression, which load_dcp doesn't undo; "
            "write it without"
        )
    sizes_of((start, length))
    key = _key(name, None if offset is None else sizes_of(offset))
    return key, StoredAt(folder, path, start, length)


def _tensor(
    name: str, fields: dict[str, Any], stored: Mapping[str, StoredAt]
) -> tuple[torch.dtype, tuple[int, ...], list[StoredChunk]]:
    """Returns (dtype, shape, chunks); each element of the tensor is in exactly one of the chunks."""
    dtype = _fields(fields["properties"], "TensorProperties")["dtype"]
    if type(dtype) is not torch.dtype:
        raise ValueError(f"{name} has no dtype")
    shape = shape_of(fields["size"], f"shape of {name!r:.100}")
    chunks: dict[str, StoredChunk] = {}
    for chunk in fields["chunks"]:
        box = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = sizes_of(box["offsets"]), sizes_of(box["sizes"])
        inside = len(offsets) == len(sizes) == len(shape) and all(
            o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"{name}, {shape}, has a chunk at {offsets} of {sizes}, outside of it")
        chunks[f"{offsets} {sizes}"] = StoredChunk(offsets, sizes, stored.get(_key(name, offsets)))
    if not tile(shape, [chunk.box for chunk in chunks.values() if prod(chunk.sizes)]):
        raise ValueError(f"the chunks of {name}, {shape}, overlap or don't cover it")
    return dtype, shape, list(chunks.values())


# -- sources -----------------------------------------------------------------------------------------------


class Source(ABC):
    """A stored tensor, which is read by boxes."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def entries(self, boxes: Iterable[Box]) -> list[Entry]:
        """Returns the records of ``boxes``, for the caller to verify; raises if some are not stored."""
        return []

    @abstractmethod
    def take(self, name: str) -> None:
        """Raises CorruptCheckpointError if memory for ``name``, of its shape, would exceed what is stored."""

    @abstractmethod
    def copy(self, box: Box, target: Tensor) -> None:
        """Copies ``box`` into ``target``, of the same sizes."""

    def fill(self, tensor: Tensor) -> None:
        """Copies what this rank holds of ``tensor``, of this shape."""
        for piece in pieces_of(tensor):
            self.copy(piece.box, piece.local)

    def whole(self) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.fill(tensor)
        return tensor


def _check_memory(name: str, source: Source, stored: int) -> None:
    nbytes = prod(source.shape) * source.dtype.itemsize
    if nbytes > stored:
        raise CorruptCheckpointError(
            f"{name} would be {nbytes} bytes, {source.dtype} of shape {source.shape}, and {stored} are "
            "stored of it; if it was expanded, save a .clone() of it"
        )


class Memory(Source):
    """A tensor of a file that was unpickled as a whole."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.dtype, self.shape = tensor, tensor.dtype, tuple(tensor.shape)

    def take(self, name: str) -> None:
        _check_memory(name, self, self.tensor.untyped_storage().nbytes())

    def copy(self, box: Box, target: Tensor) -> None:
        target.copy_(self.tensor[slices_of(*box)])


class FileTensor(Source):
    """A tensor of an archive."""

    def __init__(self, archive: Archive, tensor: SavedTensor) -> None:
        self.archive, self.tensor = archive, tensor
        self.dtype, self.shape = tensor.dtype, tensor.shape

    @cached_property
    def entry(self) -> Entry:
        """Its record; raises if the tensor is not within it."""
        entry, tensor = self.archive.record_of(self.tensor.storage), self.tensor
        if prod(tensor.shape) and tensor.end * tensor.dtype.itemsize > entry.size:
            raise CorruptCheckpointError(
                f"{self.archive.what}: a tensor of shape {tensor.shape} exceeds its storage"
            )
        return entry

    def entries(self, boxes: Iterable[Box]) -> list[Entry]:
        return [self.entry]

    def take(self, name: str) -> None:
        self.archive.bytes_left -= self.tensor.nbytes
        if self.archive.bytes_left < 0:
            raise CorruptCheckpointError(
                f"{name} would be {self.tensor.nbytes} bytes, {self.dtype} of shape {self.shape}: with what "
                f"came before it more than {self.archive.what} has; if it was expanded, save a .clone() of it"
            )

    def copy(self, box: Box, target: Tensor) -> None:
        entry, stride = self.entry, self.tensor.stride
        offset = self.tensor.start + self.tensor.span(*box)[0]
        with open(entry.path, "rb") as file:
            read_strided(
                file.fileno(), entry.offset, self.dtype, offset, stride, target, entry.what
            )


@dataclass(eq=False)
class DcpTensor(Source):
    """A tensor of a DCP folder, in chunks that are archives; ``what`` names it in errors."""

    what: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[StoredChunk]
    checksums: bool
    _opened: dict[Box, FileTensor] = field(default_factory=dict)

    def entries(self, boxes: Iterable[Box]) -> list[Entry]:
        entries: list[Entry] = []
        for box in boxes:
            for chunk, _ in self._common(box):
                if chunk.box not in self._opened:
                    source = self._opened[chunk.box] = self._open(chunk)
                    entries += source.entries([])
        return entries

    def copy(self, box: Box, target: Tensor) -> None:
        for chunk, (offsets, sizes) in self._common(box):
            in_chunk = tuple(o - c for o, c in zip(offsets, chunk.offsets, strict=True))
            in_target = tuple(o - b for o, b in zip(offsets, box[0], strict=True))
            source = self._opened[chunk.box]
            source.copy((in_chunk, sizes), target[slices_of(in_target, sizes)])

    def take(self, name: str) -> None:
        stored = sum(chunk.at.length for chunk in self.chunks if chunk.at is not None)
        _check_memory(f"{name} ({self.what})", self, stored)

    def _common(self, box: Box) -> Iterable[tuple[StoredChunk, Box]]:
        """Yields the chunks that contain a part of ``box``, and that part."""
        for chunk in self.chunks:
            part = intersection(box, chunk.box)
            if part is not None:
                yield chunk, part

    def _open(self, chunk: StoredChunk) -> FileTensor:
        what = f"{self.what} at {chunk.offsets}"
        if chunk.at is None:
            raise CorruptCheckpointError(f"{what} is listed but not stored")
        archive = chunk.at.archive(what, checksums=self.checksums)
        value = archive.value
        if not isinstance(value, SavedTensor):
            raise CorruptCheckpointError(f"{what} is not a tensor")
        if value.dtype != self.dtype or value.shape != chunk.sizes:
            raise CorruptCheckpointError(
                f"{what} is {value.dtype} of {value.shape}; the metadata says {self.dtype} of {chunk.sizes}"
            )
        return FileTensor(archive, value)


def read_small(source: Source, name: str) -> Tensor:
    """Reads and verifies a whole tensor, if it takes no more memory than is stored of it."""
    entries = source.entries([whole_box(source.shape)])
    source.take(name)
    for entry in entries:
        entry.verify()
    return source.whole()
