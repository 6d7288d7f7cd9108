"""Reader: brings parts of stored tensors into tensors of the model, a bounded piece at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.checkpoint.format.blocks import bytes_of
from parallel3d.checkpoint.format.dtypes import DTYPES
from parallel3d.checkpoint.format.safetensors_file import Stored
from parallel3d.checkpoint.hf.folder import path_in
from parallel3d.checkpoint.hf.layout import Patch
from parallel3d.errors import CorruptCheckpointError

__all__ = ["Reader"]

_PIECE = 4 << 20  # bytes read at once, and then copied to where they belong
_GAP = 4096  # bytes not wanted that are read along: a page, which the disk brings in any case


class Reader:
    """Opens a folder's files as they are needed.

    Attributes:
        bytes_read: so far.
    """

    def __init__(self, folder: Path, stored: Mapping[str, Stored]) -> None:
        self.folder, self.stored = folder, stored
        self.bytes_read = 0
        self._files: dict[str, int] = {}
        self._scratch: Tensor | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        files, self._files = self._files, {}
        for opened in files.values():
            os.close(opened)

    def check_there(self, names: Sequence[str]) -> None:
        """Raises CorruptCheckpointError unless the files of ``names`` are there and long enough."""
        ends: dict[str, int] = {}
        for name in names:
            stored = self.stored[name]
            ends[stored.file] = max(ends.get(stored.file, 0), stored.end)
        for file, end in ends.items():
            size = os.fstat(self._opened(file)).st_size
            if size < end:
                raise CorruptCheckpointError(
                    f"{self.folder / file} has {size} bytes on this rank, and should have {end} at least"
                )

    def read(self, patch: Patch, out: Tensor) -> None:
        """What ``patch`` says of its source, into ``out``, of its counts and any dtype and device."""
        stored = self.stored[patch.source]
        self._read(stored, DTYPES[stored.dtype], patch.offset, patch.strides, out)

    def same(self, one: Patch, two: Patch) -> bool:
        """Whether two patches of equal counts have the same values, bit for bit."""
        rows = one.counts[0] if one.counts else 1
        at_once = max(1, _PIECE * rows // max(1, 16 * prod(one.counts)))
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            parts = [each.part(0, first, count) if each.counts else each for each in (one, two)]
            a, b = (torch.empty(p.counts, dtype=self.dtype_of(p)) for p in parts)
            self.read(parts[0], a)
            self.read(parts[1], b)
            if a.dtype != b.dtype or bytes_of(a) != bytes_of(b):
                return False
        return True

    def dtype_of(self, patch: Patch) -> torch.dtype:
        return DTYPES[self.stored[patch.source].dtype]

    def _read(
        self,
        stored: Stored,
        dtype: torch.dtype,
        offset: int,
        strides: Sequence[int],
        out: Tensor,
    ) -> None:
        dims = sorted((d for d in range(out.dim()) if out.shape[d] > 1), key=lambda d: strides[d])
        span, dense = (
            1,
            True,
        )  # of what is inside the outermost dim, in elements; no large gaps in it
        for dim in dims[:-1]:
            dense &= (strides[dim] - span) * dtype.itemsize <= _GAP
            span += (out.shape[dim] - 1) * strides[dim]
        outer = dims[-1] if dims else None
        stride, count = (1, 1) if outer is None else (strides[outer], out.shape[outer])
        whole = span + (count - 1) * stride
        if _is_image(out, strides, whole, dtype):
            self._fill(stored, offset * dtype.itemsize, bytes_of(out))
            return
        at_once = 1
        if dense and (stride - span) * dtype.itemsize <= _GAP:
            at_once = max(1, _PIECE // (stride * dtype.itemsize))
        if outer is None or (at_once >= count and dense):
            self._read_block(stored, dtype, offset, whole, strides, out)
            return
        for first in range(0, count, at_once):
            part = out.narrow(outer, first, min(at_once, count - first))
            self._read(stored, dtype, offset + first * stride, strides, part)

    def _read_block(
        self,
        stored: Stored,
        dtype: torch.dtype,
        offset: int,
        span: int,
        strides: Sequence[int],
        out: Tensor,
    ) -> None:
        """``span`` elements from ``offset`` on in one go, of which ``out`` gets those at ``strides``."""
        size = span * dtype.itemsize
        if self._scratch is None or self._scratch.numel() < size:
            self._scratch = torch.empty(max(size, min(_PIECE, 1 << 16)), dtype=torch.uint8)
        scratch = self._scratch[:size]
        self._fill(stored, offset * dtype.itemsize, bytes_of(scratch))
        out.copy_(scratch.view(dtype).as_strided(out.shape, strides))

    def _fill(self, stored: Stored, offset: int, view: memoryview) -> None:
        opened, at = self._opened(stored.file), stored.start + offset
        while view:
            n = os.preadv(opened, [view[: 1 << 30]], at)
            if not n:
                raise CorruptCheckpointError(f"{self.folder / stored.file} ends at byte {at}")
            self.bytes_read += n
            at, view = at + n, view[n:]

    def _opened(self, file: str) -> int:
        if file not in self._files:
            self._files[file] = os.open(path_in(self.folder, file), os.O_RDONLY)
        return self._files[file]


def _is_image(out: Tensor, strides: Sequence[int], span: int, dtype: torch.dtype) -> bool:
    """Whether ``out``'s memory is to become just what is in the file."""
    return (
        out.dtype == dtype
        and out.device.type == "cpu"
        and not out.is_conj()
        and not out.is_neg()
        and out.numel() == span
        and all(out.stride(d) == strides[d] for d in range(out.dim()) if out.shape[d] > 1)
    )
