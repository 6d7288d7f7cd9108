"""Versions: which values the unsharded parameters of a bucket hold, told to autograd.

What an operation has saved for backward, autograd reads only if the tensor's version counter is what it was
then. So the engine sets the counters of the unsharded parameters: to a number of the weights' values while
these are there, and to another one while the memory is free, or an all-gather writes to it. A backward that
comes when the engine has not been told of it, or after the weights have changed, is then an error and never
computes with what happens to be in the memory. ``explain`` says in the engine's words what it was.

A counter has 32 bits. The highest is set while a bucket is free; the others are the bucket's number then, and
else a part of the bucket's number, a part of that of the values, and some room for in-place changes by the
user, which raise the counter by one each.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from parallel3d._compat import inner_tensors, local_tensor_of, set_versions
from parallel3d.fsdp.running.freshness import WeightsStamp

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket

__all__ = ["Versions", "explain", "read_while_free"]

_FREE = 1 << 31
_NUMBER, _VALUES, _CHANGES = 11, 12, 8  # bits of each part; they are all but the highest

_numbers = count(1)
_buckets: weakref.WeakValueDictionary[int, Bucket] = weakref.WeakValueDictionary()


class Versions:
    """Of one bucket, as it was built last.

    Attributes:
        stamp: of the weights that were gathered last.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.number = next(_numbers)
        self.stamp = WeightsStamp([bucket])
        self._bucket = weakref.ref(bucket)
        self._of: Any = None
        self._counted: tuple[torch.Tensor, ...] = ()
        self._free: tuple[int, ...] = ()
        _buckets[self.number] = bucket

    def set_unsharded(self) -> None:
        """The parameters hold the values of ``stamp``; what forward sees of a gate does too."""
        bucket = self._bucket()
        tensors = self._tensors()
        if bucket is not None and bucket.gate is not None:
            tensors += tuple(bucket.gate.outputs)
        place = self.number % (1 << _NUMBER) << _VALUES | self.stamp.number % (1 << _VALUES)
        set_versions(tensors, (place << _CHANGES,) * len(tensors))

    def set_free(self) -> None:
        """Their memory is free."""
        tensors = self._tensors()
        set_versions(tensors, self._free)

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        bucket = self._bucket()
        assert bucket is not None
        if self._of is not bucket.compute_params:  # of another precision, or made anew
            self._of = params = bucket.compute_params
            local = [local_tensor_of(p) for p in params if isinstance(p, DTensor)]
            self._counted = (*params, *local)
            self._free = (_FREE | self.number,) * len(self._counted)
        return self._counted


_MISMATCH = re.compile(r"is at version (\d+); expected version (\d+)")
# What comes of asking a view of a subclass for its name in that message.
_NO_STORAGE = re.compile(r"setStorage: .*storage offset (\d+), .* storage of size 0")


def explain(error: BaseException) -> str | None:
    """What has happened where ``error``, of a backward, comes of versions of ours; None: it does not."""
    text = str(error)
    found = _MISMATCH.search(text)
    if found is None:
        missing = _NO_STORAGE.search(text)
        return None if missing is None else _read_while_free(_free_at(int(missing.group(1))))
    now, then = map(int, found.groups())
    if now & _FREE or then & _FREE:
        bucket = _buckets.get((now if now & _FREE else then) & ~_FREE)
        return _read_while_free([] if bucket is None else [bucket])
    shift = _VALUES + _CHANGES
    if now >> shift != then >> shift or not now >> shift:
        return None
    number = now >> shift
    names = _names(bucket for n, bucket in _buckets.items() if n % (1 << _NUMBER) == number)
    if not names:
        return None
    return (
        f"unit {names}: parameters that its forward has computed with were changed before the backward (an "
        "optimizer step, an in-place change), so that its gradient can't be computed any more; call backward "
        "before the weights change"
    )


def _free_at(offset: int) -> list[Bucket]:
    """The free buckets with a parameter at ``offset``."""
    return [
        bucket
        for bucket in _buckets.values()
        if any(p._version & _FREE and _offset_of(p) == offset for p in bucket.compute_params)
    ]


def _offset_of(param: torch.Tensor) -> int:
    return int(next(inner_tensors(param)).storage_offset())


def _read_while_free(buckets: Iterable[Bucket]) -> str | None:
    names = _names(buckets)
    return read_while_free(names) if names else None


def read_while_free(names: str) -> str:
    """What an error says of a backward that came to units, whose ``names`` these are, unnoticed."""
    return (
        f"unit {names}: a backward reads parameters of the unit while they are freed. It came there by a "
        "tensor that the engine does not know of: one that the unit's forward neither has returned nor left "
        "on an attribute of its modules (in a global list, an object of C++ ...). Return it from forward, or "
        "keep it on an attribute; with set_reshard_after_forward(False) and a single backward of the sum of "
        "all losses it may stay where it is"
    )


def _names(buckets: Iterable[Bucket]) -> str:
    return " or ".join(sorted({bucket.unit for bucket in buckets}))
