"""What each piece of memory was for, told when the run is over, and the memory over time by kind."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel3d._torch.dtensor import get_local_tensor
from parallel3d._util.trees import tensors_in
from parallel3d.fsdp.inspect import units_of
from parallel3d.tools.dryrun.result import KINDS, LiveTensor, MemorySample, Operation, Peak

# Who holds how much memory, from the making of each storage to its end.


@dataclass(eq=False)
class Held:
    """One storage.

    Attributes:
        shape, dtype: of the first tensor in it. module, phase, made_by: where that was made.
        roles: what it has been used for, such as "gather" (output of an all-gather).
        lived_through_forward: whether it was alive when a backward began.
        recomputed: whether a module made it within a backward (activation checkpointing).
        kind, name: of what belongs to a model or its optimizer.
    """

    shape: tuple[int, ...]
    dtype: str
    module: str
    phase: str
    step: int
    made_by: str
    roles: set[str] = field(default_factory=set)
    lived_through_forward: bool = False
    recomputed: bool = False
    kind: str = ""
    name: str = ""


@dataclass(frozen=True)
class Change:
    """At operation number ``operation`` the storage ``held`` got ``size`` bytes in place of what it had."""

    operation: int
    held: Held
    size: int


class Ledger:
    """Follows storages by identity.

    Attributes:
        changes: in order. alive: storage's key -> what is known of it.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.alive: dict[int, Held] = {}
        self.operation = 0
        self.closed = False
        self._watched: dict[int, weakref.ref] = {}

    def add(self, tensor: torch.Tensor, held: Held) -> Held:
        """``tensor``'s storage is new unless it is known; returns what is known of it."""
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self.alive.get(key)
        if known is not None:
            return known
        self.alive[key] = held
        self._watched[key] = weakref.ref(storage, partial(self._end, key))
        self.changes.append(Change(self.operation, held, storage.nbytes()))
        return held

    def find(self, tensor: torch.Tensor) -> Held | None:
        """What is known of ``tensor``'s storage."""
        return self.alive.get(id(tensor.untyped_storage()))

    def begin_backward(self) -> None:
        """What is alive now is there for the backward."""
        for held in self.alive.values():
            held.lived_through_forward = True

    def resized(self, storage: torch.UntypedStorage) -> None:
        """``storage`` may have another size now."""
        held = self.alive.get(id(storage))
        if held is not None and not self.closed:
            self.changes.append(Change(self.operation, held, storage.nbytes()))

    def close(self) -> None:
        """What happens from now on is not noted."""
        self.closed = True

    def _end(self, key: int, _: object) -> None:
        held = self.alive.pop(key)
        del self._watched[key]
        if not self.closed:
            self.changes.append(Change(self.operation, held, 0))


LARGEST = 30
"""Tensors that ``Peak`` lists."""


def note_gradients(roots: Iterable[nn.Module], ledger: Ledger) -> None:
    """What is in ``.grad`` now is a gradient, and was from its beginning."""
    for root in roots:
        for name, param in root.named_parameters():
            if param.grad is not None:
                _mark(ledger, param.grad, "gradients", name)


def name_kinds(roots: list[nn.Module], optimizers: list[Any], ledger: Ledger) -> None:
    """Gives what belongs to the models and their optimizers its kind; others have one by their life."""
    for root in roots:
        for unit in units_of(root, recurse=True):
            for bucket in unit.group.buckets:
                _mark(ledger, bucket.flat, "parameters", bucket.unit)
                if bucket.has_own_unsharded:
                    _mark(ledger, bucket.unsharded, "unsharded parameters", bucket.unit)
                _mark(ledger, bucket.gathered, "communication", bucket.unit)
        for name, param in root.named_parameters():
            _mark(ledger, param, "parameters", name)
        for name, buffer in root.named_buffers():
            _mark(ledger, buffer, "buffers", name)
    note_gradients(roots, ledger)
    for optimizer in optimizers:
        for state in tensors_in(list(optimizer.state.values())):
            _mark(ledger, state, "optimizer state", "")


def _mark(ledger: Ledger, tensor: Tensor, kind: str, name: str) -> None:
    held = ledger.find(get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor)
    if held is not None and not held.kind:
        held.kind, held.name = kind, name


def kind_of(held: Held) -> str:
    """Of what belongs to no model: by what it was used for, and how long it lived."""
    if held.kind:
        return held.kind
    if any(held.roles):
        return "communication"
    if held.phase in ("forward", "other"):
        return "activations" if held.lived_through_forward else "temporaries"
    return "activations" if held.recomputed else "temporaries"


def memory_over_time(
    ledger: Ledger, operations: list[Operation]
) -> tuple[tuple[MemorySample, ...], Peak, Peak | None]:
    """A sample for each operation at which memory changed, the most that was alive at it; the peak; and that
    from the first forward on."""
    now: Counter[str] = Counter()
    samples: list[MemorySample] = []
    begin = next((i for i, each in enumerate(operations) if each.phase == "forward"), None)
    top = most = at = 0
    step_most, step_at = 0, None
    for position, total in _replay(ledger, now):
        operation = ledger.changes[position].operation
        if not samples or samples[-1].operation != operation:
            samples.append(MemorySample(operation, _known(now)))
            top = total
        elif total > top:
            samples[-1] = MemorySample(operation, _known(now))
            top = total
        if total > most:
            most, at = total, position
        if begin is not None and operation >= begin and total > step_most:
            step_most, step_at = total, position
    peak = _peak(ledger, operations, at)
    step_peak = None if step_at is None else _peak(ledger, operations, step_at)
    return tuple(samples), peak, step_peak


def _replay(ledger: Ledger, now: Counter[str]) -> Iterator[tuple[int, int]]:
    """(position of each change, bytes alive after it), while ``now`` has them by kind."""
    sizes: dict[Held, int] = {}
    total = 0
    for position, change in enumerate(ledger.changes):
        difference = change.size - sizes.get(change.held, 0)
        sizes[change.held] = change.size
        now[kind_of(change.held)] += difference
        total += difference
        yield position, total


def _known(now: Counter[str]) -> dict[str, int]:
    return {kind: now[kind] for kind in KINDS if now[kind]}


def _peak(ledger: Ledger, operations: list[Operation], position: int) -> Peak:
    alive: dict[Held, int] = {}
    now: Counter[str] = Counter()
    for change in ledger.changes[: position + 1]:
        alive[change.held] = change.size
    for held, size in alive.items():
        now[kind_of(held)] += size
    largest = sorted(alive.items(), key=lambda item: -item[1])[:LARGEST]
    at = ledger.changes[position].operation if ledger.changes else 0
    operation = operations[at] if at < len(operations) else Operation("", "", "", "other", 0)
    return Peak(
        operation=at,
        bytes=sum(alive.values()),
        by_kind=_known(now),
        phase=operation.phase,
        module=operation.module,
        name=operation.name,
        largest=tuple(
            LiveTensor(kind_of(h), size, h.shape, h.dtype, h.name or h.module, h.made_by)
            for h, size in largest
            if size
        ),
    )
