"""Sources: where the values of a stored tensor come from, box by box."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from parallel3d.checkpoint.torch_formats.archive import Archive, Entry
from parallel3d.checkpoint.torch_formats.folder import (
    DcpFolder,
    StoredAt,
    StoredChunk,
    StoredTensor,
    file_within,
)
from parallel3d.checkpoint.torch_formats.vocabulary import SavedTensor
from parallel3d.errors import CheckpointError, CorruptCheckpointError

__all__ = [
    "Box",
    "DcpTensor",
    "FileTensor",
    "Memory",
    "Source",
    "archive_at",
    "blob_in",
    "blob_of",
    "small",
    "whole",
]

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
