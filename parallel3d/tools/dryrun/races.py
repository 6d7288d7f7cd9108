"""The race detector: finds memory that two streams use with no wait between them.

The vector clocks of ``_util.streams`` tell which use comes before which. Two uses of the same memory race if
one of them writes and neither comes before the other. Freed memory returns to the stream that it was
allocated on, as in torch's caching allocator, and a later allocation on that stream may get it: whoever uses
it then must come after everybody who used it before.

``PlayedStreams`` says on which stream a collective runs. The backend holds the tensors of an asynchronous one
until its work is waited for, as ProcessGroupNCCL does: what the program frees before counts as freed then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d._util.streams import HOST, FakeStream, Streams, join
from parallel3d._util.trace import issuing
from parallel3d.tools.dryrun.captures import CaptureChecker
from parallel3d.tools.dryrun.memory import Held, Ledger, kind_of, local_of
from parallel3d.tools.dryrun.place import Place, line_text, running_line
from parallel3d.tools.dryrun.result import Race, StreamOperation


@dataclass(slots=True, eq=False)
class _Use:
    """One use of memory: the stream and the stream's count of operations then, what was done, and where in
    the program."""

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
        pool: number of the stream that it was allocated on; None: it is the host's memory.
        before: stream -> its last use of memory that was freed to the pool before this was allocated; empty
            after the first write, which must come after all of these.
        write, reads: the last write; stream -> its last read since then.
        recorded: numbers of the streams that ``record_stream`` was called with.
        held_by: number of running collectives that hold it.
        freed: where the program freed it, if a collective still holds it.
    """

    pool: int | None
    before: dict[int, tuple[_Use, Held, Any]]
    write: _Use | None = None
    reads: dict[int, _Use] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    held_by: int = 0
    freed: tuple[tuple[CodeType, int] | None] | None = None


class RaceDetector:
    """Follows the uses of memory, and tells the capture checker; ``races()`` returns what it found."""

    def __init__(
        self, streams: Streams, place: Place, ledger: Ledger, captures: CaptureChecker
    ) -> None:
        self.streams, self.place, self.ledger, self.captures = streams, place, ledger, captures
        self._memory: dict[Held, _Memory] = {}
        self._pools: dict[int, dict[int, tuple[_Use, Held, Any]]] = {}
        self._holding: dict[int, list[Held]] = {}  # index of a collective -> what it holds
        self._found: dict[Any, list[Any]] = {}
        ledger.on_new, ledger.on_free = self._allocated, self._freed

    # -- what the program does

    def operation(self, name: str, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """Records an operation that was just put on the current stream, with the tensors that it uses."""
        self._put(self.streams.current_stream(), name, self._known(read), self._known(written))

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
        """Records a collective that was just put on ``stream``. ``holds``: it is asynchronous, and holds its
        tensors until its work is waited for."""
        reads, writes = self._known(read), self._known(written)
        self._put(stream, name, reads, writes)
        if holds:
            self._holding[index] = list(reads | writes)
            for held in self._holding[index]:
                self._memory[held].held_by += 1

    def arrived(self, index: int) -> None:
        """Called when the current stream has waited for this collective, which frees its tensors."""
        for held in self._holding.pop(index, ()):
            memory = self._memory[held]
            memory.held_by -= 1
            if memory.freed is not None and not memory.held_by:
                self._release(held, memory, memory.freed[0])

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        """Notes ``Tensor.record_stream``: the tensor's memory, once freed, isn't reused before the work that
        is on ``stream`` then is done."""
        held = self.ledger.find(local_of(tensor))
        if held in self._memory:
            self._memory[held].recorded.add(stream.number)

    def host_reads(self, tensor: Tensor | None = None) -> None:
        """Called when the host waits for the current stream; with ``tensor``, to read its value."""
        if tensor is not None and not isinstance(tensor, DTensor):  # whose local tensors are seen
            self.operation("item", [tensor], [])
        stream = self.streams.current_stream()
        join(self.streams.host.clock, stream.seen())

    # -- the allocator

    def _allocated(self, held: Held) -> None:
        self.captures.allocated(held)
        pool = None if held.on_host else self.streams.current_stream().number
        before = dict(self._pools.get(pool, {})) if pool is not None else {}
        self._memory[held] = _Memory(pool, before)

    def _freed(self, held: Held) -> None:
        self.captures.freed(held)
        memory = self._memory.get(held)
        if memory is None:
            return
        if memory.held_by:
            memory.freed = (running_line(),)
        else:
            self._release(held, memory, running_line())

    def _release(self, held: Held, memory: _Memory, line: Any) -> None:
        """Gives memory back to its stream's pool; the host's memory needs no pool, as the allocator keeps
        pinned memory while streams use it."""
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

    def _put(
        self, stream: FakeStream, name: str, reads: dict[Held, None], writes: dict[Held, None]
    ) -> None:
        """Records uses of memory on ``stream``, and the races with earlier uses. If all memory is the host's,
        as with gloo, the uses are on the host."""
        if not reads and not writes:
            return
        if all(self._memory[held].pool is None for held in reads | writes):
            stream = self.streams.host
            stream.put()
        clock, number, place = stream.clock, stream.number, self.place
        where = name, (place.module, issuing.unit, place.phase, place.steps), running_line()
        for held in reads | writes:
            memory, write = self._memory[held], held in writes
            self.captures.use(held, writes=write and held not in reads)
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
        """Returns the races in the order in which they were found, each pair of lines once."""
        return tuple(self._described(*each) for each in self._found.values())

    def _described(self, first: _Use, second: _Use, held: Held, freed: Any, count: int) -> Race:
        one, other = (self.streams.made[use.stream].name for use in (first, second))
        uses = [
            StreamOperation(
                use.name, "writes" if use.writes else "reads", name, *use.place, line_text(use.line)
            )
            for use, name in ((first, one), (second, other))
        ]
        if second.stream == HOST:
            missing = f"synchronize() of an event recorded on {one!r} after {first.name}"
        elif first.stream == HOST:
            missing = f"put {second.name} on {other!r} after the host's {first.name}"
        else:
            missing = f"let {other!r} wait for an event recorded on {one!r} after {first.name}"
            missing += "" if freed is None else ", or keep the memory until it has"
        kind, at = "no wait between", ""
        if freed is not None:
            kind, at = "memory used again", line_text(freed[0])
        what = kind_of(held), held.shape, held.dtype, held.made_by
        return Race(kind, *what, at, uses[0], uses[1], missing, count)
