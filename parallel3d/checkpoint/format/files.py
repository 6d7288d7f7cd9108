"""Reads and writes the files of a checkpoint: regular files, checked by CRC-32; JSON; safetensors.

A safetensors file is eight bytes (the header's length, little endian), the header (JSON: name -> dtype, shape
and ``data_offsets`` from the header's end), and the tensors' bytes without gaps. The safetensors library maps
whole files, so that a file that ends early kills the process by a signal instead of raising an error, and it
writes whole files at once; so headers are handled here.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import reprlib
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from parallel3d.errors import CheckpointError, CorruptCheckpointError

try:  # several times as fast as zlib's, but without a wheel for some machines
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

BLOCK = 4 << 20
"""Bytes of a chunk that share one CRC-32. A rank that reads some rows of a large chunk verifies only the
blocks that hold them."""
_STRIDE = 256 << 10  # bytes read and summed at once; they stay in the processor's cache
_MAX_DIMS = 64  # that torch's kernels take
_MAX_ELEMENTS = 1 << 58
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ESTALE)


@contextmanager
def damaged_if(what: str, kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Context manager: turns errors of ``kinds`` into CorruptCheckpointErrors that begin with ``what``."""
    try:
        yield
    except kinds as error:
        if isinstance(error, CheckpointError) and not isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(f"{what}: {error}") from error


def open_regular(path: str, flags: int) -> int:
    """Opens a regular file, no pipe, device or folder; returns its descriptor. An ``opener`` for ``open``."""
    # Opening a pipe would wait for a writer; for a regular file O_NONBLOCK changes nothing.
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CorruptCheckpointError(f"{path} is not a regular file")
    return file


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Context manager: yields the descriptor of a regular file, opened for reading, not through a link."""
    try:
        file = open_regular(os.fspath(path), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        if error.errno not in _GONE:
            raise
        check_file(path)
        raise CorruptCheckpointError(f"{path} can't be read: {error.strerror}") from None
    try:
        yield file
    finally:
        os.close(file)


def check_file(path: Path, size: int | None = None) -> None:
    """Raises CorruptCheckpointError unless ``path`` is a regular file, of ``size`` bytes if given."""
    try:
        status = path.lstat()
    except OSError as error:
        raise CorruptCheckpointError(f"{path} can't be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CorruptCheckpointError(f"{path} is not a regular file")
    if size is not None and status.st_size != size:
        raise CorruptCheckpointError(f"{path} has {status.st_size} bytes; it was saved with {size}")


def file_in(folder: Path, name: str, links_to: Path | None = None) -> Path:
    """Returns ``folder / name``; raises CorruptCheckpointError unless it is a file in ``folder``, or a link
    to one in ``folder`` or ``links_to``."""
    pure, windows = PurePosixPath(name), PureWindowsPath(name)
    absolute = pure.is_absolute() or windows.drive or windows.root
    if not name or "\0" in name or absolute or ".." in (*pure.parts, *windows.parts):
        raise CorruptCheckpointError(
            f"{folder} names a file {name[:200]!r}, which is outside of it"
        )
    path = folder / name
    real = Path(os.path.realpath(path))
    roots = [os.path.realpath(root) for root in (folder, links_to) if root is not None]
    if not any(real.is_relative_to(root) for root in roots):
        raise CorruptCheckpointError(f"{path} is a link to {real}, outside of its folder")
    if not os.path.isfile(real):
        problem = "is no file" if os.path.lexists(real) else "is missing"
        raise CorruptCheckpointError(f"{folder / name[:200]} {problem}")
    return path


def check_disjoint(ranges: Iterable[tuple[str, int, int, str]]) -> None:
    """Raises ValueError if two of ``ranges``, (file, first byte, size, name), share a byte."""
    for (file, start, size, name), (other, begin, _, following) in pairwise(sorted(ranges)):
        if file == other and begin < start + size:
            raise ValueError(f"{name!r:.100} and {following!r:.100} share bytes of {file!r:.100}")


def read_json_object(path: Path, limit: int) -> bytes:
    """Returns the bytes of a JSON file, checking that they are at most ``limit`` and end with "}"."""
    with opened(path) as file:
        size = os.fstat(file).st_size
        if size > limit:
            raise CorruptCheckpointError(f"{path} has {size} bytes, more than the limit of {limit}")
        end = os.pread(file, 16, max(size - 16, 0))  # not that of a large file with a hole
        if not end.rstrip().endswith(b"}"):
            raise CorruptCheckpointError(f"{path} has {size} bytes and is not a JSON object")
        with os.fdopen(os.dup(file), "rb") as reader:
            return reader.read(limit)


def loads(text: str | bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object in UTF-8; raises CorruptCheckpointError if it isn't one, or has a key twice."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        result = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{what} is not valid JSON: {error}") from None
    if not isinstance(result, dict):
        raise CorruptCheckpointError(f"{what} is not a JSON object")
    return result


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise ValueError(f"it has the key {twice[:80]!r} twice")
    return result


def numbers_of(value: Any, what: str) -> tuple[int, ...]:
    """Returns ``value`` as a tuple; raises ValueError, naming ``what``, unless it is a list of ints >= 0."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"there is no list for the {what}")
    for number in value:
        if type(number) is not int or not 0 <= number < 1 << 62:
            raise ValueError(f"there is {reprlib.repr(number)} in the {what}")
    return tuple(value)


def shape_of(value: Any, what: str) -> tuple[int, ...]:
    """Returns ``value`` as a tensor's shape; raises ValueError if it is invalid or too large."""
    shape = numbers_of(value, what)
    if len(shape) > _MAX_DIMS or prod(max(n, 1) for n in shape) > _MAX_ELEMENTS:
        raise ValueError(f"the {what} has {len(shape)} dims or too many elements")
    return shape


_REQUIRED: Any = object()


def get_of(holder: Any, key: str, kind: type, default: Any = _REQUIRED) -> Any:
    """Returns ``holder[key]``, or ``default`` if missing or null; ValueError if it is not of ``kind``."""
    value = holder.get(key) if isinstance(holder, dict) else None
    if value is None and default is not _REQUIRED:
        return default
    if type(value) is not kind:
        raise ValueError(f"{key} is {reprlib.repr(value)}")
    return value


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns a memoryview of the bytes of a contiguous CPU tensor; it does not keep the tensor alive."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    assert not tensor.is_conj() and not tensor.is_neg()
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def write_new(path: Path, data: bytes) -> None:
    """Writes a new file and flushes it to the disk; raises FileExistsError if it exists."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_into(file: int, target: memoryview, at: int, where: str) -> None:
    """Fills ``target`` with bytes of the descriptor ``file``, from byte ``at`` on; raises
    CorruptCheckpointError if the file ends before. ``where`` names it in the error."""
    while target:
        count = os.preadv(file, [target], at)
        if not count:
            raise CorruptCheckpointError(f"{where} ends at byte {at}, before the end of its data")
        target, at = target[count:], at + count


def crcs_of(data: memoryview) -> list[int]:
    """Returns the CRC-32 of each block of ``BLOCK`` bytes of ``data``."""
    return [crc32(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)]


def verify_blocks(
    file: int, blocks: Iterable[tuple[int, int, int]], where: str, hint: str = ""
) -> None:
    """Raises CorruptCheckpointError unless each block of ``file``, given as (first byte, size, CRC-32), has
    that CRC-32. ``where`` begins the error, ``hint`` ends it."""
    buffer = memoryview(bytearray(_STRIDE))
    for begin, size, expected in blocks:
        crc = 0
        for at in range(0, size, _STRIDE):
            part = buffer[: min(_STRIDE, size - at)]
            read_into(file, part, begin + at, where)
            crc = crc32(part, crc)
        if crc != expected:
            raise CorruptCheckpointError(
                f"{where}: the bytes {begin} to {begin + size} are not those that were saved "
                f"(CRC-32 {crc:08x}, saved was {expected:08x}){hint}"
            )


def hidden_beside(path: Path, suffix: str) -> Path:
    """Returns an unused hidden path next to ``path``, for a temporary file or folder."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{suffix}")


def replace_folder(temporary: Path, folder: Path) -> None:
    """Renames the folder ``temporary`` to ``folder``, and removes the previous one."""
    with suppress(OSError):  # not every file system can
        sync_folder(temporary)
    old = None
    if folder.exists():
        old = hidden_beside(folder, "old")
        folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        if old is not None:
            old.rename(folder)
        raise
    with suppress(OSError):
        sync_folder(folder.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's list of entries to the disk, so that a rename in it survives a crash."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


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
    """Reads a strided part of a stored tensor, a few megabytes at a time; returns how many bytes were read.

    Args:
        begin: byte at which the stored tensor, of ``dtype``, begins in ``file``, a descriptor.
        offset, strides: the part, in elements of the stored tensor, as in ``as_strided``; its shape is that
            of ``out``.
        out: the tensor to fill; of any dtype and device.
        where: names the file in errors.
    """
    itemsize = dtype.itemsize
    if not out.numel():
        return 0
    dims = sorted((d for d in range(out.dim()) if out.shape[d] > 1), key=lambda d: strides[d])
    span, dense = 1, True  # elements within the outermost dim; whether they have only small gaps
    for dim in dims[:-1]:
        dense &= (strides[dim] - span) * itemsize <= _GAP
        span += (out.shape[dim] - 1) * strides[dim]
    outer = dims[-1] if dims else None
    stride, count = (1, 1) if outer is None else (strides[outer], out.shape[outer])
    size = (span + (count - 1) * stride) * itemsize
    at = begin + offset * itemsize
    if (  # the memory of ``out`` becomes exactly the file's bytes
        (out.dtype, out.nbytes, out.device.type) == (dtype, size, "cpu")
        and not out.is_conj()
        and not out.is_neg()
        and out.is_contiguous()
        and all(out.stride(d) == strides[d] for d in dims)
    ):
        read_into(file, bytes_of(out), at, where)
        increment_version(out)
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
    """A tensor in a safetensors file: its bytes are [start, end), counted from the file's beginning."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path, file: str) -> dict[str, Stored]:
    """Returns the tensors of the safetensors file ``path`` by name; each has ``file`` as its file's name.
    Raises CorruptCheckpointError for an incomplete file, CheckpointError for an unknown dtype."""
    with open(path, "rb", opener=open_regular) as opened:
        size = os.fstat(opened.fileno()).st_size
        first = opened.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(MAX_HEADER, size - 8):
            raise CorruptCheckpointError(
                f"{path} is not a safetensors file, or was cut short: it has {size} bytes and a "
                f"header of {length}"
            )
        text = opened.read(length)
    header = loads(text, f"{path}: its header")
    with damaged_if(f"{path} has an invalid header"):
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
    dtype, shape = entry["dtype"], shape_of(entry["shape"], f"shape of {name!r}")
    offsets = numbers_of(entry["data_offsets"], f"data_offsets of {name!r}")
    if not isinstance(dtype, str):
        raise ValueError(f"{name!r} has the dtype {reprlib.repr(dtype)}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name!r} has the data_offsets {reprlib.repr(offsets)}")
    if dtype not in DTYPES:
        raise CheckpointError(f"{name!r} is stored as {dtype:.80}, which torch has no dtype for")
    nbytes = offsets[1] - offsets[0]
    if prod(shape) * DTYPES[dtype].itemsize != nbytes:
        raise ValueError(f"{name!r}, {dtype} of shape {shape}, can't have {nbytes} bytes")
    return Stored(file, DTYPES[dtype], shape, begin + offsets[0], begin + offsets[1])


def is_ours(path: Path) -> bool:
    """Returns whether a safetensors file was written by this package, as its header's metadata says."""
    try:
        with open(path, "rb", opener=open_regular) as opened:
            length = int.from_bytes(opened.read(8), "little")
            metadata = loads(opened.read(min(length, MAX_HEADER)), "")["__metadata__"]
            return metadata.get("made_by") == _METADATA["made_by"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def header_of(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """Returns the header of a safetensors file; ``tensors``: name -> (dtype, shape), in the file's order."""
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
