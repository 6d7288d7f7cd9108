"""Folders: a run's checkpoints side by side, each made under another name and renamed when it is whole.

run/step-00000300/            COMPLETE, checkpoint.json, index.json, rank-00000.safetensors, ...
run/step-00000400.tmp-3f2a/   being written, or left by a process that was killed
run/saving.lock               while one is being saved: no other job saves here
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.format.index import Index, loads
from parallel3d.checkpoint.format.lock import LOCK, Lock, Owner, this_process
from parallel3d.errors import CheckpointError, CorruptCheckpointError

# Opens the files of a checkpoint's folder: ordinary files only, which nothing in the folder can
# redirect.

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


INFO, INDEX, MARKER = "checkpoint.json", "index.json", "COMPLETE"
_VERSION = 1
_FORMAT = f"parallel3d checkpoint {_VERSION}"
_STEP = re.compile(r"step-([0-9]{8,18})(\.old)?")
_LEFT = re.compile(r"step-[0-9]{8,18}(\.old)?\.tmp-[0-9a-f]{8}")
_LOCK_LEFT = re.compile(re.escape(LOCK) + "-[0-9a-f]{8}")
_OURS = re.compile(r"COMPLETE|checkpoint\.json|index\.json|rank-[0-9]{5,9}\.safetensors")
_LISTINGS = (
    3  # that find nothing: while one is read, an old folder may go and the new one come behind it
)
_MOST = {MARKER: 1 << 16, INDEX: 1 << 31, INFO: 1 << 31}  # bytes


def as_path(path: Any) -> Path:
    """What a user has given for a folder or file.

    Raises:
        CheckpointError: it is no path, or one in bytes.
    """
    try:
        return Path(path)
    except TypeError:
        raise CheckpointError(f"path is {path!r:.80}; it must be a string or a Path") from None


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` has its place."""
    return run / f"step-{step:08d}"


def step_of(final: Path) -> int:
    """The step of the checkpoint that has its place there."""
    match = _STEP.fullmatch(final.name)
    assert match is not None
    return int(match[1])


def new_folder(final: Path) -> Path:
    """Makes the folder that ``final`` is written in until it is whole.

    Raises:
        CheckpointError: as ``check_place``.
    """
    check_place(final)
    folder = _temporary(final)
    folder.mkdir(parents=True)
    return folder


def check_place(final: Path) -> None:
    """Makes sure that a checkpoint can have its place at ``final``.

    Raises:
        CheckpointError: there is something at ``final`` that is no checkpoint, and won't be replaced; or it
            would be in another checkpoint, or in a folder that a link leads to and isn't there.
    """
    run = final.parent
    if is_checkpoint(run) and (os.path.lexists(run / MARKER) or _STEP.fullmatch(run.name)):
        raise CheckpointError(
            f"{run} is one checkpoint; give the run's folder, such as {run.parent}"
        )
    if run.is_symlink() and not run.exists():
        raise CheckpointError(f"{run} is a link to {os.readlink(run)}, and there is nothing")
    if os.path.lexists(final) and not is_checkpoint(final) and not _is_ours(final):
        raise CheckpointError(
            f"{final} is there and no checkpoint of parallel3d; it is left as it is: save elsewhere"
        )


def _temporary(final: Path) -> Path:
    return final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")


def finish(
    folder: Path, final: Path, index: Index, info: dict[str, Any], lock: Lock | None = None
) -> None:
    """Completes a folder whose tensors are written, and gives it its name; under ``lock``, if there is one.

    Raises:
        CheckpointError: the lock was lost.
    """
    digests = {}
    for name, text in ((INDEX, index.to_json()), (INFO, json.dumps(info, indent=1))):
        _write(folder / name, text)
        digests[name] = hashlib.sha256(text.encode()).hexdigest()
    _sync(folder)
    serial = 1 + max((_serial(entry) or 0 for entry in found_in(final.parent)), default=0)
    by = this_process().as_json()
    marker = {"format": _FORMAT, "serial": serial, "sha256": digests, "by": by}
    _write(folder / MARKER, json.dumps(marker))
    _sync(folder)
    if lock is not None:
        lock.check()
    old = _old_of(final)
    if os.path.lexists(final):  # the same step again: while the names change, the old one counts
        discard(old)
        final.rename(old)
    folder.rename(final)
    _sync(final.parent)
    discard(old)


def _old_of(final: Path) -> Path:
    return final.with_name(f"{final.name}.old")


def discard(folder: Path) -> None:
    """Removes a folder: its name first, so that who is killed leaves no half of a checkpoint.

    What can't be removed is a warning: the save itself has been done.
    """
    failed: list[BaseException] = []

    def note(function: object, path: object, found: Any) -> None:
        error = found if isinstance(found, BaseException) else found[1]
        if not isinstance(error, FileNotFoundError):
            failed.append(error)

    if folder.is_symlink():
        try:
            folder.unlink(missing_ok=True)
        except OSError as error:
            failed.append(error)
    else:
        if not _LEFT.fullmatch(folder.name) and folder.is_dir():
            with contextlib.suppress(OSError):
                folder = folder.rename(_temporary(folder))
        if sys.version_info >= (3, 12):
            shutil.rmtree(folder, onexc=note)
        else:
            shutil.rmtree(folder, onerror=note)
    if failed:
        warnings.warn(
            f"{folder} could not be removed, and takes space: {failed[0]}; the next save tries again",
            stacklevel=2,
        )


def prune(run: Path, keep: int) -> None:
    """Leaves the ``keep`` checkpoints saved last, and removes what killed processes have left.

    One whose marker is missing or can't be read doesn't count, and stays for somebody to look at. More of
    them isn't read: one whose tensors are damaged counts as any other.
    """
    for old in [entry for entry in run.glob("step-*.old") if _STEP.fullmatch(entry.name)]:
        final = old.with_suffix("")
        if _serial(old) and not os.path.lexists(final):
            old.rename(final)  # who was replacing it was killed before the new one had its name
        elif _serial(final) and (_serial(old) or _is_ours(old)):
            discard(old)
    for folder in whole(run)[keep:]:
        discard(folder)
    for entry in list(run.iterdir()):
        if _LEFT.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            discard(entry)
        elif _LOCK_LEFT.fullmatch(entry.name):
            entry.unlink(missing_ok=True)


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder that has nothing but a checkpoint's files, all or some."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return all(_OURS.fullmatch(entry.name) for entry in folder.iterdir())


def identity(folder: Path) -> tuple[int, int, int] | None:
    """Of what has this name now: another one when it was removed, or replaced; None: there is nothing."""
    try:
        found = folder.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns  # a number may come again


def candidates(run: Path) -> list[Path]:
    """The folders that are named as checkpoints, whole or not, the one saved last first; no links."""
    return [entry for entry in found_in(run) if not entry.is_symlink()]


def found_in(run: Path) -> list[Path]:
    """Folders and links that are named as checkpoints, whole or not, the one saved last first.

    In the order in which they were saved, not of their steps: who has gone back to an earlier step and
    saved from there goes on from that. Where this can't be read the folder comes first, to be looked at.
    """
    for _ in range(_LISTINGS):
        if found := _listed(run):
            break
    return found


def _listed(run: Path) -> list[Path]:
    found = []
    for entry in run.iterdir():
        match = _STEP.fullmatch(entry.name)
        if match and (entry.is_dir() or entry.is_symlink()):
            serial = _serial(entry)
            found.append((serial is None, serial or 0, int(match[1]), entry))
    return [entry for *_, entry in sorted(found, reverse=True)]


def whole(run: Path) -> list[Path]:
    """Those of ``candidates`` that were completed; what is in them isn't looked at."""
    return [folder for folder in candidates(run) if _serial(folder)]


def newest(run: Path) -> tuple[int, Path | None, Owner | None]:
    """(which save made it, the folder, which process, if it says so) of the checkpoint saved last."""
    for folder in candidates(run) if run.is_dir() else ():
        marker = _marker(folder)
        if serial := _serial_in(marker):
            return serial, folder, Owner.from_json(marker.get("by"))
    return 0, None, None


def _marker(folder: Path) -> dict[str, Any]:
    """What COMPLETE says; nothing where that can't be read."""
    try:
        marker = loads(_read(folder, MARKER), MARKER)
    except (CorruptCheckpointError, OSError):
        return {}
    return marker if isinstance(marker, dict) else {}


def _serial(folder: Path) -> int | None:
    """Which save of its run made it; None where that can't be read."""
    return _serial_in(_marker(folder))


def _serial_in(marker: dict[str, Any]) -> int | None:
    serial = marker.get("serial")
    return serial if type(serial) is int and 0 < serial < 1 << 62 else None


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is one checkpoint, or was to be: not a run's folder, which may have a user's file of
    one of the names."""
    if os.path.lexists(path / MARKER):
        return True
    return any(os.path.lexists(path / name) for name in (INDEX, INFO)) and not found_in(path)


def open_checkpoint(folder: Path) -> tuple[Index, dict[str, Any]]:
    """(index, what checkpoint.json says), when marker, digests and the files' sizes are right.

    Raises:
        CorruptCheckpointError: something isn't.
        CheckpointError: a newer version has saved it.
    """
    marker = _loads(folder, MARKER, _read(folder, MARKER))
    newer = re.fullmatch(r"parallel3d checkpoint ([0-9]{1,9})", str(marker.get("format"))[:80])
    if newer and int(newer[1]) > _VERSION:
        raise CheckpointError(
            f"{folder} was saved by a newer version of parallel3d: its format is {newer[1]}, and this one "
            f"reads {_VERSION}; update parallel3d"
        )
    if marker.get("format") != _FORMAT:
        raise CorruptCheckpointError(f"{folder}: {MARKER} isn't that of a {_FORMAT!r}")
    digests = marker.get("sha256")
    texts = {}
    for name in (INDEX, INFO):
        texts[name] = _read(folder, name)
        found = hashlib.sha256(texts[name]).hexdigest()
        if not isinstance(digests, dict) or digests.get(name) != found:
            raise CorruptCheckpointError(f"{folder}: {name} has changed since it was saved")
    try:
        index = Index.from_json(texts[INDEX])
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{folder}: {error}") from None
    info = _loads(folder, INFO, texts[INFO])
    for name, size in index.files.items():
        check_file(folder / name, size)
    return index, info


def _loads(folder: Path, name: str, text: bytes) -> dict[str, Any]:
    try:
        found = loads(text, name)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{folder}: {error}") from None
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{folder}: {name} is no JSON object")
    return found


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    if not os.path.lexists(path):
        what = "was not completed" if is_checkpoint(folder) else "is no checkpoint of parallel3d"
        raise CorruptCheckpointError(f"{folder} {what}: it has no {name}")
    return read_small(path, _MOST[name])


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} can't be written: {error}") from error


def _sync(folder: Path) -> None:
    """Brings a folder's names to the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# Whether another job saves into a run's folder too, between the saves of this one.
#
# A lock tells of two saves at the same time; two jobs seldom save at the same time. But each
# checkpoint says which save of its run it was and which process made it: one that this process
# hasn't made and that wasn't there when it last looked is another job's.

_seen: dict[tuple[str, str], int] = {}
"""(process's token, run) -> the last save that the process knows of."""


def looked(run: Path) -> None:
    """What is in ``run`` now is known to this process: it has been asked for, or it has saved."""
    _seen[_key(run)] = newest(run)[0]


def check_alone(run: Path) -> None:
    """Looks whether another job, that lives or may live, has saved into ``run`` since this process looked.

    It is an error in the job that was started later, and a warning in the one before.

    Raises:
        CheckpointError: as said.
    """
    known = _seen.get(_key(run))
    if known is None:
        return
    serial, folder, by = newest(run)
    mine = this_process()
    if by is None or serial <= known or by.token == mine.token or by.is_alive() is False:
        return
    text = (
        f"{run}: another job saves here too: {by}, has saved {folder.name if folder else ''} since this job "
        "last looked. Two jobs in one folder remove each other's checkpoints"
    )
    if _is_before(mine, by):
        _seen[_key(run)] = serial
        warnings.warn(f"{text}: end that one, or give it another folder", stacklevel=3)
        return
    raise CheckpointError(
        f"{text}: end one of them, or give it another folder. If that one has ended, load again (or start "
        "again) to go on from what it has saved"
    )


def _is_before(mine: Owner, other: Owner) -> bool:
    if mine.machine and mine.machine == other.machine and mine.start != other.start:
        return mine.start < other.start
    return (mine.began, mine.token) < (other.began, other.token)


def _key(run: Path) -> tuple[str, str]:
    return this_process().token, os.path.realpath(run)
