"""Reads strided parts of stored tensors, a bounded number of bytes at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel3d.checkpoint.format.files import bytes_of, read_into

_PIECE = 4 << 20  # bytes read at once and then copied
_GAP = 4096  # bytes read although not needed: a page, which the disk reads in any case


def read_strided(
    file: int,
    begin: int,
    dtype: torch.dtype,
    offset: int,
    strides: Sequence[int],
    out: Tensor,
    where: str,
) -> int:
    """Reads elements of a file into ``out``, of any dtype and device; returns how many bytes were read.

    Args:
        begin: where the stored elements, of ``dtype``, begin in the file.
        offset, strides: of the elements to read, as of a view with the shape of ``out``.
        where: names the file in errors.

    Raises:
        CorruptCheckpointError: if the file ends before.
    """
    itemsize = dtype.itemsize
    if not out.numel():
        return 0
    dims = sorted((d for d in range(out.dim()) if out.shape[d] > 1), key=lambda d: strides[d])
    # Elements within the outermost dim, and whether they have only small gaps.
    span, dense = 1, True
    for dim in dims[:-1]:
        dense &= (strides[dim] - span) * itemsize <= _GAP
        span += (out.shape[dim] - 1) * strides[dim]
    outer = dims[-1] if dims else None
    stride, count = (1, 1) if outer is None else (strides[outer], out.shape[outer])
    size = (span + (count - 1) * stride) * itemsize
    at = begin + offset * itemsize
    if _is_image(out, dtype, strides, size):
        read_into(file, bytes_of(out), at, where)
        return size
    at_once = 1
    if dense and (stride - span) * itemsize <= _GAP:
        at_once = max(1, _PIECE // max(1, stride * itemsize))
    if outer is None or (at_once >= count and dense):
        buffer = torch.empty(size, dtype=torch.uint8)
        read_into(file, bytes_of(buffer), at, where)
        out.copy_(buffer.view(dtype).as_strided(out.shape, strides))
        return size
    total = 0
    for first in range(0, count, at_once):
        part = out.narrow(outer, first, min(at_once, count - first))
        place = offset + first * stride
        total += read_strided(file, begin, dtype, place, strides, part, where)
    return total


def _is_image(out: Tensor, dtype: torch.dtype, strides: Sequence[int], size: int) -> bool:
    """Returns whether the memory of ``out`` becomes exactly the file's bytes."""
    return (
        out.dtype == dtype
        and out.device.type == "cpu"
        and not out.is_conj()
        and not out.is_neg()
        and out.nbytes == size
        and out.is_contiguous()
        and all(out.stride(d) == strides[d] for d in range(out.dim()) if out.shape[d] > 1)
    )
