"""A rank that has waited a minute for other ranks prints which code each of them runs.

It is always on. A thread checks a few times a minute whether the main thread still runs the same line. It
costs nothing per step or collective, and ends nothing: a rank may be slow, and process groups have timeouts.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from torch import distributed as dist

from parallel3d._torch.groups import clone_store
from parallel3d._util.arguments import counted
from parallel3d._util.trace import issuing
from parallel3d.guards.journal import describe_places
from parallel3d.guards.timeouts import users_frame
from parallel3d.mesh.store import others, say

AFTER = timedelta(seconds=60)
"""How long ranks wait for each other before they say where they are."""

_LOOKS = 6  # within AFTER
_ANY = "any"  # whether a rank waits: the others then post where they are


def say_where_ranks_wait() -> None:
    """Starts, once, the thread that looks whether this rank waits for others (see the top of the file), if
    there are other ranks."""
    if others() is not None:
        _start()


@cache
def _start() -> None:
    if not faulthandler.is_enabled():
        with suppress(OSError, ValueError, AttributeError):  # standard error is no file
            faulthandler.enable()  # gloo aborts the process where sizes differ: this shows the line
    ended = threading.Event()
    thread = threading.Thread(target=_run, args=(ended,), name="parallel3d-stalls", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join(1.0)  # it may not be within the store when the interpreter goes

    atexit.register(end)


def _run(ended: threading.Event) -> None:
    stall: Stall | None = None
    store: dist.Store | None = None
    while not ended.wait(AFTER.total_seconds() / _LOOKS):
        try:
            found = others()
            if found is None:
                stall = store = None
                continue
            if store is not found[0]:  # another group
                store, rank, world_size = found
                table = dist.PrefixStore("parallel3d/stalls", clone_store(store))
                stall = Stall(table, rank, world_size, threading.main_thread().ident)
            assert stall is not None
            stall.look(time.monotonic())
        except (RuntimeError, ValueError):  # the store, or the group, has ended
            stall = store = None


class Stall:
    """Posts which line ``thread``, the main thread of this rank, runs, and reads those of the other ranks. No
    other thread may use the connection ``table``."""

    def __init__(
        self, table: dist.Store, rank: int, world_size: int, thread: int | None = None
    ) -> None:
        self._table, self._rank, self._world_size = table, rank, world_size
        self._thread = thread
        self._at: Any = None
        self._since = 0.0
        self._posted = False
        self._said: set[str] = set()

    def look(self, now: float) -> None:
        """Called a few times a minute: posts where this rank is if any rank waits, and prints where all are
        once this one has been at one line for ``AFTER``."""
        frame, called = users_frame(sys._current_frames().get(self._thread or 0))
        at = (_stack(frame), called, issuing.unit, issuing.runs)
        if at != self._at:
            self._at, self._since = at, now
            if self._posted:
                self._posted = False
                self._table.delete_key(str(self._rank))
                self._table.delete_key(_ANY)
        waited, after = now - self._since, AFTER.total_seconds()
        waits = waited >= after / 2
        if not waits and not self._table.check([_ANY]):
            return
        self._table.set(str(self._rank), json.dumps([waits, _describe(frame, called)]))
        self._posted = True
        if waits:
            self._table.set(_ANY, "")
        if waited >= after:
            self._say()

    def _say(self) -> None:
        """Prints where all ranks are, on the first of those that wait, if they are at different places."""
        places: dict[int, str] = {}
        for rank in range(self._world_size):
            text = "unknown: it does not answer"
            if self._table.check([str(rank)]):
                waits, text = json.loads(self._table.get(str(rank)))
                if waits and rank < self._rank:
                    return
            places[rank] = text
        lines = describe_places(places)
        if len(set(places.values())) > 1 and lines not in self._said:
            self._said.add(lines)
            say(
                f"rank {self._rank} has been at one place for {AFTER.total_seconds():g} s, while others are "
                f"elsewhere:{lines}\nAll ranks must make the same calls that communicate, in one order: "
                "full_tensor(), state dicts and checkpoint.save on all of them, as many micro-batches and "
                "evaluation batches on each. guards.debug stops at the first that differs."
            )


def _stack(frame: FrameType | None) -> list[tuple[object, int]]:
    """Returns the place in each running function, innermost first; frames would keep tensors alive."""
    places: list[tuple[object, int]] = []
    while frame is not None:
        places.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return places


def _describe(frame: FrameType | None, called: str) -> str:
    """Returns a text such as ``train.py:8 main, in full_tensor (2 forwards begun)``. ``called``: the function
    that the user's code calls."""
    place = "no line of Python"
    if frame is not None:
        code = frame.f_code
        place = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
    place += f", in {called}" if called else ""
    place += f" of unit {issuing.unit}" if issuing.unit else ""
    without = issuing.runs - issuing.forwards
    counts = f"{counted(issuing.forwards, 'forward')} begun"
    return f"{place} ({counts}{f', {without} without gradients' if without else ''})"
