"""The race detector: finds memory that two streams use with no wait between them.

What comes before what is known from the vector clocks of ``_util.streams``. Two uses of the same memory race
if one of them writes, and neither comes before the other. Memory that is freed goes back to the stream that
it was allocated on, as in torch's caching allocator, and may be used again by what is allocated on that
stream later: those who use it then must come after everybody who used it before.

Which stream a collective is on: see ``PlayedStreams``. Until its work is waited for, the backend holds the
tensors of an asynchronous one, as ProcessGroupNCCL does: what the program frees meanwhile is freed then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d._util.streams import HOST, FakeStream, Streams, join
from parallel3d._util.trace import issuing
from parallel3d.tools.dryrun.memory import Held, Ledger, kind_of, local_of
from parallel3d.tools.dryrun.place import Place
from parallel3d.tools.dryrun.result import Race, StreamOperation

_OURS = ("parallel3d._trace.", "parallel3d._util.", "parallel3d.tools.dryrun.")
_UNSEEN = ("torch.", "contextlib.", "unittest.", *_OURS)
_SEEN = "torch.distributed.fsdp."  # of torch, the code that makes streams


@dataclass(slots=True, eq=False)
class _Use:
    """One use of memory: its stream and its count there, and what and where in the program it is."""

    stream: int
    count: int
    writes: bool
    name: str
    place: tuple[str, str, str, int]  # module, unit, phase, step
    line: tuple[CodeType, int] | None

    @property
    def key(self) -> tuple[object, ...]:
        return self.line, self.name, self.stream


@dataclass(slots=True, eq=False)
class _Memory:
    """The uses of one storage.

    Attributes:
        pool: number of the stream that it was allocated on; None: the host's memory.
        before: stream -> the last use of memory that was freed to the pool before, until this is written.
        write, reads: the last write, and stream -> the last read since then.
        recorded: streams that ``record_stream`` was called with.
        held_by: how many collectives hold it.
        freed: where it was freed, while a collective still holds it.
    """

    pool: int | None
    before: dict[int, tuple[_Use, Held, Any]]
    write: _Use | None = None
    reads: dict[int, _Use] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    held_by: int = 0
    freed: tuple[tuple[CodeType, int] | None] | None = None


class RaceDetector:
    """Follows the memory of a dry run's tensors; ``races()`` says what was found.

    Args:
        streams: what the program's streams are made of.
        place: where the program is.
        ledger: tells of memory that is allocated and freed.
    """

    def __init__(self, streams: Streams, place: Place, ledger: Ledger) -> None:
        self.streams, self.place, self.ledger = streams, place, ledger
        self._memory: dict[Held, _Memory] = {}
        self._pools: dict[int, dict[int, tuple[_Use, Held, Any]]] = {}
        self._holding: dict[int, list[Held]] = {}  # index of a collective -> what it holds
        self._found: dict[Any, list[Any]] = {}
        ledger.on_new, ledger.on_free = self._allocated, self._freed

    # -- what the program does

    def operation(self, name: str, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """An operation that was just put on the current stream; the host's, if it is in its memory only."""
        reads, writes = self._known(read), self._known(written)
        if self._is_hosts(reads | writes):
            stream = self.streams.host
            stream.put()
        else:
            stream = self.streams.current_stream()
        self._use(stream, name, reads, writes)

    def collective(
        self,
        index: int,
        stream: FakeStream,
        name: str,
        read: Iterable[Tensor],
        written: Iterable[Tensor],
        *,
        holds: bool,
    ) -> None:
        """A collective that was just put on ``stream``. An asynchronous one ``holds`` its tensors."""
        reads, writes = self._known(read), self._known(written)
        if self._is_hosts(reads | writes):  # gloo's, and over when it is waited for
            stream = self.streams.host
            stream.put()
        self._use(stream, name, reads, writes)
        if holds:
            self._holding[index] = list(reads | writes)
            for held in self._holding[index]:
                self._memory[held].held_by += 1

    def arrived(self, index: int) -> None:
        """The current stream has waited for the collective with this index: it holds nothing any more."""
        for held in self._holding.pop(index, ()):
            memory = self._memory[held]
            memory.held_by -= 1
            if memory.freed is not None and not memory.held_by:
                self._release(held, memory, memory.freed[0])

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        """The memory of ``tensor`` is not used again before what is on ``stream`` at its end is over."""
        held = self.ledger.find(local_of(tensor))
        if held in self._memory:
            self._memory[held].recorded.add(stream.number)

    def host_reads(self, tensor: Tensor | None = None) -> None:
        """The host waits for the current stream; with ``tensor`` its value is copied there first."""
        if tensor is not None and not isinstance(tensor, DTensor):  # whose local tensors are seen
            self.operation("item", [tensor], [])
        stream = self.streams.current_stream()
        join(self.streams.host.clock, stream.seen())

    def _is_hosts(self, used: dict[Held, None]) -> bool:
        """Whether an operation that uses this memory runs on the host."""
        return bool(used) and all(self._memory[held].pool is None for held in used)

    # -- the allocator

    def _allocated(self, held: Held) -> None:
        pool = None if held.on_host else self.streams.current_stream().number
        before = dict(self._pools.get(pool, {})) if pool is not None else {}
        self._memory[held] = _Memory(pool, before)

    def _freed(self, held: Held) -> None:
        memory = self._memory.get(held)
        if memory is None:
            return
        if memory.held_by:
            memory.freed = (_line(),)
        else:
            self._release(held, memory, _line())

    def _release(self, held: Held, memory: _Memory, line: Any) -> None:
        """Gives memory back to its pool. (Pinned memory is kept by the allocator while streams use it.)"""
        del self._memory[held]
        if memory.pool is None:
            return
        pool = self._pools.setdefault(memory.pool, {})
        for use in (*memory.reads.values(), *([memory.write] if memory.write else ())):
            if use.stream in memory.recorded:
                continue
            last = pool.get(use.stream)
            if last is None or last[0].count < use.count:
                pool[use.stream] = use, held, line
        for number, last in memory.before.items():  # not written since: it is others' memory still
            if number not in pool or pool[number][0].count < last[0].count:
                pool[number] = last

    # -- uses

    def _known(self, tensors: Iterable[Tensor]) -> dict[Held, None]:
        found = (self.ledger.find(tensor) for tensor in tensors)
        return {held: None for held in found if held in self._memory}

    def _use(
        self, stream: FakeStream, name: str, reads: dict[Held, None], writes: dict[Held, None]
    ) -> None:
        if not reads and not writes:
            return
        clock, number, place = stream.clock, stream.number, self.place
        where = name, (place.module, issuing.unit, place.phase, place.steps), _line()
        for held in reads | writes:
            memory, write = self._memory[held], held in writes
            use = _Use(number, clock.get(number, 0), write, *where)
            for earlier, freed, line in memory.before.values():
                if clock.get(earlier.stream, 0) < earlier.count:
                    self._race(earlier, use, freed, (line,))
            earlier_uses = [memory.write] if memory.write else []
            if write:
                earlier_uses += memory.reads.values()
            for earlier in earlier_uses:
                if clock.get(earlier.stream, 0) < earlier.count:
                    self._race(earlier, use, held, None)
            if write:
                memory.write, memory.reads, memory.before = use, {}, {}
            else:
                memory.reads[number] = use

    def _race(self, first: _Use, second: _Use, held: Held, freed: Any) -> None:
        key = first.key, second.key, bool(freed)
        self._found.setdefault(key, [first, second, held, freed, 0])[-1] += 1

    # -- what was found

    def races(self) -> tuple[Race, ...]:
        """Returns the races, each pair of lines once, in the order in which they were found."""
        return tuple(self._described(*each) for each in self._found.values())

    def _described(self, first: _Use, second: _Use, held: Held, freed: Any, count: int) -> Race:
        one, other = (self.streams.made[use.stream].name for use in (first, second))
        if second.stream == HOST:
            missing = f"synchronize() of an event recorded on {one!r} after {first.name}"
        elif first.stream == HOST:
            missing = f"put {second.name} on {other!r} after the host's {first.name}"
        else:
            missing = f"let {other!r} wait for an event recorded on {one!r} after {first.name}"
            missing += "" if freed is None else ", or keep the memory until it has"
        return Race(
            kind="memory used again" if freed is not None else "no wait between",
            memory=kind_of(held),
            shape=held.shape,
            dtype=held.dtype,
            made_by=held.made_by,
            freed=_text(freed[0]) if freed is not None else "",
            first=self._operation(first),
            second=self._operation(second),
            missing=missing,
            count=count,
        )

    def _operation(self, use: _Use) -> StreamOperation:
        does, stream = "writes" if use.writes else "reads", self.streams.made[use.stream].name
        return StreamOperation(use.name, does, stream, *use.place, line=_text(use.line))


def _line() -> tuple[CodeType, int] | None:
    """The line that runs: the user's, the engine's, or that of torch's ``fully_shard``."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "") + "."
        if name.startswith(_SEEN) or not name.startswith(_UNSEEN):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _text(line: tuple[CodeType, int] | None) -> str:
    if line is None:
        return "?"
    code, number = line
    return f"{code.co_filename}:{number}, in {code.co_name}"
