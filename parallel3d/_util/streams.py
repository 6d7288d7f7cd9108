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
    """A point in a stream, or nothing until it is recorded."""

    def __init__(self, streams: Streams, stream: FakeStream | None = None) -> None:
        self.streams = streams
        self.clock: Clock | None = None
        if stream is not None:
            self.record(stream)

    def record(self, stream: FakeStream | None = None) -> None:
        """Makes this the end of what was put on ``stream`` so far; by default on the current one."""
        self.clock = dict((stream or self.streams.current_stream()).seen())

    def wait(self, stream: FakeStream | None = None) -> None:
        """What is put on ``stream``, by default the current one, from now on comes after this."""
        (stream or self.streams.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """The host waits, and with it what is put on any stream later."""
        self.streams.host.wait_event(self)

    def query(self) -> bool:
        """Whether it is over: always, as nothing runs. The host knows it from now on."""
        if self.clock is not None:
            join(self.streams.host.clock, self.clock)
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        return 0.0


class FakeStream:
    """What is put on it comes in this order.

    Attributes:
        number: 0 is that of the computation, ``HOST`` the host's.
        name: for people; of a stream that a program makes, the variable that it is assigned to.
        clock: what comes before the next thing that is put on it.
    """

    def __init__(self, streams: Streams, number: int, name: str) -> None:
        self.streams, self.number, self.name = streams, number, name
        self.clock: Clock = {}
        self._before: list[FakeStream] = []  # the current streams around each ``with`` of this one

    def seen(self) -> Clock:
        """Returns the clock, with what the host has waited for: it comes before what the host issues now."""
        if self.number != HOST:
            join(self.clock, self.streams.host.clock)
        return self.clock

    def put(self, what: object = None) -> None:
        """Puts ``what`` on the stream; ``clock`` is then its clock, and has its count."""
        clock = self.seen()
        clock[self.number] = clock.get(self.number, 0) + 1
        self.streams.on_put(self, what)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Returns the end of what was put on the stream so far."""
        if event is None:
            return self.streams.make_event(self)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        """What is put on the stream from now on comes after ``event``; one of a real GPU is ignored."""
        if isinstance(event, FakeEvent) and event.clock is not None:
            self.streams.waits(self, event.clock)

    def wait_stream(self, other: FakeStream) -> None:
        """What is put on the stream from now on comes after what was put on ``other`` so far."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """The host waits for what was put on the stream so far."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Whether all of it is over: always, as nothing runs. The host knows it from now on."""
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
    """Stands for ``torch.cuda`` where a program makes streams and asks for the current one.

    Attributes:
        compute: the current stream at first.
        host: the host, as a stream.
    """

    def __init__(self) -> None:
        self.compute = FakeStream(self, 0, "compute")
        self.host = FakeStream(self, HOST, "host")
        self.made: dict[int, FakeStream] = {0: self.compute, HOST: self.host}
        self._numbers = count(1)
        self._current = self.compute

    def new_stream(self, name: str) -> FakeStream:
        """Returns a new stream called ``name``."""
        number = next(self._numbers)
        self.made[number] = FakeStream(self, number, name)
        return self.made[number]

    def on_put(self, stream: FakeStream, what: object) -> None:
        """Called after ``what`` was put on ``stream``."""

    def make_event(self, stream: FakeStream) -> FakeEvent:
        """Returns the end of what was put on ``stream`` so far."""
        return FakeEvent(self, stream)

    def waits(self, stream: FakeStream, clock: Clock) -> None:
        """What is put on ``stream`` from now on comes after ``clock``."""
        join(stream.clock, clock)

    # -- torch.cuda's interface

    def Stream(self, device: Any = None, priority: int = 0, **_: Any) -> FakeStream:
        """Returns a new stream, named as the variable in the line that calls this."""
        return self.new_stream(self.name_in_line(1))

    def name_in_line(self, depth: int) -> str:
        """Returns the name of the variable that a caller of the caller, ``depth`` up, assigns a stream to."""
        frame = sys._getframe(depth + 1)
        if frame.f_code is StandIn.__call__.__code__ and frame.f_back is not None:
            frame = frame.f_back
        made = _MADE.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno))
        return made[1] if made else f"stream {len(self.made) - 1}"

    def Event(self, *_: Any, **__: Any) -> FakeEvent:
        """Returns an event that is not recorded."""
        return FakeEvent(self)

    def current_stream(self, device: Any = None) -> FakeStream:
        return self._current

    def default_stream(self, device: Any = None) -> FakeStream:
        return self.compute

    def set_stream(self, stream: FakeStream) -> None:
        """Makes ``stream`` the current one."""
        self._current = stream

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        """``stream`` is the current one in the body; None changes nothing."""
        before = self._current
        self._current = before if stream is None else stream
        try:
            yield
        finally:
            self._current = before

    def synchronize(self, device: Any = None) -> None:
        """The host waits for all streams."""
        for stream in list(self.made.values()):
            join(self.host.clock, stream.clock)

    def current_device(self) -> int:
        return 0


class StandIn:
    """Replaces a class of torch's, whose instances ``make`` makes; a type in annotations and ``isinstance``.

    While no dry run is active it is the class itself: a module that is imported in a dry run may keep it.
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
    """``clock`` comes after ``other`` too."""
    for number, position in other.items():
        if position > clock.get(number, 0):
            clock[number] = position
