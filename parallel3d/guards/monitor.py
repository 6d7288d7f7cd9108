"""Monitor: a thread that reads the board while the main thread computes or waits.

It answers roll calls, so that a rank that hangs is told from one that was killed; it remembers what was
posted, also when the store's host is gone; and where the main thread still waits for a collective that
can't end any more, it lets the wait fail (gloo only, see ``wake_waiting``). It also notices ranks, and a
store, that have fallen silent.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from parallel3d._compat_groups import all_groups, clone_store, wake_waiting
from parallel3d.guards.board import Board, Note
from parallel3d.guards.progress import here, stack_of
from parallel3d.guards.silence import Pulse, Sentinel
from parallel3d.mesh.naming import seconds as in_words

__all__ = ["Monitor"]


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
