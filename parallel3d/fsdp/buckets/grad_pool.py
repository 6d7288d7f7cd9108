"""GradPool: a bucket's gradients, whose tensors the next backward uses again.

The result of a reduction is one buffer, and each ``.grad`` a DTensor of its part of it. Making these anew
costs more than the reduction's arithmetic (a view 1 us and a DTensor 2 us for each parameter), so they stay,
and the next result is written where they look. That is done only if nobody can tell: every reference to them
is counted, and as long as the user holds one, or a storage, or a view, or has put an attribute on one, the
next gradients are new ones. At rest the memory is freed when the next forward begins, at the latest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch

from parallel3d import _dry_run
from parallel3d._compat import make_dtensor, storage_uses, tensor_uses, torch_function_off

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket

__all__ = ["GradPool", "make_gradients"]

# On a gradient: the buffer (S,) that it and its bucket's others are views of, its parameter's index, and the
# sizes of all slots of the buffer.
PLACE = "_parallel3d_place"

_REQUIRES_GRAD = attrgetter("requires_grad")


def make_gradients(
    bucket: Bucket, flat: torch.Tensor, parts: list[torch.Tensor]
) -> list[torch.Tensor]:
    """What ``.grad`` of the parameters is, of their ``parts`` of ``flat``."""
    low = flat.dtype if flat.dtype != bucket.dtype else None
    grads: list[torch.Tensor] = []
    for index, (param, part) in enumerate(zip(bucket.params, parts, strict=True)):
        grad = make_dtensor(part, param.spec if low is None else param.reduced_spec(low))
        setattr(grad, PLACE, (flat, index, bucket.slot_sizes))
        grads.append(grad)
    return grads


Make = Callable[[Any, torch.Tensor, list[torch.Tensor]], list[torch.Tensor]]


class GradPool:
    """Of one bucket.

    Attributes:
        flat: (S,) in ``bucket.grad_dtype``; None before the first use.
        parts, grads: the parameters' parts of it, and their gradients.
        lent: whether a reduction writes there, whose result is not in ``.grad`` yet.
        released: whether ``flat`` has no memory.
    """

    def __init__(self, make: Make = make_gradients) -> None:
        self._make_gradients = make
        self.flat: torch.Tensor | None = None
        self.parts: list[torch.Tensor] = []
        self.grads: list[torch.Tensor] = []
        self.lent = False
        self.released = False
        self._storage: Any = None
        self._unused: list[Any] = []

    def lend(self, bucket: Bucket) -> torch.Tensor | None:
        """Memory for the result of a reduction, if the tensors are free to be used again."""
        # No name for ``flat`` here: it would be counted.
        if self.flat is None or self.lent or self.flat.dtype != bucket.grad_dtype:
            if type(bucket.flat) is not torch.Tensor and not _dry_run.active():
                return None  # simulated ranks, fake tensors of others
            self._make(bucket)
        elif self.released:
            self._storage.resize_(self.flat.nbytes)
            self.released = False
        elif not self._is_free():
            return None
        self.lent = True
        return self.flat

    def _make(self, bucket: Bucket) -> None:
        """New ones; an exception has left a reduction in the others, or the dtype is another."""
        self.flat = torch.empty(bucket.numel, dtype=bucket.grad_dtype, device=bucket.home)
        with torch.inference_mode(False), torch.no_grad():
            self.parts = bucket.local_parts(self.flat)
            self.grads = self._make_gradients(bucket, self.flat, self.parts)
        self._storage = self.flat.untyped_storage()
        self.released = False
        self._unused = self._uses()

    def release(self) -> None:
        """Frees the memory, if nobody uses it."""
        if self.flat is None or self.released or self.lent or not self._is_free():
            return
        if self._storage.resizable():
            self._storage.resize_(0)
            self.released = True
        else:  # numpy has had it
            self.flat, self.parts, self.grads = None, [], []

    def _is_free(self) -> bool:
        with torch_function_off():
            return self._uses() == self._unused

    def _uses(self) -> list[Any]:
        """Counts of every kind of reference to the tensors and their memory, and of what was put on them."""
        grads, parts = self.grads, self.parts
        return [
            getrefcount(self.flat),
            getrefcount(self._storage),
            storage_uses(self._storage),
            *map(getrefcount, grads),
            *map(tensor_uses, grads),
            *map(weakref.getweakrefcount, grads),
            *map(len, map(vars, grads)),
            *map(_REQUIRES_GRAD, grads),
            *map(getrefcount, parts),
            *map(tensor_uses, parts),
        ]
