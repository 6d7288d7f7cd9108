"""guards.watch's monitor: a store that answers no more, notes of strangers, and the cause that it finds."""

import json
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from parallel3d.checkpoint.ranks import as_checkpoint_error
from parallel3d.guards.board import Board, Note
from parallel3d.guards.session import (
    Monitor,
    _more_forwards,
    find_cause,
    is_of_communication,
    short,
)
from parallel3d.guards.timeouts import here
from parallel3d.testing import fake_world

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


# A store that does not answer holds up no rank for longer than ``silence``, whoever asks it.


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


# What no rank has written into the store is ignored, and said once: the watch goes on.

BAD = [
    b"",
    b"{",
    b"\xff\xfe",
    b"3",
    b"[]",
    b"null",
    b'"failed"',
    b"{}",
    b"[" * 5000,
    b"x" * 20_000,
    b'{"kind": "failed"}',
    b'{"kind": "failed", "rank": 1, "more": 2}',
    b'{"kind": "burned", "rank": 1}',
    b'{"kind": "failed", "rank": "1"}',
    b'{"kind": "failed", "rank": true}',
    b'{"kind": "failed", "rank": 7}',
    b'{"kind": "failed", "rank": -1}',
    b'{"kind": "failed", "rank": 1, "error": 5}',
    b'{"kind": "failed", "rank": 1, "where": null}',
    b'{"kind": "failed", "rank": 1, "step": 1e400}',
]


@pytest.mark.parametrize("text", BAD, ids=lambda text: repr(text[:40]))
def test_a_note_that_is_none(text: bytes) -> None:
    store = Freezing()
    board = Board(store, 2)  # type: ignore[arg-type]
    store.table["note/1"] = text
    with pytest.warns(UserWarning, match=r"note/1 in the job's store is .* is ignored") as told:
        assert board.read() == [] and board.read() == []
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        board.post(NOTE)  # its number is the one that was spoilt
        assert board.read() == [NOTE]
        board.post(NOTE)
        store.table["note/2"] = text  # after it was posted
        board.post(NOTE)
        assert board.read() == []  # it may still be on its way
        board._gap = 0.0
        assert board.read() == [NOTE]


@pytest.mark.parametrize("text", [b"xyz", b"", b"-3", b"99999999999999999999", b"\xff", b"1e3"])
def test_a_count_that_is_none(text: bytes) -> None:
    """Adding to it would close the connection."""
    store = Freezing()
    a, b = Board(store, 2), Board(store, 2)  # type: ignore[arg-type]
    a.post(NOTE)
    store.table["notes"] = text
    other = Note("left", 0)
    with pytest.warns(UserWarning, match=r"notes in the job's store is .*no count of notes"):
        b.post(other)
    assert a.read() == b.read() == [NOTE, other]


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"where": "x"}', b"\xff"])
def test_an_answer_that_is_none(text: bytes) -> None:
    store = Freezing()
    board = Board(store, 3)  # type: ignore[arg-type]
    store.table["answer/0"] = text
    store.table["host/0"], store.table["host/1"] = b"\xff\xfe", b"a\nb"
    board.post_fact("answer", 2, {"where": "step 1", "stack": "a.py:3"})
    with pytest.warns(UserWarning, match="answer/0 in the job's store"):
        assert list(board.facts("answer", [0, 1, 2])) == [2]
    assert 1 not in board.facts("host", [0, 1])


@pytest.mark.parametrize("filters", ["default", "error"])
def test_the_watch_goes_on(filters: Any) -> None:
    """Also where warnings are errors."""
    store = Freezing()
    with warnings.catch_warnings(), monitor(store, NEVER) as watching:
        warnings.simplefilter(filters)
        store.table["note/1"] = b"spoilt"
        if filters == "default":
            with pytest.warns(UserWarning, match="note/1"):
                watching.look()
        watching.look()
        watching.post(NOTE)
        watching.look()
        assert watching.notes() == [NOTE] and not watching.store_lost
        store.table["note/2"] = json.dumps({"kind": "failed", "rank": 9}).encode()
        assert watching.failure() is None


# What a rank says whose collective failed, from what all have posted.

CLOSED = RuntimeError("Application timeout caused pair closure")
TIMED_OUT = "RuntimeError: gloo: Timed out waiting 2000ms for send operation to complete"


@pytest.mark.parametrize(
    ("others", "own", "text"),
    [
        (TIMED_OUT, CLOSED, "rank 2 did not come within "),
        ("RuntimeError: Connection closed", RuntimeError(TIMED_OUT), "rank 2 did not come within "),
        ("RuntimeError: Connection closed", CLOSED, "rank 2 is not in this collective"),
    ],
    ids=["another's time was up", "its own was", "nobody's"],
)
def test_a_rank_that_hangs(others: str, own: RuntimeError, text: str) -> None:
    """Who is woken before its own time is up says the same as who waited for all of it."""
    store = Freezing()
    board = Board(store)
    board.post(Note("lost", 0, others, "step 3", 3))
    board.post(Note("roll", 0))
    board.post_fact("answer", 2, {"where": "step 3", "stack": "data.py:7"})
    with fake_world(0, 3), monitor(store, NEVER, world_size=3) as watching:
        watching.grace = 0.2
        error = find_cause(watching, own, "step 3", lambda rank: "")
    assert text in str(error) and "its process lives, at step 3, and is in data.py:7" in str(error)


class Mute(LookupError):
    """Of a user's, with a fault of its own."""

    def __str__(self) -> str:
        raise KeyError("no such attribute")


def test_an_exception_whose_text_raises_is_named() -> None:
    assert short(Mute()) == "Mute: its text can't be read: __str__ raises KeyError"
    assert not is_of_communication(Mute())
    error = as_checkpoint_error({0: Mute()}, 2)
    assert str(error) == "on rank 0: Mute: its text can't be read: __str__ raises KeyError"


def test_what_gloo_says_is_quoted_without_its_advice() -> None:
    place = "/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537"
    happened = "Read error [127.0.0.1]:54946: Connection reset by peer."
    advice = (
        "This is typically caused by a remote worker hanging or bugs in the application. Check the logs "
        "of the remote worker before reporting an error. GLHF! \U0001f3d6\ufe0f"
    )
    assert short(RuntimeError(f"[{place}] {happened} {advice}")) == f"RuntimeError: {happened}"


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (
            {0: (5, 0), 1: (5, 0), 2: (6, 0), 3: (5, 0)},
            "Forwards begun: 6 on rank 2, 5 on ranks 0-1, 3",
        ),
        ({0: (5, 0), 1: (6, 0)}, "6 on rank 1, 5 on rank 0"),
        ({0: (5, 0), 1: (5, 0), 2: (4, 1)}, "without gradients begun: 1 on rank 2, 0 on ranks 0-1"),
        ({0: (5, 0), 1: (4, 0), 2: (5, 0)}, ""),  # who was killed or hangs has fewer
        ({0: (5, 2), 1: (5, 2)}, ""),
        ({1: (5, 0)}, ""),
        ({}, ""),
    ],
)
def test_who_has_begun_more_forwards(counts: dict[int, tuple[int, int]], text: str) -> None:
    said = _more_forwards(counts)
    assert (text in said) and bool(said) == bool(text)


def test_a_rank_that_evaluates_alone_is_named() -> None:
    """Whoever of them is lost for it."""
    here.reset()  # as ``guards.watch`` does
    store = Freezing()
    board = Board(store)
    board.post(Note("lost", 0, "RuntimeError: Connection reset by peer", "step 3", 3))
    board.post_fact("forwards", 0, (5, 0))
    board.post_fact("forwards", 2, (6, 0))
    store.table["forwards/3"] = b"spoilt"
    with fake_world(0, 4), monitor(store, NEVER, world_size=4) as watching:
        watching.grace = 0.2
        with pytest.warns(UserWarning, match="forwards/3 in the job's store"):
            error = find_cause(watching, CLOSED, "step 3", lambda rank: "")
    assert "Forwards begun: 6 on rank 2, 5 on rank 0." in str(error)
