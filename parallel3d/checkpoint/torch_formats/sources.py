"""Archives of ``torch.save``, checked before torch loads them; tensors as sources of what ranks hold.

An archive is a zip file of uncompressed records: ``data.pkl`` describes the values, ``data/N`` are the bytes
of storages. torch stores a CRC-32 of each record and does not check it when it loads.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.checkpoint.format.files import verify_blocks
from parallel3d.checkpoint.pieces import Box, pieces_of
from parallel3d.errors import CheckpointError, CorruptCheckpointError

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MAX_READ = 1 << 28  # bytes of a zip file's directory
_MAX_VALUES = 1_000_000
_MAX_DEPTH = 50


@dataclass(frozen=True)
class Records:
    """Records of a file, (first byte, size, CRC-32) each; ``what`` names them in errors."""

    path: Path
    blocks: tuple[tuple[int, int, int], ...]
    what: str

    def verify(self) -> None:
        hint = (
            "; files written under torch.serialization.set_crc32_options(False) have no checksums, and "
            "checksums=False reads them"
        )
        with open(self.path, "rb") as file:
            verify_blocks(file.fileno(), self.blocks, self.what, hint)


@dataclass(frozen=True)
class Archive:
    """Bytes [offset, offset + length) of a file, as ``torch.save`` writes them; ``what`` in errors."""

    path: Path
    offset: int
    length: int
    what: str

    @cached_property
    def records(self) -> dict[str, tuple[int, int, int]]:
        """(First byte in the file, size, CRC-32) of each record, by its name without the folder.

        They are uncompressed and together not larger than the archive: loading it takes as much memory.
        """
        with self._errors(), open(self.path, "rb") as file:
            part = _FilePart(file, self.offset, self.length)
            with zipfile.ZipFile(part) as archive:
                infos = archive.infolist()
            records = {info.filename.partition("/")[2]: self._place(info, part) for info in infos}
            if len(records) != len(infos) or sum(s for _, s, _ in records.values()) > self.length:
                raise zipfile.BadZipFile("records of one name, or that share bytes")
            if "data.pkl" not in records:
                raise zipfile.BadZipFile("no data.pkl")
            return records

    def _place(self, info: zipfile.ZipInfo, part: _FilePart) -> tuple[int, int, int]:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise zipfile.BadZipFile(f"{info.filename} is compressed or encrypted")
        part.seek(info.header_offset)
        magic, name, extra = _LOCAL_HEADER.unpack(part.read(_LOCAL_HEADER.size))
        start = info.header_offset + _LOCAL_HEADER.size + name + extra
        if magic != b"PK\x03\x04" or start + info.file_size > self.length:
            raise zipfile.BadZipFile(f"{info.filename} isn't where the directory says")
        return self.offset + start, info.file_size, info.CRC

    def checked(self, *, checksums: bool) -> list[Records]:
        """Returns the records to verify, after verifying the description, which is unpickled before."""
        records = self.records
        if not checksums:
            return []
        Records(self.path, (records["data.pkl"],), self.what).verify()
        return [Records(self.path, tuple(records.values()), self.what)]

    def load(self, *, trusted: bool = False, mmap: bool = False, device: str = "cpu") -> Any:
        """Returns the saved value. ``trusted``: with code of the file's; ``mmap``: tensors are views of the
        mapped file, which must be the archive; ``device``: "meta" for tensors without values."""
        with self._errors(), open(self.path, "rb") as file:
            source: Any = (
                os.fspath(self.path) if mmap else _FilePart(file, self.offset, self.length)
            )
            return torch.load(source, map_location=device, weights_only=not trusted, mmap=mmap)

    @cached_property
    def _storage_sizes(self) -> set[int]:
        return {0, *(size for n, (_, size, _) in self.records.items() if n.startswith("data/"))}

    def check(self, tensor: Tensor) -> None:
        """Raises a CheckpointError unless ``tensor``, loaded from here, is plain and its storage is one of
        the records."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.device.type not in ("cpu", "meta"):
            raise CheckpointError(
                f"{self.what} has a {type(tensor).__name__}, {tensor.layout} on {tensor.device}; only plain "
                "tensors are read"
            )
        if (nbytes := tensor.untyped_storage().nbytes()) not in self._storage_sizes:
            raise CorruptCheckpointError(f"{self.what}: no record is a storage of {nbytes} bytes")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Converts errors of zipfile, torch and the file system to CheckpointErrors."""
        try:
            yield
        except CheckpointError:
            raise
        except pickle.UnpicklingError as error:
            why = (
                str(error).rpartition("WeightsUnpickler error: ")[2].strip().split("Please use")[0]
            )
            raise CheckpointError(
                f"{self.what} has what torch.load(weights_only=True) doesn't read: {why:.300}. If you trust "
                "who made it: trusted=True"
            ) from None
        except Exception as error:  # they raise many types for invalid files
            if isinstance(error, OSError) and error.errno is not None:
                raise CheckpointError(f"{self.what} can't be read: {error}") from error
            raise CorruptCheckpointError(
                f"{self.what} is not a complete file of torch.save ({type(error).__name__}: {error!s:.300})"
            ) from None


class _FilePart(io.RawIOBase):
    """Bytes [offset, offset + length) of a file, as a file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = (0, self._at, self._length)[whence] + offset
        if at < 0:
            raise ValueError(f"a seek to {at}")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        if size > _MAX_READ:  # zipfile reads a directory in one call; torch calls readinto
            raise zipfile.BadZipFile(f"a directory of {size} bytes")
        return super().read(size) or b""

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])
        self._at += count
        return count


# -- sources -----------------------------------------------------------------------------------------------


class Budget:
    """How much a file may describe: tensors that are not read into existing ones may take ``nbytes``, what is
    stored; other values may be a million, nested 50 deep.

    Stored tensors may be expanded or overlap, and one list may be in many places, so a small file can
    describe large values.
    """

    def __init__(self, nbytes: int, what: str) -> None:
        self.what, self._bytes, self._values = what, nbytes, _MAX_VALUES

    def take(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Raises CorruptCheckpointError if memory for a tensor would exceed it."""
        nbytes = prod(shape) * dtype.itemsize
        self._bytes -= nbytes
        if self._bytes < 0:
            raise CorruptCheckpointError(
                f"{name} would be {nbytes} bytes, {dtype} of shape {shape}: with what came before it more "
                f"than {self.what} has; if it was expanded, save a .clone() of it"
            )

    def count(self, value: Any) -> list[Tensor]:
        """Returns the tensors in ``value``; raises CorruptCheckpointError if what is in it exceeds this."""
        waiting, tensors = [(value, 0)], []
        while waiting:
            item, depth = waiting.pop()
            self._values -= 1
            if depth > _MAX_DEPTH or self._values < 0:
                raise CorruptCheckpointError(f"{self.what} has a value that is nested without end")
            if isinstance(item, Tensor):
                self.take(f"{self.what}: a tensor", item.dtype, tuple(item.shape))
                tensors.append(item)
            elif isinstance(item, (Mapping, list, tuple, set)):
                inner = item.values() if isinstance(item, Mapping) else item
                waiting += [(each, depth + 1) for each in inner]
        return tensors


class Source(ABC):
    """A stored tensor, which is read into the pieces that a rank holds."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    budget: Budget

    def records(self, boxes: Iterable[Box]) -> list[Records]:
        """Returns the records of ``boxes``, for the caller to verify; raises if some are not stored."""
        return []

    def take(self, name: str) -> None:
        """Raises CorruptCheckpointError if memory for ``name``, of its shape, would exceed what is stored."""
        self.budget.take(name, self.dtype, self.shape)

    @abstractmethod
    def fill(self, tensor: Tensor) -> None:
        """Copies what this rank holds of ``tensor``, of this shape."""

    def whole(self) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.fill(tensor)
        return tensor


class Memory(Source):
    """A tensor in memory, or in a mapped file."""

    def __init__(self, tensor: Tensor, budget: Budget) -> None:
        self.tensor, self.budget = tensor.detach(), budget
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)

    def fill(self, tensor: Tensor) -> None:
        for piece in pieces_of(tensor):
            piece.local.copy_(self.tensor[piece.slices])
