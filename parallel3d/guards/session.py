"""watch: a rank that raises says so to the others, and one whose collective fails learns why."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ContextDecorator, ExitStack, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch import distributed as dist

from parallel3d._torch.groups import all_groups, clone_store, group_timeout, wake_waiting
from parallel3d._util.arguments import text_of
from parallel3d._util.trace import issuing
from parallel3d.errors import Parallel3dError, PeerFailureError, StateError
from parallel3d.guards import timeouts as _timeouts
from parallel3d.guards.board import Board, Note, Pulse, Sentinel
from parallel3d.guards.timeouts import Schedule, Timeouts, counting_steps, here, stack_of
from parallel3d.mesh.agreement import name_ranks, seconds
from parallel3d.mesh.agreement import seconds as in_words
from parallel3d.mesh.store import next_table, others, while_waiting

# Monitor: a thread that reads the board while the main thread computes or waits.
#
# It answers roll calls, so that a rank that hangs is told from one that was killed; it remembers
# what was posted, also when the store's host is gone; and where the main thread still waits for a
# collective that can't end any more, it lets the wait fail (gloo only, see ``wake_waiting``). It
# also notices ranks, and a store, that have fallen silent.


class Monitor(threading.Thread):
    """One rank's.

    Attributes:
        rank, world_size: of the default process group.
        grace: seconds that ranks are given to post what they have to say.
        host: name of this rank's machine.
        silence: seconds after which who says nothing is given up; None: never.
        store_lost: whether the process that hosts the store has ended, or
        store_silent: has not answered for ``silence`` seconds, which means ``store_lost`` too.
    """

    def __init__(
        self,
        table: dist.Store,
        rank: int,
        world_size: int,
        grace: float,
        silence: float | None = None,
    ) -> None:
        super().__init__(name="parallel3d-guards", daemon=True)
        self.rank = rank
        self.world_size = world_size
        self.grace = grace
        self.host = socket.gethostname()
        self.silence = silence
        self.store_lost = self.store_silent = False
        own = clone_store(table)  # a connection of its own
        self._board = Board(own, world_size)
        self._pulse = None if silence is None else Pulse(own, rank, world_size, silence)
        self._waits_since: float | None = None
        self._main = threading.get_ident()
        self._notes: list[Note] = []
        self._lock = threading.Lock()
        self._waking = threading.Lock()
        self._ended = threading.Event()
        self._closed = threading.Event()
        self._seen: float | None = None  # when the first failure was
        self._woken = False
        self._runs = (0, 0)  # what the others know
        self._news, self._said = threading.Event(), threading.Event()
        if silence is not None:
            Sentinel(self, silence, self._closed).start()
        self._ask(lambda: self._board.settle(rank, self.host))

    # -- for the main thread -------------------------------------------------------------------------

    def notes(self) -> list[Note]:
        """What was posted so far, by others and this rank."""
        return list(self._notes)  # one that grows: the thread only adds to it

    def failure(self) -> Note | None:
        """The first error that another rank has had of its own, if there is one."""
        notes = self.notes()
        return next((n for n in notes if n.kind == "failed" and n.rank != self.rank), None)

    def post(self, note: Note) -> None:
        """Tells the others."""
        self._ask(lambda: self._board.post(note))

    def answers(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        """Those of ``ranks`` that have answered the roll call."""
        return self._ask(lambda: self._board.answers(ranks)) or {}

    def hosts(self, ranks: Sequence[int]) -> dict[int, str]:
        """On which machines those of ``ranks`` are, or were, that have come into the watched part."""
        return self._ask(lambda: self._board.hosts(ranks)) or {}

    def forwards(self) -> dict[int, tuple[int, int]]:
        """By rank, how many forwards it has begun, with a gradient and without; as far as it has said so."""
        self._ask(self._count)
        return self._ask(lambda: self._board.forwards(range(self.world_size))) or {}

    def forward_begins(self) -> None:
        """Called in each forward of a model. Of one that is not usual the others are told before it goes on:
        if the others don't make it, this process may be ended within it."""
        if torch.is_grad_enabled() and here.micro_batch <= here.usual:
            return
        self._said.clear()
        self._news.set()
        self._said.wait(0.2)  # no longer: the store may be silent

    def look(self) -> None:
        """Reads what there is now, without waiting for the thread to do so."""
        self._ask(self._read)

    def wait_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Waits for ``done()``, reading on; whether it came in time."""
        end = time.monotonic() + seconds
        while not done():
            if self.store_lost or time.monotonic() > end:
                return False
            time.sleep(0.05)
            self.look()
        return True

    def end(self) -> None:
        """Stops the thread; nothing is woken any more. The store can still be asked, and fall silent."""
        with self._waking:
            self._ended.set()
            self._news.set()
        if self._pulse is not None:
            self._ask(self._pulse.end)

    def close(self) -> None:
        """The last call: nobody looks any more whether the store answers."""
        self._closed.set()

    def _ask(self, what: Callable[[], Any]) -> Any:
        """``what()`` in a thread of its own: a store that is silent holds that one up, and not this."""
        if self._closed.is_set() or self.silence is None:
            return self._do(what)
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._do(what))
            except BaseException as error:  # raised to who waits for the answer
                answer.set_exception(error)

        threading.Thread(target=ask, name="parallel3d-guards-asks", daemon=True).start()
        while not self.store_silent and not answer.done():
            wait([answer], 0.1)
        return answer.result() if answer.done() else None

    # -- the thread ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Until ``end``."""
        while not self.store_lost:
            self._news.wait(self.grace / 10)
            self._news.clear()
            if self._ended.is_set():
                return
            self._do(self._count)
            self._said.set()
            self._do(self._read)
            self._do(self._feel)
            self._wake()

    def _feel(self) -> None:
        """Gives a sign of life; one that has none of the next rank's any more tells all."""
        if self._ended.is_set() or self._pulse is None or not self._pulse.beat():
            return
        if self._seen is None:
            limit = in_words(timedelta(seconds=self._pulse.silence))
            what = f"no sign of life from rank {self._pulse.next} for {limit}"
            self._board.post(Note("lost", self.rank, what, str(here), here.step))
            self._seen = time.monotonic()

    def _count(self) -> None:
        """Says how many forwards this rank has begun, if that is news."""
        if here.runs != self._runs:
            self._runs = here.runs
            self._board.ran(self.rank, self._runs)

    def _read(self) -> None:
        notes = self._board.read()
        if any(note.kind == "roll" for note in notes):
            state = {"where": str(here), "stack": stack_of(self._main)}
            self._board.answer(self.rank, state)
        self._notes += notes
        others = (n for n in notes if n.kind in ("failed", "lost") and n.rank != self.rank)
        if self._seen is None and any(True for _ in others):
            self._seen = time.monotonic()

    def _wake(self) -> None:
        """Not at once: it may well find out by itself, or have failed in the same way as the others."""
        if self._woken or self._seen is None or time.monotonic() - self._seen < 0.4 * self.grace:
            return
        with self._waking:
            if self._ended.is_set():
                return
            self._woken = True
            for group in all_groups():
                with suppress(Exception):  # destroyed meanwhile, or of a backend we don't know
                    wake_waiting(group)

    # -- for the thread that looks after this one ------------------------------------------------------

    def waits_since(self) -> float | None:
        """Since when the store is asked something; None: it has answered."""
        return self._waits_since

    def store_is_silent(self, seconds: float) -> None:
        """It is not asked again; what waits for others does so in vain."""
        self.store_silent = self.store_lost = True
        self._seen = time.monotonic() - self.grace
        self._wake()

    def _do(self, what: Callable[[], Any]) -> Any:
        while not self._lock.acquire(timeout=0.1):
            if self.store_silent:  # who holds the lock waits in the kernel
                return None
        try:
            if self.store_lost:
                return None
            self._waits_since = time.monotonic()
            return what()
        except RuntimeError:  # a DistNetworkError, or what the store says after one
            self.store_lost = True
            return None
        finally:
            self._waits_since = None
            self._lock.release()


# Why a collective of this rank failed: which rank is to blame, and what it said.

# What errors of backends have in them; gloo's are plain RuntimeErrors.
_MARKS = (
    "gloo",
    "NCCL",
    "ncclSystemError",
    "ProcessGroup",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Application timeout caused pair closure",
    "Timed out waiting",
)
_TIMED_OUT = ("Timed out waiting", "timed out", "Timeout")


def is_of_communication(error: BaseException) -> bool:
    """Whether ``error`` is one that a collective or the store has raised because of somebody else."""
    if isinstance(error, PeerFailureError | dist.DistError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, Parallel3dError):
        return False
    text = text_of(error)
    return any(mark in text for mark in _MARKS)


def short(error: BaseException, width: int = 2000) -> str:
    """Type and text of an exception; of a long text the beginning."""
    text = text_of(error)
    text = text if len(text) <= width else f"{text[:width]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def peer_failure(note: Note, rank: int) -> PeerFailureError:
    """What rank ``rank`` raises when ``note`` is the first failure."""
    return PeerFailureError(
        f"rank {note.rank} failed first, at {note.where}: {note.error}\nRank {rank} can't go on without it. "
        f"Look at the output of rank {note.rank}.",
        (note.rank,),
    )


def find_cause(
    monitor: Monitor, error: BaseException, where: str, last_known: Callable[[int], str]
) -> PeerFailureError:
    """Asks the others, for up to ``monitor.grace`` seconds, who is to blame for ``error`` of this rank.

    Args:
        where: this rank is.
        last_known: what is known of where another rank was; "" if nothing.
    """
    rank = monitor.rank
    others = [each for each in range(monitor.world_size) if each != rank]
    monitor.post(Note("lost", rank, short(error), where))
    if not any(note.kind == "roll" for note in monitor.notes()):
        monitor.post(Note("roll", rank))

    def all_have_posted() -> bool:
        posted = {note.rank for note in monitor.notes() if note.kind not in ("roll", "end")}
        return monitor.failure() is not None or posted.issuperset(others)

    monitor.wait_until(all_have_posted, monitor.grace)
    failure = monitor.failure()
    if failure is not None:
        return peer_failure(failure, rank)
    own = f"Rank {rank} was at {where}; its collective failed: {short(error, 300)}"
    late = _others_gave_up(monitor)
    if monitor.store_lost and late:
        return PeerFailureError(f"{late}. {own}")
    if monitor.store_silent:
        limit = seconds(timedelta(seconds=monitor.silence or 0))
        where = os.environ.get("MASTER_ADDR", "another machine")
        return PeerFailureError(
            f"the store, on {where}, has not answered for {limit}: this machine, {monitor.host}, has lost "
            f"the network, or that one has, or is frozen. Look at the network between the two. {own}"
        )
    if monitor.store_lost:
        return PeerFailureError(
            "the process that hosts the store has ended: rank 0, or the launcher (torchrun's agent) on its "
            f"machine. Look at its output first. {own}"
        )
    return _blame_the_silent(monitor, others, error, own, last_known)


def _blame_the_silent(
    monitor: Monitor,
    others: list[int],
    error: BaseException,
    own: str,
    last_known: Callable[[int], str],
) -> PeerFailureError:
    notes = [note for note in monitor.notes() if note.kind in ("lost", "left")]
    posted = {note.rank for note in notes}
    silent = [each for each in others if each not in posted]
    answers = monitor.answers(silent)
    lost = [each for each in silent if each not in answers]
    left = [note for note in notes if note.kind == "left" and note.rank != monitor.rank]
    limit = f"did not come within {seconds(group_timeout())}"
    # A rank that was woken before its own time was up says what those say who waited for all of it.
    up = _timed_out(text_of(error)) or any(_timed_out(n.error) for n in notes if n.kind == "lost")
    waited = limit if up else "is not in this collective"
    lines: list[str] = []
    hosts = monitor.hosts(lost)
    for host in dict.fromkeys(hosts.get(each, "") for each in lost):
        lines.append(
            _lost(monitor, host, [r for r in lost if hosts.get(r, "") == host], last_known)
        )
    for each, state in answers.items():
        lines.append(
            f"rank {each} {waited}: its process lives, at {state['where']}, and is in {state['stack']}"
        )
    if not lost and not answers:
        lines += [f"rank {note.rank} has left the watched part, at {note.where}" for note in left]
    if not lines:
        lines.append(_others_gave_up(monitor))
    blamed = lost or list(answers) or [note.rank for note in left]
    head = _head(lost, list(answers)) if len(lines) > 1 else ""
    more = _more_forwards(monitor.forwards())
    return PeerFailureError(f"{head}{'; '.join(lines)}.{more}\n{own}", tuple(blamed))


def _more_forwards(counts: Mapping[int, tuple[int, int]]) -> str:
    """Who has begun more forwards than the rest, by (with a gradient, without one): from an extra one on, a
    rank's collectives are matched with others than it means, and who fails then may be any rank."""
    without = _most({rank: each[1] for rank, each in counts.items()})
    found = without or _most({rank: sum(each) for rank, each in counts.items()})
    if found is None:
        return ""
    most, odd, usual, rest = found
    return (
        f"\nForwards{' without gradients' if without else ''} begun: {most} on {odd}, {usual} on {rest}. "
        f"Unless the latter are only behind, look for a forward that only {odd} makes, an evaluation say; "
        "guards.debug stops at the first collective that differs."
    )


def _most(counts: Mapping[int, int]) -> tuple[int, str, int, str] | None:
    """(the largest, whose, the usual one, whose); None where they are equal."""
    tally = Counter(counts.values())
    if len(tally) < 2:
        return None
    usual, most = min(tally, key=lambda number: (-tally[number], number)), max(tally)
    if most == usual:
        return None
    by_number = {n: name_ranks(r for r in counts if counts[r] == n) for n in (most, usual)}
    return most, by_number[most], usual, by_number[usual]


def _lost(
    monitor: Monitor, host: str, ranks: Sequence[int], last_known: Callable[[int], str]
) -> str:
    """What is said of ``ranks``, all on ``host``, of which nothing is heard."""
    elsewhere = f" on {host}" if host and host != monitor.host else ""
    one = len(ranks) == 1
    text = f"{name_ranks(ranks)}{elsewhere} {'is' if one else 'are'} lost: killed or hung"
    text += ", or the network to there is down" if elsewhere else ""
    text += f"; {'it' if one else 'they'} posted no error and {'does' if one else 'do'} not answer"
    known = {rank: last_known(rank) for rank in ranks}
    found = [text if one else f"rank {rank}: {text}" for rank, text in known.items() if text]
    return f"{text}. Last known: {'; '.join(found)}" if found else text


def _others_gave_up(monitor: Monitor) -> str:
    """Where nobody posted an error of its own, and all that is known is that others lost a collective too."""
    notes = [n for n in monitor.notes() if n.kind == "lost" and n.rank != monitor.rank]
    if not notes:
        return ""
    return (
        f"{name_ranks(note.rank for note in notes)} lost a collective before this rank did, rank "
        f"{notes[0].rank} at {notes[0].where}: {notes[0].error[:200]}. This rank came too late for "
        "it, or the network between the ranks failed"
    )


def _head(lost: Iterable[int], hung: Iterable[int]) -> str:
    ranks = [*lost, *hung]
    return f"{name_ranks(ranks)}: " if len(ranks) > 1 else ""


def _timed_out(text: str) -> bool:
    return any(mark in text for mark in _TIMED_OUT)


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

at_begin: list[Callable[[ExitStack], None]] = []
"""Called with the outermost watch's stack when it is entered."""


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
            if self._session is not None:
                for begin in at_begin:
                    begin(stack)
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
