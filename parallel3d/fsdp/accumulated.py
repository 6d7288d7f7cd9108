"""Accumulation: a bucket's gradients from one micro-batch to the next.

At rest ``.grad`` of a sharded parameter is a DTensor:

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
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from parallel3d._torch.autograd import set_grad
from parallel3d._torch.dtensor import get_local_tensor, make_dtensor
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.placement import DataAxes
from parallel3d.fsdp.records import Precision
from parallel3d.fsdp.reduction import Reduced, Stage


class GradientBucket(Reduced, Protocol):
    """The attributes of ``bucket.Bucket``, which imports this file, that this file reads."""

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
    def local_parts(self, flat: torch.Tensor) -> list[torch.Tensor]: ...


class AccumulatedGradients:
    """Gradient sums of one bucket that the sharded parameters' ``.grad`` hold until they are reduced.

    One object holds the unsharded sums (no reduction yet) or the reduce-scattered ones (no all-reduce yet).

    Attributes:
        params: the bucket's parameters.
        flat: the buffer of the sums.
        views: for each parameter its part of ``flat``: shaped as by ``Geometry.by_rank`` if the sums are
            unsharded, of ``local_shape`` if they are reduce-scattered.
        grads: for each parameter a DTensor on the memory of its view, which ``.grad`` is set to.
        placed: indices of the parameters whose ``.grad`` was set to its DTensor in ``grads``.
        with_reduced: indices of those in ``placed`` whose sum includes a gradient that was already reduced.
        tp_partial: indices of the parameters whose sum is partial over tp because a gradient was.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        flat: torch.Tensor,
        views: list[torch.Tensor],
        grads: list,
    ) -> None:
        self.params, self.flat, self.views, self.grads = params, flat, views, grads
        self.placed: set[int] = set()
        self.with_reduced: set[int] = set()
        self.tp_partial: set[int] = set()

    def make_tp_partial(self, index: int) -> None:
        """Makes the sum of parameter ``index`` partial over tp, by dividing it by the number of tp ranks."""
        param, old = self.params[index], self.grads[index]
        self.tp_partial.add(index)
        self.views[index].div_(param.tp_size)
        spec = param.unreduced_spec(old.dtype, over_shard=True, tp_partial=True)
        self.grads[index] = make_dtensor(get_local_tensor(old), spec)
        if param.sharded.grad is old:
            set_grad(param.sharded, self.grads[index])

    def attach(self, index: int) -> torch.Tensor | None:
        """Sets ``.grad`` of parameter ``index`` to its sum.

        If the sum was in ``.grad`` before and is no longer, the user has cleared it: it is zeroed.

        Returns:
            Another gradient that ``.grad`` held, which the caller must add to the sum; or None.
        """
        sharded = self.params[index].sharded
        before = sharded.grad
        if before is self.grads[index]:
            return None
        if index in self.placed:
            self.reset(index)
        self.placed.add(index)
        set_grad(sharded, self.grads[index])
        return before

    def reset(self, index: int) -> None:
        self.views[index].zero_()
        self.placed.discard(index)
        self.with_reduced.discard(index)

    def take(self) -> list[int]:
        """Removes the sums from ``.grad``, for a reduction, and zeroes those that the user has removed from
        it before. Returns the indices of the parameters whose ``.grad`` was still the sum."""
        indices = []
        for index in list(self.placed):
            if self.is_in_grad([index]):
                self.params[index].sharded.grad = None
                indices.append(index)
            else:
                self.reset(index)
        return indices

    def is_in_grad(self, indices: Iterable[int]) -> bool:
        """Returns whether at least one of the parameters ``indices`` still has its sum as ``.grad``."""
        return any(self.params[index].sharded.grad is self.grads[index] for index in indices)


class Accumulation:
    """The accumulated gradient sums of one bucket, of both kinds.

    Attributes:
        unsharded: sums of this rank's own gradients that wait for the reduction; None if there are none.
        scattered: sums of reduce-scattered gradients that wait for the all-reduce; None if there are none.
    """

    def __init__(self, bucket: GradientBucket) -> None:
        self._bucket: Any = weakref.ref(bucket)  # whose gradients hold this: no cycle
        self.unsharded: AccumulatedGradients | None = None
        self.scattered: AccumulatedGradients | None = None

    @property
    def bucket(self) -> GradientBucket:
        return self._bucket()

    def add(self, index: int, grad: torch.Tensor, *, tp_partial: bool) -> None:
        """Adds ``grad``, of ``compute_shape``, to the unsharded sum of parameter ``index``. ``tp_partial``:
        whether it is partial over tp."""
        if self.unsharded is None:
            self.unsharded = self._zero_unsharded()
        held, param = self.unsharded, self.bucket.params[index]
        before = held.attach(index)
        if tp_partial and index not in held.tp_partial:
            held.make_tp_partial(index)
        elif index in held.tp_partial and not tp_partial:
            grad = grad / param.tp_size
        if before is not None:
            self._add_reduced(index, before)
        by_rank = param.geometry.grad_by_rank(grad)
        held.views[index].add_(by_rank.to(self.bucket.storage_device))

    def _zero_unsharded(self) -> AccumulatedGradients:
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
        return AccumulatedGradients(bucket.params, flat, views, grads)

    def _add_reduced(self, index: int, grad: torch.Tensor) -> None:
        """Adds ``grad`` of parameter ``index``, which is reduced or reduce-scattered, to the unsharded sum.

        The next reduction sums over the data ranks and divides by ``divisor``, so ``grad`` is scaled to come
        out of it unchanged. In each shard group only the rank that holds the shard adds it, and there are as
        many shard groups as replicas: a reduced gradient is multiplied by the divisor and divided by the
        number of replicas. A reduce-scattered one is only multiplied, as each replica has its own summand. A
        communication hook is assumed to average over shard and over replicate.
        """
        held, scattered = self.unsharded, self.scattered
        assert held is not None
        bucket, param = self.bucket, self.bucket.params[index]
        factor = bucket.divisor * bucket.num_shards / bucket.axes.data_size
        local = get_local_tensor(grad).to(bucket.precision.sum_dtype, copy=True)
        if scattered is not None and grad is scattered.grads[index]:
            factor = bucket.num_shards if bucket.settings.reducer.averages else bucket.divisor
            scattered.reset(index)
        held.with_reduced.add(index)
        if param.layout.tp_grad == "partial" or index in held.tp_partial:
            factor /= param.tp_size  # it has been summed over tp, and will be again
        segment = torch.zeros(param.geometry.padded_numel, dtype=local.dtype, device=local.device)
        param.geometry.local_view(segment).copy_(local.mul_(factor))
        shard_rank = bucket.axes.part_index if bucket.num_shards > 1 else 0
        shard = param.geometry.segments_by_rank(segment.unsqueeze(0)).select(0, 0)
        held.views[index].select(0, shard_rank).add_(shard)

    def add_scattered(self, flat: torch.Tensor, used: list[int]) -> None:
        """Adds ``flat``, (S,) of a reduce-scatter, to the reduce-scattered sums of parameters ``used``."""
        bucket, held = self.bucket, self.scattered
        if held is None:
            held = self.scattered = self._scattered_in(flat)
        # Each rank of the all-reduce to come has a reduced gradient: it makes a sum of them, or an average.
        sizes = [group.size() for group in bucket.replicate_groups]
        copies = 1 if bucket.settings.reducer.averages else math.prod(sizes)
        for index in used:
            before = held.attach(index)
            if before is not None:
                held.views[index].add_(get_local_tensor(before), alpha=1.0 / copies)
        if held.flat is not flat:
            held.flat.add_(flat)

    def _scattered_in(self, flat: torch.Tensor) -> AccumulatedGradients:
        """Returns reduce-scattered sums that are views of the buffer ``flat``, (S,)."""
        params, views = self.bucket.params, self.bucket.local_parts(flat)
        grads = [
            make_dtensor(view, p.unreduced_spec(flat.dtype, over_shard=False))
            for p, view in zip(params, views, strict=True)
        ]
        return AccumulatedGradients(params, flat, views, grads)

    def zero_scattered(self) -> AccumulatedGradients:
        bucket = self.bucket
        dtype, device = bucket.precision.sum_dtype, bucket.storage_device
        return self._scattered_in(torch.zeros(bucket.layout.numel, dtype=dtype, device=device))

    def as_reduce_output(self, held: AccumulatedGradients) -> torch.Tensor:
        """Returns the buffer of ``held`` with its elements in the order of the reduce-scatter's result."""
        return held.flat

    def carry_over(self, old: Accumulation) -> None:
        """Copies the sums of ``old``, from before the bucket's buffers were rebuilt, into new buffers.

        The rebuild follows a conversion such as ``model.double()``, which may have replaced the DTensors in
        ``.grad``: their values are then taken from there.
        """
        if old.unsharded is not None:
            self.unsharded = self._zero_unsharded()
            for index in old.unsharded.tp_partial:
                self.unsharded.make_tp_partial(index)
            self._copy(old.unsharded, self.unsharded, over_shard=True)
        if old.scattered is not None:
            self.scattered = self.zero_scattered()
            self._copy(old.scattered, self.scattered, over_shard=False)

    def _copy(
        self, old: AccumulatedGradients, new: AccumulatedGradients, *, over_shard: bool
    ) -> None:
        """Copies the sums in ``old`` whose parameters still have a ``.grad`` to ``new``, and sets ``.grad``
        to the new sums. ``over_shard``: whether the sums are unsharded."""
        for index in old.placed:
            param = self.bucket.params[index]
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
                axes, divisor = self.bucket.axes, self.bucket.divisor
                reduced = grad.redistribute(placements=param.spec.placements)
                param.sharded.grad = reduced.mul_(axes.data_size / divisor if over_shard else 1.0)
        new.with_reduced = old.with_reduced & new.placed

    def drop(self) -> None:
        """Discards all sums, and sets ``.grad`` to None where it is one of them."""
        for held in (self.unsharded, self.scattered):
            if held is not None:
                held.take()
        self.unsharded = self.scattered = None

    @property
    def holds_reduced(self) -> bool:
        """Whether an unsharded sum in ``.grad`` includes a gradient that was already reduced and divided."""
        held = self.unsharded
        return held is not None and held.is_in_grad(held.with_reduced)

    @property
    def holds_scattered(self) -> bool:
        """Whether ``.grad`` of any parameter is a reduce-scattered sum that waits for its all-reduce."""
        held = self.scattered
        return held is not None and held.is_in_grad(held.placed)


def waits_for_reduction(grad: torch.Tensor | None) -> bool:
    """Returns whether ``grad`` is an accumulated sum that is not reduced over all data axes yet."""
    return isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)
