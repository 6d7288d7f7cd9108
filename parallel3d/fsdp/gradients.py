"""GradientSlots: a bucket's gradients from their arrival in backward to the parameters' ``.grad``.

Gradients come one by one, and go into the inputs of one reduce-scatter: those of parameters in place as they
are, the others packed; see ``ReduceInput``. What ``.grad`` of a sharded Parameter may hold at rest:

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
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from parallel3d._torch.autograd import gradient_hooks, has_gradient_hooks, set_grad
from parallel3d._torch.dtensor import get_local_tensor, make_dtensor, new_dtensor
from parallel3d._torch.kernels import chunk_cat
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.placement import DataAxes
from parallel3d.fsdp.reduction import Reduced, Reduction, Stage, divisor_before_sum, stages_of


class GradientBucket(Reduced, Protocol):
    """A bucket, as far as its gradients go; see ``Bucket``."""

    params: list[ShardedParam]
    compute_params: list[torch.nn.Parameter]
    policy: MixedPrecisionPolicy
    axes: DataAxes
    num_shards: int
    device: torch.device
    storage_device: torch.device
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    sum_dtype: torch.dtype
    grad_dtype: torch.dtype
    reduce_unused: bool
    small_grads: list[bool]
    tensor_classes: list[type[DTensor]]
    packs_as_chunks: bool
    replicate_groups: list[ProcessGroup]
    over_replicate: list[Stage]
    on_result: list[Stage]
    to_rest: list[Stage]
    on_large_gradient: Callable[[int], None] | None

    @property
    def divisor(self) -> float: ...

    @property
    def reduced_zero_copy(self) -> int: ...

    def reduce_input(self, since: int) -> torch.Tensor: ...

    def local_parts(self, flat: torch.Tensor) -> list[torch.Tensor]: ...

    def views_by_rank(self, packed: torch.Tensor, since: int) -> list[torch.Tensor]: ...


class GradientSlots:
    """See the module's docstring. Shapes: n = size of the shard axis, S = slots of all parameters.

    Attributes:
        unsharded_accumulated: put off by ``set_requires_gradient_sync(False)``: this rank's own sums.
        partial_reduce_output: put off by ``set_requires_all_reduce(False)``: sums over shard.
    """

    def __init__(self, bucket: GradientBucket) -> None:
        self._bucket = weakref.ref(bucket)  # it holds this: no cycle, freed without the collector
        self.unsharded_accumulated: HeldSum | None = None
        self.partial_reduce_output: HeldSum | None = None
        self.arrived: set[int] = set()
        self.tp_partial: set[int] = set()  # of these, those whose sum is a part over tp
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
            if part or index in self.tp_partial:
                grad = self._as_part(index, grad, part=part, first=first)
            if first:
                self.input.take(index, grad)
            else:
                self.input.add(index, grad)
        self.arrived.add(index)

    def _as_part(self, index: int, grad: torch.Tensor, *, part: bool, first: bool) -> torch.Tensor:
        """``grad`` as a summand of parts over tp; see ``reduction.SumOverTp``."""
        n = self.bucket.params[index].tp_size
        if index not in self.tp_partial:
            self.tp_partial.add(index)
            if not first:
                assert self.input is not None
                self.input.view(index).div_(n)
        return grad if part else grad / n

    def _new_input(self) -> ReduceInput:
        bucket = self.bucket
        if bucket.reduce_unused:  # others may have a part where this rank has nothing
            self.tp_partial.update(i for i, p in enumerate(bucket.params) if p.may_be_partial)
        return ReduceInput(bucket)

    def carry_over(self, old: GradientSlots) -> None:
        """After the bucket was built anew: takes on what waited in ``old``, as a conversion has left it."""
        self.in_flight = old.in_flight
        if old.unsharded_accumulated is not None:
            new = self._new_whole()
            for index in old.unsharded_accumulated.tp_partial:
                new.becomes_part(index, self.bucket.params[index])
            self.unsharded_accumulated = self._continued(
                old.unsharded_accumulated, new, over_shard=True
            )
        if old.partial_reduce_output is not None:
            self.partial_reduce_output = self._continued(
                old.partial_reduce_output, self._zero_partial(), over_shard=False
            )

    def forget(self) -> None:
        """Drops what a backward has brought."""
        self.arrived, self.tp_partial = set(), set()
        self.input, self.in_flight = None, None

    # -- reduction ---------------------------------------------------------------------------------

    def has_work(self, *, sync: bool, all_reduce: bool) -> bool:
        """Whether a reduction is due at the end of this backward."""
        if not sync:
            return False
        waiting = self.input is not None or self.unsharded_accumulated is not None
        return waiting or (all_reduce and self.partial_reduce_output is not None)

    @property
    def is_busy(self) -> bool:
        """Whether anything has come here, or waits."""
        sums = self.input, self.unsharded_accumulated, self.partial_reduce_output
        return bool(self.arrived) or any(each is not None for each in sums)

    def settle(self) -> None:
        """Completes an earlier reduction of the same backward, before another one begins."""
        if self.in_flight is not None:
            comm = self.in_flight()
            if comm is not None:
                comm.drain(self.bucket)
            self.in_flight = None

    def start(self, *, all_reduce: bool) -> Reduction:
        """Hands over the reduce inputs, sums put off by earlier micro-batches folded in."""
        bucket = self.bucket
        self.settle()
        used = set(self.arrived)
        if self.input is None:
            used = set()
            self.input = self._new_input()
        if self.unsharded_accumulated is not None:
            used.update(self.unsharded_accumulated.take(self.sharded))
            self._add_to_input(self.input, self.unsharded_accumulated)
        earlier = None
        if self.partial_reduce_output is not None and all_reduce:
            used.update(self.partial_reduce_output.take(self.sharded))
            earlier, self.partial_reduce_output = self._waiting(self.partial_reduce_output), None
        if bucket.reduce_unused:
            used.update(i for i, p in enumerate(bucket.compute_params) if p.requires_grad)
        before, scale, rest = self._divisors()
        inputs = self.input.finish(before)
        tp_partial = frozenset(self.tp_partial)
        final = all_reduce or not bucket.over_replicate
        job = Reduction(bucket, inputs, sorted(used), scale, final, earlier, tp_partial, rest)
        job.stages = stages_of(job, bucket.over_replicate, bucket.on_result, bucket.to_rest)
        self.forget()
        self.unsharded_accumulated = None
        return job

    def _divisors(self) -> tuple[float, float, float]:
        """What the inputs are divided by, and what the sum over shard and that over replicate are multiplied
        by."""
        bucket = self.bucket
        if bucket.reducer.averages:
            return 1.0, 1.0, 1.0
        before = divisor_before_sum(bucket.divisor, bucket.reduce_dtype)
        after = before / bucket.divisor
        if before == 1:
            return 1.0, after, 1.0
        # What is left of it would come before the sum over replicate, and too small for it.
        return (before, 1.0, after) if bucket.over_replicate else (before, after, 1.0)

    def _add_to_input(self, given: ReduceInput, whole: HeldSum) -> None:
        bucket = self.bucket
        for index in self.tp_partial ^ whole.tp_partial:  # only one of the two is a part
            total = given.view(index) if index in whole.tp_partial else whole.parts[index]
            total.div_(bucket.params[index].tp_size)
        self.tp_partial |= whole.tp_partial
        for index, part in enumerate(whole.parts):
            given.add_by_rank(index, part.to(bucket.device))

    def finish(self, job: Reduction) -> None:
        """Puts the result of a reduction into ``.grad``, adding to what is there."""
        self.in_flight = None
        bucket = self.bucket
        if not job.final:
            flat = job.tensor.to(bucket.sum_dtype)
            self._hold_partial(flat if job.rest == 1.0 else flat.mul_(job.rest), job.used)
            return
        self._put(job.take(), job.used)
        self.run_hooks(job.used)
        if bucket.on_reduced is not None:
            bucket.on_reduced(bucket, job.used)

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

    # -- sums that wait, from one micro-batch to the one that reduces them -------------------------

    @property
    def bucket(self) -> GradientBucket:
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
        if self.unsharded_accumulated is None:
            self.unsharded_accumulated = self._new_whole()
        whole, param = self.unsharded_accumulated, bucket.params[index]
        before = whole.place(index, param.sharded)
        if part != (index in whole.tp_partial):
            if part:
                whole.becomes_part(index, param)
            else:
                by_rank = by_rank / param.tp_size
        if before is not None:
            self._fold_into_whole(index, before)
        whole.parts[index].add_(by_rank.to(bucket.storage_device))

    def _new_whole(self) -> HeldSum:
        bucket = self.bucket
        # At storage_device, as every gradient: a Parameter's ``.grad`` must be on its device.
        dtype = bucket.sum_dtype
        flat = torch.zeros(
            bucket.num_shards * bucket.numel, dtype=dtype, device=bucket.storage_device
        )
        regions = flat.split([bucket.num_shards * size for size in bucket.slot_sizes])
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
        flat = torch.zeros(bucket.numel, dtype=bucket.sum_dtype, device=bucket.storage_device)
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
                grad.dtype, over_shard=over_shard, tp_partial=index in old.tp_partial
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
        assert self.unsharded_accumulated is not None
        bucket, param = self.bucket, self.bucket.params[index]
        factor = bucket.divisor * bucket.num_shards / bucket.axes.data_size
        local = get_local_tensor(grad).to(bucket.sum_dtype, copy=True)
        if (
            self.partial_reduce_output is not None
            and grad is self.partial_reduce_output.marks[index]
        ):
            factor = bucket.num_shards if bucket.reducer.averages else bucket.divisor
            self.partial_reduce_output.drop(index)
        self.unsharded_accumulated.folded.add(index)
        if param.layout.tp_grad == "partial" or index in self.unsharded_accumulated.tp_partial:
            factor /= param.tp_size  # it has been summed over tp, and will be again
        slot = torch.zeros(param.slot_numel, dtype=local.dtype, device=local.device)
        param.local_view(slot).copy_(local.mul_(factor))
        index_of_part = bucket.axes.part_index if bucket.num_shards > 1 else 0
        mine = param.slots_by_rank(slot.unsqueeze(0)).select(0, 0)
        self.unsharded_accumulated.parts[index].select(0, index_of_part).add_(mine)

    def drop_waiting(self) -> None:
        """Drops the sums that wait for their reduction, and empties the ``.grad`` they stand in."""
        for held in (self.unsharded_accumulated, self.partial_reduce_output):
            if held is not None:
                held.take(self.sharded)
        self.unsharded_accumulated = self.partial_reduce_output = None

    @property
    def holds_reduced(self) -> bool:
        """Whether a sum that waits holds a reduced gradient, multiplied so that today's divisor undoes it."""
        if self.unsharded_accumulated is None:
            return False
        params, marks = self.bucket.params, self.unsharded_accumulated.marks
        return any(params[i].sharded.grad is marks[i] for i in self.unsharded_accumulated.folded)

    @property
    def holds_scattered(self) -> bool:
        """Whether a sum waits that has been reduce-scattered."""
        if self.partial_reduce_output is None:
            return False
        params, marks = self.bucket.params, self.partial_reduce_output.marks
        return any(params[i].sharded.grad is marks[i] for i in self.partial_reduce_output.placed)

    def _waiting(self, held: HeldSum) -> torch.Tensor:
        """A partial sum as the reduce-scatter's result lies."""
        return held.flat

    def _hold_partial(self, flat: torch.Tensor, used: list[int]) -> None:
        """Adds ``flat``, summed over shard, to what waits for the all-reduce."""
        bucket = self.bucket
        params, parts, held = bucket.params, bucket.local_parts(flat), self.partial_reduce_output
        if held is None:
            held = self.partial_reduce_output = self._new_partial(flat, parts)
        # What the all-reduce to come makes of a value that every rank has: a sum, or a mean.
        copies = math.prod(group.size() for group in bucket.replicate_groups)
        copies = 1 if bucket.reducer.averages else copies
        for index in used:
            before = held.place(index, params[index].sharded)
            if before is not None:  # reduced: every rank of the all-reduce to come has it
                held.parts[index].add_(get_local_tensor(before), alpha=1.0 / copies)
        if held.flat is not flat:
            held.flat.add_(flat)


# HeldSum: gradients of a bucket that wait for their reduction, in the parameters' ``.grad``.


def waits_for_reduction(grad: torch.Tensor | None) -> bool:
    """Whether ``grad`` is a sum that is still to be reduced, and not the gradient."""
    return isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)


class HeldSum:
    """A sum that waits for its reduction: a flat buffer whose parts stand in the parameters' ``.grad``.

    Attributes:
        parts: the buffer by parameter, in the shape gradients are added in.
        marks: DTensors of the same memory, what ``.grad`` is.
        placed: indices whose mark was put into ``.grad``.
        folded: of these, those whose sum holds a reduced gradient, which was there before.
        tp_partial: indices whose sum is a part that other tp ranks have the rest of, as autograd brought it.
    """

    def __init__(self, flat: torch.Tensor, parts: list[torch.Tensor], marks: list) -> None:
        self.flat = flat
        self.parts = parts
        self.marks = marks
        self.placed: set[int] = set()
        self.folded: set[int] = set()
        self.tp_partial: set[int] = set()

    def becomes_part(self, index: int, param: ShardedParam) -> None:
        """From now on the sum of part ``index`` is partial over tp too; its mark says so."""
        self.tp_partial.add(index)
        self.parts[index].div_(param.tp_size)
        old = self.marks[index]
        spec = param.unreduced_spec(old.dtype, over_shard=True, tp_partial=True)
        self.marks[index] = make_dtensor(get_local_tensor(old), spec)
        if param.sharded.grad is old:
            set_grad(param.sharded, self.marks[index])

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


# ReduceInput: a bucket's gradients of one backward, from their arrival to the reduce-scatter.
#
# Gradients of parameters in place are sent from where they are, in the reduce dtype. The others
# are packed, one row of slots per shard rank: small ones all by one kernel at the end, others at
# once, so that they are freed. What a cast makes larger is cast at the end too, when the unsharded
# parameters are freed.


class ReduceInput:
    """Of one bucket and one backward. n: size of the shard axis.

    Attributes:
        zero_copy: how many gradients, the first ones, are reduced from where they are.
        kept: by index, gradients that are kept as they are, of compute shape.
        packed: one row of slots per shard rank, of the gradients behind the first ones; as soon as one is not
            kept. ``views``: of it, by index less ``zero_copy``.
        written: indices of those that ``packed`` holds.
    """

    __slots__ = ("_bucket", "kept", "packed", "views", "written", "zero_copy")

    def __init__(self, bucket: GradientBucket) -> None:
        self._bucket = weakref.ref(bucket)  # whose gradients hold this: no cycle
        self.zero_copy = bucket.reduced_zero_copy
        self.kept: dict[int, torch.Tensor] = {}
        self.packed: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.written: set[int] = set()

    @property
    def bucket(self) -> GradientBucket:
        """The bucket whose gradients these are."""
        bucket = self._bucket()
        assert bucket is not None
        return bucket

    # -- arrival -----------------------------------------------------------------------------------

    def take(self, index: int, grad: torch.Tensor) -> None:
        """The first gradient of parameter ``index``."""
        bucket = self._bucket()
        assert bucket is not None
        if index < self.zero_copy:
            if grad.dtype.itemsize > bucket.reduce_dtype.itemsize:
                grad = grad.to(bucket.reduce_dtype)
            self.kept[index] = grad.contiguous()
            if bucket.on_large_gradient is not None:
                bucket.on_large_gradient(index)
        elif bucket.small_grads[index]:
            self.kept[index] = grad
        else:
            self._written(index, zero=False).copy_(bucket.params[index].grad_by_rank(grad))

    def add(self, index: int, grad: torch.Tensor) -> None:
        """A later one: sums are made in the reduce dtype, and not in place, as others may read the first."""
        if index < self.zero_copy:
            self.kept[index] = self._sum(self.kept[index], grad)
        else:
            self.view(index).add_(self.bucket.params[index].grad_by_rank(grad))

    def _sum(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dtype = self.bucket.reduce_dtype
        return torch.add(a.to(dtype), b).to(dtype)

    def add_by_rank(self, index: int, part: torch.Tensor) -> None:
        """Adds a sum of earlier micro-batches, shaped as ``ShardedParam.by_rank`` does."""
        if index >= self.zero_copy:
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
            self.packed = self.bucket.reduce_input(self.zero_copy)
            self.views = self.bucket.views_by_rank(self.packed, self.zero_copy)
        view = self.views[index - self.zero_copy]
        if index not in self.written:
            self.written.add(index)
            if zero:
                view.zero_()
        return view

    # -- reduction ---------------------------------------------------------------------------------

    def finish(self, divisor: float) -> list[torch.Tensor]:
        """The inputs of the reduce-scatter, divided by ``divisor``; where there is no gradient, zeros."""
        bucket, members = self.bucket, []
        for index in range(self.zero_copy):
            members.append(self._member(index, divisor))
        if bucket.slot_sizes[self.zero_copy :] or not members:
            packed = self._pack()
            members.append(packed if divisor == 1 else packed.div_(divisor))
        return members

    def _member(self, index: int, divisor: float) -> torch.Tensor:
        bucket = self.bucket
        grad = self.kept.pop(index, None)
        if grad is None:
            size = bucket.num_shards * bucket.slot_sizes[index]
            return torch.zeros(size, dtype=bucket.reduce_dtype, device=bucket.device)
        grad = grad.to(bucket.reduce_dtype).view(-1)
        return grad if divisor == 1 else grad / divisor

    def _pack(self) -> torch.Tensor:
        bucket, first = self.bucket, self.zero_copy
        indices = range(first, len(bucket.params))
        if self.packed is None and len(self.kept) == len(indices) and bucket.packs_as_chunks:
            packed = bucket.reduce_input(first)
            grads = [self.kept[i] for i in indices]
            if len({grad.dtype for grad in grads}) > 1:  # one was summed on its way here
                grads = [grad.to(bucket.reduce_dtype) for grad in grads]
            n = bucket.num_shards
            chunk_cat(grads, dim=0, num_chunks=n, out=packed.view(n, -1))
            self.kept.clear()
            return packed
        for index in indices:
            self.view(index)
        assert self.packed is not None
        return self.packed


# On a gradient: the buffer (S,) that it and its bucket's others are views of, its parameter's index, and the
# sizes of all slots of the buffer.
PLACE = "_parallel3d_place"

_place_of = attrgetter(PLACE)


def make_gradients(
    bucket: GradientBucket, flat: torch.Tensor, parts: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What ``.grad`` of the parameters is, of their ``parts`` of ``flat``.

    New tensors in each backward: the user may hold the last one's.
    """
    low = flat.dtype if flat.dtype != bucket.dtype else None
    grads: list[torch.Tensor] = []
    for index, (param, part) in enumerate(zip(bucket.params, parts, strict=True)):
        spec = param.spec if low is None else param.reduced_spec(low)
        grad = new_dtensor(bucket.tensor_classes[index], part, spec, requires_grad=False)
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
