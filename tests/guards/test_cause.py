"""What a rank says whose collective failed, from what all have posted."""

import pytest
from _support.guards.monitors import NEVER, Freezing, monitor

from parallel3d.checkpoint.ranks import as_checkpoint_error
from parallel3d.guards.board import Board, Note
from parallel3d.guards.session import _more_forwards, find_cause, is_of_communication, short
from parallel3d.guards.timeouts import here
from parallel3d.testing import fake_world

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
