"""Saves in the background: one thread, and a report of errors that nobody has asked for."""

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


class Saving(Future[Path]):
    """The future of a save in the background, which records whether its error has been reported."""

    reported = False  # whether ``result`` or ``exception`` has been called since it ended

    @property
    def cause(self) -> BaseException | None:
        """As ``exception()``, but does not count as reporting it."""
        return super().exception()

    def report(self) -> None:
        """Raises its error if that has not been reported."""
        if not self.reported:
            self.result()

    def result(self, timeout: float | None = None) -> Path:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.reported = True
        return error

    def run(self, work: Callable[[], Path]) -> None:
        try:
            self.set_result(work())
        except BaseException as error:
            self.set_exception(error)


_EXIT_PRIORITY = -(10**6)  # after all others

_pending: Saving | None = None
_last: Saving | None = None
_thread: ThreadPoolExecutor | None = None
"""Kept, because starting a thread blocks its caller for a while."""


def run_in_background(work: Callable[[], Path]) -> Future[Path]:
    """Runs ``work`` in a thread that the interpreter waits for at exit; the previous save must have ended."""
    global _pending, _last, _thread
    assert _pending is None
    if _last is None:
        if multiprocessing.parent_process() is None:
            atexit.register(_report_at_exit)
        else:  # multiprocessing's children call no atexit handlers
            Finalize(None, _exit_with_error, exitpriority=_EXIT_PRIORITY)
    _pending = _last = Saving()
    _pending.set_running_or_notify_cancel()  # it can't be cancelled
    if _thread is None:
        _thread = ThreadPoolExecutor(1, thread_name_prefix="parallel3d-checkpoint")
    _thread.submit(_pending.run, work)
    return _pending


def _report_at_exit() -> None:
    """Prints an unreported error of the last save, whose thread has ended; makes the process fail."""
    if _print_unreported():
        # Python's only exit code at this stage is 120, when a standard stream cannot be flushed. Other
        # handlers still run, and open files are closed.
        sys.stdout = _FailingStream(sys.stdout)


def _exit_with_error() -> None:
    """The same in a process of ``multiprocessing``."""
    if _pending is not None:
        wait([_pending])
    if _print_unreported():
        raise SystemExit(1)


def _print_unreported() -> bool:
    """Prints an unreported error of the last save; returns whether there was one."""
    if _last is None or _last.reported or not _last.done():
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


class _FailingStream:
    """A standard stream whose last flush, at the interpreter's exit, fails."""

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


def wait_for_background() -> Saving | None:
    """Waits for the save under way, if there is one; returns it if it has failed."""
    global _pending
    pending, _pending = _pending, None
    return pending if pending is not None and pending.cause is not None else None
