"""Abort: ends the kernels of NCCL collectives that wait for a rank that has failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from parallel3d._torch.groups import abort_communicator, communicators
from parallel3d._util.arguments import text_of

LOAD_AGAIN = (
    "A collective that is aborted ends without an error and leaves a part of its result. Optimizer steps "
    "that the device had not finished by then may have used it, so the weights may hold values of an "
    "aborted collective: load the last checkpoint"
)


class Abort:
    """An abort of all NCCL communicators of this process; while there is such an object, results may be
    undefined.

    Under NCCL the device waits for a collective, in a kernel that only an abort ends, and the main thread
    waits for the device. After the abort it would continue with incomplete results of the kernels. So
    ``guards.watch`` raises once there is an Abort.

    Each communicator is aborted in a thread of its own, all at the same time, because an abort may wait for
    the device, and so for the kernels of the others (pytorch/pytorch#119797). The threads are daemons,
    because an abort may never end (NVIDIA/nccl#1777).
    """

    def __init__(self, backends: Sequence[Any], where: str) -> None:
        self.where = where  # the step, phase and unit that this rank is in
        self._backends = list(backends)
        self._problems: list[str] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts a thread for each communicator; one that can't be started counts as a failed abort."""
        for backend in self._backends:
            thread = threading.Thread(
                target=self._run, args=(backend,), name="parallel3d-guards-abort", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # no more threads
                self._problems.append(f"{type(error).__name__}: {text_of(error)}")
            else:
                self._threads.append(thread)

    def wait(self, seconds: float) -> bool:
        """Waits for the aborts, at most ``seconds``. Returns whether all have ended."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def __str__(self) -> str:
        """Returns a text that says what has been aborted, and which aborts have raised or not ended yet."""
        number = len(self._backends)
        text = f"{number} NCCL communicator{'s' if number != 1 else ''} aborted, at {self.where}"
        if self._problems:
            text += f"; {len(self._problems)} raised {self._problems[0][:300]}"
        alive = sum(thread.is_alive() for thread in self._threads)
        return f"{text}; {alive} not ended yet" if alive else text

    def _run(self, backend: Any) -> None:
        try:
            abort_communicator(backend)
        except Exception as error:  # it may have ended the kernels even so
            self._problems.append(f"{type(error).__name__}: {text_of(error)}")


def all_communicators(groups: Sequence[Any]) -> list[Any]:
    """Returns the NCCL backends of ``groups``, each once; a group that has been destroyed has none."""
    found: dict[int, Any] = {}
    for group in groups:
        try:
            backends = communicators(group)
        except Exception:  # destroyed meanwhile, or of a backend that is not known here
            continue
        found |= {id(backend): backend for backend in backends}
    return list(found.values())
