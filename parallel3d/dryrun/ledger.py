"""Who holds how much memory, from the making of each storage to its end."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial

import torch

__all__ = ["Change", "Held", "Ledger"]


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
