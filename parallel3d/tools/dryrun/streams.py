"""The streams of a dry run: which operations and collectives come after which."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from parallel3d._util.streams import HOST, Clock, FakeStream, Streams, join


class PlayedStreams(Streams):
    """Replaces ``torch.cuda`` for the engine, and for the program's own streams.

    Operations are put on the current stream, and so are synchronous collectives, as on NCCL. An asynchronous
    one is on its communicator's own stream, which waits for the current one when the collective is issued;
    the stream on which its work is waited for comes after it.

    ``on_wait`` is called when the computation begins to wait for a collective, with its index among the
    collectives and the indices of the operations on other streams that come before, or, with None, for such
    operations alone; ``on_host_wait`` when the host waits for a stream.
    """

    def __init__(self, on_wait: Callable[[int | None, tuple[int, ...]], None]) -> None:
        super().__init__()
        self.on_wait = on_wait
        self.on_host_wait: Callable[[], None] | None = None
        self.communicators: dict[str, FakeStream] = {}  # name of a process group -> its stream
        self._operations: dict[int, list[int]] = {}  # number of a stream -> what was put on it
        # Number of a stream -> (its count, index) of each collective that was put on it.
        self._collectives: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._before: dict[int, Clock] = {}  # number of a stream -> its clock at its last operation
        self._issued: dict[int, Clock] = {}  # index of an asynchronous collective -> its clock

    def place(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Puts the operation with index ``position`` on the current stream.

        Returns the stream's number, and the operations on others that come before, which it has not waited
        for before.
        """
        stream = self.current_stream()
        if stream is self.compute:
            stream.put()
            return 0, ()
        known = self._before.get(stream.number, {})
        after = self._new_operations(stream.seen(), known)
        self._before[stream.number] = dict(stream.clock)
        stream.put()
        self._operations.setdefault(stream.number, []).append(position)
        return stream.number, after

    def issue(self, index: int, group: str, name: str = "", *, blocks: bool = False) -> FakeStream:
        """Puts the collective with this index on the communicator of ``group``; returns its stream.

        ``blocks``: it is the operation that was placed on the current stream last.
        """
        if blocks:
            stream = self.current_stream()
        else:
            if group not in self.communicators:
                self.communicators[group] = self.new_stream(f"communicator of {name or group}")
            stream = self.communicators[group]
            join(stream.clock, self.current_stream().seen())
            stream.put()
            self._issued[index] = dict(stream.clock)
        self._collectives[stream.number].append((stream.clock[stream.number], index))
        return stream

    def arrived(self, index: int) -> bool:
        """What is put on the current stream from now on comes after the collective with this index.

        Each stream that is to come after it must wait itself. Returns whether the current stream is the
        computation's.
        """
        stream = self.current_stream()
        join(stream.clock, self._issued.get(index, {}))
        return stream is self.compute

    def waits(self, stream: FakeStream, clock: Clock) -> None:
        """As in ``Streams``; tells of the collectives that the computation, or the host, waits for."""
        if stream.number == HOST and self.on_host_wait is not None:
            self.on_host_wait()
        if stream is self.compute or stream.number == HOST:
            known = {**self.compute.clock}
            join(known, self.host.clock)
            found = sorted(
                index
                for number, issued in self._collectives.items()
                for index in _within(issued, known.get(number, 0), clock.get(number, 0))
            )
            after = self._new_operations(clock, known)
            join(stream.clock, clock)
            for index in found:
                self.on_wait(index, after if index == found[-1] else ())
            if after and not found:
                self.on_wait(None, after)
        else:
            join(stream.clock, clock)

    def synchronize(self, device: Any = None) -> None:
        """The host waits for all streams."""
        clock: Clock = {}
        for stream in list(self.made.values()):
            join(clock, stream.clock)
        self.waits(self.host, clock)

    def _new_operations(self, clock: Clock, known: Clock) -> tuple[int, ...]:
        """The last operation of each stream that ``clock`` comes after and ``known`` does not."""
        return tuple(
            sorted(
                self._operations[number][position - 1]
                for number, position in clock.items()
                if number in self._operations and position > known.get(number, 0)
            )
        )


_COUNT = itemgetter(0)


def _within(issued: list[tuple[int, int]], known: int, until: int) -> Iterator[int]:
    """The indices of the collectives whose count is above ``known``, and not above ``until``."""
    if until > known:
        start = bisect_right(issued, known, key=_COUNT)
        for _, index in issued[start : bisect_right(issued, until, key=_COUNT)]:
            yield index
