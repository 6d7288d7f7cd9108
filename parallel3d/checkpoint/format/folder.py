"""Folders: the checkpoints of a run side by side, each written under a temporary name and renamed when
complete.

run/step-00000300/            COMPLETE, checkpoint.json, index.json, rank-00000.safetensors, ...
run/step-00000400.tmp-3f2a/   being written, or left by a process that was killed
run/saving.lock               held during a save, so that no other job saves into the folder
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import reprlib
import secrets
import shutil
import warnings
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from parallel3d.checkpoint.format import files
from parallel3d.checkpoint.format.lock import LOCK, Lock, Owner, this_process
from parallel3d.checkpoint.pieces import Boxed, check_tiles
from parallel3d.errors import CheckpointError, CorruptCheckpointError

_FILE = re.compile(r"rank-[0-9]{5,9}\.safetensors")


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Chunk(Boxed):
    """A part of a tensor (offsets and sizes) that is stored contiguously in one file."""

    file: str
    begin: int  # its first byte in the file
    crc: tuple[int, ...]  # CRC-32 of each of its blocks

    def nbytes(self, dtype: torch.dtype) -> int:
        return prod(self.sizes) * dtype.itemsize


@dataclass
class TensorEntry:
    """A stored tensor: its dtype, its global shape and the chunks it consists of."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class Index:
    """The content of index.json: all stored tensors, files and other values."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)  # size in bytes
    objects: dict[str, Any] = field(default_factory=dict)  # JSON values that are not tensors

    def to_json(self) -> str:
        tensors = {
            name: {
                "dtype": files.NAMES[entry.dtype],
                "shape": entry.shape,
                "chunks": [[c.offsets, c.sizes, c.file, c.begin, c.crc] for c in entry.chunks],
            }
            for name, entry in self.tensors.items()
        }
        content = {
            "block": files.BLOCK,
            "files": self.files,
            "tensors": tensors,
            "objects": self.objects,
        }
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes, what: str) -> Index:
        """Parses index.json, named ``what`` in errors; raises CorruptCheckpointError if it is invalid."""
        content, index = files.loads(text, what), cls()
        with files.damaged_if(f"{what} is damaged"):
            if content.get("block") != files.BLOCK:
                raise ValueError(f"its block size is not {files.BLOCK}")
            for name, size in files.get_of(content, "files", dict).items():
                if not _FILE.fullmatch(name):
                    raise ValueError(f"{name!r} is not the name of a checkpoint's file")
                (index.files[name],) = files.numbers_of([size], f"size of {name}")
            for name, entry in files.get_of(content, "tensors", dict).items():
                index.tensors[name] = _tensor(name, entry, index.files)
            files.check_disjoint(
                (chunk.file, chunk.begin, chunk.nbytes(entry.dtype), name)
                for name, entry in index.tensors.items()
                for chunk in entry.chunks
            )
            index.objects = files.get_of(content, "objects", dict)
            return index


def _tensor(name: str, entry: Any, lengths: dict[str, int]) -> TensorEntry:
    if not isinstance(entry, dict):
        raise ValueError(f"{name!r} is not a tensor")
    kind, chunks = entry.get("dtype"), entry.get("chunks")
    if not isinstance(kind, str) or kind not in files.DTYPES:
        raise ValueError(f"{name!r} has the dtype {reprlib.repr(kind)}")
    result = TensorEntry(
        files.DTYPES[kind], files.shape_of(entry.get("shape"), f"shape of {name!r}")
    )
    if not isinstance(chunks, list):
        raise ValueError(f"{name!r} has no chunks")
    parts = [_chunk(name, chunk, result, lengths) for chunk in chunks]
    check_tiles(name, result.shape, [part.box for part in parts])
    result.chunks = [chunk for chunk in parts if prod(chunk.sizes)]
    return result


def _chunk(name: str, chunk: Any, entry: TensorEntry, lengths: dict[str, int]) -> Chunk:
    if not isinstance(chunk, list) or len(chunk) != 5:
        raise ValueError(f"a chunk of {name!r} doesn't have 5 fields")
    offsets = files.numbers_of(chunk[0], "offsets of a chunk")
    sizes = files.numbers_of(chunk[1], "sizes of a chunk")
    file, (begin,) = chunk[2], files.numbers_of([chunk[3]], "begin of a chunk")
    if not isinstance(file, str) or file not in lengths:
        raise ValueError(f"{name!r} is stored in {reprlib.repr(file)}, which is not listed")
    result = Chunk(offsets, sizes, file, begin, files.numbers_of(chunk[4], "checksums of a chunk"))
    size = result.nbytes(entry.dtype)
    if begin + size > lengths[file]:
        raise ValueError(f"a chunk of {name!r} exceeds the end of {file}")
    if len(result.crc) != -(-size // files.BLOCK):
        raise ValueError(f"a chunk of {name!r} has {len(result.crc)} checksums")
    return result


INFO, INDEX, MARKER = "checkpoint.json", "index.json", "COMPLETE"
_LIMITS = {MARKER: 1 << 16, INDEX: 1 << 31, INFO: 1 << 31}  # bytes
_VERSION = 1
_FORMAT = f"parallel3d checkpoint {_VERSION}"
_STEP = re.compile(r"step-([0-9]{8,18})(\.old)?")
_TEMPORARY = re.compile(r"step-[0-9]{8,18}(\.old)?\.tmp-[0-9a-f]{8}")
_TEMPORARY_LOCK = re.compile(re.escape(LOCK) + "-[0-9a-f]{8}")
_OURS = re.compile(r"COMPLETE|checkpoint\.json|index\.json|rank-[0-9]{5,9}\.safetensors")
_LISTINGS = 3  # tries: during a listing an old folder may be removed and a new one be missed


def as_path(path: Any) -> Path:
    """Returns a user's argument as a Path; raises CheckpointError unless it is a string or a path."""
    try:
        return Path(path)
    except TypeError:
        raise CheckpointError(f"path is {path!r:.80}; it must be a string or a Path") from None


def step_folder(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


def new_folder(final: Path) -> Path:
    """Makes the temporary folder in which the checkpoint ``final`` is written, and returns it."""
    check_place(final)
    folder = _temporary(final)
    folder.mkdir(parents=True)
    return folder


def check_place(final: Path) -> None:
    """Raises CheckpointError if no checkpoint can be saved as ``final``: something else is there, which is
    never replaced; or the folder around it is a checkpoint itself, or a dangling link."""
    run = final.parent
    if is_checkpoint(run) and (os.path.lexists(run / MARKER) or _STEP.fullmatch(run.name)):
        raise CheckpointError(
            f"{run} is one checkpoint; give the run's folder, such as {run.parent}"
        )
    if run.is_symlink() and not run.exists():
        raise CheckpointError(f"{run} is a link to {os.readlink(run)}, where nothing is")
    if os.path.lexists(final) and not is_checkpoint(final) and not _is_ours(final):
        raise CheckpointError(
            f"{final} exists and is not a checkpoint of parallel3d, so it is not replaced: save elsewhere"
        )


def _temporary(final: Path) -> Path:
    return final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")


def finish(
    folder: Path, final: Path, index: Index, info: dict[str, Any], lock: Lock | None = None
) -> None:
    """Completes a checkpoint: writes index, info and the marker COMPLETE into ``folder``, which has the
    tensors, and renames it to ``final``. Raises CheckpointError if another job has taken over ``lock``."""
    digests = {}
    for name, text in ((INDEX, index.to_json()), (INFO, json.dumps(info, indent=1))):
        _write(folder / name, text)
        digests[name] = hashlib.sha256(text.encode()).hexdigest()
    files.sync_folder(folder)
    serial = 1 + max((_serial(entry) or 0 for entry in found_in(final.parent)), default=0)
    by = asdict(this_process())
    marker = {"format": _FORMAT, "serial": serial, "sha256": digests, "by": by}
    _write(folder / MARKER, json.dumps(marker))
    files.sync_folder(folder)
    if lock is not None:
        lock.check()
    old = final.with_name(f"{final.name}.old")
    if os.path.lexists(final):
        # The same step again: the old checkpoint stays valid until the rename.
        discard(old)
        final.rename(old)
    folder.rename(final)
    files.sync_folder(final.parent)
    discard(old)


def discard(folder: Path) -> None:
    """Removes a folder, renamed first: a process killed meanwhile leaves no part of it under its name."""
    try:
        if folder.is_symlink():
            folder.unlink(missing_ok=True)
            return
        if not _TEMPORARY.fullmatch(folder.name) and folder.is_dir():
            with contextlib.suppress(OSError):
                folder = folder.rename(_temporary(folder))
        shutil.rmtree(folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)  # what is left after the first error
        if os.path.lexists(folder):
            warnings.warn(
                f"{folder} could not be removed and takes up space: {error}; the next save tries again",
                stacklevel=2,
            )


def prune(run: Path, keep: int) -> None:
    """Removes all checkpoints of ``run`` but the ``keep`` saved last, and temporary folders of killed
    processes. A checkpoint whose marker is missing or unreadable is neither counted nor removed."""
    for old in [entry for entry in run.glob("step-*.old") if _STEP.fullmatch(entry.name)]:
        final = old.with_suffix("")
        if _serial(old) and not os.path.lexists(final):
            old.rename(final)  # a process was killed between the two renames of ``finish``
        elif _serial(final) and (_serial(old) or _is_ours(old)):
            discard(old)
    for folder in complete(run)[keep:]:
        discard(folder)
    for entry in list(run.iterdir()):
        if _TEMPORARY.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            discard(entry)
        elif _TEMPORARY_LOCK.fullmatch(entry.name):
            entry.unlink(missing_ok=True)


def _is_ours(folder: Path) -> bool:
    """Returns whether ``folder`` is a folder, no link, in which every file is named as a checkpoint's."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return all(_OURS.fullmatch(entry.name) for entry in folder.iterdir())


def identity(folder: Path) -> tuple[int, int, int] | None:
    """Returns a value that changes when the folder is removed or replaced; None if it does not exist."""
    try:
        status = folder.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns  # an inode number may be reused


def found_in(run: Path) -> list[Path]:
    """Returns folders and links in ``run`` named as checkpoints, complete or not, the one saved last first
    (not that of the largest step). Those without a readable marker come before: ``load`` reports them."""
    return next(filter(None, (_listed(run) for _ in range(_LISTINGS))), [])


def _listed(run: Path) -> list[Path]:
    entries = []
    for entry in run.iterdir():
        match = _STEP.fullmatch(entry.name)
        if match and (entry.is_dir() or entry.is_symlink()):
            serial = _serial(entry)
            entries.append((serial is None, serial or 0, int(match[1]), entry))
    return [entry for *_, entry in sorted(entries, reverse=True)]


def complete(run: Path) -> list[Path]:
    """Returns the completed checkpoints in ``run`` (marker readable), the one saved last first; no links."""
    return [folder for folder in found_in(run) if not folder.is_symlink() and _serial(folder)]


def _newest(run: Path) -> tuple[int, Path | None, Owner | None]:
    """Returns (number of the save, folder, saving process if known) of the checkpoint saved last."""
    for folder in found_in(run) if run.is_dir() else ():
        serial, by = (None, None) if folder.is_symlink() else _marker(folder)
        if serial:
            return serial, folder, Owner.from_json(by)
    return 0, None, None


def _marker(folder: Path) -> tuple[int | None, object]:
    """Returns (number of the save within its run, saving process) from COMPLETE; None if unreadable."""
    try:
        content = files.loads(_read(folder, MARKER), f"{folder}: {MARKER}")
    except (CorruptCheckpointError, OSError):
        return None, None
    serial = content.get("serial")
    valid = type(serial) is int and 0 < serial < 1 << 62
    return serial if valid else None, content.get("by")


def _serial(folder: Path) -> int | None:
    return _marker(folder)[0]


def is_checkpoint(path: Path) -> bool:
    """Returns whether ``path`` is one checkpoint, complete or not; a folder of several is not."""
    if os.path.lexists(path / MARKER):
        return True
    return any(os.path.lexists(path / name) for name in (INDEX, INFO)) and not found_in(path)


def open_checkpoint(folder: Path) -> tuple[Index, dict[str, Any]]:
    """Returns (index, content of checkpoint.json), after checking marker, SHA-256 and file sizes."""
    marker = files.loads(_read(folder, MARKER), f"{folder}: {MARKER}")
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
        digest = hashlib.sha256(texts[name]).hexdigest()
        if not isinstance(digests, dict) or digests.get(name) != digest:
            raise CorruptCheckpointError(f"{folder}: {name} has changed since it was saved")
    index = Index.from_json(texts[INDEX], f"{folder}: {INDEX}")
    info = files.loads(texts[INFO], f"{folder}: {INFO}")
    for name, size in index.files.items():
        files.check_file(folder / name, size)
    return index, info


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    if not os.path.lexists(path):
        what = "was not completed" if is_checkpoint(folder) else "is not a checkpoint of parallel3d"
        raise CorruptCheckpointError(f"{folder} {what}: it has no {name}")
    return files.read_json_object(path, _LIMITS[name])


def _write(path: Path, text: str) -> None:
    try:
        files.write_new(path, text.encode())
    except OSError as error:
        raise CheckpointError(f"{path} can't be written: {error}") from error


# Detects another job that saves into the same run folder between the saves of this one. The lock only shows
# saves at the same time. But each marker has the number of the save and the process: a checkpoint that this
# process has not saved and that did not exist when it last looked is another job's.

_known: dict[tuple[str, str], int] = {}
"""(token of the process, run) -> number of the last save that the process knows of."""


def note_newest(run: Path) -> None:
    """Records the newest save in ``run`` as known to this process, for ``check_alone``."""
    _known[_key(run)] = _newest(run)[0]


def check_alone(run: Path) -> None:
    """Checks that no other running job has saved into ``run`` since this process last looked. If one has, the
    job that started first warns, and the one that started later raises a CheckpointError."""
    known = _known.get(_key(run))
    if known is None:
        return
    serial, folder, by = _newest(run)
    this = this_process()
    if by is None or serial <= known or by.token == this.token or by.is_alive() is False:
        return
    text = (
        f"{run}: another job saves here too: {by}, has saved {folder.name if folder else ''} since this job "
        "last looked. Two jobs in one folder remove each other's checkpoints"
    )
    same_clock = this.machine and this.machine == by.machine and this.start != by.start
    mine, theirs = ((p.start,) if same_clock else (p.began, p.token) for p in (this, by))
    if mine < theirs:
        _known[_key(run)] = serial
        warnings.warn(f"{text}: end that one, or give it another folder", stacklevel=3)
        return
    raise CheckpointError(
        f"{text}: end one of them, or give it another folder. If the other one has ended, load or start "
        "again to continue from what it has saved"
    )


def _key(run: Path) -> tuple[str, str]:
    return this_process().token, os.path.realpath(run)
