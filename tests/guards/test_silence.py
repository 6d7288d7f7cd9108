"""A store that does not answer any more holds up no rank for longer than ``silence``, whoever asks it."""

import threading
import time

import pytest
from _support.guards.monitors import KILLED, NEVER, NOTE, OFTEN, SILENCE, Freezing, monitor


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
