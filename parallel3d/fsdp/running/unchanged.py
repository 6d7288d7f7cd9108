"""Snapshot: whether anything that ``Residents`` rest on is another than it was.

What they show and reduce stays the same from step to step, unless the user changes a setting, a parameter or
a module. Looking for that one unit after the other costs more than all else they do, so everything is read
in a few passes that stay within C, and compared by identity: a False for a False, a list for the same list.
What is equal and not the same only costs a look at the units themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

from parallel3d._compat import local_tensor_of, torch_function_off

if TYPE_CHECKING:
    from parallel3d.fsdp.group import ParamGroup
    from parallel3d.fsdp.state import Unit

__all__ = ["Snapshot"]

_OF_UNIT = attrgetter(
    "sync",
    "all_reduce",
    "order_check",
    "guard",
    "tracked",
    "input_dtype",
    "policy",
    "follows_mode",
    "group",
)
_CONTEXT = attrgetter("context")
_OF_GROUP = attrgetter("state", "kept", "gated", "buffers")
_OF_BUCKET = attrgetter(
    "gate", "policy", "comm_hook", "all_reduce_hook", "reduce_unused", "divide_factor", "grads"
)
_OF_GRADS = attrgetter("whole", "partial")
_IS_TRAINABLE = attrgetter("requires_grad")
_LISTED = attrgetter("holders", "shown")


class Snapshot:
    """Of the ``units`` of one root, some of which are ``resident``, as they are now, at rest."""

    def __init__(self, units: Sequence[Unit], resident: Sequence[ParamGroup]) -> None:
        buckets = [bucket for group in resident for bucket in group.buckets]
        self._resident = resident
        self._groups = [unit.group for unit in units]
        self._buckets = [bucket for group in self._groups for bucket in group.buckets]
        self._grads = [bucket.grads for bucket in self._buckets]
        self._sharded = [param.sharded for bucket in buckets for param in bucket.params]
        self._views = [view for bucket in buckets for view in bucket.local_views]
        self._contexts = _contexts_of(units)
        self._settings = list(self._read_settings(units))
        self._trainable = self._read_trainable()
        self._listed = list(self._read_lists())
        self._dicts = [holder for group in resident for holder, _, _ in group.holders]
        self._names = list(chain.from_iterable(self._dicts))
        self._found = list(self._read_modules())

    def _read_settings(self, units: Iterable[Unit]) -> Iterable[Any]:
        return chain(
            chain.from_iterable(map(_OF_UNIT, units)),
            chain.from_iterable(map(_OF_GROUP, self._groups)),
            chain.from_iterable(map(_OF_BUCKET, self._buckets)),
            chain.from_iterable(map(_OF_GRADS, self._grads)),
        )

    def _read_lists(self) -> Iterable[Any]:
        return chain.from_iterable(map(_LISTED, self._resident))

    def _read_modules(self) -> Iterable[Any]:
        return chain.from_iterable(map(dict.values, self._dicts))

    def has_settings_of(self, units: Sequence[Unit]) -> bool:
        """Whether what has been set is the same, but for ``requires_grad``; and no other root has run."""
        return _contexts_of(units) == self._contexts and _are_same(
            self._read_settings(units), self._settings
        )

    def _read_trainable(self) -> list[bool]:
        with torch_function_off():  # takes a third of the time
            return list(map(_IS_TRAINABLE, self._sharded))

    def is_of(self, units: Sequence[Unit]) -> bool:
        """Whether parameters and modules are too, and everything is at rest."""
        return (
            self.has_settings_of(units)
            and _are_same(self._read_lists(), self._listed)
            and self._read_trainable() == self._trainable
            and _are_same(map(local_tensor_of, self._sharded), self._views)
            and _are_same(chain.from_iterable(self._dicts), self._names)
            and _are_same(self._read_modules(), self._found)
        )


def _contexts_of(units: Iterable[Unit]) -> list[int]:
    """Their ids: the contexts have the snapshots. A unit holds its own, so that another has another id."""
    return list(map(id, map(_CONTEXT, units)))


def _are_same(values: Iterable[Any], before: list[Any]) -> bool:
    now = list(values)
    return len(now) == len(before) and all(map(is_, now, before))
