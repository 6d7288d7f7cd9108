"""Owner: which process writes, in words that another process, job or machine can check."""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["Owner", "this_process"]

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
