"""Lock: keeps other jobs from saving into a run's folder during a save.

The file ``saving.lock`` exists from before a save makes its folder until it has removed old checkpoints, and
names the process that saves. It needs hard links or exclusive creation, so it works on NFS, without
``flock``. A killed process leaves it behind. On the same machine the next save sees that the process has
ended; for another machine it can only watch whether the lock still changes, which it does every few seconds.
Clocks of different machines are never compared.
"""

from __future__ import annotations

import errno
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
from itertools import count
from pathlib import Path

from parallel3d.checkpoint.format.files import loads, write_new
from parallel3d.errors import CheckpointError, CorruptCheckpointError

_MAX_TEXT = 300  # characters of a text field


@dataclass(frozen=True)
class Owner:
    """A process, identified so that another process, job or machine can check it."""

    host: str
    pid: int
    machine: str
    """Identifies the boot of the machine and the pid namespace: processes with the same value see the same
    pids. It is "" if the system does not say."""
    start: int  # when the process started, in kernel ticks; pids are reused
    began: float  # the same in seconds since 1970
    token: str  # unique

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, started {format_time(self.began)}"

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
        state, start = status
        return start == self.start and state not in "ZX"

    @classmethod
    def from_json(cls, content: object) -> Owner | None:
        """Returns the process that ``content`` describes; None if it is not a valid description."""
        names = {field.name for field in fields(cls)}
        if not isinstance(content, dict) or not names <= set(content):
            return None
        owner = cls(**{name: content[name] for name in names})
        texts = (owner.host, owner.machine, owner.token)
        valid = (
            all(type(text) is str and len(text) < _MAX_TEXT for text in texts)
            and all(type(number) is int for number in (owner.pid, owner.start))
            and (0 < owner.pid < 1 << 31 and 0 <= owner.start < 1 << 62)
            and (type(owner.began) in (int, float) and abs(owner.began) < 1e12)
            and owner.host.isprintable()
        )
        return owner if valid else None


def this_process() -> Owner:
    return _process(os.getpid())


@cache
def _process(pid: int) -> Owner:
    """Describes the calling process; cached by ``pid``, as a forked process is another one."""
    status = _stat(pid)
    return Owner(
        host=socket.gethostname(),
        pid=pid,
        machine="" if status is None else _machine(),
        start=0 if status is None else status[1],
        began=time.time() if status is None else _seconds(status[1]),
        token=secrets.token_hex(8),
    )


def format_time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return f"at second {seconds:.0f}"


def _stat(pid: int) -> tuple[str, int] | None:
    """Returns (state, start in ticks) of a process; None if the kernel does not say."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        # The second field, the command in brackets, may itself contain blanks and brackets.
        words = text[text.rindex(b")") + 1 :].split()
        return words[0].decode(), int(words[19])
    except (OSError, ValueError, IndexError):
        return None


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _seconds(ticks: int) -> float:
    """Converts ticks since this machine's boot to seconds since 1970."""
    try:
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):
        return time.time()
    return time.time() - max(age, 0.0)


LOCK = "saving.lock"
BEAT = 5.0  # seconds between two heartbeats
SILENCE = 60.0
"""Seconds without a heartbeat after which a lock of another machine is broken. If its process was only
frozen, it finds that before it completes its checkpoint."""
_UNREADABLE = 3.0  # seconds: a file without valid content may be one that is being written
_LOOK = 0.25  # seconds between two looks at such a lock
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)
_LIMIT = 1 << 16  # bytes

_held: set[str] = set()
"""Tokens of this process's locks."""


class Lock:
    """Holds the folder ``run`` for one save, of ``step``; an error if another job saves there."""

    def __init__(self, run: Path, step: int) -> None:
        self.path = run / LOCK
        self._step = step
        self._pid = os.getpid()
        self._take()

    def _take(self) -> None:
        token = secrets.token_hex(8)
        owner = asdict(this_process())
        content = {
            "parallel3d lock": token,
            "owner": owner,
            "since": time.time(),
            "step": self._step,
        }
        text = json.dumps(content)
        file = _make(self.path, f"{text}\n{0:012d}\n".encode())
        _held.add(token)
        self._token, self._ended = token, threading.Event()
        beat, name = (file, len(text) + 1, self._ended), "parallel3d-saving-lock"
        threading.Thread(target=_beat, args=beat, name=name, daemon=True).start()

    def check(self) -> None:
        """Checks that no other job has taken the lock; takes it again if somebody has removed it."""
        content, holder = self._holder()
        if holder is not None and holder.token == self._token:
            return
        if content is None:
            self._drop()
            self._take()
            return
        raise CheckpointError(
            f"{self.path.parent}: this save's lock was taken over by {holder or 'somebody'}, because it gave "
            f"no sign of life for {SILENCE:.0f} s or was removed; the checkpoint is not completed. Two jobs "
            "must not save into one folder: end one of them, or give it another folder"
        )

    def release(self) -> None:
        """Removes the lock; warns if that fails, as the next save sees that this one has ended."""
        if os.getpid() != self._pid:  # in a forked process; the lock is the parent's
            return
        self._drop()
        _, holder = self._holder()
        if holder is None or holder.token != self._token:
            return
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(f"{self.path} could not be removed: {error}", stacklevel=2)

    def _holder(self) -> tuple[bytes | None, _Holder | None]:
        content = _read(self.path)
        return content, None if content is None else _Holder.of(content)

    def _drop(self) -> None:
        _held.discard(self._token)
        self._ended.set()


def _beat(file: int, place: int, ended: threading.Event) -> None:
    """Writes a growing count into the lock until the save has ended, and closes the file."""
    numbers = count(1)
    try:
        while not ended.wait(BEAT):
            os.pwrite(file, f"{next(numbers):012d}".encode(), place)
            os.fsync(file)
    except OSError:  # ``Lock.check`` finds what has become of the lock
        pass
    finally:
        os.close(file)


@dataclass
class _Holder:
    """The content of a lock."""

    token: str
    owner: Owner
    since: float
    step: int

    @classmethod
    def of(cls, text: bytes) -> _Holder | None:
        """Parses a lock; returns None if it is not one."""
        try:
            content = loads(text.partition(b"\n")[0], LOCK)
        except CorruptCheckpointError:
            return None
        token, since, step = (content.get(key) for key in ("parallel3d lock", "since", "step"))
        owner = Owner.from_json(content.get("owner"))
        if owner is None or (type(token), type(since), type(step)) != (str, float, int):
            return None
        return cls(token, owner, since, step)  # type: ignore[arg-type]

    def is_alive(self) -> bool | None:
        """As ``Owner.is_alive``; a lock of this process is alive while its save runs."""
        if self.owner.token == this_process().token:
            return self.token in _held
        return self.owner.is_alive()

    def __str__(self) -> str:
        return f"{self.owner}, saving step {self.step} since {format_time(self.since)}"


def _make(path: Path, text: bytes) -> int:
    """Makes the lock when nobody holds it, and returns its file, open."""
    seen: tuple[bytes, float] | None = None  # content, and when it was first seen
    while True:
        content = _read(path)
        if content is None:
            try:
                file = _create(path, text)
            except OSError as error:
                raise CheckpointError(f"{path} can't be written: {error}") from error
            if file is not None:
                return file
            continue
        holder = _Holder.of(content)
        alive = None if holder is None else holder.is_alive()
        changed = seen is not None and seen[0] != content
        if holder is not None and (alive or changed):
            raise CheckpointError(
                f"{path.parent} is being saved into already, by {holder}. Two jobs in one folder would "
                "remove each other's checkpoints: end one of them, or give it another folder. (If that "
                f"process no longer saves here, remove {path})"
            )
        if holder is not None and alive is False:
            _break(path, content, f"{holder}; that process has ended")
            continue
        if seen is None or changed:
            seen = content, time.monotonic()
        silent = time.monotonic() - seen[1]
        if holder is not None and silent > SILENCE:
            _break(path, content, f"{holder}; it has given no sign of life for {SILENCE:.0f} s")
        elif holder is None and silent > _UNREADABLE:
            raise CheckpointError(
                f"{path} doesn't say who saves there; if nobody saves into this folder, remove that file, or "
                "save elsewhere"
            )
        else:
            time.sleep(_LOOK)


def _create(path: Path, text: bytes) -> int | None:
    """Creates the lock with its content in one step, and returns it open; None if it already exists."""
    temporary = path.with_name(f"{LOCK}-{secrets.token_hex(4)}")
    try:
        write_new(temporary, text)
        try:
            os.link(temporary, path)
        except FileExistsError:
            if os.stat(temporary).st_nlink != 2:  # else NFS lost the reply to a first try
                return None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            write_new(path, text)
        return os.open(path, os.O_RDWR)
    except (FileExistsError, FileNotFoundError):
        if not path.parent.is_dir():
            raise
        return None
    finally:
        with suppress(OSError):
            temporary.unlink()


def _break(path: Path, content: bytes, why: str) -> None:
    """Removes a lock with this content, which nobody holds, and warns."""
    aside = path.with_name(f"{LOCK}-{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:  # another process has removed it
        return
    if _read(aside) != content:  # another process has made a new one, or the holder lives
        try:
            os.link(aside, path)
        except FileExistsError:
            pass
        except OSError:  # no hard links here
            os.rename(aside, path)
    else:
        warnings.warn(f"{path} was left by {why}: it is removed", stacklevel=2)
    with suppress(OSError):
        aside.unlink()


def _read(path: Path) -> bytes | None:
    """Returns the file's content; None if it does not exist."""
    try:
        # Neither waits for a pipe's writer nor follows a link.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return None
    except OSError:
        return b""
    try:
        return os.read(file, _LIMIT)
    except OSError:  # NFS: removed just now on another machine
        return None
    finally:
        os.close(file)
