"""What a rank says whose collective failed, from what all have posted."""

import pytest
from test_silence import NEVER, Freezing, monitor

from parallel3d.guards.board import Board, Note
from parallel3d.guards.cause import find_cause
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
    board.answer(2, {"where": "step 3", "stack": "data.py:7"})
    with fake_world(0, 3), monitor(store, NEVER, world_size=3) as watching:
        watching.grace = 0.2
        error = find_cause(watching, own, "step 3", lambda rank: "")
    assert text in str(error) and "its process lives, at step 3, and is in data.py:7" in str(error)
