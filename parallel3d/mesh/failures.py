"""Errors of one rank: posted in the store for the ranks that wait for it, and printed once.

A rank that raises never reaches the call in which the others wait. Without this they would wait for the
process group's timeout, and then know only that the rank is missing.
"""

import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import ParamSpec, TypeVar

from torch import distributed as dist

from parallel3d._util.arguments import text_of, without_gloo
from parallel3d.errors import AgreementError, Parallel3dError, PeerFailureError
from parallel3d.mesh.store import others, say

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
    """Whether ``error`` comes from a collective or the store, and so from another rank's failure."""
    if isinstance(error, PeerFailureError | dist.DistError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, Parallel3dError):
        return False
    text = text_of(error)
    return any(mark in text for mark in _MARKS)


def short(error: BaseException, width: int = 2000) -> str:
    """Returns type and text of ``error``; the text is cut after ``width`` characters."""
    text = without_gloo(text_of(error))
    text = text if len(text) <= width else f"{text[:width]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def tells_others(call: Callable[P, R]) -> Callable[P, R]:
    """Decorator for ``call``, which all ranks make: its exceptions are posted in the store, so that ranks
    that wait for this one raise too, at once.

    If all ranks raise the same error, none of them gets PeerFailureError: see ``raise_failed_alone``.
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
    """Posts in the store that ``rank`` has raised ``error``; ``ends``: whether its process ends by it."""
    before = _read(store, rank)[0]
    store.set(_key(rank), json.dumps([before + 1, ends, short(error)]))
    store.set(_ANY, "")


def raise_failed_alone(store: dist.Store, rank: int, awaited: Callable[[], Sequence[int]]) -> None:
    """Called while ``rank`` waits for the ranks ``awaited()``. Raises FailedAlone if one of them has posted
    an error that ends its process, or more errors than ``rank`` itself."""
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
    """Returns (rank, error's type and text) of another rank whose process an error has ended; or None."""
    if not store.check([_ANY]):
        return None
    for other in range(world_size):
        _, ends, text = _read(store, other)
        if ends and other != rank:
            return other, text
    return None


class FailedAlone(Exception):
    """Raised in a wait for a rank that has failed. ``error``: the PeerFailureError for the user."""

    def __init__(self, error: PeerFailureError) -> None:
        super().__init__(str(error))
        self.error = error


def _key(rank: int) -> str:
    return f"parallel3d/failed/{rank}"


def _read(store: dist.Store, rank: int) -> tuple[int, bool, str]:
    """Returns (number of errors that ``rank`` has posted, whether the last ends it, its type and text)."""
    if not store.check([_key(rank)]):
        return 0, False, ""
    count, ends, text = json.loads(store.get(_key(rank)))
    return count, ends, text


# An error that nobody catches: one of all ranks is printed once, one that another rank caused in a line.

_WAIT = 1.0  # seconds for the first rank to print: a launcher ends all ranks when one has ended
_KEY = "parallel3d/uncaught"
_before_group: list[tuple[dist.Store, int]] = []  # the store and this rank, until there is a group
_installed: list[bool] = []


def print_once(store: dist.Store | None = None, rank: int = 0) -> None:
    """Installs an excepthook by which an uncaught error that all ranks raise is printed by rank 0 only.

    Ranks whose collectives fail because another rank has ended print one line that names that rank.

    Two errors are the same if they and the errors that caused them have equal types and texts. Ctrl-C
    interrupts all ranks with the same error. Errors that only some ranks raise, or that rank 0 doesn't raise
    within two seconds, are printed by each of these ranks. ``store`` and ``rank`` are those of a default
    process group that is yet to be started.
    """
    _before_group[:] = [] if store is None else [(store, rank)]  # a store kept is a server kept
    if _installed:
        return
    _installed.append(True)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        store, rank = next(iter(_before_group), (None, 0))
        world_size = 0
        if (found := others()) is not None:
            store, rank, world_size = found
        if store is None or not isinstance(error, Exception | KeyboardInterrupt):
            before(kind, error, at)
        elif is_of_communication(error):
            _print_cause(error, store, rank, world_size) or before(kind, error, at)
        else:
            _in_time(lambda: post_failure(store, rank, error, ends=True))
            if rank == 0:
                before(kind, error, at)
                _in_time(lambda: store.set(_KEY, json.dumps(_chain(error))))
            elif not _in_time(lambda: _first_prints(store, _chain(error))):
                before(kind, error, at)

    sys.excepthook = hook


def _print_cause(error: BaseException, store: dist.Store, rank: int, world_size: int) -> bool:
    """Prints one line that says which rank's failure has caused ``error``, of a collective or the store.
    Returns whether it did: False if no rank has posted one.

    A rank that fails posts its error before its process ends, which then makes others' collectives fail.
    """
    if isinstance(error, PeerFailureError):  # which says it
        say(short(error))
        return True
    found: list[str] = []

    def look() -> bool:
        end = time.monotonic() + _WAIT
        try:
            while time.monotonic() < end:
                if (cause := first_to_end(store, rank, world_size)) is not None:
                    other, text = cause
                    first_line = text.partition("\n")[0]
                    found.append(
                        f"rank {other} has failed: {first_line} (see the output of rank {other})"
                    )
                    return True
                time.sleep(0.05)
        except RuntimeError:
            found.append(
                f"the process that hosts the store, rank 0 or its launcher, has ended: see its output "
                f"({short(error, 300)})"
            )
        return bool(found)

    told = _in_time(look)
    if told:
        say(f"rank {rank} can't go on, as {found[0]}")
    return told


def _chain(error: BaseException | None) -> list[str]:
    """Returns the texts of ``error`` and of the errors that caused it, as a traceback shows them."""
    texts: list[str] = []
    while error is not None and len(texts) < 20:
        texts.append(f"{type(error).__name__}: {error}")
        hidden = error.__suppress_context__
        error = error.__cause__ or (None if hidden else error.__context__)
    return texts


def _first_prints(store: dist.Store, texts: list[str]) -> bool:
    while not store.check([_KEY]):
        time.sleep(0.01)
    same = set(texts) <= set(json.loads(store.get(_KEY)))
    if same:
        time.sleep(_WAIT / 2)
    return same


def _in_time(action: Callable[[], bool | None]) -> bool:
    """Runs ``action`` on a thread; returns whether it returns True within two seconds. (The store may be
    gone, or blocked by a thread that waits.)"""
    found: list[bool | None] = []

    def run() -> None:
        try:
            found.append(action())
        except RuntimeError:
            found.append(False)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(2 * _WAIT)
    return found == [True]
