"""One save at a time in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

__all__ = ["run_in_background", "wait_for_background"]


class _Saving(Future[Path]):
    """The future of a save; knows whether somebody has been told how it ended."""

    told = False

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


_pending: _Saving | None = None
_thread: ThreadPoolExecutor | None = None
"""Kept: who starts a thread waits until it has run a little."""


def run_in_background(work: Callable[[], Path]) -> Future[Path]:
    """Runs ``work`` in a thread, which the interpreter's end waits for; the one before must be done."""
    global _pending, _thread
    assert _pending is None
    _pending = _Saving()
    _pending.set_running_or_notify_cancel()  # it can't be cancelled
    if _thread is None:
        _thread = ThreadPoolExecutor(1, thread_name_prefix="parallel3d-checkpoint")
    _thread.submit(_pending.run, work)
    return _pending


def wait_for_background() -> _Saving | None:
    """Returns when no save is under way: the last one, if it has failed."""
    global _pending
    pending, _pending = _pending, None
    if pending is None:
        return None
    told = pending.told
    failed = pending.exception() is not None
    pending.told = told
    return pending if failed else None
