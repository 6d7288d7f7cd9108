"""Blocks: stored bytes are checked by a CRC-32 for every ``BLOCK`` bytes of a chunk.

So a rank that reads some rows of a large chunk verifies them without reading the rest.
"""

from __future__ import annotations

import ctypes
import os

import torch

from parallel3d.checkpoint.format.crc import crc32
from parallel3d.errors import CorruptCheckpointError

__all__ = ["BLOCK", "BlockCheck", "bytes_of", "crcs_of", "read_into", "write_all"]

BLOCK = 4 << 20
_STRIDE = 256 << 10  # what is read and checked at once: it stays in the processor's cache


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor whose values are those in it: it has no conjugate or negative
    bit. Keep the tensor as long as the view."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    assert not tensor.is_conj() and not tensor.is_neg()
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def crcs_of(data: memoryview) -> list[int]:
    """CRC-32 of each block of ``data``."""
    return [crc32(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)]


def write_all(file: int, data: memoryview) -> None:
    """``os.write`` until all is written."""
    while data:
        data = data[os.write(file, data) :]


def read_into(file: int, target: memoryview, at: int, where: str) -> None:
    """Fills ``target`` from the file's bytes from ``at`` on.

    Raises:
        CorruptCheckpointError: the file ends before; ``where`` says which it is.
    """
    while target:
        count = os.preadv(file, [target], at)
        if not count:
            raise CorruptCheckpointError(f"{where} ends at byte {at}, where data should be")
        target, at = target[count:], at + count


class BlockCheck:
    """Verifies blocks of files against their CRCs, with one small buffer."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_STRIDE))

    def verify(self, file: int, begin: int, size: int, crc: int, where: str) -> None:
        """Raises CorruptCheckpointError unless the ``size`` bytes from ``begin`` have this CRC-32."""
        found = 0
        for at in range(0, size, _STRIDE):
            part = self._buffer[: min(_STRIDE, size - at)]
            read_into(file, part, begin + at, where)
            found = crc32(part, found)
        if found != crc:
            raise CorruptCheckpointError(
                f"{where}: the bytes {begin} to {begin + size} are not those that were saved "
                f"(CRC-32 {found:08x}, saved was {crc:08x})"
            )
