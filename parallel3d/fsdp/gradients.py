"""BucketGradients: a bucket's gradients from their arrival in backward to the sharded parameters' ``.grad``.

Autograd brings the gradients of the unsharded parameters one by one. They become the inputs of one
reduce-scatter: a zero-copy parameter's gradient is sent from where autograd has put it, the others are
packed into one buffer (``ReduceInput``). At rest ``.grad`` of a sharded parameter is a DTensor:

- reduced: it is placed as the parameter. This is the gradient.
- reduce-scattered: it is ``Partial("sum")`` over replicate, an accumulated sum that waits for the all-reduce
  that ``set_requires_all_reduce(False)`` has put off.
- unsharded: it is ``Partial("avg")`` over replicate and shard, the sum of this rank's own gradients, which
  waits for the reduction that ``set_requires_gradient_sync(False)`` has put off.

A gradient that ``.grad`` holds when an accumulation begins is added to the accumulated sum. So nothing is
kept outside of ``.grad``: ``zero_grad()``, scaling and setting to None act on an accumulated sum as on any
gradient.
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

from parallel3d._torch.autograd import gradient_hooks, have_gradient_hooks, set_grad
from parallel3d._torch.dtensor import get_local_tensor, make_dtensor, new_dtensor
from parallel3d._torch.kernels import chunk_cat
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.placement import DataAxes
from parallel3d.fsdp.records import AccumulatedGradients, Precision
from parallel3d.fsdp.reduction import Reduced, Reduction, Stage, divisor_before_sum, stages_of


class GradientBucket(Reduced, Protocol):
    """A ``bucket.Bucket``, which imports this file, as its gradients know it; see there."""

    params: list[ShardedParam]
    axes: DataAxes
    num_shards: int
    dtype: torch.dtype
    device: torch.device
    storage_device: torch.device
    replicate_groups: list[ProcessGroup]
    over_replicate: list[Stage]

    @property
    def precision(self) -> Precision: ...
    @property
    def divisor(self) -> float: ...
    @property
    def reduced_zero_copy(self) -> int: ...
    @property
    def to_rest(self) -> Sequence[Stage]: ...
    def reduce_input(self, since: int) -> torch.Tensor: ...
    def local_parts(self, flat: torch.Tensor) -> list[torch.Tensor]: ...


class BucketGradients:
    """The gradients of one bucket; see the module's docstring.

    Attributes:
        unsharded_accumulated: this rank's own gradients, accumulated, waiting for the reduction; or None.
        partial_reduce_output: reduce-scattered gradients, accumulated, waiting for the all-reduce; or None.
        arrived: indices of the parameters whose gradient has arrived in this backward.
        tp_partial: those of them whose gradient is partial over tp.
        input: the inputs of this backward's reduce-scatter; None before the first gradient.
        in_flight: the comm that runs a reduction whose result is not in ``.grad`` yet; or None.
        merged: in a backward, what may reduce it together with others; see ``options/merged``.
        on_large: called with the index of each zero-copy gradient that arrives.
    """

    merged: Any = None
    on_large: Callable[[int], None] | None = None

    def __init__(self, bucket: GradientBucket) -> None:
        self._bucket: Any = weakref.ref(bucket)  # the bucket holds this: no cycle
        self.unsharded_accumulated: AccumulatedGradients | None = None
        self.partial_reduce_output: AccumulatedGradients | None = None
        self.forget()

    def forget(self) -> None:
        """Drops the gradients that have arrived in the backward under way."""
        self.arrived: set[int] = set()
        self.tp_partial: set[int] = set()
        self.input: ReduceInput | None = None
        self.in_flight: weakref.ref[Any] | None = None

    @property
    def bucket(self) -> GradientBucket:
        """The bucket whose gradients these are."""
        return self._bucket()

    @property
    def sharded(self) -> list[torch.nn.Parameter]:
        """The bucket's sharded parameters."""
        return [p.sharded for p in self.bucket.params]

    # -- arrival -----------------------------------------------------------------------------------

    def accept(self, index: int, grad: torch.Tensor, *, sync: bool) -> None:
        """Takes the gradient of parameter ``index``, or a further summand of it.

        Args:
            grad: the gradient, shaped as the parameter's ``compute_shape``.
            sync: whether the gradients of this backward are reduced. False: they are accumulated unsharded.
        """
        bucket = self._bucket()
        param = bucket.params[index]
        if not param.sharded.requires_grad:
            return  # it was frozen after the forward
        tp_partial = False
        if isinstance(grad, DTensor):
            grad, tp_partial = param.local_grad(grad, bucket.precision.reduce_dtype)
        if not sync:
            self.settle()
            self._accumulate_unsharded(index, param.geometry.grad_by_rank(grad), tp_partial)
        else:
            if self.input is None:
                self.input = self._new_input()
            first = index not in self.arrived
            if tp_partial or index in self.tp_partial:
                grad = self._as_tp_summand(index, grad, tp_partial=tp_partial, first=first)
            if first:
                self.input.take(index, grad)
            else:
                self.input.add(index, grad)
        self.arrived.add(index)

    def _as_tp_summand(
        self, index: int, grad: torch.Tensor, *, tp_partial: bool, first: bool
    ) -> torch.Tensor:
        """Returns ``grad`` as a summand of a gradient that is summed over tp; see ``reduction.SumOverTp``.

        If ``grad`` is not partial over tp, it is divided by the number of tp ranks. With the first partial
        summand the same is done to the gradient that has arrived before; ``first``: none has.
        """
        n = self.bucket.params[index].tp_size
        if index not in self.tp_partial:
            self.tp_partial.add(index)
            if not first:
                assert self.input is not None
                self.input.view(index).div_(n)
        return grad if tp_partial else grad / n

    def _new_input(self) -> ReduceInput:
        bucket = self.bucket
        # Another tp rank may have a partial gradient where this one has none.
        if bucket.settings.reduce_unused:
            self.tp_partial.update(i for i, p in enumerate(bucket.params) if p.may_be_partial)
        return ReduceInput(bucket)

    # -- reduction ---------------------------------------------------------------------------------

    def has_work(self, *, sync: bool, all_reduce: bool) -> bool:
        """Returns whether a reduction is due at the end of this backward; see ``Unit`` for the arguments."""
        if not sync:
            return False
        unreduced = self.input is not None or self.unsharded_accumulated is not None
        return unreduced or (all_reduce and self.partial_reduce_output is not None)

    def to_reduce(self) -> set[int]:
        """Returns the indices of the parameters that the next reduction has a gradient of."""
        sums = self.unsharded_accumulated, self.partial_reduce_output
        return self.arrived.union(*(held.placed for held in sums if held is not None))

    @property
    def is_busy(self) -> bool:
        """Whether a gradient has arrived in this backward, or an accumulated sum waits."""
        sums = self.input, self.unsharded_accumulated, self.partial_reduce_output
        return bool(self.arrived) or any(grads is not None for grads in sums)

    def settle(self) -> None:
        """Completes an earlier reduction of the same backward, before another one begins."""
        if self.in_flight is not None:
            comm = self.in_flight()
            if comm is not None:
                comm.drain(self.bucket)
            self.in_flight = None

    def start(self, *, all_reduce: bool) -> Reduction:
        """Returns the reduction of what has arrived and of what earlier micro-batches have accumulated. Its
        result is accumulated unless ``all_reduce``: it is reduced over replicate too."""
        bucket = self.bucket
        self.settle()
        used = set() if self.input is None else set(self.arrived)
        inputs = self._new_input() if self.input is None else self.input
        if self.unsharded_accumulated is not None:
            used.update(self.unsharded_accumulated.take(self.sharded))
            self._add_to_input(inputs, self.unsharded_accumulated)
            self.unsharded_accumulated = None
        accumulated = None
        if self.partial_reduce_output is not None and all_reduce:
            used.update(self.partial_reduce_output.take(self.sharded))
            accumulated = self._as_reduce_output(self.partial_reduce_output)
            self.partial_reduce_output = None
        if bucket.settings.reduce_unused:
            used.update(i for i, p in enumerate(bucket.precision.compute_params) if p.requires_grad)
        before, scale, final_scale = self._factors()
        job = Reduction(
            bucket,
            inputs.finish(before),
            sorted(used),
            scale,
            all_reduce or not bucket.over_replicate,
            accumulated,
            frozenset(self.tp_partial),
            final_scale,
        )
        job.stages = stages_of(
            job, bucket.over_replicate, bucket.settings.on_result, bucket.to_rest
        )
        self.forget()
        return job

    def _factors(self) -> tuple[float, float, float]:
        """Returns (divisor of the inputs, factor of the sum over shard, factor of the sum over replicate)."""
        bucket = self.bucket
        if bucket.settings.reducer.averages:
            return 1.0, 1.0, 1.0
        before = divisor_before_sum(bucket.divisor, bucket.precision.reduce_dtype)
        after = before / bucket.divisor
        # In float16 the second division comes after the sum over replicate, too: it makes gradients small.
        divides_last = before != 1 and bucket.over_replicate
        return (before, 1.0, after) if divides_last else (before, after, 1.0)

    def _add_to_input(self, inputs: ReduceInput, held: AccumulatedGradients) -> None:
        """Adds the unsharded accumulated sum to the inputs of the reduce-scatter."""
        bucket = self.bucket
        for index in self.tp_partial ^ held.tp_partial:  # only one of the two is partial over tp
            total = inputs.view(index) if index in held.tp_partial else held.views[index]
            total.div_(bucket.params[index].tp_size)
        self.tp_partial |= held.tp_partial
        for index, view in enumerate(held.views):
            inputs.add_by_rank(index, view.to(bucket.device))

    def finish(self, job: Reduction) -> None:
        """Adds the result of a reduction to ``.grad``, or accumulates it where the all-reduce is put off."""
        self.in_flight = None
        bucket = self.bucket
        if not job.final:
            flat = job.tensor.to(bucket.precision.sum_dtype)
            self._accumulate_partial(
                flat if job.final_scale == 1.0 else flat.mul_(job.final_scale), job.used
            )
            return
        self._put(job.take(), job.used)
        self.run_hooks(job.used)
        if bucket.settings.on_reduced is not None:
            bucket.settings.on_reduced(bucket, job.used)

    def run_hooks(self, used: list[int]) -> None:
        """Calls the user's post-accumulate-grad hooks on the sharded parameters of indices ``used``."""
        params = self.sharded
        if have_gradient_hooks(params):
            for index in used:
                for hook in gradient_hooks(params[index]):
                    hook(params[index])

    def _put(self, result: torch.Tensor, used: list[int]) -> None:
        """Adds ``result``, (S,) in the dtype of the reduction, to ``.grad``."""
        self.put_gradients(result.to(self.bucket.precision.grad_dtype), None, None, used)

    def put_gradients(
        self,
        flat: torch.Tensor,
        views: list[torch.Tensor] | None,
        grads: list[torch.Tensor] | None,
        used: list[int],
    ) -> None:
        """Adds reduced gradients to ``.grad`` of the parameters of indices ``used``.

        Args:
            flat: (S,), in ``grad_dtype``.
            views, grads: the bucket's ``local_parts`` and ``make_gradients`` of ``flat``. None: they are made
                here if they are needed.
        """
        bucket, params = self.bucket, self.sharded
        present = [param.grad for param in params]
        if len(used) == len(params):
            total = flat_gradient(present, bucket.layout.segment_sizes)
            if total is not None:
                total.add_(flat)  # one kernel for the bucket
                return
        if views is None or grads is None:
            views = bucket.local_parts(flat)
            grads = make_gradients(bucket, flat, views)
        keep = bucket.precision.policy.keep_low_precision_grads
        for index in used:
            param, grad = params[index], present[index]
            if grad is not None:
                get_local_tensor(grad).add_(views[index])
            elif keep or bucket.precision.sum_dtype is not bucket.precision.grad_dtype:
                # ``.grad`` may have been an accumulated sum of another dtype.
                set_grad(param, grads[index], lasting=keep)
            else:
                param.grad = grads[index]

    # -- gradients accumulated unsharded -----------------------------------------------------------

    def _accumulate_unsharded(self, index: int, by_rank: torch.Tensor, tp_partial: bool) -> None:
        """Adds a gradient, (num_shards, ...), to the unsharded sum in ``.grad`` of parameter ``index``."""
        bucket = self.bucket
        if self.unsharded_accumulated is None:
            self.unsharded_accumulated = self._new_unsharded()
        held, param = self.unsharded_accumulated, bucket.params[index]
        before = held.attach(index, param.sharded)
        if tp_partial and index not in held.tp_partial:
            held.make_tp_partial(index, param)
        elif index in held.tp_partial and not tp_partial:
            by_rank = by_rank / param.tp_size
        if before is not None:
            self._add_reduced(index, before)
        held.views[index].add_(by_rank.to(bucket.storage_device))

    def _new_unsharded(self) -> AccumulatedGradients:
        bucket = self.bucket
        n, dtype = bucket.num_shards, bucket.precision.sum_dtype
        # On ``storage_device``, as every gradient at rest: ``.grad`` must be on its parameter's device.
        flat = torch.zeros(n * bucket.layout.numel, dtype=dtype, device=bucket.storage_device)
        regions = flat.split([n * size for size in bucket.layout.segment_sizes])
        views, grads = [], []
        for param, region in zip(bucket.params, regions, strict=True):
            views.append(param.geometry.by_rank(region))
            spec = param.unreduced_spec(dtype, over_shard=True)
            grads.append(make_dtensor(param.geometry.compute_view(region), spec))
        return AccumulatedGradients(flat, views, grads)

    def _add_reduced(self, index: int, grad: torch.Tensor) -> None:
        """Adds ``grad``, which is reduced or reduce-scattered, to the unsharded accumulated sum.

        The next reduction will sum over the data ranks and divide by ``divisor``. In each shard group only
        the rank that holds the shard adds it, and there are as many shard groups as replicas. So a reduced
        gradient is multiplied by the divisor and divided by the number of replicas. A reduce-scattered one is
        not divided, as each replica has its own summand. A communication hook is assumed to average over
        shard and over replicate.
        """
        held, partial = self.unsharded_accumulated, self.partial_reduce_output
        assert held is not None
        bucket, param = self.bucket, self.bucket.params[index]
        factor = bucket.divisor * bucket.num_shards / bucket.axes.data_size
        local = get_local_tensor(grad).to(bucket.precision.sum_dtype, copy=True)
        if partial is not None and grad is partial.grads[index]:
            factor = bucket.num_shards if bucket.settings.reducer.averages else bucket.divisor
            partial.reset(index)
        held.with_reduced.add(index)
        if param.layout.tp_grad == "partial" or index in held.tp_partial:
            factor /= param.tp_size  # it has been summed over tp, and will be again
        segment = torch.zeros(param.geometry.padded_numel, dtype=local.dtype, device=local.device)
        param.geometry.local_view(segment).copy_(local.mul_(factor))
        shard_rank = bucket.axes.part_index if bucket.num_shards > 1 else 0
        shard = param.geometry.segments_by_rank(segment.unsqueeze(0)).select(0, 0)
        held.views[index].select(0, shard_rank).add_(shard)

    # -- gradients accumulated after the reduce-scatter --------------------------------------------

    def _accumulate_partial(self, flat: torch.Tensor, used: list[int]) -> None:
        """Adds ``flat``, (S,) summed over shard, to the reduce-scattered accumulated sum in ``.grad``."""
        bucket = self.bucket
        params, views, held = bucket.params, bucket.local_parts(flat), self.partial_reduce_output
        if held is None:
            held = self.partial_reduce_output = self._new_partial(flat, views)
        # Each rank of the all-reduce to come has a reduced gradient: it makes a sum of them, or an average.
        sizes = [group.size() for group in bucket.replicate_groups]
        copies = 1 if bucket.settings.reducer.averages else math.prod(sizes)
        for index in used:
            before = held.attach(index, params[index].sharded)
            if before is not None:
                held.views[index].add_(get_local_tensor(before), alpha=1.0 / copies)
        if held.flat is not flat:
            held.flat.add_(flat)

    def _new_partial(self, flat: torch.Tensor, views: list[torch.Tensor]) -> AccumulatedGradients:
        grads = [
            make_dtensor(view, p.unreduced_spec(flat.dtype, over_shard=False))
            for p, view in zip(self.bucket.params, views, strict=True)
        ]
        return AccumulatedGradients(flat, views, grads)

    def _zero_partial(self) -> AccumulatedGradients:
        """Returns a reduce-scattered sum of zeros."""
        bucket = self.bucket
        flat = torch.zeros(
            bucket.layout.numel, dtype=bucket.precision.sum_dtype, device=bucket.storage_device
        )
        return self._new_partial(flat, bucket.local_parts(flat))

    def _as_reduce_output(self, held: AccumulatedGradients) -> torch.Tensor:
        """Returns a reduce-scattered sum in the layout of the reduce-scatter's result."""
        return held.flat

    # -- both --------------------------------------------------------------------------------------

    def carry_over(self, old: BucketGradients) -> None:
        """Takes the accumulated sums of ``old``, the gradients of the bucket before its buffers were rebuilt.

        A conversion such as ``model.double()`` may have replaced the DTensors in ``.grad`` meanwhile.
        """
        self.in_flight = old.in_flight
        if old.unsharded_accumulated is not None:
            self.unsharded_accumulated = new = self._new_unsharded()
            for index in old.unsharded_accumulated.tp_partial:
                new.make_tp_partial(index, self.bucket.params[index])
            self._copy_held(old.unsharded_accumulated, new, over_shard=True)
        if old.partial_reduce_output is not None:
            self.partial_reduce_output = new = self._zero_partial()
            self._copy_held(old.partial_reduce_output, new, over_shard=False)

    def _copy_held(
        self, old: AccumulatedGradients, new: AccumulatedGradients, *, over_shard: bool
    ) -> None:
        """Copies to ``new`` the sums of ``old`` that are still in ``.grad``, and puts ``new`` there."""
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
                get_local_tensor(new.grads[index]).copy_(get_local_tensor(grad))
                set_grad(param.sharded, new.grads[index])
                new.placed.add(index)
            elif grad is old.grads[index] or grad.placements != param.spec.placements:
                # DTensor has reduced it, for an operation that it does not do on partial tensors.
                scale = bucket.axes.data_size / bucket.divisor if over_shard else 1.0
                reduced = grad.redistribute(placements=param.spec.placements)
                param.sharded.grad = reduced.mul_(scale)
        new.with_reduced = old.with_reduced & new.placed

    def drop_waiting(self) -> None:
        """Drops the accumulated sums, and sets the ``.grad`` that hold them to None."""
        for held in (self.unsharded_accumulated, self.partial_reduce_output):
            if held is not None:
                held.take(self.sharded)
        self.unsharded_accumulated = self.partial_reduce_output = None

    @property
    def holds_reduced(self) -> bool:
        """Whether an unsharded accumulated sum contains a reduced gradient, which was multiplied by the
        present divisor."""
        held = self.unsharded_accumulated
        return held is not None and held.is_in_grad(held.with_reduced, self.sharded)

    @property
    def holds_scattered(self) -> bool:
        """Whether a reduce-scattered accumulated sum waits for its all-reduce."""
        held = self.partial_reduce_output
        return held is not None and held.is_in_grad(held.placed, self.sharded)


def waits_for_reduction(grad: torch.Tensor | None) -> bool:
    """Returns whether ``grad`` is an accumulated sum that is not reduced over all data axes yet."""
    return isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)


class ReduceInput:
    """The inputs of a bucket's reduce-scatter, while the gradients of one backward arrive.

    Zero-copy gradients are sent from where they are, in the reduce dtype. The others are packed into a buffer
    with one row per shard rank: small ones by one kernel at the end, others when they arrive, so that they
    are freed. A cast that makes a gradient larger is left to the end too, when the unsharded parameters are
    freed.

    Attributes:
        bucket: returns the bucket.
        zero_copy: number of gradients that are sent from where they are. They are the bucket's first ones.
        kept: by index, the gradients that are not copied yet, of ``compute_shape``.
        packed: (num_shards * the sum of the other segments); None until a gradient is copied to it.
        views: for each other parameter its part of ``packed``, shaped as by ``Geometry.by_rank``.
        written: indices of the parameters whose gradient is in ``packed``.
    """

    def __init__(self, bucket: GradientBucket) -> None:
        self.bucket: Any = weakref.ref(bucket)  # whose gradients hold this: no cycle
        self.zero_copy: int = bucket.reduced_zero_copy
        self.kept: dict[int, torch.Tensor] = {}
        self.packed: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.written: set[int] = set()

    def take(self, index: int, grad: torch.Tensor) -> None:
        """Takes the first gradient of parameter ``index``."""
        bucket = self.bucket()
        if index < self.zero_copy:
            if grad.dtype.itemsize > bucket.precision.reduce_dtype.itemsize:
                grad = grad.to(bucket.precision.reduce_dtype)
            self.kept[index] = grad.contiguous()
            if bucket.grads.on_large is not None:
                bucket.grads.on_large(index)
        elif bucket.layout.small_grads[index]:
            self.kept[index] = grad
        else:
            self._view(index, zero=False).copy_(bucket.params[index].geometry.grad_by_rank(grad))

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Adds a further gradient of parameter ``index``, in the reduce dtype."""
        if index < self.zero_copy:
            self.kept[index] = self._sum(self.kept[index], grad)
        else:
            self.view(index).add_(self.bucket().params[index].geometry.grad_by_rank(grad))

    def _sum(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Returns a + b in the reduce dtype. It is a new tensor, as others may read the first gradient."""
        dtype = self.bucket().precision.reduce_dtype
        return torch.add(a.to(dtype), b).to(dtype)

    def add_by_rank(self, index: int, by_rank: torch.Tensor) -> None:
        """Adds the sum of earlier micro-batches, shaped as by ``Geometry.by_rank``."""
        if index >= self.zero_copy:
            self.view(index).add_(by_rank)
            return
        grad = by_rank.reshape(self.bucket().params[index].geometry.region_shape)
        before = self.kept.get(index)
        self.kept[index] = grad if before is None else self._sum(before, grad)

    def view(self, index: int) -> torch.Tensor:
        """Returns the packed gradient of parameter ``index``, shaped as by ``Geometry.by_rank``.

        A gradient that was kept is copied there first. Where there is none, the result is zeros.
        """
        grad = self.kept.pop(index, None)
        view = self._view(index, zero=grad is None)
        if grad is not None:
            view.copy_(self.bucket().params[index].geometry.grad_by_rank(grad))
        return view

    def _view(self, index: int, *, zero: bool) -> torch.Tensor:
        """Returns parameter ``index``'s part of ``packed``; ``zero``: it is zeroed if nothing was written."""
        bucket, first = self.bucket(), self.zero_copy
        if self.packed is None:
            self.packed = bucket.reduce_input(first)
        if not self.views:
            rows = self.packed.view(bucket.num_shards, -1)
            columns = rows.split(bucket.layout.segment_sizes[first:], dim=1)
            params = zip(bucket.params[first:], columns, strict=True)
            self.views = [param.geometry.segments_by_rank(column) for param, column in params]
        view = self.views[index - self.zero_copy]
        if index not in self.written:
            self.written.add(index)
            if zero:
                view.zero_()
        return view

    def finish(self, divisor: float) -> list[torch.Tensor]:
        """Returns the inputs of the reduce-scatter, divided by ``divisor``, with zeros where no gradient is.

        They are (num_shards * segment) for each zero-copy parameter, and ``packed`` if there are others.
        """
        bucket, inputs = self.bucket(), []
        for index in range(self.zero_copy):
            grad = self.kept.pop(index, None)
            if grad is None:
                size = bucket.num_shards * bucket.layout.segment_sizes[index]
                grad = torch.zeros(size, dtype=bucket.precision.reduce_dtype, device=bucket.device)
            grad = grad.to(bucket.precision.reduce_dtype).view(-1)
            inputs.append(grad if divisor == 1 else grad / divisor)
        if len(bucket.params) > self.zero_copy or not inputs:
            packed = self.pack()
            inputs.append(packed if divisor == 1 else packed.div_(divisor))
        return inputs

    def pack(self) -> torch.Tensor:
        """Returns ``packed`` with all gradients in it, and zeros where none is."""
        bucket, first = self.bucket(), self.zero_copy
        indices = range(first, len(bucket.params))
        if self.packed is not None and len(self.written) == len(indices) and not self.kept:
            return self.packed
        if self.packed is None and len(self.kept) == len(indices) and bucket.layout.packs_as_chunks:
            self.packed = bucket.reduce_input(first)
            grads = [self.kept[i] for i in indices]
            # A further gradient was added to one of them.
            if len({grad.dtype for grad in grads}) > 1:
                grads = [grad.to(bucket.precision.reduce_dtype) for grad in grads]
            n = bucket.num_shards
            chunk_cat(grads, dim=0, num_chunks=n, out=self.packed.view(n, -1))
            self.kept.clear()
            self.written.update(indices)
            return self.packed
        for index in indices:
            self.view(index)
        assert self.packed is not None
        return self.packed


# An attribute of each gradient: (the buffer (S,) that the bucket's gradients are views of, the index of its
# parameter, the sizes of the buffer's segments).
PLACE = "_parallel3d_place"

_place_of = attrgetter(PLACE)


def make_gradients(
    bucket: GradientBucket, flat: torch.Tensor, views: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the DTensors that ``.grad`` of the parameters is set to.

    They are new in each backward, as the user may hold those of the last one.

    Args:
        flat: (S,).
        views: for each parameter its part of ``flat``, of ``local_shape``.
    """
    dtype = flat.dtype if flat.dtype != bucket.dtype else None
    grads: list[torch.Tensor] = []
    for index, (param, view) in enumerate(zip(bucket.params, views, strict=True)):
        spec = param.spec if dtype is None else param.reduced_spec(dtype)
        grad = new_dtensor(bucket.layout.tensor_classes[index], view, spec, requires_grad=False)
        setattr(grad, PLACE, (flat, index, bucket.layout.segment_sizes))
        grads.append(grad)
    return grads


def flat_gradient(
    grads: Sequence[torch.Tensor | None], segment_sizes: list[int], first: int = 0
) -> torch.Tensor | None:
    """Returns the buffer (S,) that ``grads``, of neighbours in a bucket, are views of at their places.

    Returns None if they are not, because the user has set ``.grad`` to other tensors.

    Args:
        grads: at least one.
        segment_sizes: the bucket's, for all its parameters.
        first: the index of the first gradient's parameter.
    """
    try:
        buffers, places, sizes = zip(*map(_place_of, grads), strict=True)
    except AttributeError:  # None, or a tensor of the user's
        return None
    # No Python code per gradient: it would take about as long as a norm or a step of small gradients.
    at_places = places == tuple(range(first, first + len(places)))
    if at_places and sizes[0] == segment_sizes and all(map(is_, buffers, repeat(buffers[0]))):
        return buffers[0]
    return None


def flat_gradients_of(grads: Sequence[torch.Tensor | None], segment_sizes: list[int]) -> list[Any]:
    """Returns a key for each gradient of a bucket. Neighbours of equal keys have one ``flat_gradient``.

    The key of a parameter without a gradient is None. That of a gradient of the user's equals no other.
    """
    keys: list[Any] = []
    for index, grad in enumerate(grads):
        buffer, place, sizes = getattr(grad, PLACE, (None, None, None))
        at_place = place == index and sizes == segment_sizes
        keys.append(None if grad is None else id(buffer) if at_place else object())
    return keys
