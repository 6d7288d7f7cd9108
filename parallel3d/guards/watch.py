"""watch: a rank that raises says so to the others, and one whose collective fails learns why."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any

from parallel3d._trace import issuing
from parallel3d.errors import Parallel3dError, PeerFailureError, StateError
from parallel3d.guards import timeouts as _timeouts
from parallel3d.guards.board import Note
from parallel3d.guards.cause import find_cause, is_of_communication, peer_failure, short
from parallel3d.guards.monitor import Monitor
from parallel3d.guards.progress import counting_steps, here
from parallel3d.guards.timeouts import Schedule, Timeouts
from parallel3d.mesh.store import next_table, others, while_waiting

__all__ = ["GRACE", "SILENCE", "Session", "current_session", "watch"]

GRACE = timedelta(seconds=5)
"""How long ranks are given to post what they have to say, unless told otherwise."""
SILENCE = timedelta(minutes=1)
"""How long nothing may be heard of a rank, unless told otherwise."""


def watch(
    *,
    timeouts: Timeouts | None = None,
    grace: timedelta = GRACE,
    silence: timedelta | None = SILENCE,
) -> Watch:
    """Around a training loop, or ``main``, on every rank: failures are told to the other ranks.

    ::

        with parallel3d.guards.watch(timeouts=Timeouts(step=timedelta(seconds=100))):
            train()

    A rank that raises in the body posts its error (type, text, step, unit, phase) to the store before the
    error goes on. A rank whose collective then fails, or that waits in the store, raises a
    ``PeerFailureError`` that names the rank that failed first and what it said. A rank that was killed, or
    hangs, posts nothing: after ``grace`` it is named as lost, or with the line of code that it is in.

    A host that loses its network closes no connection: each rank's watching thread gives signs of life, and
    ranks that have not for ``silence`` are given up like those that were killed (on NCCL, which can't be
    woken, when their collective's own timeout ends).

    It can be used as a decorator too. Within another watch it only sets timeouts. It costs a thread that
    looks into the store every ``grace / 10``, and gives a sign of life every ``silence / 6``; nothing per
    collective. With the environment variable
    ``PARALLEL3D_DEBUG=1`` it switches ``guards.debug`` on, which writes into the folder
    ``PARALLEL3D_DEBUG_DIR`` if that is set.

    Args:
        timeouts: of collectives, by phase. They hold for all process groups of this process.
        grace: how long a rank is given to post its error. On all ranks alike.
        silence: how long a rank may give no sign of life, and the store no answer; None: for ever. Longer
            than any call that keeps Python's lock. On all ranks alike.

    Raises:
        PeerFailureError: another rank failed, was killed, hangs or can't be reached.
    """
    if timeouts is not None and not isinstance(timeouts, Timeouts):
        raise Parallel3dError(
            f"watch: timeouts is {timeouts!r}; it must be a guards.Timeouts(start=, step=, save=)"
        )
    if not (isinstance(grace, timedelta) and grace > timedelta(0)):
        raise Parallel3dError(
            f"watch: grace is {grace!r}; it must be a positive datetime.timedelta"
        )
    if silence is not None and not (isinstance(silence, timedelta) and silence > timedelta(0)):
        raise Parallel3dError(
            f"watch: silence is {silence!r}; it must be a positive datetime.timedelta, or None"
        )
    return Watch(timeouts, grace, silence)


class Session:
    """One outermost watch, from the moment that there is a process group."""

    def __init__(self, grace: timedelta, silence: timedelta | None) -> None:
        self._grace = grace.total_seconds()
        self._silence = None if silence is None else silence.total_seconds()
        self._monitor: Monitor | None = None
        self.last_known: Callable[[int], str] = lambda rank: ""

    def open(self) -> Monitor | None:
        """The thread that watches; None as long as there are no other ranks."""
        if self._monitor is None and (found := others()) is not None:
            store, rank, world_size = found
            table = next_table(store, "guards/watch", rank)
            self._monitor = Monitor(table, rank, world_size, self._grace, self._silence)
            self._monitor.start()
            issuing.on_run = self._monitor.forward_begins
            for schedule in _timeouts.active:
                schedule.begin()
        return self._monitor

    def check(self) -> None:
        """Called by a rank that waits in the store."""
        monitor = self.open()
        failure = None if monitor is None else monitor.failure()
        if monitor is not None and failure is not None:
            raise peer_failure(failure, monitor.rank)

    def close(self, error: BaseException | None) -> PeerFailureError | None:
        """The body has ended, with ``error``. Returns what is to be raised in its place, if anything."""
        monitor = self.open()
        if monitor is None:
            return None
        try:
            issuing.on_run = None
            monitor.end()
            return self._tell(monitor, error)
        finally:
            monitor.close()

    def _tell(self, monitor: Monitor, error: BaseException | None) -> PeerFailureError | None:
        where = str(here)
        if error is None or _is_exit(error):
            monitor.post(Note("left", monitor.rank, "", where, here.step))
            return None
        found = None
        if isinstance(error, PeerFailureError):
            monitor.post(Note("lost", monitor.rank, short(error), where, here.step))
        elif is_of_communication(error):
            found = find_cause(monitor, error, where, self.last_known)
        else:
            monitor.post(Note("failed", monitor.rank, short(error), where, here.step))
        monitor.post(Note("end", monitor.rank))
        if monitor.rank == 0:  # it may host the store
            _linger(monitor)
        return found


def _linger(monitor: Monitor) -> None:
    """Until the others have read what there is."""
    others = set(range(monitor.world_size)) - {monitor.rank}

    def all_know() -> bool:
        return {n.rank for n in monitor.notes() if n.kind in ("end", "left")}.issuperset(others)

    monitor.wait_until(all_know, monitor.grace)


def _is_exit(error: BaseException) -> bool:
    """Whether a program ends so that has nothing to complain about."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


_sessions: list[Session] = []


def current_session() -> Session | None:
    """That of the watch this is in."""
    return _sessions[-1] if _sessions else None


class Watch(ContextDecorator):
    """What ``watch`` returns."""

    def __init__(
        self, timeouts: Timeouts | None, grace: timedelta, silence: timedelta | None
    ) -> None:
        self._timeouts = timeouts
        self._grace, self._silence = grace, silence
        self._session: Session | None = None
        self._stack: ExitStack | None = None

    def _recreate_cm(self) -> Watch:
        return Watch(self._timeouts, self._grace, self._silence)

    def __enter__(self) -> Watch:
        """Raises StateError if it is entered already."""
        if self._stack is not None:
            raise StateError(
                "this guards.watch is entered already; call guards.watch() again for a block within its block"
            )
        with ExitStack() as stack:
            if current_session() is None:
                here.reset()
                self._session = Session(self._grace, self._silence)
                _sessions.append(self._session)
                stack.callback(_sessions.pop)
                while_waiting.append(self._session.check)
                stack.callback(while_waiting.remove, self._session.check)
                stack.enter_context(counting_steps(after=_after_step))
                self._session.open()
            if self._timeouts is not None:
                schedule = Schedule(self._timeouts)
                _timeouts.active.append(schedule)
                stack.callback(_timeouts.active.remove, schedule)
                stack.callback(schedule.end)
                schedule.begin()
            if self._session is not None and os.environ.get("PARALLEL3D_DEBUG", "0") not in (
                "",
                "0",
            ):
                from parallel3d.guards.debugging import debug

                folder = os.environ.get("PARALLEL3D_DEBUG_DIR") or None
                stack.enter_context(debug(folder=folder))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        session, self._session = self._session, None
        stack, self._stack = self._stack, None
        assert stack is not None
        instead = None
        try:
            if session is not None:
                instead = session.close(error)
        finally:
            stack.__exit__(kind, error, traceback)
        if instead is not None:
            raise instead from error


def _after_step(optimizer: Any) -> None:
    here.stepped(optimizer)
    session = current_session()
    if session is not None:
        session.open()
    if here.phase == "start":
        here.phase = "step"
        if _timeouts.active:
            _timeouts.active[-1].change("step")
