"""The memory of a dry run: who holds it, what it is for, and how much there is over time."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
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
from parallel3d.tools.dryrun.result import KINDS, LiveTensor, MemorySample, Operation, Peak


@dataclass(eq=False)
class Held:
    """One storage.

    Attributes:
        shape, dtype: those of the first tensor in it.
        module, phase, made_by: where that tensor was made, and by which operation.
        communicated: whether a collective has read or written it.
        lived_through_forward: whether it was alive when a backward began.
        recomputed: whether a module made it within a backward (activation checkpointing), or it was copied
            from the CPU's memory (activation offload).
        kind, name: set if it belongs to a model or its optimizer.
        on_host: whether it is in the CPU's memory (CPU offload).
        size: bytes now.
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
    """From the operation with index ``operation`` on, the storage ``held`` has ``size`` bytes."""

    operation: int
    held: Held
    size: int


class Ledger:
    """Records when storages are allocated and freed.

    Attributes:
        changes: all changes, in order.
        operation: index of the operation that runs.
        closed: whether changes are no longer recorded.
        on_new, on_free: called with the record of memory that is allocated or freed.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.operation = 0
        self.closed = False
        self.on_new: Callable[[Held], None] | None = None
        self.on_free: Callable[[Held], None] | None = None
        self._alive: dict[int, Held] = {}  # id of a storage -> its record
        self._watched: dict[int, weakref.ref] = {}

    def add(self, tensor: Tensor, held: Held) -> None:
        """Adds the storage of ``tensor``, which is not known."""
        storage = tensor.untyped_storage()
        key = id(storage)
        self._alive[key] = held
        self._watched[key] = weakref.ref(storage, partial(self._end, key))
        self._changed(held, storage.nbytes())

    def find(self, tensor: Tensor) -> Held | None:
        """Returns the record of ``tensor``'s storage."""
        return self._alive.get(id(tensor.untyped_storage()))

    def begin_backward(self) -> None:
        """Notes that all storages that are alive have lived through forward."""
        for held in self._alive.values():
            held.lived_through_forward = True

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Notes that ``storage`` may have another size."""
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
            self.changes.append(Change(self.operation, held, size))


_LARGEST = 30  # tensors that ``Peak`` lists


def note_gradients(roots: Iterable[nn.Module], ledger: Ledger) -> None:
    """Marks the storages that are ``.grad`` now as gradients."""
    for root in roots:
        for name, param in root.named_parameters():
            if param.grad is not None:
                _mark(ledger, param.grad, "gradients", name)


def name_kinds(roots: list[nn.Module], optimizers: Iterable[Optimizer], ledger: Ledger) -> None:
    """Marks what belongs to the models and their optimizers; ``kind_of`` tells the others."""
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
    """Returns the tensor that a DTensor wraps; a plain one itself."""
    return get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _mark(ledger: Ledger, tensor: Tensor, kind: str, name: str) -> None:
    held = ledger.find(local_of(tensor))
    if held is not None and not held.kind:
        held.kind, held.name = kind, name


def kind_of(held: Held) -> str:
    """Returns what a storage is for: without a mark, by its use and how long it lived."""
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
    """Returns memory over time, the peak, and the peak from the first forward on.

    There is a sample for each operation at which memory changed, with the most that was alive at it.
    """
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
    """Returns the first of the largest of ``samples``, with the largest tensors that were alive then."""
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
