"""One save at a time in a thread of its own."""

from __future__ import annotations

import atexit
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

__all__ = ["run_in_background", "wait_for_background"]


class _Saving(Future[Path]):
    """The future of a save; knows whether somebody has been told how it ended."""

    told = False

    @property
    def cause(self) -> BaseException | None:
        """As ``exception()``, but nobody counts as told."""
        return super().exception()

    def tell(self) -> None:
        """Raises what it has raised, if nobody has been told."""
        error = None if self.told else self.exception()
        if error is not None:
            raise error

    def result(self, timeout: float | None = None) -> Path:
        found = self.exception(timeout)
        if found is not None:
            raise found
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = super().exception(timeout)
        self.told = True
        return found

    def run(self, work: Callable[[], Path]) -> None:
        try:
            self.set_result(work())
        except BaseException as error:
            self.set_exception(error)


_LAST = -(10**6)  # after all others

_pending: _Saving | None = None
_last: _Saving | None = None
_thread: ThreadPoolExecutor | None = None
"""Kept: who starts a thread waits until it has run a little."""


def run_in_background(work: Callable[[], Path]) -> Future[Path]:
    """Runs ``work`` in a thread, which the interpreter's end waits for; the one before must be done."""
    global _pending, _last, _thread
    assert _pending is None
    if _last is None:
        if multiprocessing.parent_process() is None:
            atexit.register(_tell_at_exit)
        else:
            Finalize(None, _end_with_error, exitpriority=_LAST)
    _pending = _last = _Saving()
    _pending.set_running_or_notify_cancel()  # it can't be cancelled
    if _thread is None:
        _thread = ThreadPoolExecutor(1, thread_name_prefix="parallel3d-checkpoint")
    _thread.submit(_pending.run, work)
    return _pending


def _tell_at_exit() -> None:
    """Says what the last save has raised, if nobody has been told; the process then ends with an error.

    Threads have ended by then.
    """
    if _tell():
        # Python's own way to an exit code at this stage: 120, when a standard stream can't be flushed. All
        # else is still done: other handlers, files that are open.
        sys.stdout = _FailsAtTheEnd(sys.stdout)


def _end_with_error() -> None:
    """The same in a process of ``multiprocessing``, which calls no exit handlers, nor ends as Python does."""
    if _pending is not None:
        wait([_pending])
    if _tell():
        raise SystemExit(1)


def _tell() -> bool:
    """Whether the last save has failed and nobody knew."""
    if _last is None or _last.told or not _last.done():
        return False
    error = _last.exception()
    if error is None:
        return False
    print(
        "parallel3d: the last save in the background has failed, and nobody has asked for its result:\n"
        + "".join(traceback.format_exception(error)),
        file=sys.stderr,
        flush=True,
    )
    return True


class _FailsAtTheEnd:
    """A standard stream whose last flush, when the interpreter ends, fails."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing():
            raise RuntimeError("parallel3d: the last save in the background has failed; see above")


def wait_for_background() -> _Saving | None:
    """Returns when no save is under way: the last one, if it has failed."""
    global _pending
    pending, _pending = _pending, None
    if pending is None:
        return None
    return pending if pending.cause is not None else None
