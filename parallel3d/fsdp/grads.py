"""GradientSlots: a bucket's gradients from their arrival in backward to the parameters' ``.grad``.

A gradient is copied (cast, and rearranged) into the reduce input the moment autograd has it, and freed.
What ``.grad`` of a sharded Parameter may hold at rest:

- reduced: a DTensor placed as the Parameter. The gradient.
- partial: ``Partial()`` on replicate: reduce-scattered, waiting for the all-reduce that
  ``set_requires_all_reduce(False)`` put off.
- unsharded: ``Partial("avg")`` on replicate and shard: this rank's own sum, waiting for the reduction that
  ``set_requires_gradient_sync(False)`` put off.

A gradient that is there already is folded into the waiting sum, so ``.grad`` is all there is:
``zero_grad()``, scaling and setting to None do to a waiting sum what they do to any gradient.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from parallel3d._compat import get_local_tensor, gradient_hooks, make_dtensor, set_grad
from parallel3d.fsdp.reduce_job import ReduceJob, divisor_before_sum

if TYPE_CHECKING:
    from parallel3d.fsdp.bucket import Bucket

__all__ = ["GradientSlots", "flat_gradient"]

_FLAT = "_parallel3d_flat"  # on a gradient: the buffer that it and its bucket's others are views of


def flat_gradient(grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The buffer (S,) that all ``grads`` of a bucket are views of; None if they are not."""
    flat = getattr(grads[0], _FLAT, None)
    return flat if all(getattr(grad, _FLAT, None) is flat for grad in grads) else None


class HeldSum:
    """A sum that waits for its reduction: a flat buffer whose parts stand in the parameters' ``.grad``.

    Attributes:
        parts: the buffer by parameter, in the shape gradients are added in.
        marks: DTensors of the same memory, what ``.grad`` is.
        placed: indices whose mark was put into ``.grad``.
        folded: of these, those whose sum holds a reduced gradient, which was there before.
    """

    def __init__(self, flat: torch.Tensor, parts: list[torch.Tensor], marks: list) -> None:
        self.flat = flat
        self.parts = parts
        self.marks = marks
        self.placed: set[int] = set()
        self.folded: set[int] = set()

    def place(self, index: int, param: torch.nn.Parameter) -> torch.Tensor | None:
        """Puts part ``index`` into ``param.grad``; returns the gradient that was there, if any.

        A part that is no longer there was cleared by the user: its sum is dropped.
        """
        before = param.grad
        if before is self.marks[index]:
            return None
        if index in self.placed:
            self.drop(index)
        self.placed.add(index)
        set_grad(param, self.marks[index])
        return before

    def drop(self, index: int) -> None:
        """Forgets the sum of part ``index``."""
        self.parts[index].zero_()
        self.placed.discard(index)
        self.folded.discard(index)

    def take(self, params: list[torch.nn.Parameter]) -> list[int]:
        """Empties ``.grad``; returns the indices that still hold a sum. The others' parts become zero."""
        held = []
        for index in list(self.placed):
            if params[index].grad is self.marks[index]:
                params[index].grad = None
                held.append(index)
            else:
                self.drop(index)
        return held


class GradientSlots:
    """See the module's docstring. Shapes: n = size of the shard axis, S = slots of all parameters."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = weakref.ref(bucket)  # it holds this: no cycle, freed without the collector
        self.arrived: set[int] = set()
        self.input: torch.Tensor | None = None
        self.input_views: list[torch.Tensor] = []
        self.whole: HeldSum | None = None  # put off by set_requires_gradient_sync(False)
        self.partial: HeldSum | None = None  # put off by set_requires_all_reduce(False)
        # Where a reduction is under way: its result must be in ``.grad`` before another one begins.
        self.in_flight: weakref.ref[Any] | None = None

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

    # -- arrival -----------------------------------------------------------------------------------

    def accept(self, index: int, grad: torch.Tensor, *, sync: bool) -> None:
        """Takes parameter ``index``'s gradient, of its compute shape."""
        bucket = self._bucket()
        assert bucket is not None
        param = bucket.params[index]
        if not param.sharded.requires_grad:
            return  # frozen since the forward
        by_rank = param.grad_by_rank(param.local_grad(grad, bucket.reduce_dtype))
        if not sync:
            self._hold_whole(index, by_rank)
        elif index in self.arrived:
            self.input_views[index].add_(by_rank)
        else:
            if self.input is None:
                self._allocate_input()
            self.input_views[index].copy_(by_rank)
        self.arrived.add(index)

    def _allocate_input(self) -> None:
        bucket = self.bucket
        self.input = bucket.reduce_input()
        self.input_views = bucket.views_by_rank(self.input)

    def _hold_whole(self, index: int, by_rank: torch.Tensor) -> None:
        bucket = self.bucket
        self.settle()
        if self.whole is None:
            self.whole = self._new_whole()
        before = self.whole.place(index, bucket.params[index].sharded)
        if before is not None:
            self._fold_into_whole(index, before)
        self.whole.parts[index].add_(by_rank.to(bucket.home) if bucket.offloaded else by_rank)

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

    def carry_over(self, old: GradientSlots) -> None:
        """After the bucket was built anew: takes on what waited in ``old``, as a conversion has left it."""
        self.in_flight = old.in_flight
        if old.whole is not None:
            self.whole = self._continued(old.whole, self._new_whole(), over_shard=True)
        if old.partial is not None:
            bucket = self.bucket
            flat = torch.zeros(bucket.numel, dtype=bucket.sum_dtype, device=bucket.home)
            new = self._new_partial(flat, bucket.local_parts(flat))
            self.partial = self._continued(old.partial, new, over_shard=False)

    def _continued(self, old: HeldSum, new: HeldSum, *, over_shard: bool) -> HeldSum:
        """``new`` with the sums of ``old`` that are still in ``.grad``, by now maybe as other objects."""
        bucket = self.bucket
        for index in old.placed:
            param = bucket.params[index]
            grad = param.sharded.grad
            if not isinstance(grad, DTensor):
                continue  # cleared
            unreduced = param.unreduced_spec(grad.dtype, over_shard=over_shard)
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
        copies; unless it is partial there, so that each copy adds a part of its own.
        """
        assert self.whole is not None
        bucket, param = self.bucket, self.bucket.params[index]
        factor = bucket.divisor * bucket.parts / bucket.axes.data_size
        local = get_local_tensor(grad).clone()
        if self.partial is not None and grad is self.partial.marks[index]:
            factor = bucket.divisor
            self.partial.drop(index)
        self.whole.folded.add(index)
        if param.layout.tp_grad == "partial":
            factor /= param.tp_size  # it has been summed over tp, and will be again
        slot = torch.zeros(param.slot_numel, dtype=local.dtype, device=local.device)
        param.local_view(slot).copy_(local.mul_(factor))
        coordinate = bucket.axes.coordinate(bucket.axes.shard) if bucket.parts > 1 else 0
        mine = param.slots_by_rank(slot.unsqueeze(0)).select(0, 0)
        self.whole.parts[index].select(0, coordinate).add_(mine)

    def forget(self) -> None:
        """Drops what a broken backward has brought."""
        self.arrived, self.input, self.input_views, self.in_flight = set(), None, [], None

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

    # -- reduction ---------------------------------------------------------------------------------

    def has_work(self, *, sync: bool, all_reduce: bool) -> bool:
        """Whether a reduction is due at the end of this backward."""
        if not sync:
            return False
        waiting = self.input is not None or self.whole is not None
        return waiting or (all_reduce and self.partial is not None)

    def settle(self) -> None:
        """Completes an earlier reduction of the same backward, before another one begins."""
        if self.in_flight is not None:
            comm = self.in_flight()
            if comm is not None:
                comm.drain(self.bucket)
            self.in_flight = None

    def start(self, *, all_reduce: bool) -> ReduceJob:
        """Hands over the reduce input, sums put off by earlier micro-batches folded in."""
        bucket = self.bucket
        self.settle()
        used = set(self.arrived)
        if self.input is None:
            used = set()
            self._allocate_input()
        assert self.input is not None
        for index in range(len(bucket.params)):
            if index not in used:
                self.input_views[index].zero_()
        if self.whole is not None:
            used.update(self.whole.take(self.sharded))
            for view, part in zip(self.input_views, self.whole.parts, strict=True):
                view.add_(part.to(bucket.device) if bucket.offloaded else part)
        earlier = None
        if self.partial is not None and all_reduce:
            used.update(self.partial.take(self.sharded))
            earlier, self.partial = self.partial.flat, None
        if bucket.reduce_unused:
            used.update(i for i, p in enumerate(bucket.compute_params) if p.requires_grad)
        before = divisor_before_sum(bucket.divisor, bucket.reduce_dtype)
        if before != 1:
            self.input.div_(before)
        scale = before / bucket.divisor
        job = ReduceJob(bucket, self.input, sorted(used), scale, all_reduce, earlier)
        self.arrived, self.input, self.input_views, self.whole = set(), None, [], None
        return job

    def finish(self, job: ReduceJob) -> None:
        """Puts the result of a reduction into ``.grad``, adding to what is there."""
        self.in_flight = None
        bucket = job.bucket
        params = bucket.params
        flat = job.tensor.to(bucket.dtype if job.final else bucket.sum_dtype)
        parts = bucket.local_parts(flat)
        if job.final:
            self._accumulate(flat, parts, job.used)
            for index in job.used:
                param = params[index].sharded
                for hook in gradient_hooks(param):
                    hook(param)
            return
        held = self.partial
        if held is None:
            held = self.partial = self._new_partial(flat, parts)
        copies = math.prod(group.size() for group in bucket.replicate_groups)
        for index in job.used:
            before = held.place(index, params[index].sharded)
            if before is not None:  # reduced: every rank of the all-reduce to come has it
                held.parts[index].add_(get_local_tensor(before), alpha=1.0 / copies)
        if held.flat is not flat:
            held.flat.add_(flat)

    def _accumulate(self, flat: torch.Tensor, parts: list[torch.Tensor], used: list[int]) -> None:
        params = self.bucket.params
        before = getattr(params[0].sharded.grad, _FLAT, None)
        if (
            before is not None
            and len(used) == len(params)
            and all(getattr(p.sharded.grad, _FLAT, None) is before for p in params)
        ):
            before.add_(flat)  # one kernel for the bucket
            return
        for index in used:
            param = params[index].sharded
            if param.grad is not None:
                get_local_tensor(param.grad).add_(parts[index])
                continue
            grad = make_dtensor(parts[index], params[index].spec)
            setattr(grad, _FLAT, flat)
            if self.bucket.sum_dtype is self.bucket.dtype:
                param.grad = grad
            else:
                set_grad(param, grad)  # a sum of another dtype may have stood there
