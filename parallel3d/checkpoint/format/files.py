"""Regular files: opened without following links, read and written in full, checked by CRC-32; and JSON."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import reprlib
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from parallel3d.errors import CorruptCheckpointError

try:  # several times as fast as zlib's, but without a wheel for some machines
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

BLOCK = 4 << 20
"""Bytes of a chunk that share one CRC-32. A rank that reads some rows of a large chunk verifies only the
blocks that hold them."""
_STRIDE = 256 << 10  # bytes read and summed at once; they stay in the processor's cache
_UNCHECKED = 1 << 20  # bytes of JSON that are parsed without looking at their ends first
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ESTALE)


def open_regular(path: str, flags: int) -> int:
    """Opens a regular file and returns its descriptor; usable as the ``opener`` of ``open``.

    Raises CorruptCheckpointError if ``path`` is a pipe, a device or a folder.
    """
    # Opening a pipe would wait for a writer; for a regular file O_NONBLOCK changes nothing.
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CorruptCheckpointError(f"{path} is not a regular file")
    return file


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Opens a regular file for reading, without following a link, and yields its descriptor.

    Raises:
        CorruptCheckpointError: if there is no such file.
        OSError: if it cannot be read, for example for lack of permission.
    """
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


def read_json_object(path: Path, limit: int) -> bytes:
    """Returns the bytes of a JSON file of at most ``limit`` bytes.

    Raises:
        CorruptCheckpointError: if there is no such file, it is larger, or its first and last bytes, which are
            read before the rest, are not those of a JSON object.
    """
    with opened(path) as file:
        size = os.fstat(file).st_size
        if size > limit:
            raise CorruptCheckpointError(f"{path} has {size} bytes, more than the limit of {limit}")
        with os.fdopen(os.dup(file), "rb") as reader:
            if size > _UNCHECKED:
                first = reader.read(1)
                reader.seek(-1, os.SEEK_END)
                if first + reader.read(1) != b"{}":
                    raise CorruptCheckpointError(
                        f"{path} has {size} bytes and is not a JSON object"
                    )
                reader.seek(0)
            return reader.read(limit)


def loads(text: str | bytes, what: str) -> Any:
    """Parses JSON in UTF-8; raises CorruptCheckpointError if it is invalid or an object repeats a key."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{what} is not valid JSON: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise ValueError(f"it has the key {twice[:80]!r} twice")
    return result


def shown(value: Any) -> str:
    """A short text for a value of any size or depth, for error messages."""
    return reprlib.repr(value)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor without conjugate or negative bit.

    The view does not keep the tensor alive.
    """
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    assert not tensor.is_conj() and not tensor.is_neg()
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def write_all(file: int, data: memoryview) -> None:
    """Calls ``os.write`` until all of ``data`` is written."""
    while data:
        data = data[os.write(file, data) :]


def read_into(file: int, target: memoryview, at: int, where: str) -> None:
    """Fills ``target`` with the bytes of ``file`` that start at ``at``.

    Raises CorruptCheckpointError if the file ends before; ``where`` names it in the message.
    """
    while target:
        count = os.preadv(file, [target], at)
        if not count:
            raise CorruptCheckpointError(f"{where} ends at byte {at}, before the end of its data")
        target, at = target[count:], at + count


def crcs_of(data: memoryview) -> list[int]:
    """Returns the CRC-32 of each block of ``data``."""
    return [crc32(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)]


def crc_of(file: int, begin: int, size: int, where: str, buffer: memoryview | None = None) -> int:
    """Returns the CRC-32 of ``size`` bytes of a file, read through a small buffer."""
    buffer = memoryview(bytearray(_STRIDE)) if buffer is None else buffer
    crc = 0
    for at in range(0, size, _STRIDE):
        part = buffer[: min(_STRIDE, size - at)]
        read_into(file, part, begin + at, where)
        crc = crc32(part, crc)
    return crc


def verify_blocks(file: int, blocks: Iterable[tuple[int, int, int]], where: str) -> None:
    """Raises CorruptCheckpointError unless each block, (first byte, size, CRC-32), has its checksum."""
    buffer = memoryview(bytearray(_STRIDE))
    for begin, size, expected in blocks:
        crc = crc_of(file, begin, size, where, buffer)
        if crc != expected:
            raise CorruptCheckpointError(
                f"{where}: the bytes {begin} to {begin + size} are not those that were saved "
                f"(CRC-32 {crc:08x}, saved was {expected:08x})"
            )


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
