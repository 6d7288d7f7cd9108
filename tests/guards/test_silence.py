"""A store that does not answer any more holds up no rank for longer than ``silence``, whoever asks it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from parallel3d.guards.board import Note
from parallel3d.guards.session import Monitor

SILENCE = 0.4  # seconds
KILLED = 6.0  # after which a frozen store's host is killed, long after all are to have given up
OFTEN, NEVER = 0.5, 1000.0  # grace; the thread looks ten times in it


class Freezing:
    """A store in this process that can be frozen: who asks it then waits, until its host is killed."""

    def __init__(self) -> None:
        self.table: dict[str, bytes] = {}
        self.frozen = False
        self.asked = threading.Event()  # while it is frozen
        self.killed = threading.Event()

    def clone(self) -> "Freezing":
        return self

    def answer(self) -> None:
        if self.frozen:
            self.asked.set()
            self.killed.wait(KILLED)
            raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: str) -> None:
        self.answer()
        self.table[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.answer()
        return self.table[key]

    def check(self, keys: list[str]) -> bool:
        self.answer()
        return all(key in self.table for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.answer()
        self.table[key] = str(int(self.table.get(key, b"0")) + amount).encode()
        return int(self.table[key])


@contextmanager
def monitor(
    store: Any, grace: float, silence: float | None = SILENCE, world_size: int = 2
) -> Iterator[Monitor]:
    watching = Monitor(store, rank=1, world_size=world_size, grace=grace, silence=silence)
    watching.start()
    try:
        yield watching
    finally:
        store.killed.set()
        watching.end()
        watching.close()


NOTE = Note("lost", 1, "a collective failed")


def test_a_rank_that_fails_just_before_the_store_is_given_up_does_not_wait_for_it() -> None:
    """It has ended its thread by then, which waits for the store and holds the lock."""
    store = Freezing()
    with monitor(store, OFTEN) as watching:
        store.frozen = True
        assert store.asked.wait(2)
        start = time.monotonic()
        watching.end()
        watching.post(NOTE)
        assert time.monotonic() - start < KILLED / 2
        assert watching.store_silent and watching.store_lost


@pytest.mark.parametrize("call", ["post", "facts", "look", "wait_until"])
def test_a_rank_that_is_the_first_to_ask_a_frozen_store(call: str) -> None:
    """The main thread itself would wait, not the one that watches."""
    store = Freezing()
    with monitor(store, NEVER) as watching:
        asks = {
            "post": lambda: watching.post(NOTE),
            "facts": lambda: watching.facts("answer", [0]) == {},
            "look": watching.look,
            "wait_until": lambda: watching.wait_until(lambda: False, 100) is False,
        }
        store.frozen = True
        start = time.monotonic()
        assert asks[call]() in (None, True)
        assert time.monotonic() - start < KILLED / 2
        assert watching.store_silent
        watching.post(NOTE)  # not asked again
        assert time.monotonic() - start < KILLED / 2


def test_a_store_that_answers_is_not_given_up() -> None:
    store = Freezing()
    with monitor(store, OFTEN) as watching:
        watching.post(NOTE)
        time.sleep(3 * SILENCE)
        watching.end()
        time.sleep(2 * SILENCE)
        watching.post(NOTE)
        watching.look()
        assert watching.notes() == [NOTE, NOTE]
        assert not watching.store_lost


def test_a_store_whose_host_is_killed_is_lost_but_not_silent() -> None:
    store = Freezing()
    with monitor(store, NEVER, silence=None) as watching:
        store.killed.set()
        store.frozen = True
        watching.post(NOTE)
        assert watching.store_lost and not watching.store_silent


def test_an_error_of_this_rank_s_own_reaches_it() -> None:
    """What is no fault of the store is not swallowed by the thread that asks it."""
    store = Freezing()
    with monitor(store, NEVER) as watching, pytest.raises(TypeError):
        watching.facts("answer", None)  # type: ignore[arg-type]


def test_no_thread_is_left() -> None:
    store = Freezing()
    with monitor(store, OFTEN) as watching:
        watching.post(NOTE)
    deadline = time.monotonic() + 3
    names = ["parallel3d-guards"]
    while names and time.monotonic() < deadline:
        names = [t.name for t in threading.enumerate() if t.name.startswith("parallel3d-guards")]
        time.sleep(0.05)
    assert names == []
