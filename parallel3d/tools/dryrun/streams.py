"""The streams of a dry run: they tell which operations and collectives come before which."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from parallel3d._util.streams import HOST, Clock, FakeStream, Streams, join
from parallel3d.tools.dryrun.captures import CaptureChecker


class PlayedStreams(Streams):
    """Stands in for ``torch.cuda``'s streams and events, and records the order of what is on them.

    Operations and synchronous collectives are put on the current stream, as with NCCL. An asynchronous
    collective is put on its communicator's stream, which first waits for the current one; a stream that waits
    for its work comes after it.

    ``on_wait`` is called when the compute stream waits: with a collective's index (None: only for
    operations), and the indices of the operations on other streams that it waits for as well.
    ``on_host_wait`` is called when the host waits for a stream.
    """

    def __init__(self, on_wait: Callable[[int | None, tuple[int, ...]], None]) -> None:
        super().__init__()
        self.on_wait = on_wait
        self.on_host_wait: Callable[[], None] | None = None
        self.watcher: CaptureChecker | None = None
        self.communicators: dict[str, FakeStream] = {}  # name of a process group -> its stream
        self._operations: dict[int, list[int]] = {}  # number of a stream -> what was put on it
        # Number of a stream -> (its count, index) of each collective that was put on it.
        self._collectives: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._before: dict[int, Clock] = {}  # number of a stream -> its clock at its last operation
        self._issued: dict[int, Clock] = {}  # index of an asynchronous collective -> its clock

    def place(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Puts the operation with this index on the current stream. Returns (number of the stream, indices of
        the operations on other streams that it comes after and that its stream didn't come after before)."""
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
        """Puts the collective with this index on the stream of ``group``'s communicator, which it returns.

        ``blocks``: the collective is synchronous, and was already put on the current stream by ``place``.
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
        """Lets the current stream wait for this collective; returns whether it is the compute stream."""
        stream = self.current_stream()
        if index in self._issued:
            if self.watcher is not None:
                self.watcher.stream_waits(stream, self._issued[index])
            join(stream.clock, self._issued[index])
        return stream is self.compute

    def on_put(self, stream: FakeStream, what: object) -> None:
        if self.watcher is not None:
            self.watcher.put(stream)

    def asked(self) -> None:
        if self.watcher is not None:
            self.watcher.host_waits("query()")

    def waits(self, stream: FakeStream, clock: Clock) -> None:
        """Lets ``stream`` wait for ``clock``, and calls ``on_wait`` and ``on_host_wait``."""
        if stream.number == HOST and self.on_host_wait is not None:
            self.on_host_wait()
        if self.watcher is not None:
            if stream.number == HOST:
                self.watcher.host_waits("synchronize()")
            else:
                self.watcher.stream_waits(stream, clock)
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
        """Lets the host wait for all streams."""
        clock: Clock = {}
        for stream in list(self.made.values()):
            join(clock, stream.clock)
        self.waits(self.host, clock)

    def _new_operations(self, clock: Clock, known: Clock) -> tuple[int, ...]:
        """Returns the last operation of each stream that ``clock`` includes and ``known`` doesn't."""
        return tuple(
            sorted(
                self._operations[number][position - 1]
                for number, position in clock.items()
                if number in self._operations and position > known.get(number, 0)
            )
        )


_COUNT = itemgetter(0)


def _within(issued: list[tuple[int, int]], known: int, until: int) -> Iterator[int]:
    """Yields the indices of the collectives with counts above ``known`` and at most ``until``."""
    if until > known:
        start = bisect_right(issued, known, key=_COUNT)
        for _, index in issued[start : bisect_right(issued, until, key=_COUNT)]:
            yield index
