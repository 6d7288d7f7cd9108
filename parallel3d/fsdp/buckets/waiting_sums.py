"""WaitingSums: gradients of a bucket that are put off, from one micro-batch to the one that reduces them."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from parallel3d._compat import get_local_tensor, make_dtensor, set_grad
from parallel3d.fsdp.buckets.held_sum import HeldSum

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket

__all__ = ["WaitingSums"]


class WaitingSums:
    """Base of ``GradientSlots``.

    Attributes:
        whole: put off by ``set_requires_gradient_sync(False)``: this rank's own sums.
        partial: put off by ``set_requires_all_reduce(False)``: sums over shard.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = weakref.ref(bucket)  # it holds this: no cycle, freed without the collector
        self.whole: HeldSum | None = None
        self.partial: HeldSum | None = None

    @property
    def bucket(self) -> Bucket:
        """The bucket whose gradients these are."""
        bucket = self._bucket()
        assert bucket is not None
        return bucket

    @property
    def sharded(self) -> list[torch.nn.Parameter]:
        """The bucket's sharded Parameters."""
        return [p.sharded for p in self.bucket.params]

    def _hold_whole(self, index: int, by_rank: torch.Tensor, part: bool) -> None:
        bucket = self.bucket
        if self.whole is None:
            self.whole = self._new_whole()
        whole, param = self.whole, bucket.params[index]
        before = whole.place(index, param.sharded)
        if part != (index in whole.over_tp):
            if part:
                whole.becomes_part(index, param)
            else:
                by_rank = by_rank / param.tp_size
        if before is not None:
            self._fold_into_whole(index, before)
        whole.parts[index].add_(by_rank.to(bucket.home) if bucket.offloaded else by_rank)

    def _new_whole(self) -> HeldSum:
        bucket = self.bucket
        # At home, as every gradient: a Parameter's ``.grad`` must be on its device.
        dtype = bucket.sum_dtype
        flat = torch.zeros(bucket.parts * bucket.numel, dtype=dtype, device=bucket.home)
        regions = flat.split([bucket.parts * size for size in bucket.slot_sizes])
        pairs = list(zip(bucket.params, regions, strict=True))
        marks = [
            make_dtensor(p.compute_view(r), p.unreduced_spec(dtype, over_shard=True))
            for p, r in pairs
        ]
        return HeldSum(flat, [p.by_rank(r) for p, r in pairs], marks)

    def _new_partial(self, flat: torch.Tensor, parts: list[torch.Tensor]) -> HeldSum:
        marks = [
            make_dtensor(part, p.unreduced_spec(flat.dtype, over_shard=False))
            for p, part in zip(self.bucket.params, parts, strict=True)
        ]
        return HeldSum(flat, parts, marks)

    def _zero_partial(self) -> HeldSum:
        bucket = self.bucket
        flat = torch.zeros(bucket.numel, dtype=bucket.sum_dtype, device=bucket.home)
        return self._new_partial(flat, bucket.local_parts(flat))

    def _continued(self, old: HeldSum, new: HeldSum, *, over_shard: bool) -> HeldSum:
        """``new`` with the sums of ``old`` that are still in ``.grad``, by now maybe as other objects."""
        bucket = self.bucket
        for index in old.placed:
            param = bucket.params[index]
            grad = param.sharded.grad
            if not isinstance(grad, DTensor):
                continue  # cleared
            unreduced = param.unreduced_spec(
                grad.dtype, over_shard=over_shard, over_tp=index in old.over_tp
            )
            if grad.placements == unreduced.placements:
                get_local_tensor(new.marks[index]).copy_(get_local_tensor(grad))
                set_grad(param.sharded, new.marks[index])
                new.placed.add(index)
            elif grad is old.marks[index] or grad.placements != param.spec.placements:
                # An operation that DTensor does not do on sums has summed it: it waits no longer.
                scale = bucket.axes.data_size / bucket.divisor if over_shard else 1.0
                reduced = grad.redistribute(placements=param.spec.placements)
                param.sharded.grad = reduced.mul_(scale)
        new.folded = old.folded & new.placed
        return new

    def _fold_into_whole(self, index: int, grad: torch.Tensor) -> None:
        """Adds a gradient that is reduced already (or reduce-scattered) to this rank's own sum.

        What follows sums over the data axes and divides. A shard's owner alone adds it, in each of the
        copies that replicate axes make, so it is multiplied by the divisor and divided by the number of
        copies; unless it is partial there, so that each copy adds a part of its own. A hook is taken to
        average over shard and over replicate, each by itself.
        """
        assert self.whole is not None
        bucket, param = self.bucket, self.bucket.params[index]
        factor = bucket.divisor * bucket.parts / bucket.axes.data_size
        local = get_local_tensor(grad).to(bucket.sum_dtype, copy=True)
        if self.partial is not None and grad is self.partial.marks[index]:
            factor = bucket.divisor if bucket.comm_hook is None else bucket.parts
            self.partial.drop(index)
        self.whole.folded.add(index)
        if param.layout.tp_grad == "partial" or index in self.whole.over_tp:
            factor /= param.tp_size  # it has been summed over tp, and will be again
        slot = torch.zeros(param.slot_numel, dtype=local.dtype, device=local.device)
        param.local_view(slot).copy_(local.mul_(factor))
        index_of_part = bucket.axes.part_index if bucket.parts > 1 else 0
        mine = param.slots_by_rank(slot.unsqueeze(0)).select(0, 0)
        self.whole.parts[index].select(0, index_of_part).add_(mine)

    def drop_waiting(self) -> None:
        """Drops the sums that wait for their reduction, and empties the ``.grad`` they stand in."""
        for held in (self.whole, self.partial):
            if held is not None:
                held.take(self.sharded)
        self.whole = self.partial = None

    @property
    def holds_reduced(self) -> bool:
        """Whether a sum that waits holds a reduced gradient, multiplied so that today's divisor undoes it."""
        if self.whole is None:
            return False
        params, marks = self.bucket.params, self.whole.marks
        return any(params[i].sharded.grad is marks[i] for i in self.whole.folded)

    @property
    def holds_scattered(self) -> bool:
        """Whether a sum waits that has been reduce-scattered."""
        if self.partial is None:
            return False
        params, marks = self.bucket.params, self.partial.marks
        return any(params[i].sharded.grad is marks[i] for i in self.partial.placed)

    def _waiting(self, held: HeldSum) -> torch.Tensor:
        """A partial sum as the reduce-scatter's result lies."""
        return held.flat

    def _hold_partial(self, flat: torch.Tensor, used: list[int]) -> None:
        """Adds ``flat``, summed over shard, to what waits for the all-reduce."""
        bucket = self.bucket
        params, parts, held = bucket.params, bucket.local_parts(flat), self.partial
        if held is None:
            held = self.partial = self._new_partial(flat, parts)
        # What the all-reduce to come makes of a value that every rank has: a sum, or a hook's mean.
        copies = math.prod(group.size() for group in bucket.replicate_groups)
        copies = copies if bucket.comm_hook is None else 1
        for index in used:
            before = held.place(index, params[index].sharded)
            if before is not None:  # reduced: every rank of the all-reduce to come has it
                held.parts[index].add_(get_local_tensor(before), alpha=1.0 / copies)
        if held.flat is not flat:
            held.flat.add_(flat)
