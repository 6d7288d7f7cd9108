"""Player: a program's operations, one after the other, as spans of time on streams. Seconds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Player:
    """The computation's stream of one GPU, and what runs beside it. Each method plays one operation, in the
    order in which the host issues them.

    Computation runs in the program's order, nothing before the host has launched it. What is beside it begins
    when it is issued and everything that it takes turns with is free: its stream, other collectives of its
    communicator or its network card. The computation is slower while collectives run, and stands still while
    it waits for one.

    Args:
        slowdown: the fraction of its time that computation takes longer while collectives run.
        launch: seconds in which the host launches an operation.

    Attributes:
        now: until when the computation's stream has work.
        launched: when the host has launched the last operation.
        free: what operations take turns on -> from when on it is free.
        running: until when any collective runs.
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
            turns: what it takes turns on, such as its stream and its communicator.
            after: when what it comes after has ended.
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
        """The computation continues at ``end``, when what it waits for has ended.

        Returns:
            When it begins to wait and goes on; None if it doesn't wait.
        """
        start = max(self.now, min(self.launched, end))
        if end <= start:
            return None
        self.host += start - self.now
        self.now = end
        return start, end
