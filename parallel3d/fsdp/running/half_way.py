"""HalfWay: where a unit's backward gathers the unit before it, if it has large gradients.

The usual place is the backward's beginning. But then the memory at its end is two gathered units, a unit's
gradients, and the input of the last reduction, which nothing needs that long. The link carries that
reduction first in any case; so the next gather is issued when half of the gradients are there, and the
reduction's input is freed then: what it took, the gather takes. Half a backward overlaps the one, half the
other.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket
    from parallel3d.fsdp.running.context import RunContext
    from parallel3d.fsdp.state import Unit

__all__ = ["HalfWay", "bucket_to_count"]


def bucket_to_count(unit: Unit) -> Bucket | None:
    """The bucket whose gradients say when half of the backward is over; None where that is not worth it."""
    if unit.backward_prefetch is not None or unit.reduce_unused or not unit.sync:
        return None
    for bucket in unit.group.buckets:
        if bucket.reduced_in_place and not bucket.small_grads[0] and bucket.max_inputs == 1:
            return bucket if bucket.compute_params[0].requires_grad else None
    return None


class HalfWay:
    """A gather that was put off.

    Attributes:
        awaited: how much of the large gradients must come before it.
    """

    def __init__(self, bucket: Bucket, unit: Unit, position: int, context: RunContext) -> None:
        self.bucket = weakref.ref(bucket)  # which holds this: no cycle
        self.unit = unit.ref
        self.position = position
        self.context = weakref.ref(context)
        self.awaited = sum(bucket.slot_sizes[: bucket.reduced_in_place]) / 2
        bucket.half_way = self

    def count(self, index: int) -> None:
        """A large gradient has come."""
        bucket = self.bucket()
        assert bucket is not None
        self.awaited -= bucket.slot_sizes[index]
        if self.awaited <= 0:
            context = self.context()
            if context is not None:
                context.comm.free_inputs()
                self.issue()

    def issue(self) -> None:
        """Issues the gather, if that is still to be done."""
        context, unit = self.context(), self.unit()
        self.drop()
        if context is not None and unit is not None:
            context.gather_before(unit, self.position)

    def drop(self) -> None:
        """Nobody waits for it any more."""
        bucket = self.bucket()
        if bucket is not None:
            bucket.half_way = None
        context = self.context()
        if context is not None and context.half_way is self:
            context.half_way = None
