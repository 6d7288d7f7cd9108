"""WeightsStamp: whether the weights at rest have changed since, as far as counters tell.

Version counters alone don't tell: fused and foreach optimizers leave a DTensor's as it was. So optimizer
steps are counted too, by a hook on every optimizer that is set when the first stamp is taken. Not those of
optimizers without a DTensor: one rank may step such a one alone (a probe that rank 0 trains), and would
then gather what no other rank does.

No counter sees changes of ``param.data``, nor those of ``torch._foreach_`` functions on DTensors outside of
an optimizer. So nothing is kept from one forward of the root to the next unless the user asks for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from parallel3d._compat import torch_function_off, untraced
from parallel3d.fsdp.param import owner_of

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket

__all__ = ["WeightsStamp"]

_version_of = attrgetter("_version")
_steps: int | None = None  # of all optimizers so far; None until the first stamp


class _Record:
    """Of one optimizer's steps.

    Attributes:
        step: the number, among the steps of all, of the last one.
        params: ids of what it optimizes.
        copies: whether it may write to others, of which it has copies: some of what it has is of no unit.
    """

    def __init__(self) -> None:
        self.step = -1
        self.params: set[int] = set()
        self.copies = False

    def note(self, optimizer: Optimizer, step: int) -> None:
        """Step ``step`` was made."""
        self.step = step
        groups = optimizer.param_groups
        if len(self.params) != sum(len(group["params"]) for group in groups):
            params = [param for group in groups for param in group["params"]]
            self.params = set(map(id, params))
            self.copies = any(isinstance(p, DTensor) and owner_of(p) is None for p in params)


_records: weakref.WeakKeyDictionary[Optimizer, _Record] = weakref.WeakKeyDictionary()
_of_deleted: deque[_Record] = deque(
    maxlen=8
)  # who makes that many between a forward and its backward?


@untraced
def _count(optimizer: Optimizer, *_: Any) -> None:
    global _steps
    assert _steps is not None
    groups = optimizer.param_groups  # maybe of other DTensors, master weights that it copies from
    if any(isinstance(param, DTensor) for group in groups for param in group["params"]):
        _steps += 1
        record = _records.get(optimizer)
        if record is None:
            record = _records[optimizer] = _Record()
            weakref.finalize(optimizer, _of_deleted.append, record).atexit = False
        record.note(optimizer, _steps)


def _steps_so_far() -> int:
    global _steps
    if _steps is None:
        _steps = 0
        register_optimizer_step_post_hook(_count)
    return _steps


class WeightsStamp:
    """Of the weights of ``buckets`` as they were when it was taken last.

    Attributes:
        number: of the values seen so far; another one after each change.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        params = [param for bucket in buckets for param in bucket.params]
        self._sharded = [param.sharded for param in params]
        self._counted = [*self._sharded, *(param.local for param in params)]
        self._steps = -1
        self._versions = -1
        self.number = 0

    def take(self) -> int:
        """Looks at the weights as they are now; their number."""
        steps, versions = _steps_so_far(), self._read()
        if self._is_old(steps, versions):
            self.number += 1
        self._steps, self._versions = steps, versions
        return self.number

    def is_old(self) -> bool:
        """Whether the weights have changed since it was taken."""
        return self._is_old(_steps_so_far(), self._read())

    def _is_old(self, steps: int, versions: int) -> bool:
        return versions != self._versions or (steps != self._steps and self._were_stepped())

    def _read(self) -> int:
        with torch_function_off():
            return sum(map(_version_of, self._counted))

    def _were_stepped(self) -> bool:
        """Whether an optimizer that has one of the weights, or copies to them, has made a step since."""
        mine = set(map(id, self._sharded))
        return any(
            record.step > self._steps and (record.copies or not mine.isdisjoint(record.params))
            for record in chain(_records.values(), _of_deleted)
        )
