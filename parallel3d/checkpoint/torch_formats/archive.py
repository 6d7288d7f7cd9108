"""Archive: what ``torch.save`` has written, as a whole file or a part of one; tensors are read by boxes.

It is a zip file of uncompressed records: ``data.pkl`` describes the values, ``data/N`` are the bytes of
storages. torch stores a CRC-32 of each record and does not check it when it loads.
"""

from __future__ import annotations

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

from parallel3d.checkpoint.format.files import crc_of, read_into, read_strided
from parallel3d.checkpoint.torch_formats.pickled import (
    PROTO,
    SAVED_VALUES,
    SavedTensor,
    StorageId,
    read_pickle,
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
        self._bytes_left = length
        self._values_left = _MAX_VALUES
        self._copies: dict[int, tuple[Any, Any, int]] = {}  # id -> (the value, its copy, count)
        self._verified: set[Entry] = set()

    def raw(self) -> bytes:
        """Returns all its bytes."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.length)

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
            ranges = sorted((e.offset, e.size, name) for name, e in entries.items())
            for (start, size, name), (begin, _, following) in pairwise(ranges):
                if start + size > begin:
                    raise zipfile.BadZipFile(f"the records {name} and {following} share bytes")
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
            self._record_of(found := StorageId.of(value))
            return found

        return read_pickle(data, SAVED_VALUES, what=self.what, persistent=storage)

    def _record_of(self, storage: StorageId) -> Entry:
        """Returns the record of ``storage`` after checking its size."""
        entry = self.entries.get(f"data/{storage.key}")
        itemsize = 1 if storage.dtype is None else storage.dtype.itemsize
        if entry is None or entry.size != storage.elements * itemsize:
            state = "is not there" if entry is None else f"has {entry.size} bytes"
            raise CorruptCheckpointError(
                f"{self.what}: the record of a storage of {storage.elements} x {itemsize} bytes {state}"
            )
        return entry

    def checked(self, tensor: SavedTensor) -> Entry:
        """Returns the record of ``tensor`` after checking that the tensor is within it."""
        entry = self._record_of(tensor.storage)
        if prod(tensor.shape) and tensor.end * tensor.dtype.itemsize > entry.size:
            raise CorruptCheckpointError(
                f"{self.what}: a tensor of shape {tensor.shape} exceeds its storage"
            )
        return entry

    def take(self, tensor: SavedTensor, name: str) -> None:
        """Counts memory allocated for ``tensor``; raises if it would exceed the archive's size in all."""
        self.checked(tensor)
        self._bytes_left -= tensor.nbytes
        if self._bytes_left < 0:
            raise CorruptCheckpointError(
                f"{name} would be {tensor.nbytes} bytes, {tensor.dtype} of shape {tensor.shape}: with what "
                f"came before it more than {self.what} has; if it was expanded, save a .clone() of it"
            )

    def copy(self, tensor: SavedTensor, offsets: tuple[int, ...], target: Tensor) -> None:
        """Copies the box of ``tensor`` that begins at ``offsets`` into ``target``, of the box's sizes."""
        entry = self.checked(tensor)
        offset = tensor.start + tensor.span(offsets, tuple(target.shape))[0]
        with open(entry.path, "rb") as file:
            begin, dtype, stride = entry.offset, tensor.dtype, tensor.stride
            read_strided(file.fileno(), begin, dtype, offset, stride, target, entry.what)

    def with_tensors(self, value: Any) -> Any:
        """Returns a copy of ``value``, a part of ``self.value``, with its tensors read and verified.

        Raises CorruptCheckpointError if it is nested too deep or, as a tree and with all that was copied
        before, has more than a million values.
        """
        result, count = self._copied(value, 0)
        self._values_left -= count
        if self._values_left < 0:
            raise CorruptCheckpointError(f"{self.what} has a value that is nested without end")
        return result

    def _copied(self, value: Any, depth: int) -> tuple[Any, int]:
        """Returns (the copy, how many values are in it); a value in several places is copied once."""
        if isinstance(value, SavedTensor):
            self.take(value, f"{self.what}: a tensor")
            entry = self.checked(value)
            if entry not in self._verified:
                entry.verify()
                self._verified.add(entry)
            result = torch.empty(value.shape, dtype=value.dtype)
            self.copy(value, (0,) * len(value.shape), result)
            return result, 1
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
