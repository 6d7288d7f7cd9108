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

import weakref
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from parallel3d._compat import (
    get_local_tensor,
    gradient_hooks,
    has_gradient_hooks,
    make_dtensor,
    set_grad,
)
from parallel3d.fsdp.buckets.held_sum import HeldSum
from parallel3d.fsdp.buckets.reduce_input import ReduceInput
from parallel3d.fsdp.buckets.reduce_job import ReduceJob, divisor_before_sum
from parallel3d.fsdp.buckets.waiting_sums import WaitingSums

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket

__all__ = ["GradientSlots", "flat_gradient", "flat_gradients_of", "make_gradients"]

# On a gradient: the buffer (S,) that it and its bucket's others are views of, its parameter's index, and the
# sizes of all slots of the buffer.
PLACE = "_parallel3d_place"

_place_of = attrgetter(PLACE)


def make_gradients(
    bucket: Bucket, flat: torch.Tensor, parts: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What ``.grad`` of the parameters is, of their ``parts`` of ``flat``.

    New tensors in each backward: the user may hold the last one's.
    """
    low = flat.dtype if flat.dtype != bucket.dtype else None
    grads: list[torch.Tensor] = []
    for index, (param, part) in enumerate(zip(bucket.params, parts, strict=True)):
        grad = make_dtensor(part, param.spec if low is None else param.reduced_spec(low))
        setattr(grad, PLACE, (flat, index, bucket.slot_sizes))
        grads.append(grad)
    return grads


def flat_gradient(
    grads: Sequence[torch.Tensor | None], slot_sizes: list[int], first: int = 0
) -> torch.Tensor | None:
    """The buffer (S,) that ``grads``, of neighbours in a bucket, are views of, each where it belongs.

    None if they are not: the user has put others there, or these where they don't belong.

    Args:
        grads: one at least.
        slot_sizes: the bucket's, of all its parameters.
        first: the index of the first one's parameter.
    """
    try:
        buffers, places, sizes = zip(*map(_place_of, grads), strict=True)
    except AttributeError:  # None, or of the user's
        return None
    # No Python code for each: norms and steps of small gradients take about as long as looking at them does.
    belong = places == tuple(range(first, first + len(places)))
    if belong and sizes[0] == slot_sizes and all(map(is_, buffers, repeat(buffers[0]))):
        return buffers[0]
    return None


def flat_gradients_of(grads: Sequence[torch.Tensor | None], slot_sizes: list[int]) -> list[Any]:
    """What to compare for whether neighbours in a bucket have one ``flat_gradient``: equal is one.

    Of parameters without a gradient it is None, and with one of the user's unlike any other.
    """
    kinds: list[Any] = []
    for index, grad in enumerate(grads):
        buffer, place, sizes = getattr(grad, PLACE, (None, None, None))
        belongs = place == index and sizes == slot_sizes
        kinds.append(None if grad is None else id(buffer) if belongs else object())
    return kinds


class GradientSlots(WaitingSums):
    """See the module's docstring. Shapes: n = size of the shard axis, S = slots of all parameters."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.arrived: set[int] = set()
        self.over_tp: set[int] = set()  # of these, those whose sum is a part over tp
        self.input: ReduceInput | None = None
        # Where a reduction is under way: its result must be in ``.grad`` before another one begins.
        self.in_flight: weakref.ref[Any] | None = None

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
            self.settle()
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

    def forget(self) -> None:
        """Drops what a backward has brought."""
        self.arrived, self.over_tp = set(), set()
        self.input, self.in_flight = None, None

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
        self.run_hooks(job.used)
        if bucket.guard is not None:
            bucket.guard.update(bucket, job.used)

    def run_hooks(self, used: list[int]) -> None:
        """Calls the users' hooks on gradients that are complete."""
        params = self.sharded
        if not any(map(has_gradient_hooks, params)):
            return
        for index in used:
            for hook in gradient_hooks(params[index]):
                hook(params[index])

    def _put(self, result: torch.Tensor, used: list[int]) -> None:
        """Puts ``result``, as it was reduced, into ``.grad``, or adds it to what is there."""
        bucket = self.bucket
        flat = result.to(bucket.grad_dtype)
        present = [param.grad for param in self.sharded]
        if self._add_whole(flat, present, used):
            return
        parts = bucket.local_parts(flat)
        self._place(parts, make_gradients(bucket, flat, parts), present, used)

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
        if len(used) < len(present):
            return False
        before = flat_gradient(present, self.bucket.slot_sizes)
        if before is None:
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
            elif keep or bucket.sum_dtype is not bucket.grad_dtype:
                # A sum of another dtype may have stood there.
                set_grad(param, grads[index], lasting=keep)
            else:
                param.grad = grads[index]
