"""Lines: what a transfer occupies for its time. One per link on the CPU, one per link and GPU beside it."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel3d._compat_emulated import cuda_sleep

__all__ = ["CpuLine", "CudaLine", "Transfer", "VirtualClock", "WallClock"]

_SPIN = 2e-4  # seconds before the end in which sleeping is not precise enough


@dataclass(slots=True)
class Transfer:
    """One collective on an emulated link. Times are seconds of the network's clock.

    Attributes:
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ... as ``Collective.op`` has it.
        unit: the unit our engine issued it for; ``""`` elsewhere.
        axis: mesh axis of its group; ``"world"`` for the default group.
        link: name of the link.
        bytes: what this rank sends through the link.
        issued: when it was called.
        started: when the link was free for it.
        ended: when it had gone through.
        waited: seconds that callers have spent in ``wait``; on a GPU, where callers don't, 0.
    """

    op: str
    unit: str
    axis: str
    link: str
    bytes: int
    issued: float
    started: float
    ended: float
    waited: float = 0.0
    events: Any = field(default=None, repr=False, compare=False)


class WallClock:
    """Real time. Whoever waits sleeps, and so leaves the CPU to others."""

    def __init__(self) -> None:
        self.now = time.perf_counter
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._open = True

    def sleep_until(self, moment: float) -> None:
        """Sleeps, and spins for the last moment: a sleep alone wakes 50 us late and more."""
        left = moment - self.now()
        if left > _SPIN:
            time.sleep(left - _SPIN)
        while self.now() < moment:
            pass

    def rewind_to(self, moment: float) -> None:
        """Real time doesn't."""

    def call_at(self, moment: float, what: Callable[[], None]) -> None:
        """Calls ``what`` on a thread of the clock's, which sleeps in between."""
        if moment <= self.now():
            what()
            return
        with self._changed:
            heapq.heappush(self._due, (moment, next(self._numbers), what))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, daemon=True, name="emulated network"
                )
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Calls all that is due at once."""
        with self._changed:
            self._open = False
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._open and (not self._due or self._due[0][0] > self.now()):
                    self._changed.wait(self._due[0][0] - self.now() if self._due else None)
                if not self._due:
                    return
                _, _, what = heapq.heappop(self._due)
            what()


class VirtualClock:
    """A clock that waiting moves on at once: nobody sleeps.

    ``VirtualClock()`` stands still otherwise; compute takes what the model advances it by, and a schedule's
    figures are exact. ``VirtualClock(time.process_time)`` goes on with this process's CPU time: figures of
    real compute that don't depend on what else runs on the machine. A ``torch.futures.Future`` (DDP's) is
    complete at once.

    Args:
        runs_with: what it goes on with, in seconds; by default nothing.
    """

    def __init__(self, runs_with: Callable[[], float] = lambda: 0.0) -> None:
        self._runs_with = runs_with
        self._ahead = -runs_with()

    def now(self) -> float:
        """Seconds since the clock was made."""
        return self._runs_with() + self._ahead

    def advance(self, seconds: float) -> None:
        """What has computed for ``seconds``."""
        self._ahead += seconds

    def sleep_until(self, moment: float) -> None:
        """Moves the clock on, never back."""
        self._ahead += max(0.0, moment - self.now())

    def rewind_to(self, moment: float) -> None:
        """What was computed since ``moment`` was not this process's work."""
        self._ahead -= max(0.0, self.now() - moment)

    def call_at(self, moment: float, what: Callable[[], None]) -> None:
        """Calls it now."""
        what()

    def close(self) -> None:
        """Nothing is left to do."""


class CpuLine:
    """First come, first served: a transfer starts when all before it have ended."""

    def __init__(self, clock: WallClock | VirtualClock) -> None:
        self.clock = clock
        self.free = 0.0

    def values(self) -> AbstractContextManager[Any]:
        """Where the values are written."""
        return nullcontext()

    def begin(self, transfer: Transfer, seconds: float) -> None:
        """Puts ``transfer`` behind what is under way."""
        transfer.started = max(transfer.issued, self.free)
        transfer.ended = self.free = transfer.started + seconds

    def is_over(self, transfer: Transfer) -> bool:
        """Whether it has gone through by now."""
        return self.clock.now() >= transfer.ended

    def wait(self, transfer: Transfer) -> None:
        """Blocks the caller until it has."""
        now = self.clock.now()
        if now < transfer.ended:
            self.clock.sleep_until(transfer.ended)
            transfer.waited += self.clock.now() - now

    def resolve(self, transfer: Transfer) -> None:
        """Fills in times known by the device only."""


class CudaLine:
    """A stream that sleeps for a transfer's time: other streams go on; ``wait`` lets the current one wait.

    That the line is first come, first served is the stream's own doing. Times come from events, so reading
    them synchronizes.

    Args:
        clock: for the time at which the GPU's was taken.
        device: ``torch.cuda``, or what stands for it in a test.
        sleep: occupies the current stream for a number of cycles.
    """

    def __init__(
        self,
        clock: WallClock | VirtualClock,
        device: Any,
        sleep: Callable[[int], None] = cuda_sleep,
    ) -> None:
        self.device, self.sleep = device, sleep
        self.stream = device.Stream()
        self.cycles_per_second = self._calibrate()
        self.zero = device.Event(enable_timing=True)
        device.synchronize()
        self.zero.record()
        self.zero_time = clock.now()

    def _calibrate(self, cycles: int = 20_000_000) -> float:
        """By the second of two sleeps: the first also wakes the GPU up."""
        begin, end = (self.device.Event(enable_timing=True) for _ in range(2))
        self.sleep(cycles)
        begin.record()
        self.sleep(cycles)
        end.record()
        self.device.synchronize()
        return cycles / (begin.elapsed_time(end) * 1e-3)

    def values(self) -> AbstractContextManager[Any]:
        """See ``CpuLine``. The line waits for what has made the input."""
        self.stream.wait_stream(self.device.current_stream())
        return self.device.stream(self.stream)

    def begin(self, transfer: Transfer, seconds: float) -> None:
        """See ``CpuLine``."""
        start, end = (self.device.Event(enable_timing=True) for _ in range(2))
        with self.device.stream(self.stream):
            start.record()
            self.sleep(round(seconds * self.cycles_per_second))
            end.record()
        transfer.events = (start, end)

    def is_over(self, transfer: Transfer) -> bool:
        """See ``CpuLine``."""
        return bool(transfer.events[1].query())

    def wait(self, transfer: Transfer) -> None:
        """Lets the current stream wait; the CPU goes on."""
        self.device.current_stream().wait_event(transfer.events[1])

    def resolve(self, transfer: Transfer) -> None:
        """See ``CpuLine``."""
        self.device.synchronize()
        start, end = transfer.events
        transfer.started = self.zero_time + self.zero.elapsed_time(start) * 1e-3
        transfer.ended = self.zero_time + self.zero.elapsed_time(end) * 1e-3
        transfer.events = None


def line_for(device: torch.device, clock: WallClock | VirtualClock) -> CpuLine | CudaLine:
    """The kind of line that carries tensors of ``device``."""
    return CudaLine(clock, torch.cuda) if device.type == "cuda" else CpuLine(clock)
