"""The streams of a GPU that isn't there: what is put on them comes after what they have waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Event:
    """A point in a stream; see ``PlayedStream`` for the attributes."""

    def __init__(self, stream: PlayedStream) -> None:
        self._streams = stream.streams
        stream.collectives -= self._streams.over
        self.after = frozenset(stream.after)
        self.collectives = frozenset(stream.collectives)

    def synchronize(self) -> None:
        """The host waits, and with it what is put on any stream later."""
        self._streams.compute.wait_event(self)

    def wait(self, stream: PlayedStream | None = None) -> None:
        """``stream`` waits, or else the current one."""
        (stream or self._streams.current_stream()).wait_event(self)


class PlayedStream:
    """One stream, with CUDA's interface as far as the engine uses it.

    Attributes:
        number: 0 for the one that computes.
        after: positions of the operations, on other streams than the one that computes, that are to be over
            before what is put on it next.
        collectives: positions of the collectives that are over then and that the computation has not
            waited for.
    """

    def __init__(self, streams: Streams, number: int) -> None:
        self.streams, self.number = streams, number
        self.after: set[int] = set()
        self.collectives: set[int] = set()

    def record_event(self) -> Event:
        """The end of what it has been given so far."""
        return Event(self)

    def wait_event(self, event: Event) -> None:
        """What is put on it from now on comes after ``event``; one of a real GPU has nothing of these."""
        if not isinstance(event, Event):
            return
        if self.number == 0:
            self.streams.wait(event)
            return
        self.after |= event.after
        self.collectives |= event.collectives

    def wait_stream(self, other: PlayedStream) -> None:
        """What is put on it from now on comes after what ``other`` has been given so far."""
        self.wait_event(other.record_event())


class Streams:
    """What ``torch.cuda`` is to the engine: makes streams and says which is the current one.

    What is put on a stream comes after all that the computation was given before: the engine's streams wait
    for it first.

    Attributes:
        over: positions of the collectives that the computation has waited for.

    Args:
        on_wait: called when the computation begins to wait for a collective, with its position among them
            and with the operations that are to be over.
    """

    def __init__(self, on_wait: Callable[[int, tuple[int, ...]], None]) -> None:
        self._on_wait = on_wait
        self._made = 0
        self.compute = PlayedStream(self, 0)
        self._now = self.compute
        self.over: set[int] = set()

    def Stream(self, priority: int = 0) -> PlayedStream:
        """A new one."""
        self._made += 1
        return PlayedStream(self, self._made)

    def current_stream(self) -> PlayedStream:
        """On which operations are put."""
        return self._now

    @contextmanager
    def stream(self, stream: PlayedStream) -> Iterator[None]:
        """Operations are put on ``stream`` in the body."""
        before, self._now = self._now, stream
        try:
            yield
        finally:
            self._now = before

    def place(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Puts the operation at ``position`` on the current stream.

        Returns:
            The stream's number, and after which operations it comes.
        """
        stream = self._now
        if stream is self.compute:
            return 0, ()
        after, stream.after = tuple(sorted(stream.after)), {position}
        return stream.number, after

    def arrived(self, index: int) -> bool:
        """What is put on the current stream comes after the collective at ``index``.

        Returns:
            Whether it is the computation that waits for it.
        """
        if self._now is self.compute:
            self.over.add(index)
            return True
        self._now.collectives.add(index)
        return False

    def wait(self, event: Event) -> None:
        """The computation waits for what ``event`` comes after, unless it has done so."""
        found = sorted(event.collectives - self.over)
        self.over.update(found)
        for index in found:
            self._on_wait(index, tuple(sorted(event.after)) if index == found[-1] else ())
