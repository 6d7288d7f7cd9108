"""Opens the files of a checkpoint's folder: ordinary files only, which nothing in the folder can redirect."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel3d.errors import CorruptCheckpointError

__all__ = ["check_file", "opened", "read_small"]

_LITTLE = 1 << 20
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ESTALE)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file by its number: not through a link, which may lead anywhere, and no pipe, which may never end.

    Raises:
        CorruptCheckpointError: there is no such file.
        CheckpointError: from others than this package's: it can't be read, for its rights, say.
    """
    # Opening a pipe would wait for its writer; for an ordinary file O_NONBLOCK changes nothing.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        number = os.open(path, flags)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        check_file(path)
        raise CorruptCheckpointError(f"{path} can't be read: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise CorruptCheckpointError(f"{path} is no ordinary file")
        yield number
    finally:
        os.close(number)


def read_small(path: Path, most: int) -> bytes:
    """What a file of JSON holds, an object.

    Raises:
        CorruptCheckpointError: there is no such file, or it has more than ``most`` bytes; or, before more of
            it is read than its ends, it is no object.
    """
    with opened(path) as number:
        size = os.fstat(number).st_size
        if size > most:
            raise CorruptCheckpointError(f"{path} has {size} bytes, more than it can have")
        with os.fdopen(os.dup(number), "rb") as file:
            if size > _LITTLE:  # what isn't is for the parser to say
                first = file.read(1)
                file.seek(-1, os.SEEK_END)
                if first + file.read(1) != b"{}":
                    raise CorruptCheckpointError(f"{path} has {size} bytes, and is no JSON object")
                file.seek(0)
            return file.read(most)


def check_file(path: Path, size: int | None = None) -> None:
    """Raises CorruptCheckpointError unless it is an ordinary file, of this size."""
    try:
        found = path.lstat()
    except OSError as error:
        raise CorruptCheckpointError(f"{path} can't be read: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise CorruptCheckpointError(f"{path} is no ordinary file")
    if size is not None and found.st_size != size:
        raise CorruptCheckpointError(f"{path} has {found.st_size} bytes; saved were {size}")
