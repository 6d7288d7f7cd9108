"""watch: a rank that raises tells the others, and a rank whose collective fails learns the cause."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ContextDecorator, ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from parallel3d._torch.groups import all_groups, clone_store, group_timeout, wake_waiting
from parallel3d._util.arguments import text_of
from parallel3d._util.trace import issuing
from parallel3d.errors import Parallel3dError, PeerFailureError, StateError
from parallel3d.guards import timeouts as _timeouts
from parallel3d.guards.aborting import LOAD_AGAIN, Abort, all_communicators
from parallel3d.guards.board import Board, Note, Pulse
from parallel3d.guards.timeouts import Schedule, Timeouts, check_duration, here, stack_of
from parallel3d.mesh.agreement import name_ranks, ranks_by_value, seconds
from parallel3d.mesh.failures import is_of_communication, short
from parallel3d.mesh.store import next_table, others, say, while_waiting


class Monitor(threading.Thread):
    """A thread of each rank that reads the other ranks' notes (``board.py``) while the main thread computes
    or waits.

    It answers notes ``roll``, which distinguishes a rank that hangs from one that was killed, and keeps
    copies of the notes in case the store's host ends. If the main thread, or the device, waits for a
    collective that can't complete any more, the thread ends that wait: on gloo the wait fails (see
    ``wake_waiting``), on NCCL the communicators are aborted (see ``Abort``). It also detects a rank, or a
    store, that is silent. Ranks get ``grace`` seconds to post their notes; without a heartbeat for
    ``silence`` seconds a rank, or the store, counts as lost.
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
        self.rank, self.world_size = rank, world_size
        self.grace, self.silence = grace, silence
        self.host = socket.gethostname()
        self.aborted: Abort | None = None  # once the abort of NCCL communicators has begun
        # Whether the store can't be reached, and whether that is as it has not answered for ``silence``.
        self.store_lost = self.store_silent = False
        own = clone_store(table)  # a connection of its own
        self._board = Board(own, world_size)
        self._pulse = None if silence is None else Pulse(own, rank, world_size, silence)
        self._asked: float | None = None  # since when the store is being asked something
        self._main = threading.get_ident()
        self._notes: list[Note] = []
        self._lock, self._waking = threading.Lock(), threading.Lock()
        self._ended, self._closed = threading.Event(), threading.Event()
        self._seen: float | None = None  # when the first failure was seen
        self._woken = False
        self._runs = (0, 0)  # as last posted
        self._news, self._posted = threading.Event(), threading.Event()
        if silence is not None:
            _start_thread("parallel3d-guards-silence", self._watch_store, silence)
        self._ask(lambda: self._board.post_fact("host", rank, self.host))

    # -- for the main thread -------------------------------------------------------------------------

    def notes(self) -> list[Note]:
        return list(self._notes)

    def failure(self) -> Note | None:
        """Returns the first note of another rank that raised an error of its own, or None."""
        notes = self.notes()
        return next((n for n in notes if n.kind == "failed" and n.rank != self.rank), None)

    def post(self, note: Note) -> None:
        self._ask(lambda: self._board.post(note))

    def facts(self, topic: str, ranks: Sequence[int]) -> dict[int, Any]:
        """Returns rank -> its fact ``topic``, for those of ``ranks`` that have posted one
        (``Board.facts``)."""
        self._ask(self._count)
        return self._ask(lambda: self._board.facts(topic, ranks)) or {}

    def forward_begins(self) -> None:
        """Called when a forward of a model begins. If other ranks may not run it (it is without gradients, or
        one more than the last step had), its number is posted at once: this process may be ended within
        it."""
        if torch.is_grad_enabled() and here.micro_batch <= here.usual:
            return
        self._posted.clear()
        self._news.set()
        self._posted.wait(0.2)  # no longer: the store may be silent

    def look(self) -> None:
        """Reads the other ranks' new notes now, without waiting for the thread to do so."""
        self._ask(self._read)

    def wait_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Reads notes until ``done()`` is true, at most ``seconds``. Returns whether it became true."""
        end = time.monotonic() + seconds
        while not done():
            if self.store_lost or time.monotonic() > end:
                return False
            time.sleep(0.05)
            self.look()
        return True

    def end(self) -> None:
        """Stops the thread, so that it interrupts no more collectives. The main thread may still read the
        store.

        If an abort has begun, this waits up to ``grace`` seconds for it, so that process groups are not
        destroyed meanwhile.
        """
        with self._waking:
            self._ended.set()
            self._news.set()
        if self.aborted is not None:
            self.aborted.wait(self.grace)
        if self._pulse is not None:
            self._ask(self._pulse.end)

    def close(self) -> None:
        """Stops the thread that looks whether the store answers; must be the last call."""
        self._closed.set()

    def _ask(self, what: Callable[[], Any]) -> Any:
        """Returns ``what()``, called in another thread, so that a silent store doesn't block this one; None
        if the store is lost."""
        if self._closed.is_set() or self.silence is None:
            return self._do(what)
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._do(what))
            except BaseException as error:  # raised in the thread that waits for the answer
                answer.set_exception(error)

        _start_thread("parallel3d-guards-asks", ask)
        while not self.store_silent and not answer.done():
            wait([answer], 0.1)
        return answer.result() if answer.done() else None

    def _do(self, what: Callable[[], Any]) -> Any:
        """Returns ``what()``, which uses the connection to the store; None if the store is lost."""
        while not self._lock.acquire(timeout=0.1):
            if self.store_silent:  # the thread that holds the lock waits in the kernel
                return None
        try:
            if self.store_lost:
                return None
            self._asked = time.monotonic()
            return what()
        except RuntimeError:  # a DistNetworkError, or the error of a store that had one
            self.store_lost = True
            return None
        finally:
            self._asked = None
            self._lock.release()

    # -- the threads ---------------------------------------------------------------------------------

    def run(self) -> None:
        while not self.store_lost:
            self._news.wait(self.grace / 10)
            self._news.clear()
            if self._ended.is_set():
                return
            self._do(self._count)
            self._posted.set()
            self._do(self._read)
            self._do(self._beat)
            self._wake()

    def _watch_store(self, silence: float) -> None:
        """Runs in a thread of its own: declares the store lost if a call to it has not returned within
        ``silence`` seconds."""
        while not self._closed.wait(min(1.0, silence / 6)):
            since = self._asked
            if since is not None and time.monotonic() - since > silence:
                self.store_silent = self.store_lost = True
                self._seen = time.monotonic() - self.grace
                self._wake()
                return

    def _count(self) -> None:
        """Posts how many forwards this rank has begun, if that has changed."""
        if here.runs != self._runs:
            self._runs = here.runs
            self._board.post_fact("forwards", self.rank, self._runs)

    def _read(self) -> None:
        notes = self._board.read()
        if any(note.kind == "roll" for note in notes):
            state = {"where": str(here), "stack": stack_of(self._main)}
            self._board.post_fact("answer", self.rank, state)
        self._notes += notes
        failed = any(n.kind in ("failed", "lost") and n.rank != self.rank for n in notes)
        if self._seen is None and failed:
            self._seen = time.monotonic()

    def _beat(self) -> None:
        """Sends this rank's heartbeat, and posts a note ``lost`` if the next rank sends none."""
        if self._ended.is_set() or self._pulse is None or not self._pulse.beat():
            return
        if self._seen is None:
            limit = seconds(timedelta(seconds=self._pulse.silence))
            what = f"no sign of life from rank {self._pulse.next} for {limit}"
            self._board.post(Note("lost", self.rank, what, str(here), here.step))
            self._seen = time.monotonic()

    def _wake(self) -> None:
        """Ends the collectives that the main thread waits for, 0.4 x ``grace`` seconds after another rank's
        failure, if the main thread has not noticed it by itself.

        That is before ``grace`` is over, because the other ranks wait that long for this rank's note.
        """
        if self._woken or self._seen is None or time.monotonic() - self._seen < 0.4 * self.grace:
            return
        with self._waking:
            if self._ended.is_set() or self._woken:
                return
            self._woken = True
            groups = all_groups()
            if backends := all_communicators(groups):
                # Set before it starts: kernels may end at once, and the main thread go on.
                self.aborted = Abort(backends, str(here))
                self._announce(len(backends))
                self.aborted.start()
            for group in groups:
                with suppress(Exception):  # the group is destroyed, or its backend unknown
                    wake_waiting(group)

    def _announce(self, number: int) -> None:
        """Prints why ``number`` communicators are aborted: if the abort does not end, the main thread can't
        raise the error."""
        failure = self.failure()
        why = "another rank is lost or silent"
        if failure is not None:
            why = f"rank {failure.rank} failed first, at {failure.where}: {failure.error}"
        say(f"guards.watch on rank {self.rank} aborts {number} NCCL communicators: {why}")


def _start_thread(name: str, target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, name=name, daemon=True).start()


# The cause of an error in a collective of this rank.

_TIMED_OUT = ("Timed out waiting", "timed out", "Timeout")


def peer_failure(note: Note, rank: int) -> PeerFailureError:
    """Returns the error that rank ``rank`` raises; ``note`` is that of the rank that failed first."""
    return PeerFailureError(
        f"rank {note.rank} failed first, at {note.where}: {note.error}\nRank {rank} can't go on without it. "
        f"Look at the output of rank {note.rank}.",
        (note.rank,),
    )


def find_cause(
    monitor: Monitor, error: BaseException, where: str, last_known: Callable[[int], str]
) -> PeerFailureError:
    """Returns the error to raise in place of ``error``, with which a collective of this rank has failed: asks
    the other ranks for the cause, for up to ``monitor.grace`` seconds.

    ``where`` is the step, phase and unit of this rank; ``last_known`` returns those of another, or "".
    """
    rank = monitor.rank
    others = [r for r in range(monitor.world_size) if r != rank]
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
    late = _others_lost(monitor)
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
    """Returns an error that names the ranks that have posted no note: killed ones, or ones that hang."""
    notes = [note for note in monitor.notes() if note.kind in ("lost", "left")]
    silent = sorted(set(others) - {note.rank for note in notes})
    hung = monitor.facts("answer", silent)
    lost = [rank for rank in silent if rank not in hung]
    left = [note for note in notes if note.kind == "left" and note.rank != monitor.rank]
    # A rank that was woken before its own timeout says what ranks say whose timeout has passed.
    texts = [text_of(error), *(note.error for note in notes if note.kind == "lost")]
    timed_out = any(mark in text for text in texts for mark in _TIMED_OUT)
    waited = "is not in this collective"
    if timed_out:
        waited = f"did not come within {seconds(group_timeout())}"
    hosts = monitor.facts("host", lost)
    by_host = ranks_by_value({rank: hosts.get(rank, "") for rank in lost})
    lines = [_lost(monitor, host, ranks, last_known) for host, ranks in by_host.items()]
    for rank, state in hung.items():
        lines.append(
            f"rank {rank} {waited}: its process lives, at {state['where']}, and is in {state['stack']}"
        )
    if not lines:
        lines = [f"rank {note.rank} has left the watched part, at {note.where}" for note in left]
    head = f"{name_ranks([*lost, *hung])}: " if len(lines) > 1 and len(lost) + len(hung) > 1 else ""
    text = "; ".join(lines) or _others_lost(monitor)
    blamed = lost or list(hung) or [note.rank for note in left]
    more = _more_forwards(monitor.facts("forwards", range(monitor.world_size)))
    return PeerFailureError(f"{head}{text}.{more}\n{own}", tuple(blamed))


def _lost(
    monitor: Monitor, host: str, ranks: Sequence[int], last_known: Callable[[int], str]
) -> str:
    """Returns a text about ``ranks``, all on ``host``, that have posted nothing and do not answer."""
    elsewhere = f" on {host}" if host and host != monitor.host else ""
    one = len(ranks) == 1
    text = f"{name_ranks(ranks)}{elsewhere} {'is' if one else 'are'} lost: killed or hung"
    text += ", or the network to there is down" if elsewhere else ""
    text += f"; {'it' if one else 'they'} posted no error and {'does' if one else 'do'} not answer"
    known = {rank: last_known(rank) for rank in ranks}
    places = [place if one else f"rank {rank}: {place}" for rank, place in known.items() if place]
    return f"{text}. Last known: {'; '.join(places)}" if places else text


def _others_lost(monitor: Monitor) -> str:
    """Returns a text about other ranks whose collective failed too; "" if there are none."""
    notes = [n for n in monitor.notes() if n.kind == "lost" and n.rank != monitor.rank]
    if not notes:
        return ""
    return (
        f"{name_ranks(note.rank for note in notes)} lost a collective before this rank did, rank "
        f"{notes[0].rank} at {notes[0].where}: {notes[0].error[:200]}. This rank came too late for "
        "it, or the network between the ranks failed"
    )


def _more_forwards(counts: Mapping[int, tuple[int, int]]) -> str:
    """Returns a text with the ranks that have begun more forwards than most; "" if there are none.

    ``counts``: rank -> numbers of its forwards (with a gradient, without). After an additional forward a
    rank's collectives are matched with different ones of the others, so that any rank may fail.
    """
    without = {rank: count for rank, (_, count) in counts.items()}
    both = {rank: sum(count) for rank, count in counts.items()}
    for numbers, kind in ((without, " without gradients"), (both, "")):
        tally = Counter(numbers.values())
        usual = min(tally, key=lambda number: (-tally[number], number), default=0)
        most = max(tally, default=0)
        if most > usual:
            odd = name_ranks(rank for rank, number in numbers.items() if number == most)
            rest = name_ranks(rank for rank, number in numbers.items() if number == usual)
            return (
                f"\nForwards{kind} begun: {most} on {odd}, {usual} on {rest}. "
                f"Unless {rest} {'is' if rest.startswith('rank ') else 'are'} only behind, look "
                f"for a forward that only {odd} makes, for example an evaluation; guards.debug "
                "stops at the first collective that differs."
            )
    return ""


GRACE = timedelta(seconds=5)  # default time that ranks get to post their notes
SILENCE = timedelta(minutes=1)  # default time without a sign of life after which a rank is given up


def watch(
    *,
    timeouts: Timeouts | None = None,
    grace: timedelta = GRACE,
    silence: timedelta | None = SILENCE,
) -> Watch:
    """Tells the other ranks about a failure in the body: put it around the training loop on all ranks.

    ::

        with parallel3d.guards.watch(timeouts=Timeouts(step=timedelta(seconds=100))):
            train()

    A rank that raises in the body posts its error (type, text, step, unit, phase) to the store before the
    error propagates. A rank whose collective then fails, or that waits in the store, raises a
    ``PeerFailureError`` with the rank that failed first and its error. A rank that was killed, or hangs,
    posts nothing: after ``grace`` it is named as lost, or with the line of code that it runs.

    A host that loses its network closes no connection. So each rank increments a number in the store, its
    heartbeat, and a rank whose number has not changed for ``silence`` is treated like a killed one.

    On NCCL the communicators of a rank whose peer has failed are aborted, which ends their kernels with
    undefined results. So before the next optimizer step, forward, save or load, and at the end of the body,
    the rank raises the PeerFailureError. The weights may be undefined too: load the last checkpoint.

    It is a decorator too. Within another watch it only sets timeouts. It costs a thread that reads the store
    every ``grace / 10`` and sends a heartbeat every ``silence / 6``, and nothing per collective. The
    environment variable ``PARALLEL3D_DEBUG=1`` also enters ``guards.debug``, with the folder in
    ``PARALLEL3D_DEBUG_DIR`` if that is set.

    Args:
        timeouts: timeouts of collectives, by phase, for all process groups of this process.
        grace: time that a rank gets to post its error; the same on all ranks.
        silence: time after which a rank without a heartbeat, or a store without an answer, counts as lost;
            None: no limit. It must be longer than any call that holds the GIL, and the same on all ranks.

    Raises:
        PeerFailureError: another rank failed, was killed, hangs or can't be reached.
        Parallel3dError: ``timeouts`` is no Timeouts, or a duration no positive timedelta.
    """
    if timeouts is not None and not isinstance(timeouts, Timeouts):
        raise Parallel3dError(
            f"watch: timeouts is {timeouts!r}; it must be a guards.Timeouts(start=, step=, save=)"
        )
    check_duration("watch: grace", grace)
    check_duration("watch: silence", silence, or_none=True)
    return Watch(timeouts, grace, silence)


class Session:
    """The state of the outermost ``watch``; it has a monitor as soon as there is a process group."""

    def __init__(self, grace: timedelta, silence: timedelta | None) -> None:
        self._grace = grace.total_seconds()
        self._silence = None if silence is None else silence.total_seconds()
        self._monitor: Monitor | None = None
        self._cause: PeerFailureError | None = None  # of the abort
        self.last_known: Callable[[int], str] = lambda rank: ""

    def open(self) -> Monitor | None:
        """Starts the monitor if there are other ranks, and returns it; None as long as there are none."""
        if self._monitor is None and (peers := others()) is not None:
            store, rank, world_size = peers
            table = next_table(store, "guards/watch", rank)
            self._monitor = Monitor(table, rank, world_size, self._grace, self._silence)
            self._monitor.start()
            issuing.on_run = self._forward_begins
            for schedule in _timeouts.active:
                schedule.begin()
        return self._monitor

    def check(self) -> None:
        """Raises PeerFailureError if another rank has failed; called while this rank waits in the store."""
        monitor = self.open()
        failure = None if monitor is None else monitor.failure()
        if monitor is not None and failure is not None:
            raise peer_failure(failure, monitor.rank)

    def refuse(self, what: str) -> None:
        """Raises PeerFailureError if this rank's communicators have been aborted; see ``refuse_aborted``."""
        if self._monitor is not None and self._monitor.aborted is not None:
            raise self._refusal(self._monitor, self._monitor.aborted, what)

    def _forward_begins(self) -> None:
        self.refuse("This forward was not begun")
        if self._monitor is not None:
            self._monitor.forward_begins()

    def _refusal(
        self, monitor: Monitor, abort: Abort, what: str, error: BaseException | None = None
    ) -> PeerFailureError:
        """Returns the error to raise after ``abort``, with its cause. ``what``: what this rank was about to
        do; ``error``: what the body has raised since.

        Any such error may come from undefined results of the abort, so it is not blamed on this rank.
        """
        if self._cause is None:
            if error is None or not is_of_communication(error):
                error = dist.DistBackendError("aborted by guards.watch")
            self._cause = find_cause(monitor, error, str(here), self.last_known)
        text = f"{self._cause}\nRank {monitor.rank}: {abort}. {what}. {LOAD_AGAIN}."
        return PeerFailureError(text, self._cause.ranks)

    def close(self, error: BaseException | None) -> PeerFailureError | None:
        """Ends the watch, whose body raised ``error``. Returns the error to raise instead, if any."""
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
        """Posts how the body has ended. Returns the error to raise instead of ``error`` if that is of a
        collective, or if there was an abort; else None."""
        where, rank, abort = str(here), monitor.rank, monitor.aborted
        normal = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        foreseen = isinstance(error, PeerFailureError)
        cause = None
        if abort is not None and not foreseen and (normal or isinstance(error, Exception)):
            cause = self._refusal(monitor, abort, "The watched part ended after it", error)
        elif error is None or normal:
            monitor.post(Note("left", rank, "", where, here.step))
            return None
        elif foreseen or not is_of_communication(error):
            kind = "lost" if foreseen else "failed"
            monitor.post(Note(kind, rank, short(error), where, here.step))
        else:
            cause = find_cause(monitor, error, where, self.last_known)
        monitor.post(Note("end", rank))
        if rank == 0:  # it may host the store, which the others still read
            others = set(range(1, monitor.world_size))

            def all_know() -> bool:
                known = {note.rank for note in monitor.notes() if note.kind in ("end", "left")}
                return known.issuperset(others)

            monitor.wait_until(all_know, monitor.grace)
        return cause


_sessions: list[Session] = []

# Called with the outermost watch's stack when it is entered.
at_begin: list[Callable[[ExitStack], None]] = []


def current_session() -> Session | None:
    """Returns the state of the outermost watch that is entered; None if there is none."""
    return _sessions[-1] if _sessions else None


def refuse_aborted(what: str) -> None:
    """Raises PeerFailureError if ``watch`` has aborted this rank's communicators, because results may then be
    undefined. ``what``: a sentence for the message that says what this rank was about to do, and whether it
    was done."""
    if _sessions:
        _sessions[-1].refuse(what)


@dataclass(eq=False)
class Watch(ContextDecorator):
    """The context manager that ``watch`` returns."""

    _timeouts: Timeouts | None
    _grace: timedelta
    _silence: timedelta | None
    _session: Session | None = field(default=None, init=False)
    _stack: ExitStack | None = field(default=None, init=False)

    def _recreate_cm(self) -> Watch:
        return Watch(self._timeouts, self._grace, self._silence)

    def __enter__(self) -> Watch:
        """Starts the watch; StateError if this object is entered already."""
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
                for hook in (
                    register_optimizer_step_pre_hook(_before_step),
                    register_optimizer_step_post_hook(_after_step),
                ):
                    stack.callback(hook.remove)
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

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
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


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    refuse_aborted("This optimizer step was not made")


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # The abort may have come after ``_before_step``.
    refuse_aborted("An optimizer step was made meanwhile")
    here.stepped(optimizer)
    session = current_session()
    if session is not None:
        session.open()
    if here.phase == "start":
        here.phase = "step"
        if _timeouts.active:
            _timeouts.active[-1].change("step")
