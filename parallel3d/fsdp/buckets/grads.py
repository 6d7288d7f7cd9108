"""GradientSlots: a bucket's gradients from their arrival in backward to the parameters' ``.grad``.

Gradients come one by one, and go into the inputs of one reduce-scatter: those of parameters in place as they
are, the others packed; see ``reduce_input``. What ``.grad`` of a sharded Parameter may hold at rest:

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
from parallel3d.fsdp.buckets.grad_pool import PLACE, GradPool, make_gradients
from parallel3d.fsdp.buckets.held_sum import HeldSum
from parallel3d.fsdp.buckets.reduce_input import ReduceInput
from parallel3d.fsdp.buckets.reduce_job import ReduceJob, divisor_before_sum

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket

__all__ = ["GradientSlots", "flat_gradient"]


def flat_gradient(grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The buffer (S,) that the gradients of all parameters of a bucket are views of, in their order.

    None if they are not: the user has put others there, or these where they don't belong.
    """
    flat = None
    for index, grad in enumerate(grads):
        buffer, place = getattr(grad, PLACE, (None, None))
        if place != index or (index and buffer is not flat):
            return None
        flat = buffer
    return flat


class GradientSlots:
    """See the module's docstring. Shapes: n = size of the shard axis, S = slots of all parameters."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = weakref.ref(bucket)  # it holds this: no cycle, freed without the collector
        self.arrived: set[int] = set()
        self.over_tp: set[int] = set()  # of these, those whose sum is a part over tp
        self.input: ReduceInput | None = None
        self.whole: HeldSum | None = None  # put off by set_requires_gradient_sync(False)
        self.partial: HeldSum | None = None  # put off by set_requires_all_reduce(False)
        self.pool = GradPool()
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
        part = False
        if isinstance(grad, DTensor):
            grad, part = param.local_grad(grad, bucket.reduce_dtype)
        if not sync:
            self._hold_whole(index, param.grad_by_rank(grad), part)
        else:
            if self.input is None:
                self.input = self._new_input()
            first = index not in self.arrived
            if part or index in self.over_tp:
                grad = self._as_part(index, grad, part=part, first=first)
            if first:
                self.input.take(index, grad)
            else:
                self.input.add(index, grad)
        self.arrived.add(index)

    def _as_part(self, index: int, grad: torch.Tensor, *, part: bool, first: bool) -> torch.Tensor:
        """``grad`` as a summand of parts over tp; see ``tp_sums``."""
        n = self.bucket.params[index].tp_size
        if index not in self.over_tp:
            self.over_tp.add(index)
            if not first:
                assert self.input is not None
                self.input.view(index).div_(n)
        return grad if part else grad / n

    def _new_input(self) -> ReduceInput:
        bucket = self.bucket
        if bucket.reduce_unused:  # others may have a part where this rank has nothing
            self.over_tp.update(i for i, p in enumerate(bucket.params) if p.may_be_partial)
        return ReduceInput(bucket)

    def _hold_whole(self, index: int, by_rank: torch.Tensor, part: bool) -> None:
        bucket = self.bucket
        self.settle()
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

    def carry_over(self, old: GradientSlots) -> None:
        """After the bucket was built anew: takes on what waited in ``old``, as a conversion has left it."""
        self.in_flight = old.in_flight
        if old.whole is not None:
            new = self._new_whole()
            for index in old.whole.over_tp:
                new.becomes_part(index, self.bucket.params[index])
            self.whole = self._continued(old.whole, new, over_shard=True)
        if old.partial is not None:
            self.partial = self._continued(old.partial, self._zero_partial(), over_shard=False)

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

    def forget(self) -> None:
        """Drops what a backward has brought."""
        self.arrived, self.over_tp = set(), set()
        self.input, self.in_flight = None, None

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

    # -- reduction ---------------------------------------------------------------------------------

    def has_work(self, *, sync: bool, all_reduce: bool) -> bool:
        """Whether a reduction is due at the end of this backward."""
        if not sync:
            return False
        waiting = self.input is not None or self.whole is not None
        return waiting or (all_reduce and self.partial is not None)

    @property
    def is_busy(self) -> bool:
        """Whether anything has come here, or waits."""
        sums = self.input, self.whole, self.partial
        return bool(self.arrived) or any(each is not None for each in sums)

    def settle(self) -> None:
        """Completes an earlier reduction of the same backward, before another one begins."""
        if self.in_flight is not None:
            comm = self.in_flight()
            if comm is not None:
                comm.drain(self.bucket)
            self.in_flight = None

    def start(self, *, all_reduce: bool) -> ReduceJob:
        """Hands over the reduce inputs, sums put off by earlier micro-batches folded in."""
        bucket = self.bucket
        self.settle()
        used = set(self.arrived)
        if self.input is None:
            used = set()
            self.input = self._new_input()
        if self.whole is not None:
            used.update(self.whole.take(self.sharded))
            self._add_to_input(self.input, self.whole)
        earlier = None
        if self.partial is not None and all_reduce:
            used.update(self.partial.take(self.sharded))
            earlier, self.partial = self._waiting(self.partial), None
        if bucket.reduce_unused:
            used.update(i for i, p in enumerate(bucket.compute_params) if p.requires_grad)
        before, scale, rest = self._divisors()
        inputs = self.input.finish(before)
        over_tp = frozenset(self.over_tp)
        job = ReduceJob(bucket, inputs, sorted(used), scale, all_reduce, earlier, over_tp, rest)
        self.forget()
        self.whole = None
        return job

    def _divisors(self) -> tuple[float, float, float]:
        """What the inputs are divided by, and what the sum over shard and that over replicate are multiplied
        by."""
        bucket = self.bucket
        if bucket.comm_hook is not None:
            return 1.0, 1.0, 1.0  # it divides by itself
        before = divisor_before_sum(bucket.divisor, bucket.reduce_dtype)
        after = before / bucket.divisor
        if before == 1:
            return 1.0, after, 1.0
        # What is left of it would come before the sum over replicate, and too small for it.
        again = bucket.replicate_groups or bucket.second_group is not None
        return (before, 1.0, after) if again else (before, after, 1.0)

    def _waiting(self, held: HeldSum) -> torch.Tensor:
        """A partial sum as the reduce-scatter's result lies."""
        return held.flat

    def _add_to_input(self, given: ReduceInput, whole: HeldSum) -> None:
        bucket = self.bucket
        for index in self.over_tp ^ whole.over_tp:  # only one of the two is a part
            total = given.view(index) if index in whole.over_tp else whole.parts[index]
            total.div_(bucket.params[index].tp_size)
        self.over_tp |= whole.over_tp
        for index, part in enumerate(whole.parts):
            given.add_by_rank(index, part.to(bucket.device) if bucket.offloaded else part)

    def finish(self, job: ReduceJob) -> None:
        """Puts the result of a reduction into ``.grad``, adding to what is there."""
        self.in_flight = None
        bucket = job.bucket
        if not job.final:
            flat = job.tensor.to(bucket.sum_dtype)
            self._hold_partial(flat if job.rest == 1.0 else flat.mul_(job.rest), job.used)
            return
        self._put(job.take(), job.used)
        hooked = self.run_hooks(job.used)
        if bucket.guard is not None:
            bucket.guard.update(bucket, job.used)
        if hooked or bucket.guard is not None:  # the gradients may have served
            self.pool.release()

    def run_hooks(self, used: list[int]) -> bool:
        """Calls the users' hooks on gradients that are complete; whether there are any."""
        hooked = False
        for index in used:
            param = self.bucket.params[index].sharded
            for hook in gradient_hooks(param):
                hook(param)
                hooked = True
        return hooked

    def result_memory(self, job: ReduceJob) -> torch.Tensor | None:
        """Where the reduce-scatter of ``job`` may write its result; None: to memory of its own."""
        bucket = job.bucket
        others = bucket.offloaded or bucket.scatter_comm is not None or bucket.comm_hook is not None
        if others or bucket.second_group is not None or bucket.reduce_dtype != bucket.grad_dtype:
            return None
        return self.pool.lend(bucket) if job.final else None

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

    def _put(self, result: torch.Tensor, used: list[int]) -> None:
        """Puts ``result``, as it was reduced, into ``.grad``, or adds it to what is there."""
        bucket, flat = self.bucket, result
        if result.dtype != bucket.grad_dtype:
            memory = None if bucket.offloaded else self.pool.lend(bucket)
            flat = result.to(bucket.grad_dtype) if memory is None else memory.copy_(result)
        pool = self.pool
        if flat is pool.flat:
            pool.lent = False
        present = [param.grad for param in self.sharded]
        if self._add_whole(flat, present, used):
            return
        parts, grads = pool.parts, pool.grads
        if flat is not pool.flat:
            parts = bucket.local_parts(flat)
            grads = make_gradients(bucket, flat, parts)
        self._place(parts, grads, present, used)

    def put_piece(
        self,
        flat: torch.Tensor,
        parts: list[torch.Tensor],
        grads: list[torch.Tensor],
        used: list[int],
    ) -> None:
        """The same with a piece of a larger result, in ``grad_dtype``, whose gradients are made already."""
        present = [param.grad for param in self.sharded]
        if not self._add_whole(flat, present, used):
            self._place(parts, grads, present, used)

    def _add_whole(self, flat: torch.Tensor, present: list, used: list[int]) -> bool:
        if len(used) < len(present) or (before := flat_gradient(present)) is None:
            return False
        before.add_(flat)  # one kernel for the bucket
        return True

    def _place(self, parts: list, grads: list, present: list, used: list[int]) -> None:
        bucket, params = self.bucket, self.sharded
        keep = bucket.policy.keep_low_precision_grads
        for index in used:
            param, grad = params[index], present[index]
            if grad is not None:
                get_local_tensor(grad).add_(parts[index])
            elif keep or bucket.sum_dtype is not bucket.dtype:
                # A sum of another dtype may have stood there.
                set_grad(param, grads[index], lasting=keep)
            else:
                param.grad = grads[index]
