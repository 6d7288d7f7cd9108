"""The memory of a dry run: what each storage is for, how much there is over time, what torch's allocator
reserves."""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel3d._torch.dtensor import get_local_tensor
from parallel3d._torch.fully_shard import unsharded_by_torch
from parallel3d._util.trees import tensors_in
from parallel3d.fsdp.inspect import units_of
from parallel3d.tools.dryrun.result import (
    KINDS,
    LiveTensor,
    MemorySample,
    Operation,
    Peak,
    Reserved,
)


@dataclass(eq=False)
class Held:
    """The record of one storage: what it is for, and its size.

    Attributes:
        shape, dtype: those of the first tensor that was seen in it.
        module, phase, made_by: where that tensor was made, and by which operation.
        communicated: whether a collective has read or written it.
        lived_through_forward: whether it existed when a backward began.
        recomputed: whether a module made it during backward (activation checkpointing), or it was copied from
            the CPU's memory (activation offload).
        kind, name: what it is and its name, if it belongs to a model or its optimizer; else "".
        on_host: whether it is in the CPU's memory (CPU offload).
        size: its bytes now.
    """

    shape: tuple[int, ...]
    dtype: str
    module: str
    phase: str
    made_by: str
    communicated: bool = False
    lived_through_forward: bool = False
    recomputed: bool = False
    kind: str = ""
    name: str = ""
    on_host: bool = False
    size: int = 0


class Change(NamedTuple):
    """A storage's new size: from the operation with index ``operation`` on it has ``size`` bytes. ``stream``:
    the number of the current stream."""

    operation: int
    held: Held
    size: int
    stream: int = 0


class Ledger:
    """Records when storages are allocated, resized and freed.

    Attributes:
        changes: all changes of sizes, in order.
        operation: index of the operation that runs now.
        stream: a function that returns the number of the current stream.
        closed: whether changes are no longer recorded.
        on_new, on_free: called with the record of a storage that is allocated or freed.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.operation = 0
        self.stream: Callable[[], int] = int
        self.closed = False
        self.on_new: Callable[[Held], None] | None = None
        self.on_free: Callable[[Held], None] | None = None
        self._alive: dict[int, Held] = {}  # id of a storage -> its record
        self._watched: dict[int, weakref.ref] = {}

    def add(self, tensor: Tensor, held: Held) -> None:
        """Adds the storage of ``tensor``, which isn't in the ledger yet, with the record ``held``."""
        storage = tensor.untyped_storage()
        key = id(storage)
        self._alive[key] = held
        self._watched[key] = weakref.ref(storage, partial(self._end, key))
        self._changed(held, storage.nbytes())

    def find(self, tensor: Tensor) -> Held | None:
        """Returns the record of ``tensor``'s storage; None if it has none."""
        return self._alive.get(id(tensor.untyped_storage()))

    def begin_backward(self) -> None:
        """Marks all existing storages with ``lived_through_forward``."""
        for held in self._alive.values():
            held.lived_through_forward = True

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Records the present size of ``storage``, which may have been resized."""
        held = self._alive.get(id(storage))
        if held is not None and not self.closed:
            self._changed(held, storage.nbytes())

    def _end(self, key: int, _: object) -> None:
        held = self._alive.pop(key)
        del self._watched[key]
        if not self.closed:
            self._changed(held, 0)

    def _changed(self, held: Held, size: int) -> None:
        before, held.size = held.size, size
        if size and before != size and self.on_new is not None:
            self.on_new(held)
        elif before and not size and self.on_free is not None:
            self.on_free(held)
        if not held.on_host:
            self.changes.append(Change(self.operation, held, size, self.stream()))


_LARGEST = 30  # tensors that ``Peak`` lists


def note_gradients(roots: Iterable[nn.Module], ledger: Ledger) -> None:
    """Marks the storages of all present ``.grad`` as gradients."""
    for root in roots:
        for name, param in root.named_parameters():
            if param.grad is not None:
                _mark(ledger, param.grad, "gradients", name)


def name_kinds(roots: list[nn.Module], optimizers: Iterable[Optimizer], ledger: Ledger) -> None:
    """Marks the storages of the models' parameters, buffers and gradients and of their optimizers' state with
    their kinds."""
    for root in roots:
        for unit in units_of(root, recurse=True):
            for bucket in unit.group.buckets:
                _mark(ledger, bucket.flat, "parameters", bucket.unit)
                if bucket.precision.has_own_unsharded:
                    _mark(ledger, bucket.precision.unsharded, "unsharded parameters", bucket.unit)
                _mark(ledger, bucket.precision.gathered, "communication", bucket.unit)
        for name, module in root.named_modules():
            for gathered in unsharded_by_torch(module):
                _mark(ledger, gathered, "unsharded parameters", name)
        for name, param in root.named_parameters():
            _mark(ledger, param, "parameters", name)
        for name, buffer in root.named_buffers():
            _mark(ledger, buffer, "buffers", name)
    note_gradients(roots, ledger)
    for optimizer in optimizers:
        for state in tensors_in(list(optimizer.state.values())):
            _mark(ledger, state, "optimizer state", "")


def local_of(tensor: Tensor) -> Tensor:
    """Returns the local tensor of a DTensor; a plain tensor itself."""
    return get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _mark(ledger: Ledger, tensor: Tensor, kind: str, name: str) -> None:
    held = ledger.find(local_of(tensor))
    if held is not None and not held.kind:
        held.kind, held.name = kind, name


def kind_of(held: Held) -> str:
    """Returns what a storage is for, one of ``KINDS``: its mark, or else by its use and how long it lived."""
    if held.kind:
        return held.kind
    if held.communicated:
        return "communication"
    in_forward = held.phase in ("forward", "other")
    kept = held.lived_through_forward if in_forward else held.recomputed
    return "activations" if kept else "temporaries"


def memory_over_time(
    ledger: Ledger, operations: list[Operation]
) -> tuple[tuple[MemorySample, ...], Peak, Peak | None]:
    """Returns (for each operation at which memory changes the most bytes alive, the peak, the peak from the
    first forward on)."""
    now: Counter[str] = Counter()
    sizes: dict[Held, int] = {}
    samples: dict[int, MemorySample] = {}  # number of changes until then -> the sample
    total = top = 0
    for count, change in enumerate(ledger.changes, 1):
        difference = change.size - sizes.get(change.held, 0)
        sizes[change.held] = change.size
        now[kind_of(change.held)] += difference
        total += difference
        if samples and ledger.changes[count - 2].operation == change.operation:
            if total <= top:
                continue
            samples.popitem()
        by_kind = {kind: now[kind] for kind in KINDS if now[kind]}
        samples[count] = MemorySample(change.operation, by_kind)
        top = total
    begin = next((i for i, each in enumerate(operations) if each.phase == "forward"), inf)
    in_steps = {n: s for n, s in samples.items() if s.operation >= begin and s.by_kind}
    peak = _peak(ledger, operations, samples or {0: MemorySample(0, {})})
    step_peak = _peak(ledger, operations, in_steps) if in_steps else None
    return tuple(samples.values()), peak, step_peak


def _peak(ledger: Ledger, operations: list[Operation], samples: dict[int, MemorySample]) -> Peak:
    """Returns the peak: the first of the largest ``samples``, with the largest tensors at that time."""
    count, sample = max(samples.items(), key=lambda item: item[1].total)
    alive = {change.held: change.size for change in ledger.changes[:count]}
    largest = sorted(alive.items(), key=lambda item: -item[1])[:_LARGEST]
    at = sample.operation
    operation = operations[at] if at < len(operations) else Operation("", "", "", "other", 0)
    return Peak(
        operation=at,
        bytes=sample.total,
        by_kind=sample.by_kind,
        phase=operation.phase,
        module=operation.module,
        name=operation.name,
        largest=tuple(
            LiveTensor(kind_of(h), size, h.shape, h.dtype, h.name or h.module, h.made_by)
            for h, size in largest
            if size
        ),
    )


# What torch's allocator of an accelerator reserves. The rules are those of torch's documentation ("CUDA
# semantics: memory management") and of its sources (``c10/cuda/CUDACachingAllocator.cpp``), with the default
# settings or ``expandable_segments:True``, on a GPU with memory to spare. What a kernel makes inside itself,
# and libraries' workspaces, are not among them.

_LEAST = 512  # bytes of a block, and what its size is a multiple of
_SMALL = 2**20  # what is larger lies in other segments
_LARGE = 10 * _SMALL  # what is larger has a segment of its own size
_ROUNDING = 2 * _SMALL
_SEGMENTS = {True: 2 * _SMALL, False: 20 * _SMALL}  # of what is small, and of what is not


@dataclass(eq=False)
class _Block:
    """A part of a segment, used or free; ``pool``: (its stream's number, whether tensors are small)."""

    pool: tuple[int, bool]
    start: int
    size: int
    before: _Block | None = None
    after: _Block | None = None
    is_free: bool = False


class CachingAllocator:
    """Models torch's caching allocator: its segments are divided into blocks, and never given back.

    ``expandable``: each stream has one segment, which grows. ``reserved``: bytes of all segments.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self.reserved = self.segments = 0
        self._addresses = itertools.count(0, 2**50)
        self._free: dict[tuple[int, bool], list[tuple[int, int, int]]] = {}  # (size, start, id)
        self._blocks: dict[int, _Block] = {}  # id -> those that are free
        self._ends: dict[tuple[int, bool], _Block] = {}  # of segments that grow: the last block

    def allocate(self, size: int, stream: int = 0) -> _Block:
        """Returns a block of at least ``size`` bytes for the stream with the number ``stream``."""
        size = -(-max(size, 1) // _LEAST) * _LEAST
        pool = stream, size <= _SMALL
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, (size, -1, -1))  # the smallest that fits, and of those the first
        if at < len(free):
            block = self._blocks[free[at][2]]
            self._take(block)
        else:
            block = self._new(pool, size)
        rest = block.size - size
        if rest > _SMALL or (rest and (pool[1] or self.expandable)):
            self._put(self._split(block, size))
        return block

    def free(self, block: _Block) -> None:
        """Frees ``block``, and joins it with free neighbours."""
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._take(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                if self._ends.get(block.pool) is second:
                    self._ends[block.pool] = first
                block = first
        self._put(block)

    def _new(self, pool: tuple[int, bool], size: int) -> _Block:
        small = pool[1]
        if self.expandable:
            return self._grown(pool, size)
        new = _SEGMENTS[small] if size < _LARGE else -(-size // _ROUNDING) * _ROUNDING
        self.reserved += new
        self.segments += 1
        return _Block(pool, next(self._addresses), new)

    def _grown(self, pool: tuple[int, bool], size: int) -> _Block:
        """Grows the pool's segment by as many pages as ``size`` needs; returns the free block at its end."""
        page, last = _SEGMENTS[pool[1]], self._ends.get(pool)
        has = last.size if last is not None and last.is_free else 0
        more = -(-(size - has) // page) * page
        self.reserved += more
        self.segments += last is None
        if last is not None and has:
            self._take(last)
            last.size += more
            return last
        start = next(self._addresses) if last is None else last.start + last.size
        block = _Block(pool, start, more, before=last)
        if last is not None:
            last.after = block
        self._ends[pool] = block
        return block

    def _split(self, block: _Block, size: int) -> _Block:
        """Shrinks ``block`` to ``size`` bytes; returns the rest as a new block."""
        rest = _Block(block.pool, block.start + size, block.size - size, block, block.after)
        if block.after is not None:
            block.after.before = rest
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = rest
        block.after, block.size = rest, size
        return rest

    def _put(self, block: _Block) -> None:
        block.is_free = True
        self._blocks[id(block)] = block
        insort(self._free.setdefault(block.pool, []), (block.size, block.start, id(block)))

    def _take(self, block: _Block) -> None:
        block.is_free = False
        del self._blocks[id(block)]
        free, key = self._free[block.pool], (block.size, block.start, id(block))
        del free[bisect_left(free, key)]


def reserved_for(changes: Sequence[Change]) -> Reserved:
    """Returns what torch's allocator reserves after ``changes``, with and without expandable segments."""
    usual, expandable = (_after(changes, CachingAllocator(expandable=e)) for e in (False, True))
    return Reserved(usual.reserved, usual.segments, expandable.reserved)


def _after(changes: Sequence[Change], allocator: CachingAllocator) -> CachingAllocator:
    blocks: dict[Held, tuple[int, _Block]] = {}
    for change in changes:
        size, block = blocks.get(change.held, (0, None))
        if change.size == size:
            continue
        if change.size:  # of a storage that is resized the old memory is freed when it is copied
            blocks[change.held] = change.size, allocator.allocate(change.size, change.stream)
        else:
            del blocks[change.held]
        if block is not None:
            allocator.free(block)
    return allocator
