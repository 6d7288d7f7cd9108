"""Player: a program's operations, one after the other, as spans of time on streams. Seconds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Player:
    """The computation's stream of one GPU, and what runs beside it. Each method plays one operation, in the
    order in which the host issues them.

    Computation runs in the program's order, and no operation before the host has launched it. A collective or
    copy beside it begins when it has been issued and all its resources are free: its stream, its communicator
    or its network card. Computation is slower while collectives run, and stops while it waits for one.

    Args:
        slowdown: the fraction of its time that computation takes longer while collectives run.
        launch: seconds in which the host launches an operation.

    Attributes:
        now: time in seconds at which the computation's stream has finished its work.
        launched: time at which the host has launched the last operation.
        free: resource, such as a stream -> time from which it is free.
        running: time at which the last collective ends.
        host: seconds in which the computation's stream waited for the host.
    """

    def __init__(self, slowdown: float, launch: float = 0.0) -> None:
        self.slowdown, self.launch = slowdown, launch
        self.now = self.launched = self.running = self.host = 0.0
        self.free: dict[Hashable, float] = {}

    @property
    def end(self) -> float:
        """When everything that was issued has ended."""
        return max([self.now, *self.free.values()])

    def compute(self, seconds: float) -> tuple[float, float]:
        """Plays a kernel that takes ``seconds`` alone; returns when it begins and ends."""
        self.launched += self.launch
        start = max(self.now, self.launched)
        self.host += start - self.now
        beside = min(max(self.running - start, 0.0), seconds)
        self.now = start + seconds + self.slowdown * beside
        return start, self.now

    def beside(
        self,
        seconds: float,
        turns: Iterable[Hashable],
        after: float = 0.0,
        *,
        is_collective: bool = True,
    ) -> tuple[float, float]:
        """Plays a collective, or a copy, beside the computation; returns when it begins and ends.

        Args:
            turns: the resources that it occupies, such as its stream and its communicator.
            after: earliest time at which it may begin.
        """
        self.launched += self.launch
        start = max(self.now, self.launched, after)
        for each in turns:
            start = max(start, self.free.get(each, 0.0))
        end = start + seconds
        for each in turns:
            self.free[each] = end
        if is_collective:
            self.running = max(self.running, end)
        return start, end

    def wait(self, end: float) -> tuple[float, float] | None:
        """Lets the computation wait until time ``end``.

        Returns:
            The times at which it begins to wait and continues; None if it doesn't wait.
        """
        start = max(self.now, min(self.launched, end))
        if end <= start:
            return None
        self.host += start - self.now
        self.now = end
        return start, end
