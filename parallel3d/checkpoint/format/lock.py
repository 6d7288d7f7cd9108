"""Lock: while a save of one job writes into a run's folder, no other job does.

``saving.lock`` is there from the moment that a save makes its folder until it has removed old checkpoints. It
says who saves: host, process, time. It works where hard links or exclusive creation do, also on NFS, without
``flock``. A process that was killed leaves it: on the same machine the next save sees that the process has
gone; of another machine nothing can be known but whether the lock still changes, which it does every few
seconds. No clock of one machine is compared with another's.
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
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.format.index import loads
from parallel3d.errors import CheckpointError, CorruptCheckpointError

# Owner: which process writes, in words that another process, job or machine can check.

_LONGEST = 300  # characters of a text in one that is read


@dataclass(frozen=True)
class Owner:
    """A process.

    Attributes:
        host, pid: of its machine's name; its number there.
        machine: which boot of which machine, and which namespace of processes: two with the same one see the
            same processes under the same numbers. "" where the system doesn't say.
        start: when the process was started, in the kernel's ticks: its number alone may have come again.
        began: the same in seconds since 1970.
        token: like no other process's.
    """

    host: str
    pid: int
    machine: str
    start: int
    began: float
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, started {at(self.began)}"

    def is_alive(self) -> bool | None:
        """Whether the process still runs; None: that can't be known here, as on another machine."""
        if not self.machine or self.machine != this_process().machine:
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # it is another user's
            pass
        found = _stat(self.pid)
        if found is None:
            return None  # ended just now, or hidden from other users
        state, start = found
        return start == self.start and state not in "ZX"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: object) -> Owner | None:
        """None: that is none."""
        names = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or not names <= set(found):
            return None
        owner = cls(**{name: found[name] for name in names})
        texts = (owner.host, owner.machine, owner.token)
        numbers = (owner.pid, owner.start)
        if not all(type(text) is str and len(text) < _LONGEST for text in texts):
            return None
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
            return None
        known = (
            0 < owner.pid < 1 << 31
            and type(owner.began) in (int, float)
            and abs(owner.began) < 1e12
        )
        return owner if known and owner.host.isprintable() else None


def this_process() -> Owner:
    """The process that asks."""
    return _process(os.getpid())


@cache
def _process(pid: int) -> Owner:
    """Of ``pid``, this process's: one that was forked is another."""
    found = _stat(pid)
    return Owner(
        host=socket.gethostname(),
        pid=pid,
        machine="" if found is None else _machine(),
        start=0 if found is None else found[1],
        began=time.time() if found is None else _seconds(found[1]),
        token=secrets.token_hex(8),
    )


def at(seconds: float) -> str:
    """A time, in words that are the same on every machine."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return f"at second {seconds:.0f}"


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, start in ticks) of a process; None where the kernel doesn't tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        # The second field, the command in brackets, may itself have blanks and brackets.
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
    """``ticks`` since this machine was started, as a time."""
    try:
        up = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):
        return time.time()
    return time.time() - max(up, 0.0)


LOCK = "saving.lock"
BEAT = 5.0  # seconds between two signs of life
SILENCE = 60.0
"""Seconds without one after which a lock of another machine is broken. If its process lives after all (it was
frozen), it finds that before it completes its checkpoint."""
_UNREADABLE = 3.0  # seconds: a file that says nothing may be one that is being written
_LOOK = 0.25  # seconds between two looks at such a lock
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)
_MOST = 1 << 16  # bytes

_held: set[str] = set()
"""Tokens of this process's locks."""


class Lock:
    """One save's hold on a run's folder.

    Args:
        run: the folder, which is there.
        step: that is being saved, for who finds it.

    Raises:
        CheckpointError: another job saves there, or a file of this name is nobody's lock.
    """

    def __init__(self, run: Path, step: int) -> None:
        self.path = run / LOCK
        self._step = step
        self._process = os.getpid()
        self._ended = threading.Event()
        self._take()

    def _take(self) -> None:
        token = secrets.token_hex(8)
        text = json.dumps(
            {
                "parallel3d lock": token,
                "owner": this_process().as_json(),
                "since": time.time(),
                "step": self._step,
            }
        )
        file = _make(self.path, f"{text}\n{0:012d}\n".encode())
        _held.add(token)
        self._token, self._ended = token, threading.Event()
        threading.Thread(
            target=_beat,
            args=(file, len(text) + 1, self._ended),
            name="parallel3d-saving-lock",
            daemon=True,
        ).start()

    def check(self) -> None:
        """Makes sure that it is still this save's: if somebody has removed it, that nobody else has taken it.

        Raises:
            CheckpointError: another job has.
        """
        found = _read(self.path)
        holder = None if found is None else _Holder.of(found)
        if holder is not None and holder.token == self._token:
            return
        if found is None:
            self._drop()
            self._take()
            return
        raise CheckpointError(
            f"{self.path.parent}: this save's lock was taken over by {holder or 'somebody'}, for it gave no "
            f"sign of life for {SILENCE:.0f} s, or was removed; the checkpoint is not completed. Two jobs "
            "must not save into one folder: end one of them, or give it another folder"
        )

    def release(self) -> None:
        """The save is over. A lock that can't be removed is a warning: who finds it sees that it is over."""
        if os.getpid() != self._process:  # forked meanwhile; the parent's
            return
        self._drop()
        found = _read(self.path)
        holder = None if found is None else _Holder.of(found)
        if holder is None or holder.token != self._token:
            return
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(f"{self.path} could not be removed: {error}", stacklevel=2)

    def _drop(self) -> None:
        _held.discard(self._token)
        self._ended.set()


def _beat(file: int, place: int, ended: threading.Event) -> None:
    """Gives signs of life until the save has ended. The file is closed here, where it is written."""
    count = 0
    try:
        while not ended.wait(BEAT):
            count += 1
            os.pwrite(file, f"{count:012d}".encode(), place)
            os.fsync(file)
    except OSError:  # ``check`` finds what has become of the lock
        pass
    finally:
        os.close(file)


class _Holder:
    """What a lock says."""

    def __init__(self, token: str, owner: Owner, since: float, step: int) -> None:
        self.token, self.owner, self.since, self.step = token, owner, since, step

    @classmethod
    def of(cls, text: bytes) -> _Holder | None:
        """None: it is no lock."""
        try:
            found = loads(text.partition(b"\n")[0], LOCK)
        except CorruptCheckpointError:
            return None
        if not isinstance(found, dict):
            return None
        token, since, step = (found.get(key) for key in ("parallel3d lock", "since", "step"))
        owner = Owner.from_json(found.get("owner"))
        if owner is None or type(token) is not str or type(step) is not int:
            return None
        return cls(token, owner, since, step) if type(since) is float else None

    def is_alive(self) -> bool | None:
        """As ``Owner.is_alive``; a lock of this process itself holds while its save does."""
        if self.owner.token == this_process().token:
            return self.token in _held
        return self.owner.is_alive()

    def __str__(self) -> str:
        return f"{self.owner}, saving step {self.step} since {at(self.since)}"


def _make(path: Path, text: bytes) -> int:
    """Makes the lock, when nobody holds it; its file, open.

    Raises:
        CheckpointError: somebody does, or the file can't be made.
    """
    seen: tuple[bytes, float] | None = None
    while True:
        found = _read(path)
        if found is None:
            try:
                file = _create(path, text)
            except OSError as error:
                raise CheckpointError(f"{path} can't be written: {error}") from error
            if file is not None:
                return file
            continue
        holder = _Holder.of(found)
        alive = None if holder is None else holder.is_alive()
        changed = seen is not None and seen[0] != found
        if holder is not None and (alive or changed):
            raise CheckpointError(_held_by(path, holder))
        if holder is not None and alive is False:
            _break(path, found, f"{holder}; that process has ended")
            continue
        if seen is None or changed:
            seen = found, time.monotonic()
        silent = time.monotonic() - seen[1]
        if holder is not None and silent > SILENCE:
            _break(path, found, f"{holder}; it has given no sign of life for {SILENCE:.0f} s")
        elif holder is None and silent > _UNREADABLE:
            raise CheckpointError(
                f"{path} doesn't say who saves there; if nobody saves into this folder, remove that file, or "
                "save elsewhere"
            )
        else:
            time.sleep(_LOOK)


def _create(path: Path, text: bytes) -> int | None:
    """Its file, open; None: it is there already. It is never seen without what it says."""
    mine = path.with_name(f"{LOCK}-{secrets.token_hex(4)}")
    try:
        _write(mine, text)
        try:
            os.link(mine, path)
        except FileExistsError:
            if os.stat(mine).st_nlink != 2:  # else NFS has lost the answer to a first try
                return None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _write(path, text)
        return os.open(path, os.O_RDWR)
    except (FileExistsError, FileNotFoundError):
        if not path.parent.is_dir():
            raise
        return None
    finally:
        with suppress(OSError):
            mine.unlink()


def _write(path: Path, text: bytes) -> None:
    """Makes a file that isn't there."""
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        os.write(file, text)
        os.fsync(file)
    finally:
        os.close(file)


def _held_by(path: Path, holder: _Holder) -> str:
    return (
        f"{path.parent} is being saved into already, by {holder}. Two jobs in one folder would remove each "
        "other's checkpoints: end one of them, or give it another folder. (If that process saves here no "
        f"more, remove {path})"
    )


def _break(path: Path, found: bytes, why: str) -> None:
    """Removes a lock that nobody holds any more, and says so."""
    aside = path.with_name(f"{LOCK}-{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:  # somebody was quicker
        return
    if _read(aside) != found:  # and has made a new one, or its process lives
        try:
            os.link(aside, path)
        except FileExistsError:
            pass
        except OSError:  # no links here
            os.rename(aside, path)
    else:
        warnings.warn(f"{path} was left by {why}: it is removed", stacklevel=2)
    with suppress(OSError):
        aside.unlink()


def _read(path: Path) -> bytes | None:
    """What the file holds; None if it isn't there."""
    try:
        # A pipe isn't waited for, and a link not followed.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return None
    except OSError:
        return b""
    try:
        return os.read(file, _MOST)
    except OSError:  # NFS: removed just now, on another machine
        return None
    finally:
        os.close(file)
