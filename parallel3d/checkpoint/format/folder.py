"""Folders: a run's checkpoints side by side, each made under another name and renamed when it is whole.

run/step-00000300/            COMPLETE, checkpoint.json, index.json, rank-00000.safetensors, ...
run/step-00000400.tmp-3f2a/   being written, or left by a process that was killed
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.format.index import Index, loads
from parallel3d.errors import CheckpointError, CorruptCheckpointError

__all__ = [
    "candidates",
    "discard",
    "finish",
    "is_checkpoint",
    "new_folder",
    "open_checkpoint",
    "prune",
    "step_folder",
]

INFO, INDEX, MARKER = "checkpoint.json", "index.json", "COMPLETE"
_FORMAT = "parallel3d checkpoint 1"
_STEP = re.compile(r"step-(\d{8,18})(\.old)?")
_LEFT = re.compile(r"step-\d{8,18}\.(tmp|old)(-[0-9a-f]{8})?")


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` has its place."""
    return run / f"step-{step:08d}"


def new_folder(final: Path) -> Path:
    """Makes the folder that ``final`` is written in until it is whole."""
    folder = final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")
    folder.mkdir(parents=True)
    return folder


def finish(folder: Path, final: Path, index: Index, info: dict[str, Any]) -> None:
    """Completes a folder whose tensors are written, and gives it its name."""
    digests = {}
    for name, text in ((INDEX, index.to_json()), (INFO, json.dumps(info, indent=1))):
        _write(folder / name, text)
        digests[name] = hashlib.sha256(text.encode()).hexdigest()
    _sync(folder)
    serial = 1 + max((_serial(entry) or 0 for entry in candidates(final.parent)), default=0)
    marker = {"format": _FORMAT, "serial": serial, "sha256": digests}
    _write(folder / MARKER, json.dumps(marker))
    _sync(folder)
    old = final.with_name(f"{final.name}.old")
    if final.exists():  # the same step again: while the names change, the old one counts
        discard(old)
        final.rename(old)
    folder.rename(final)
    _sync(final.parent)
    discard(old)


def discard(folder: Path) -> None:
    """Removes a folder: its name first, so that what a killed process leaves of it is known to be nothing."""
    if _STEP.fullmatch(folder.name):
        left = folder.with_name(f"{folder.name.removesuffix('.old')}.old-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            folder = folder.rename(left)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        (folder / MARKER).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def prune(run: Path, keep: int) -> None:
    """Leaves the ``keep`` checkpoints saved last, and removes what killed processes have left."""
    complete = [folder for folder in candidates(run) if (folder / MARKER).exists()]
    for folder in complete[keep:]:
        discard(folder)
    for entry in run.iterdir():
        if _LEFT.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            discard(entry)


def candidates(run: Path) -> list[Path]:
    """The folders that are named as checkpoints, whole or not, the one saved last first.

    In the order in which they were saved, not of their steps: who has gone back to an earlier step and
    saved from there goes on from that. Where this can't be read the folder comes first, to be looked at.
    """
    found = []
    for entry in run.iterdir():
        match = _STEP.fullmatch(entry.name)
        if match and entry.is_dir() and not entry.is_symlink():
            serial = _serial(entry)
            found.append((serial is None, serial or 0, int(match[1]), entry))
    return [entry for *_, entry in sorted(found, reverse=True)]


def _serial(folder: Path) -> int | None:
    """Which save of its run made it; None where that can't be read."""
    try:
        marker = loads(_read(folder, MARKER), MARKER)
    except (CorruptCheckpointError, OSError):
        return None
    serial = marker.get("serial") if isinstance(marker, dict) else None
    return serial if type(serial) is int and serial > 0 else None


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is one checkpoint, or was to be: not a run's folder."""
    return any((path / name).exists() for name in (MARKER, INDEX, INFO))


def open_checkpoint(folder: Path) -> tuple[Index, dict[str, Any]]:
    """(index, what checkpoint.json says), when marker, digests and the files' sizes are right.

    Raises:
        CorruptCheckpointError: something isn't.
    """
    marker = loads(_read(folder, MARKER), MARKER)
    if not isinstance(marker, dict) or marker.get("format") != _FORMAT:
        raise CorruptCheckpointError(f"{folder}: {MARKER} isn't that of a {_FORMAT!r}")
    digests = marker.get("sha256")
    texts = {}
    for name in (INDEX, INFO):
        texts[name] = _read(folder, name)
        found = hashlib.sha256(texts[name]).hexdigest()
        if not isinstance(digests, dict) or digests.get(name) != found:
            raise CorruptCheckpointError(f"{folder}: {name} has changed since it was saved")
    try:
        index, info = Index.from_json(texts[INDEX]), loads(texts[INFO], INFO)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{folder}: {error}") from None
    if not isinstance(info, dict):
        raise CorruptCheckpointError(f"{folder}: {INFO} is no JSON object")
    for name, size in index.files.items():
        _check_file(folder / name, size)
    return index, info


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.exists():
        what = "was not completed" if is_checkpoint(folder) else "is no checkpoint of parallel3d"
        raise CorruptCheckpointError(f"{folder} {what}: it has no {name}")
    _check_file(path)
    return path.read_bytes()


def _check_file(path: Path, size: int | None = None) -> None:
    """Raises unless it is an ordinary file, of this size: no link, which may lead anywhere."""
    try:
        found = path.lstat()
    except OSError as error:
        raise CorruptCheckpointError(f"{path} can't be read: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise CorruptCheckpointError(f"{path} is no ordinary file")
    if size is not None and found.st_size != size:
        raise CorruptCheckpointError(f"{path} has {found.st_size} bytes; saved were {size}")


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
