"""Lock: keeps other jobs from saving into a run's folder during a save.

The file ``saving.lock`` exists from before a save makes its folder until it has removed old checkpoints, and
names the process that saves. It needs hard links or exclusive creation, so it works on NFS, without
``flock``. A killed process leaves it behind. On the same machine the next save sees that the process has
ended; for another machine it can only watch whether the file's time still changes, which its holder sets
every few seconds. Clocks of different machines are never compared.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TypeGuard

from parallel3d.checkpoint.format.files import loads, opened, write_new
from parallel3d.errors import CheckpointError, CorruptCheckpointError

LOCK = "saving.lock"
BEAT = 5.0  # seconds between two heartbeats
SILENCE = 60.0
"""Seconds without a heartbeat after which a lock of another machine is broken. If its process was only
frozen, it finds that before it completes its checkpoint."""
_UNREADABLE = 3.0  # seconds: a file without valid content may be one that is being written
_LOOK = 0.25  # seconds between two looks at a lock
_SETTLE = 0.5  # seconds in which several processes may take over one lock
_BEGAN = time.time()

_held: set[bytes] = set()
"""Contents of this process's locks."""


@dataclass(frozen=True)
class Owner:
    """A process, identified so that another process, job or machine can check it."""

    host: str
    pid: int
    machine: str
    """Identifies the boot of the machine and the pid namespace: processes with the same value see the same
    pids. It is "" if the system does not say."""
    start: int  # when the process started, in kernel ticks; pids are reused
    began: float  # about the same in seconds since 1970
    token: str  # unique

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, started {_format(self.began)}"

    def is_alive(self) -> bool | None:
        """Returns whether the process still runs; None if unknown, as for another machine."""
        if not self.machine or self.machine != this_process().machine:
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # another user's process
            pass
        status = _stat(self.pid)
        if status is None:
            return None  # ended just now, or hidden from other users
        return status[1] == self.start and status[0] not in "ZX"

    @classmethod
    def from_json(cls, content: object) -> Owner | None:
        """Returns the Owner that a parsed JSON object describes; None if it describes none."""
        try:
            owner = cls(**{field.name: content[field.name] for field in fields(cls)})  # type: ignore[index]
        except (TypeError, KeyError):
            return None
        texts, numbers = (owner.host, owner.machine, owner.token), (owner.pid, owner.start)
        valid = (
            all(type(text) is str and len(text) < 300 and text.isprintable() for text in texts)
            and all(type(number) is int for number in numbers)
            and 0 < owner.pid < 1 << 31
            and _is_time(owner.began)
        )
        return owner if valid else None


def this_process() -> Owner:
    return _process(os.getpid())


@cache
def _process(pid: int) -> Owner:
    """Returns the calling process as an Owner, cached by its ``pid``, which a fork changes."""
    machine, start = "", 0
    with suppress(OSError):
        if status := _stat(pid):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine, start = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}", status[1]
    return Owner(socket.gethostname(), pid, machine, start, _BEGAN, secrets.token_hex(8))


def _stat(pid: int) -> tuple[str, int] | None:
    """Returns (state letter, start time in kernel ticks) of a process from /proc; None if not known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        # The second field, the command in brackets, may itself contain blanks and brackets.
        words = text[text.rindex(b")") + 1 :].split()
        return words[0].decode(), int(words[19])
    except (OSError, ValueError, IndexError):
        return None


def _is_time(value: object) -> TypeGuard[float]:
    return type(value) in (int, float) and 0 <= value < 1e11  # type: ignore[operator]


def _format(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


class Lock:
    """The lock of the folder ``run`` for one save, of ``step``. The constructor takes it, and raises
    CheckpointError if another job is saving there."""

    def __init__(self, run: Path, step: int) -> None:
        self.path = run / LOCK
        self._step = step
        self._pid = os.getpid()
        self._take()

    def _take(self) -> None:
        content = {"owner": asdict(this_process()), "since": time.time(), "step": self._step}
        self._text = json.dumps({"parallel3d lock": secrets.token_hex(8), **content}).encode()
        self._ended = threading.Event()
        _held.add(self._text)
        try:
            file = _make(self.path, self._text)
        except BaseException:
            self._drop()
            raise
        beat, name = (file, self._ended), "parallel3d-saving-lock"
        threading.Thread(target=_beat, args=beat, name=name, daemon=True).start()

    def check(self) -> None:
        """Raises CheckpointError if another job took over the lock; takes it again if it was removed."""
        text, _ = _read(self.path)
        if text is None:
            self._drop()
            self._take()
        elif text != self._text:
            _, holder = _saver(text) or (None, "somebody")
            raise CheckpointError(
                f"{self.path.parent}: this save's lock was taken over by {holder}, because it gave no sign "
                f"of life for {SILENCE:.0f} s or was removed; the checkpoint is not completed. Two jobs must "
                "not save into one folder: end one of them, or give it another folder"
            )

    def release(self) -> None:
        """Removes the lock's file; only warns if that fails: the next save sees that this one has ended."""
        if os.getpid() != self._pid:  # in a forked process; the lock is the parent's
            return
        self._drop()
        if _read(self.path)[0] == self._text:
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                warnings.warn(f"{self.path} could not be removed: {error}", stacklevel=2)

    def _drop(self) -> None:
        _held.discard(self._text)
        self._ended.set()


def _beat(file: int, ended: threading.Event) -> None:
    """Sets the lock file's modification time every ``BEAT`` seconds until ``ended`` is set; closes it."""
    with suppress(OSError):  # ``Lock.check`` finds what has become of the lock
        while not ended.wait(BEAT):
            os.utime(file)
    os.close(file)


def _make(path: Path, own: bytes) -> int:
    """Takes the lock: writes its file ``path`` with the content ``own`` and returns the open file. Waits
    while it is unclear whether the present holder is alive, and raises CheckpointError if it is."""
    seen, since = (own, 0), 0.0
    while True:
        text, changed_at = _read(path)
        if text is None:
            _put(path, own, None)
            continue
        if text == own:
            return os.open(path, os.O_RDWR)
        first = seen == (own, 0)
        changed = seen != (text, changed_at)
        if changed:
            seen, since = (text, changed_at), time.monotonic()
        silent = time.monotonic() - since
        owner, holder = _saver(text) or (None, "")
        if owner is not None:
            mine = owner.token == this_process().token
            alive = text in _held if mine else owner.is_alive()
            if alive or (changed and not first):
                raise CheckpointError(
                    f"{path.parent} is being saved into already, by {holder}. Two jobs in one folder would "
                    "remove each other's checkpoints: end one of them, or give it another folder. (If that "
                    f"process no longer saves here, remove {path})"
                )
            if alive is False or silent > SILENCE:
                silence = f"it has given no sign of life for {SILENCE:.0f} s"
                why = "that process has ended" if alive is False else silence
                warnings.warn(f"{path} was left by {holder}; {why}: it is removed", stacklevel=2)
                _put(path, own, text)
                continue
        elif silent > _UNREADABLE:
            raise CheckpointError(
                f"{path} doesn't say who saves there; if nobody saves into this folder, remove that file, or "
                "save elsewhere"
            )
        time.sleep(_LOOK)


def _put(path: Path, own: bytes, old: bytes | None) -> None:
    """Writes the lock's file with the content ``own``: as a new file if ``old`` is None, unless one exists by
    then; else in place of the file with the content ``old``. If several processes replace it, the last one
    has the lock; each finds out by reading the file again."""
    aside = path.with_name(f"{LOCK}-{secrets.token_hex(4)}")
    try:
        write_new(aside, own)
        if old is None:
            try:
                os.link(aside, path)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                write_new(path, own)
        elif _read(path)[0] == old:
            os.replace(aside, path)
            time.sleep(_SETTLE)
    except FileExistsError:
        pass
    except OSError as error:
        raise CheckpointError(f"{path} can't be written: {error}") from error
    finally:
        with suppress(OSError):
            aside.unlink()


def _saver(text: bytes) -> tuple[Owner, str] | None:
    """Parses a lock's content; returns (the process that saves, a description of it), None if invalid."""
    try:
        content = loads(text.partition(b"\n")[0], LOCK)
    except CorruptCheckpointError:
        return None
    owner = Owner.from_json(content.get("owner"))
    since, step = content.get("since"), content.get("step")
    if owner is None or not _is_time(since) or type(step) is not int:
        return None
    return owner, f"{owner}, saving step {step} since {_format(since)}"


def _read(path: Path) -> tuple[bytes | None, int]:
    """Returns (content of the lock's file, None if there is no file; its modification time in ns)."""
    try:
        with opened(path) as file:
            return os.read(file, 1 << 16), os.fstat(file).st_mtime_ns
    except (CorruptCheckpointError, OSError):  # no regular file, or removed just now
        return b"" if os.path.lexists(path) else None, 0
