"""The safetensors format: headers read and checked, headers written.

A file is eight bytes (the header's length, little endian), the header (JSON: name -> dtype, shape and
``data_offsets`` from the header's end), and the tensors' bytes without gaps. The safetensors library maps
whole files, where a file that ends early is a signal and not an error, and writes whole files at once; so
headers are handled here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from parallel3d.checkpoint.format import files
from parallel3d.errors import CheckpointError, CorruptCheckpointError

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
"""The format's name of a dtype -> the dtype."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_METADATA = {"format": "pt", "made_by": "parallel3d"}
MAX_HEADER = 100 << 20
"""Bytes of a header, or of an index of files; the library has the same limit."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its bytes are [start, end), counted from the beginning of the file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path, file: str) -> dict[str, Stored]:
    """Returns the tensors of a file by name.

    Raises:
        CorruptCheckpointError: if it is not a complete one.
        CheckpointError: if torch has no dtype for a tensor.
    """
    with open(path, "rb", opener=files.open_regular) as opened:
        size = os.fstat(opened.fileno()).st_size
        first = opened.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(MAX_HEADER, size - 8):
            raise CorruptCheckpointError(
                f"{path} is not a safetensors file, or was cut short: it has {size} bytes and a "
                f"header of {length}"
            )
        text = opened.read(length)
    header = files.loads(text, f"{path}: its header")
    with files.damaged_if(f"{path} has an invalid header"):
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, name, entry, 8 + length) for name, entry in header.items()}
        begin = 8 + length  # tensors follow each other without gaps
        for name, stored in sorted(tensors.items(), key=lambda each: (each[1].start, each[1].end)):
            if stored.start != begin:
                raise ValueError(f"{name!r} begins at byte {stored.start}, not at {begin}")
            begin = stored.end
        if begin != size:
            raise ValueError(f"its tensors end at byte {begin}, the file at {size}")
    return tensors


def _stored(file: str, name: str, entry: Any, begin: int) -> Stored:
    name = name[:200]
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{name!r} has no dtype, shape and data_offsets")
    dtype, shape = entry["dtype"], files.shape_of(entry["shape"], f"shape of {name!r}")
    offsets = files.numbers_of(entry["data_offsets"], f"data_offsets of {name!r}")
    if not isinstance(dtype, str):
        raise ValueError(f"{name!r} has the dtype {files.shown(dtype)}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name!r} has the data_offsets {files.shown(offsets)}")
    if dtype not in DTYPES:
        raise CheckpointError(f"{name!r} is stored as {dtype:.80}, which torch has no dtype for")
    nbytes = offsets[1] - offsets[0]
    if prod(shape) * DTYPES[dtype].itemsize != nbytes:
        raise ValueError(f"{name!r}, {dtype} of shape {shape}, can't have {nbytes} bytes")
    return Stored(file, DTYPES[dtype], shape, begin + offsets[0], begin + offsets[1])


def is_ours(path: Path) -> bool:
    """Returns whether a file's metadata says that ``header_of`` made its header."""
    try:
        with open(path, "rb", opener=files.open_regular) as opened:
            length = int.from_bytes(opened.read(8), "little")
            metadata = files.loads(opened.read(min(length, MAX_HEADER)), "")["__metadata__"]
            return metadata.get("made_by") == _METADATA["made_by"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def header_of(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """Returns the beginning of a file that holds ``tensors``, (dtype, shape) by name, in this order."""
    header: dict[str, Any] = {"__metadata__": _METADATA}
    at = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in NAMES:
            raise CheckpointError(
                f"{name} is {dtype}, which safetensors files can't hold; they can hold "
                f"{', '.join(str(known).removeprefix('torch.') for known in NAMES)}"
            )
        end = at + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text
