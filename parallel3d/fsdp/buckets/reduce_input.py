"""ReduceInput: a bucket's gradients of one backward, from their arrival to the reduce-scatter.

Gradients of parameters in place are sent from where they are, in the reduce dtype. The others are packed,
one row of slots per shard rank: small ones all by one kernel at the end, others at once, so that they are
freed. What a cast makes larger is cast at the end too, when the unsharded parameters are freed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from parallel3d._compat import chunk_cat

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket

__all__ = ["ReduceInput"]


class ReduceInput:
    """Of one bucket and one backward. n: size of the shard axis.

    Attributes:
        in_place: how many gradients, the first ones, are reduced from where they are.
        kept: by index, gradients that are kept as they are, of compute shape.
        packed: one row of slots per shard rank, of the gradients behind the first ones; as soon as one is not
            kept. ``views``: of it, by index less ``in_place``.
        written: indices of those that ``packed`` holds.
    """

    __slots__ = ("_bucket", "in_place", "kept", "packed", "views", "written")

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = weakref.ref(bucket)  # whose gradients hold this: no cycle
        self.in_place = bucket.reduced_in_place
        self.kept: dict[int, torch.Tensor] = {}
        self.packed: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.written: set[int] = set()

    @property
    def bucket(self) -> Bucket:
        """The bucket whose gradients these are."""
        bucket = self._bucket()
        assert bucket is not None
        return bucket

    # -- arrival -----------------------------------------------------------------------------------

    def take(self, index: int, grad: torch.Tensor) -> None:
        """The first gradient of parameter ``index``."""
        bucket = self._bucket()
        assert bucket is not None
        if index < self.in_place:
            if grad.dtype.itemsize > bucket.reduce_dtype.itemsize:
                grad = grad.to(bucket.reduce_dtype)
            self.kept[index] = grad.contiguous()
            if bucket.half_way is not None:
                bucket.half_way.count(index)
        elif bucket.small_grads[index]:
            self.kept[index] = grad
        else:
            self._written(index, zero=False).copy_(bucket.params[index].grad_by_rank(grad))

    def add(self, index: int, grad: torch.Tensor) -> None:
        """A later one: sums are made in the reduce dtype, and not in place, as others may read the first."""
        if index < self.in_place:
            self.kept[index] = self._sum(self.kept[index], grad)
        else:
            self.view(index).add_(self.bucket.params[index].grad_by_rank(grad))

    def _sum(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dtype = self.bucket.reduce_dtype
        return torch.add(a.to(dtype), b).to(dtype)

    def add_by_rank(self, index: int, part: torch.Tensor) -> None:
        """Adds a sum of earlier micro-batches, shaped as ``ShardedParam.by_rank`` does."""
        if index >= self.in_place:
            self.view(index).add_(part)
            return
        part = part.reshape(self.bucket.params[index].region_shape)
        before = self.kept.get(index)
        if before is None:
            self.kept[index] = part
        else:
            self.kept[index] = self._sum(before, part)

    def view(self, index: int) -> torch.Tensor:
        """The sum of a packed gradient, shaped as ``ShardedParam.by_rank`` does; zeros if there is none."""
        grad = self.kept.pop(index, None)
        view = self._written(index, zero=grad is None)
        if grad is not None:
            view.copy_(self.bucket.params[index].grad_by_rank(grad))
        return view

    def _written(self, index: int, *, zero: bool) -> torch.Tensor:
        if self.packed is None:
            self.packed = self.bucket.reduce_input(self.in_place)
            self.views = self.bucket.views_by_rank(self.packed, self.in_place)
        view = self.views[index - self.in_place]
        if index not in self.written:
            self.written.add(index)
            if zero:
                view.zero_()
        return view

    # -- reduction ---------------------------------------------------------------------------------

    def finish(self, divisor: float) -> list[torch.Tensor]:
        """The inputs of the reduce-scatter, divided by ``divisor``; where there is no gradient, zeros."""
        bucket, members = self.bucket, []
        for index in range(self.in_place):
            members.append(self._member(index, divisor))
        if bucket.slot_sizes[self.in_place :] or not members:
            packed = self._pack()
            members.append(packed if divisor == 1 else packed.div_(divisor))
        return members

    def _member(self, index: int, divisor: float) -> torch.Tensor:
        bucket = self.bucket
        grad = self.kept.pop(index, None)
        if grad is None:
            size = bucket.parts * bucket.slot_sizes[index]
            return torch.zeros(size, dtype=bucket.reduce_dtype, device=bucket.device)
        grad = grad.to(bucket.reduce_dtype).view(-1)
        return grad if divisor == 1 else grad / divisor

    def _pack(self) -> torch.Tensor:
        bucket, first = self.bucket, self.in_place
        indices = range(first, len(bucket.params))
        if self.packed is None and len(self.kept) == len(indices) and bucket.packs_as_chunks:
            packed = bucket.reduce_input(first)
            grads = [self.kept[i] for i in indices]
            if len({grad.dtype for grad in grads}) > 1:  # one was summed on its way here
                grads = [grad.to(bucket.reduce_dtype) for grad in grads]
            chunk_cat(grads, bucket.parts, packed.view(bucket.parts, -1))
            self.kept.clear()
            return packed
        for index in indices:
            self.view(index)
        assert self.packed is not None
        return self.packed
