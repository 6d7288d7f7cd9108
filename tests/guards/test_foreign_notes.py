"""What no rank has written into the store is ignored, and said once: the watch goes on."""

import json
import warnings
from typing import Any

import pytest
from _support.guards.monitors import NEVER, NOTE, Freezing, monitor

from parallel3d.guards.board import Board, Note

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
