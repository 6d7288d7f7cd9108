"""A model of an accelerator's streams: what is put on which, and what comes after what.

``Streams`` has the part of ``torch.cuda``'s interface that programs use to order their work; nothing runs on
it. What comes after what is kept as vector clocks (Fidge, "Timestamps in message-passing systems that
preserve the partial ordering", 1988; Mattern, "Virtual time and global states of distributed systems", 1989):
each stream counts what is put on it, an event is a copy of its stream's clock, and a wait joins it.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import TracebackType
from typing import Any

from parallel3d._util import dry_run

Clock = dict[int, int]
"""Number of a stream -> how many of the things put on it come before."""

HOST = -1
"""Number of the host among the streams: what it does itself, and what it has waited for."""

_MADE = re.compile(r"^\s*(?:\w+\.)*(\w+)\s*(?::[^=]*)?=[^=][^,]*Stream\(")


class FakeEvent:
    """Stands for ``torch.cuda.Event``: a point in a stream, as the clock of what comes before it."""

    def __init__(self, streams: Streams, stream: FakeStream | None = None) -> None:
        self.streams = streams
        self.clock: Clock | None = None
        if stream is not None:
            self.record(stream)

    def record(self, stream: FakeStream | None = None) -> None:
        """Records the end of what was put on ``stream`` (default: the current one) so far."""
        self.clock = dict((stream or self.streams.current_stream()).seen())

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or self.streams.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Makes the host wait for this event, and so all that is put on any stream later."""
        self.streams.host.wait_event(self)

    def query(self) -> bool:
        """Returns True, as nothing really runs. What the host issues from now on comes after the event."""
        self.streams.asked()
        if self.clock is not None:
            join(self.streams.host.clock, self.clock)
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        self.streams.asked()
        return 0.0


class FakeStream:
    """Stands for ``torch.cuda.Stream``. ``number``: 0 is the compute stream, ``HOST`` the host itself."""

    def __init__(self, streams: Streams, number: int, name: str) -> None:
        self.streams, self.number, self.name = streams, number, name
        self.clock: Clock = {}  # what comes before the next thing that is put on it
        self._before: list[FakeStream] = []  # the current streams around each ``with`` of this one

    def seen(self) -> Clock:
        """Returns the clock of what comes before the next thing put on the stream, with the host's waits."""
        if self.number != HOST:
            join(self.clock, self.streams.host.clock)
        return self.clock

    def put(self, what: object = None) -> None:
        """Puts ``what`` on the stream: increments the stream's count in ``clock``."""
        clock = self.seen()
        clock[self.number] = clock.get(self.number, 0) + 1
        self.streams.on_put(self, what)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        if event is None:
            return self.streams.make_event(self)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        """Makes the stream wait for ``event``; an event of a real GPU is ignored."""
        if isinstance(event, FakeEvent) and event.clock is not None:
            self.streams.waits(self, event.clock)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        """Returns True, as nothing really runs. What the host issues from now on comes after the stream."""
        return self.record_event().query()

    def __enter__(self) -> FakeStream:
        self._before.append(self.streams.current_stream())
        self.streams.set_stream(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.streams.set_stream(self._before.pop())

    def __repr__(self) -> str:
        return f"<stream {self.name}>"


class Streams:
    """Stands for ``torch.cuda`` in programs that make streams and ask for the current one."""

    def __init__(self) -> None:
        self.compute = FakeStream(self, 0, "compute")  # the current stream at first
        self.host = FakeStream(self, HOST, "host")  # the host, as a stream
        self.made: dict[int, FakeStream] = {0: self.compute, HOST: self.host}
        self._numbers = count(1)
        self._current = self.compute

    def new_stream(self, name: str) -> FakeStream:
        number = next(self._numbers)
        self.made[number] = FakeStream(self, number, name)
        return self.made[number]

    def on_put(self, stream: FakeStream, what: object) -> None:
        """Called after ``what`` was put on ``stream``, for subclasses."""

    def make_event(self, stream: FakeStream) -> FakeEvent:
        return FakeEvent(self, stream)

    def asked(self) -> None:
        """Called when the host asks whether an event is over, for subclasses."""

    def waits(self, stream: FakeStream, clock: Clock) -> None:
        """Makes ``stream`` wait for all that ``clock`` counts."""
        join(stream.clock, clock)

    # -- torch.cuda's interface

    def Stream(self, device: Any = None, priority: int = 0, **_: Any) -> FakeStream:
        """Returns a new stream, whose name is the variable that the caller assigns it to."""
        return self.new_stream(self.name_in_line(1))

    def name_in_line(self, depth: int) -> str:
        """Returns the name of the variable that a caller's line (``depth`` up) assigns a stream to."""
        frame = sys._getframe(depth + 1)
        if frame.f_code is StandIn.__call__.__code__ and frame.f_back is not None:
            frame = frame.f_back
        made = _MADE.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno))
        return made[1] if made else f"stream {len(self.made) - 1}"

    def Event(self, *_: Any, **__: Any) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device: Any = None) -> FakeStream:
        return self._current

    def default_stream(self, device: Any = None) -> FakeStream:
        return self.compute

    def set_stream(self, stream: FakeStream) -> None:
        self._current = stream

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        before = self._current
        self._current = before if stream is None else stream
        try:
            yield
        finally:
            self._current = before

    def synchronize(self, device: Any = None) -> None:
        for stream in list(self.made.values()):
            join(self.host.clock, stream.clock)

    def current_device(self) -> int:
        return 0


class StandIn:
    """Replaces a class of torch's in a dry run, where ``make`` makes its instances. It works as a type in
    annotations and ``isinstance``.

    Without a dry run it makes the class's own: a module imported in a dry run may keep it.
    """

    def __init__(self, original: Any, make: Callable[..., Any], kind: type) -> None:
        self._original, self._make, self._kind = original, make, kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._make if dry_run.active() else self._original)(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, (self._kind, self._original))

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self._original,)

    def __or__(self, other: Any) -> Any:
        return self._original | other

    def __ror__(self, other: Any) -> Any:
        return other | self._original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def join(clock: Clock, other: Clock) -> None:
    """Raises the counts in ``clock`` to those in ``other``, so that it comes after ``other`` too."""
    for number, position in other.items():
        if position > clock.get(number, 0):
            clock[number] = position
