"""Archive: what ``torch.save`` has written, as a file of its own or a part of one; values by boxes.

It is a zip file of stored records: ``data.pkl`` describes the values, ``data/N`` are the storages' bytes.
torch writes a CRC-32 for each and doesn't look at it when it loads.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel3d.checkpoint.format.safetensors_file import crc32
from parallel3d.checkpoint.torch_formats.pickled import (
    PROTO,
    SAVED_VALUES,
    SavedTensor,
    StorageId,
    read_pickle,
)
from parallel3d.errors import CheckpointError, CorruptCheckpointError

_BLOCK = 1 << 22  # bytes read at a time
_LOCAL_HEADER = 30
_MAX_VALUES = 1_000_000
_MAX_PICKLE = _MAX_DIRECTORY = 1 << 28


@dataclass(frozen=True)
class Entry:
    """A record of an archive: bytes of a file, and what they must sum up to.

    Attributes:
        what: names it in errors.
        crc: None: not to be compared.
    """

    path: Path
    offset: int
    size: int
    crc: int | None
    what: str

    def verify(self) -> None:
        """Raises CorruptCheckpointError unless its bytes are those that were written."""
        if self.crc is None:
            return
        found = 0
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            left = self.size
            while left:
                block = file.read(min(left, _BLOCK))
                if not block:
                    raise CorruptCheckpointError(f"{self.what} ends {left} bytes early")
                found = crc32(block, found)
                left -= len(block)
        if found != self.crc:
            raise CorruptCheckpointError(
                f"{self.what} has the checksum {found:08x}, and had {self.crc:08x} when it was written "
                "(files written under torch.serialization.set_crc32_options(False) have none, which "
                "checksums=False reads)"
            )

    def read(self, start: int, stop: int) -> bytearray:
        """The bytes [start, stop) of it."""
        with open(self.path, "rb") as file:
            file.seek(self.offset + start)
            buffer = bytearray(stop - start)
            if file.readinto(buffer) != len(buffer):
                raise CorruptCheckpointError(f"{self.what} ends early")
        return buffer


class Archive:
    """One that ``torch.save`` has written at [offset, offset + length) of a file.

    Its tensors may be expanded, or lie one over the other, so a small file can describe large ones. Those
    that are not for memory which is there anyway may take as much as the archive has, in all.
    """

    def __init__(
        self, path: Path, offset: int, length: int, *, what: str, checksums: bool = True
    ) -> None:
        self.path, self.offset, self.length = path, offset, length
        self.what, self.checksums = what, checksums
        self._left = length
        self._values_left = _MAX_VALUES
        self._copies: dict[int, tuple[Any, Any, int]] = {}  # id -> (the value, its copy, count)
        self._verified: set[Entry] = set()

    def raw(self) -> bytes:
        """All of it."""
        with self._clear(), _Window(self.path, self.offset, self.length) as window:
            return window.readall() or b""

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """By name, without the directory that all are in."""
        with self._clear(), _Window(self.path, self.offset, self.length) as window:
            with zipfile.ZipFile(window) as file:
                infos = file.infolist()
            roots = {info.filename.split("/", 1)[0] for info in infos}
            if len(roots) != 1:
                raise zipfile.BadZipFile("records that are not in one directory")
            found = {}
            ranges = []
            for info in infos:
                name = info.filename.split("/", 1)[1]
                if name in found:
                    raise zipfile.BadZipFile(f"two records {name}")
                found[name] = self._entry(info, window)
                ranges.append((found[name].offset, found[name].size, name))
            ranges.sort()
            for (start, size, name), (begin, _, other) in pairwise(ranges):
                if start + size > begin:
                    raise zipfile.BadZipFile(f"the records {name} and {other} share bytes")
            return found

    def _entry(self, info: zipfile.ZipInfo, window: _Window) -> Entry:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise zipfile.BadZipFile(f"{info.filename} is compressed or encrypted")
        window.seek(info.header_offset)
        header = window.read(_LOCAL_HEADER)
        if len(header) != _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise zipfile.BadZipFile(f"{info.filename} isn't where the directory says")
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = info.header_offset + _LOCAL_HEADER + lengths
        if info.file_size != info.compress_size or start + info.file_size > self.length:
            raise zipfile.BadZipFile(f"{info.filename} reaches beyond the end")
        crc = info.CRC if self.checksums else None
        name = info.filename.split("/", 1)[1]
        what = f"{self.what}, record {name},"
        return Entry(self.path, self.offset + start, info.file_size, crc, what)

    @cached_property
    def value(self) -> Any:
        """What was saved, with a SavedTensor for each tensor."""
        with self._clear():
            pickled = self.entries["data.pkl"]
            if pickled.size > _MAX_PICKLE:
                raise zipfile.BadZipFile(f"a description of {pickled.size} bytes")
            order = self.entries.get("byteorder")
            for entry in (pickled, order):
                if entry is not None:
                    entry.verify()
            if order is not None and bytes(order.read(0, min(order.size, 16))) != b"little":
                raise CheckpointError(f"{self.what} was written on a machine of another byte order")
            if pickled.size < 2 or bytes(pickled.read(0, 1)) != PROTO:
                raise zipfile.BadZipFile("a description that doesn't begin as a pickle")
            data = bytes(pickled.read(0, pickled.size))
        return read_pickle(data, SAVED_VALUES, what=self.what, persistent=self._storage)

    def _storage(self, value: Any) -> StorageId:
        storage = StorageId.of(value)
        self.record_of(storage)
        return storage

    def record_of(self, storage: StorageId) -> Entry:
        """The record with the bytes of ``storage``, which is as large as that says."""
        entry = self.entries.get(f"data/{storage.key}")
        itemsize = 1 if storage.dtype is None else storage.dtype.itemsize
        if entry is None or entry.size != storage.elements * itemsize:
            held = "is not there" if entry is None else f"has {entry.size} bytes"
            raise CorruptCheckpointError(
                f"{self.what}: the record of a storage of {storage.elements} x {itemsize} bytes {held}"
            )
        return entry

    def checked(self, tensor: SavedTensor) -> Entry:
        """The record of ``tensor``, within which it lies."""
        entry = self.record_of(tensor.storage)
        if prod(tensor.shape) and tensor.end * tensor.dtype.itemsize > entry.size:
            raise CorruptCheckpointError(
                f"{self.what}: a tensor of shape {tensor.shape} reaches beyond its storage"
            )
        return entry

    def take(self, tensor: SavedTensor, name: str) -> None:
        """Raises if memory for it, which nothing but this file asks for, would be more than the file has."""
        self.checked(tensor)
        self._left -= tensor.nbytes
        if self._left < 0:
            raise CorruptCheckpointError(
                f"{name} would be {tensor.nbytes} bytes, {tensor.dtype} of shape {tensor.shape}: with what "
                f"came before it more than {self.what} has; if it was expanded, save a .clone() of it"
            )

    def read_verified(self, tensor: SavedTensor) -> Tensor:
        """All of a small one."""
        self.take(tensor, f"{self.what}: a tensor")
        entry = self.checked(tensor)
        if entry not in self._verified:
            entry.verify()
            self._verified.add(entry)
        return self.read(tensor, (0,) * len(tensor.shape), tensor.shape)

    def read(self, tensor: SavedTensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A box of ``tensor``, on the CPU, with memory of its own."""
        entry = self.checked(tensor)
        if not prod(sizes):
            return torch.empty(sizes, dtype=tensor.dtype)
        first, last = tensor.span(offsets, sizes)
        itemsize = tensor.dtype.itemsize
        start = tensor.start * itemsize
        buffer = entry.read(start + first * itemsize, start + last * itemsize)
        flat = torch.frombuffer(buffer, dtype=torch.uint8).view(tensor.dtype)
        return flat.as_strided(sizes, tensor.stride)

    def with_tensors(self, value: Any) -> Any:
        """A copy of ``value``, a nest of dicts, lists and tuples of what it is, with its tensors' values.

        Raises:
            ValueError: it is deeper than 50 or, seen as a tree, with all that was copied before it, has more
                than a million values.
        """
        found, count = self._copied(value, 0)
        self._values_left -= count
        if self._values_left < 0:
            raise ValueError("a value that is nested without end")
        return found

    def _copied(self, value: Any, depth: int) -> tuple[Any, int]:
        """(the copy, how many values are in it); of what is in several places, once."""
        if isinstance(value, SavedTensor):
            return self.read_verified(value), 1
        if not isinstance(value, (dict, list, tuple)):
            return value, 1
        if id(value) in self._copies:
            _, found, count = self._copies[id(value)]
            return found, count
        if depth > 50:
            raise ValueError("a value that is nested without end")
        parts = [self._copied(each, depth + 1) for each in _elements(value)]
        copies, count = [copy for copy, _ in parts], 1 + sum(each for _, each in parts)
        found = dict(zip(value, copies, strict=True)) if isinstance(value, dict) else copies
        found = tuple(copies) if isinstance(value, tuple) else found
        self._copies[id(value)] = value, found, count
        return found, count

    @contextmanager
    def _clear(self) -> Iterator[None]:
        """What goes wrong within is a CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # of many kinds, zipfile's on files that are none
            if isinstance(error, OSError) and error.errno is not None:
                raise CheckpointError(f"{self.what} can't be read: {error}") from error
            raise CorruptCheckpointError(
                f"{self.what} is nothing whole that torch.save has written "
                f"({type(error).__name__}: {error})"
            ) from None


def _elements(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


class _Window(io.RawIOBase):
    """Bytes [offset, offset + length) of a file, as a file."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        super().__init__()
        self._file = io.FileIO(path)
        self._offset, self._length, self._at = offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(f"a seek to {base + offset}")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """As of any file; but of a zip file's directory, which is asked for in one, not any amount."""
        if size > _MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"a directory of {size} bytes")
        return super().read(size) or b""

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._offset + self._at)
        read = self._file.readinto(memoryview(buffer)[:count]) or 0
        self._at += read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()
