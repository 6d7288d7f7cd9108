"""What one rank has raised, told to the ranks that wait for it in the store.

A rank that raises and goes on, or ends, never comes to where the others wait: they would wait as long as the
process group's timeout, and then know only that it is missing.
"""

import functools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ParamSpec, TypeVar

from torch import distributed as dist

from parallel3d._util.arguments import text_of, without_gloo
from parallel3d.errors import AgreementError, Parallel3dError, PeerFailureError
from parallel3d.mesh.store import others

P = ParamSpec("P")
R = TypeVar("R")

_ANY = "parallel3d/failed/any"  # whether there is a note at all: one key to look at

# Parts of the errors of backends; gloo's are plain RuntimeErrors.
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


def is_of_communication(error: BaseException) -> bool:
    """Whether a collective or the store has raised ``error``, because of another rank."""
    if isinstance(error, PeerFailureError | dist.DistError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, Parallel3dError):
        return False
    text = text_of(error)
    return any(mark in text for mark in _MARKS)


def short(error: BaseException, width: int = 2000) -> str:
    """Returns type and text of an exception; a text longer than ``width`` is cut."""
    text = without_gloo(text_of(error))
    text = text if len(text) <= width else f"{text[:width]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def tells_others(call: Callable[P, R]) -> Callable[P, R]:
    """Makes ``call``, which all ranks make, post what it raises: ranks that wait for this one raise too.

    An error that all ranks raise ends no wait: see ``raise_failed_alone``.
    """

    @functools.wraps(call)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            peers = others()
            # An AgreementError is on all of them.
            if peers is not None and not isinstance(error, AgreementError | PeerFailureError):
                with suppress(RuntimeError):  # the store has ended
                    post_failure(peers[0], peers[1], error, ends=False)
            raise

    return told


def post_failure(store: dist.Store, rank: int, error: BaseException, *, ends: bool) -> None:
    """Posts that ``rank`` has raised ``error``, and whether that ends it."""
    before = _read(store, rank)[0]
    store.set(_key(rank), json.dumps([before + 1, ends, short(error)]))
    store.set(_ANY, "")


def raise_failed_alone(store: dist.Store, rank: int, awaited: Callable[[], Sequence[int]]) -> None:
    """Raises FailedAlone if one of ``awaited``, for which ``rank`` waits, has raised what ``rank`` has not:
    an error that ends it, or more errors than ``rank`` itself."""
    if not store.check([_ANY]):
        return
    own = _read(store, rank)[0]
    for other in awaited():
        count, ends, text = _read(store, other)
        if ends or count > own:
            raise FailedAlone(
                PeerFailureError(
                    f"rank {other} failed first, and rank {rank} waits for it: {text}\nLook at the output of "
                    f"rank {other}.",
                    (other,),
                )
            )


def first_to_end(store: dist.Store, rank: int, world_size: int) -> tuple[int, str] | None:
    """Returns (another rank that an error has ended, that error's type and text), if there is one."""
    if not store.check([_ANY]):
        return None
    for other in range(world_size):
        _, ends, text = _read(store, other)
        if ends and other != rank:
            return other, text
    return None


class FailedAlone(Exception):
    """Ends a wait. ``error``: what to raise, on all ranks that wait."""

    def __init__(self, error: PeerFailureError) -> None:
        super().__init__(str(error))
        self.error = error


def _key(rank: int) -> str:
    return f"parallel3d/failed/{rank}"


def _read(store: dist.Store, rank: int) -> tuple[int, bool, str]:
    """Returns how many errors ``rank`` has posted, whether the last one ends it, and its type and text."""
    if not store.check([_key(rank)]):
        return 0, False, ""
    count, ends, text = json.loads(store.get(_key(rank)))
    return count, ends, text
