"""An error that nobody catches: one of all ranks is printed once, one that another rank caused in a line."""

import json
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from torch import distributed as dist

from parallel3d.errors import PeerFailureError
from parallel3d.mesh.failures import first_to_end, is_of_communication, post_failure, short
from parallel3d.mesh.store import others, say

_WAIT = 1.0  # seconds for the first rank to print: a launcher ends all ranks when one has ended
_KEY = "parallel3d/uncaught"
_before_group: list[tuple[dist.Store, int]] = []  # the store and this rank, until there is a group
_installed: list[bool] = []


def print_once(store: dist.Store | None = None, rank: int = 0) -> None:
    """From now on an uncaught error is printed only by rank 0 if rank 0 prints the same.

    Ranks that wait for this one raise it too (see ``mesh.failures``), and those whose collectives fail when
    this one ends print one line that names it.

    An error is the same if its type and text are, and those of the errors that led to it. Ctrl-C, which
    interrupts all ranks, is one. Errors that only some ranks raise, or that rank 0 doesn't raise within two
    seconds, are printed by each of them.

    Args:
        store, rank: those of a default process group that is yet to be started.
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
    """Prints in one line whose failure ``error`` comes from. Returns False if nobody knows.

    The collectives of this rank end when the process of the rank that failed does, which has posted why.
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
    """Returns type and text of ``error`` and of those before it that a traceback shows."""
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
    """Whether ``action`` returns True in time; the store may be gone, or in use by a thread that waits."""
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
