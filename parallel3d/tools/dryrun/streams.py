"""The streams of a GPU in a dry run: they note which operations come after which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Event:
    """A point in a stream; ``after`` and ``collectives`` are those of ``FakeStream``."""

    def __init__(self, stream: FakeStream) -> None:
        self._streams = stream.streams
        stream.collectives -= self._streams.over
        self.after = frozenset(stream.after)
        self.collectives = frozenset(stream.collectives)

    def synchronize(self) -> None:
        """The host waits, and with it what is put on any stream later."""
        self._streams.compute.wait_event(self)

    def wait(self, stream: FakeStream | None = None) -> None:
        """``stream``, by default the current one, waits."""
        (stream or self._streams.current_stream()).wait_event(self)


class FakeStream:
    """A stream with the part of CUDA's interface that the engine uses; number 0 is the computation's.

    Attributes:
        after: indices of the operations on other streams, except the computation's, that come before the
            next operation on this one.
        collectives: indices of the collectives that have ended then, without those that the computation has
            waited for.
    """

    def __init__(self, streams: Streams, number: int) -> None:
        self.streams, self.number = streams, number
        self.after: set[int] = set()
        self.collectives: set[int] = set()

    def record_event(self) -> Event:
        """Returns the end of what was put on the stream so far."""
        return Event(self)

    def wait_event(self, event: Event) -> None:
        """What is put on the stream from now on comes after ``event``; one of a real GPU is ignored."""
        if not isinstance(event, Event):
            return
        if self.number == 0:
            self.streams.wait(event)
        else:
            self.after |= event.after
            self.collectives |= event.collectives

    def wait_stream(self, other: FakeStream) -> None:
        """What is put on the stream from now on comes after what was put on ``other`` so far."""
        self.wait_event(other.record_event())


class Streams:
    """Replaces ``torch.cuda`` for the engine: makes streams and has the current one.

    What is put on a stream comes after everything that was put on the computation's before, because the
    engine's streams wait for it first. ``on_wait`` is called when the computation begins to wait for a
    collective, with its index among the collectives and the indices of the operations that come before.
    """

    def __init__(self, on_wait: Callable[[int, tuple[int, ...]], None]) -> None:
        self._on_wait = on_wait
        self._made = 0
        self.compute = FakeStream(self, 0)
        self._current = self.compute
        self.over: set[int] = set()  # the collectives that the computation has waited for

    def Stream(self, priority: int = 0) -> FakeStream:
        """Returns a new stream."""
        self._made += 1
        return FakeStream(self, self._made)

    def current_stream(self) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Makes ``stream`` the current one in the body."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def place(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Puts an operation on the current stream.

        Returns the stream's number, and the operations that come before.
        """
        stream = self._current
        if stream is self.compute:
            return 0, ()
        after, stream.after = tuple(sorted(stream.after)), {position}
        return stream.number, after

    def arrived(self, index: int) -> bool:
        """What is put on the current stream from now on comes after the collective at ``index``.

        Returns whether the current stream is the computation's.
        """
        if self._current is self.compute:
            self.over.add(index)
            return True
        self._current.collectives.add(index)
        return False

    def wait(self, event: Event) -> None:
        """The computation waits for ``event``, unless it has done so."""
        found = sorted(event.collectives - self.over)
        self.over.update(found)
        for index in found:
            self._on_wait(index, tuple(sorted(event.after)) if index == found[-1] else ())
