"""Archives of ``torch.save``, checked before torch loads them; stored tensors, of which ranks read their
parts.

An archive is a zip file of uncompressed records: ``data.pkl`` describes the values, ``data/N`` are the bytes
of storages. torch stores a CRC-32 of each record and does not check it when it loads.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.checkpoint.format.files import file_in
from parallel3d.checkpoint.pieces import Box, pieces_of
from parallel3d.errors import CheckpointError, CorruptCheckpointError

_AT_ONCE = 256 << 10  # bytes read and summed at once
_MAX_READ = 1 << 28  # bytes of a zip file's directory
_MAX_VALUES = 1_000_000
_MAX_DEPTH = 50
_SCALARS = frozenset({int, float, bool, str, type(None)})

Verify = Callable[[], None]
"""Raises a CorruptCheckpointError if stored bytes don't have their checksums."""


@dataclass(frozen=True)
class Archive:
    """What one ``torch.save`` wrote: bytes [offset, offset + length) of the file ``name`` in ``folder``, the
    whole file or a part. ``what`` names it in errors."""

    folder: Path
    name: str
    offset: int
    length: int
    what: str

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of each record, by its name without the archive's folder.

        Records must be uncompressed and together not larger than the archive, so loading takes no more
        memory.
        """
        with self._file() as file, zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
            if any(
                info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 for info in infos
            ):
                raise zipfile.BadZipFile("it is compressed or encrypted")
            sizes = {info.filename.partition("/")[2]: info.file_size for info in infos}
            if len(sizes) != len(infos) or sum(sizes.values()) > self.length:
                raise zipfile.BadZipFile("records of one name, or that share bytes")
            return sizes

    def verify(self, names: Collection[str] | None = None) -> None:
        """Raises CorruptCheckpointError if a record in ``names``, by default any, has another CRC-32."""
        wanted = self.sizes if names is None else names
        with self._file() as file, zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if info.filename.partition("/")[2] in wanted:
                    with archive.open(info) as record:
                        while record.read(_AT_ONCE):
                            pass

    def load(self, *, trusted: bool = False, mmap: bool = False, device: str = "cpu") -> Any:
        """Returns the saved value. ``trusted``: run code that the file contains; ``mmap``: tensors are views
        of the mapped file, which must be just this archive; ``device``: "meta" for tensors without values."""
        with self._file() as file:
            if not trusted and "data.pkl" not in self.sizes:
                raise zipfile.BadZipFile("no data.pkl")
            source: Any = os.fspath(self.folder / self.name) if mmap else file
            return torch.load(source, map_location=device, weights_only=not trusted, mmap=mmap)

    def check(self, tensor: Tensor) -> None:
        """Raises CheckpointError unless ``tensor``, loaded from here, is an ordinary tensor whose storage has
        the size of a record: torch itself reads as many bytes as the description says."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.device.type not in ("cpu", "meta"):
            raise CheckpointError(
                f"{self.what} has a {type(tensor).__name__}, {tensor.layout} on {tensor.device}; only plain "
                "tensors are read"
            )
        if (nbytes := tensor.untyped_storage().nbytes()) not in self._storage_sizes:
            raise CorruptCheckpointError(f"{self.what}: no record is a storage of {nbytes} bytes")

    @cached_property
    def _storage_sizes(self) -> set[int]:
        return {0, *(size for name, size in self.sizes.items() if name.startswith("data/"))}

    @contextmanager
    def _file(self) -> Iterator[_FilePart]:
        """Context manager: yields the archive as a file, and turns all its errors into CheckpointErrors."""
        try:
            with open(file_in(self.folder, self.name), "rb") as file:
                size, end = os.fstat(file.fileno()).st_size, self.offset + self.length
                if end > size:
                    raise CorruptCheckpointError(
                        f"{self.what}: bytes {self.offset} to {end} of {self.name}, which has {size}"
                    )
                yield _FilePart(file, self.offset, self.length)
        except CheckpointError:
            raise
        except pickle.UnpicklingError as error:
            why = str(error).rpartition("WeightsUnpickler error: ")[2].split("Please use")[0]
            raise CheckpointError(
                f"{self.what} has what torch.load(weights_only=True) doesn't read: {why.strip():.300}. If "
                "you trust who made it: trusted=True"
            ) from None
        except Exception as error:  # they raise many types for invalid files
            if isinstance(error, OSError) and error.errno is not None:
                raise CheckpointError(f"{self.what} can't be read: {error}") from error
            if "CRC" in str(error):
                raise CorruptCheckpointError(
                    f"{self.what} has other bytes than were saved ({error!s:.300}); files written under "
                    "torch.serialization.set_crc32_options(False) have no checksums, and checksums=False "
                    "reads them"
                ) from None
            raise CorruptCheckpointError(
                f"{self.what} is not a complete file of torch.save ({type(error).__name__}: {error!s:.300})"
            ) from None


class _FilePart(io.RawIOBase):
    """A file object of bytes [offset, offset + length) of another file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = (0, self._at, self._length)[whence] + offset
        if self._at < 0:
            raise ValueError(f"a seek to {self._at}")
        return self._at

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
    """A limit of what a file may describe: ``nbytes``, the bytes it stores, for all tensors that are not read
    into existing ones; a million other values, nested at most 50 deep.

    Without it a small file could describe large values: stored tensors may be expanded or overlap, and one
    list may be in many places.
    """

    def __init__(self, nbytes: int, what: str) -> None:
        self.what, self._bytes, self._values = what, nbytes, _MAX_VALUES

    def take(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Counts a tensor of this dtype and shape; raises CorruptCheckpointError above the limit."""
        nbytes = prod(shape) * dtype.itemsize
        self._bytes -= nbytes
        if self._bytes < 0:
            raise CorruptCheckpointError(
                f"{name} would be {nbytes} bytes, {dtype} of shape {shape}: with what came before it more "
                f"than {self.what} has; if it was expanded, save a .clone() of it"
            )

    def count(self, value: Any) -> list[Tensor]:
        """Counts ``value`` and all values in it, and returns the tensors among them; raises as ``take``."""
        waiting: list[tuple[Collection[Any], int]] = [((value,), 0)]
        tensors = []
        while waiting:
            items, depth = waiting.pop()
            self._values -= len(items)
            if items and (depth > _MAX_DEPTH or self._values < 0):
                raise CorruptCheckpointError(f"{self.what} has a value that is nested without end")
            for item in items:
                if type(item) in _SCALARS:  # what most are; the other questions take longer
                    continue
                if isinstance(item, Tensor):
                    self.take(f"{self.what}: a tensor", item.dtype, tuple(item.shape))
                    tensors.append(item)
                elif isinstance(item, (Mapping, list, tuple, set)):
                    waiting.append(
                        (item.values() if isinstance(item, Mapping) else item, depth + 1)
                    )
        return tensors


class Source(ABC):
    """A stored tensor, of which each rank reads the parts that it holds."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    budget: Budget

    def checks(self, boxes: Iterable[Box]) -> list[Verify]:
        """Returns functions that verify the stored bytes of ``boxes``; raises if some are not stored."""
        return []

    def take(self, name: str) -> None:
        """Counts the tensor in its file's Budget, before it is allocated; ``name`` is for the error."""
        self.budget.take(name, self.dtype, self.shape)

    @abstractmethod
    def fill(self, tensor: Tensor) -> None:
        """Copies this rank's parts of the stored tensor into ``tensor``, which has its global shape."""

    def whole(self) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.fill(tensor)
        return tensor


class Memory(Source):
    """A stored tensor that is in memory, or in a mapped file, already."""

    def __init__(self, tensor: Tensor, budget: Budget) -> None:
        self.tensor, self.budget = tensor.detach(), budget
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)

    def fill(self, tensor: Tensor) -> None:
        for piece in pieces_of(tensor):
            piece.local.copy_(self.tensor[piece.slices])
