"""The safetensors format: headers read and checked, headers written.

A file is eight bytes (the header's length, little endian), the header (JSON: name -> dtype, shape and
``data_offsets``, from the header's end), and the tensors' bytes one after another without gaps. Reading it
here, rather than through the safetensors library, keeps the file out of this process's memory (the library
maps whole files) and turns a file that ends early into an error (reading a mapped one is a signal).
"""

from __future__ import annotations

import ctypes
import json
import os
import reprlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from parallel3d.errors import CheckpointError, CorruptCheckpointError

# The names that safetensors files have for torch's dtypes.

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


_MOST_DIMS = 64  # that torch's kernels take
_EXPORT = {"format": "pt", "made_by": "parallel3d"}
LONGEST = 100 << 20
"""Bytes of a header, or an index of files; the library's limit too."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        file: the file's name in its folder.
        dtype: as the format writes it.
        start, end: its bytes, from the file's beginning.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path, file: str) -> dict[str, Stored]:
    """The tensors of a file.

    Raises:
        CorruptCheckpointError: it is no safetensors file, or not all of one.
        OSError: it can't be read.
    """
    with open(path, "rb", opener=open_regular) as opened:
        size = os.fstat(opened.fileno()).st_size
        first = opened.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(LONGEST, size - 8):
            raise CorruptCheckpointError(
                f"{path} is no safetensors file, or cut short: {size} bytes, and a header of {length}"
            )
        text = opened.read(length)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise ValueError("it is no JSON object")
        header.pop("__metadata__", None)
        found = {name: _stored(file, name, said, 8 + length) for name, said in header.items()}
        _check_gapless(found, 8 + length, size)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: its header can't be right: {error}") from error
    return found


def open_regular(path: str, flags: int) -> int:
    """Opens a file, and nothing that could block or act, such as a pipe or a device."""
    opened = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise CorruptCheckpointError(f"{path} is no ordinary file")
    return opened


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _stored(file: str, name: str, said: Any, begin: int) -> Stored:
    if not isinstance(said, dict) or not {"dtype", "shape", "data_offsets"} <= said.keys():
        raise ValueError(f"{name[:200]!r} has no dtype, shape and data_offsets")
    dtype, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets):
        raise ValueError(f"{name[:200]!r} is {reprlib.repr(said)}")
    if len(shape) > _MOST_DIMS:  # before any product of them
        raise ValueError(f"{name[:200]!r} has {len(shape)} dims")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name[:200]!r} lies at {reprlib.repr(offsets)}")
    known = DTYPES.get(dtype)
    if known is not None and prod(shape) * known.itemsize != offsets[1] - offsets[0]:
        taken = offsets[1] - offsets[0]
        raise ValueError(f"{name[:200]!r}, {dtype} of shape {shape}, can't have {taken} bytes")
    return Stored(file, dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
        for value in values
    )


def _check_gapless(found: Mapping[str, Stored], begin: int, size: int) -> None:
    for name, stored in sorted(found.items(), key=lambda item: (item[1].start, item[1].end)):
        if stored.start != begin:
            raise ValueError(f"{name!r} begins at byte {stored.start}, not at {begin}")
        begin = stored.end
    if begin != size:
        raise ValueError(f"its tensors end at byte {begin}, the file at {size}")


def is_ours(path: Path) -> bool:
    """Whether a file says that ``header_of`` made its header."""
    try:
        with open(path, "rb", opener=open_regular) as opened:
            length = int.from_bytes(opened.read(8), "little")
            said = json.loads(opened.read(min(length, LONGEST)).decode())["__metadata__"]
            return said.get("made_by") == _EXPORT["made_by"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def header_of(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """The beginning of a file that holds ``tensors`` in this order; their bytes follow it.

    Raises:
        CheckpointError: the format has no name for a dtype.
    """
    header: dict[str, Any] = {"__metadata__": _EXPORT}
    at = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in NAMES:
            raise CheckpointError(
                f"{name} is {dtype}, which safetensors files can't hold; they can: "
                f"{', '.join(str(known).removeprefix('torch.') for known in NAMES)}"
            )
        end = at + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text


# crc32: isal's, several times as fast as zlib's; zlib's on a machine that isal has no wheel for.

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32


# Blocks: stored bytes are checked by a CRC-32 for every ``BLOCK`` bytes of a chunk.
#
# So a rank that reads some rows of a large chunk verifies them without reading the rest.

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
