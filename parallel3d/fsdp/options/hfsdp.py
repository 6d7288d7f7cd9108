"""HybridBucket: HFSDP, which shards optimizer states over replicate x shard.

Parameters, gradients and optimizer states are sharded over R * N ranks (R, N: sizes of replicate and shard),
and the engine keeps a copy of the weights in compute dtype that is sharded over ``shard`` only. Forward and
backward gather from this copy as in HSDP. One all-gather over replicate renews it at each forward of the
root. Gradients are reduce-scattered over shard, then over replicate. Megatron-FSDP calls this HFSDP; hpZ of
ZeRO++ is similar.

The rank (r, s) has shard ``s * R + r``: the R shards of one shard coordinate are consecutive, so that the two
gathers, one after the other, return all shards in order. ``copy``, (R * S,), is a buffer beside a Bucket's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from parallel3d._torch.dtensor import get_local_tensor, make_dtensor
from parallel3d._torch.kernels import foreach_copy_
from parallel3d.fsdp.accumulated import AccumulatedGradients, Accumulation
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.collectives import all_gather
from parallel3d.fsdp.gradients import BucketGradients
from parallel3d.fsdp.options.gather_extension import is_extended
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.placement import ParamAxes, RequestedPlacement
from parallel3d.fsdp.records import plan_copy
from parallel3d.fsdp.reduction import DEFAULT_REDUCER, ON_DEMAND, Comm, Lane, Reduction, Stage


class HybridSums(Accumulation):
    """The accumulated gradient sums of a ``HybridBucket``. R is the size of replicate.

    ``set_requires_all_reduce(False)`` defers the second reduce-scatter. A rank then accumulates what an HSDP
    rank does: the R shards of its shard coordinate. A reduce-scatter returns them as R rows of S elements;
    they are accumulated parameter by parameter, as ``.grad`` must be a DTensor.
    """

    def __init__(self, bucket: HybridBucket) -> None:
        super().__init__(bucket)
        self.replicas = bucket.replicate_scatter_group.size()

    def zero_scattered(self) -> AccumulatedGradients:
        """Returns reduce-scattered sums of zeros, with views of shape (R, *chunk_shape). The DTensors for
        ``.grad`` on the same memory have the local shape that HSDP gives the parameter."""
        bucket, r = self.bucket, self.replicas
        flat = torch.zeros(
            r * bucket.layout.numel, dtype=bucket.precision.sum_dtype, device=bucket.storage_device
        )
        regions = flat.split([r * size for size in bucket.layout.segment_sizes])
        parts, marks = [], []
        for param, region in zip(bucket.params, regions, strict=True):
            assert param.dim is not None
            shape = list(param.geometry.chunk_shape)
            shape[param.dim] *= r
            held = param.geometry.shaped(region, shape)
            parts.append(held.unflatten(param.dim, (r, -1)).movedim(param.dim, 0))
            marks.append(make_dtensor(held, param.unreduced_spec(flat.dtype, over_shard=False)))
        return AccumulatedGradients(bucket.params, flat, parts, marks)

    def _rows(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns for each parameter a view of ``flat``, R rows of S elements, of shape (R, *chunk_shape)."""
        columns = flat.view(self.replicas, -1).split(self.bucket.layout.segment_sizes, dim=1)
        return [
            p.geometry.segments_by_rank(c).reshape(self.replicas, *p.geometry.chunk_shape)
            for p, c in zip(self.bucket.params, columns, strict=True)
        ]

    def as_reduce_output(self, held: AccumulatedGradients) -> torch.Tensor:
        flat = torch.empty_like(held.flat)
        foreach_copy_(self._rows(flat), held.views)
        return flat

    def add_scattered(self, flat: torch.Tensor, used: list[int]) -> None:
        bucket = self.bucket
        if self.scattered is None:
            self.scattered = self.zero_scattered()
        held = self.scattered
        row = bucket.axes.coordinate(bucket.axes.replicate)
        # Only this rank has it: the second reduce-scatter sums it with zeros, or a hook takes the mean.
        times = self.replicas if bucket.settings.reducer.averages else 1.0
        for index in used:
            before = held.attach(index)
            if before is not None:
                held.views[index].select(0, row).add_(get_local_tensor(before), alpha=times)
        for part, rows in zip(held.views, self._rows(flat), strict=True):
            part.add_(rows)

    def _add_reduced(self, index: int, grad: torch.Tensor) -> None:
        reduced, accumulated = self.scattered, self.unsharded
        if reduced is None or grad is not reduced.grads[index]:
            super()._add_reduced(index, grad)
            return
        assert accumulated is not None
        bucket, param, r = self.bucket, self.bucket.params[index], self.replicas
        factor = bucket.num_shards / r if bucket.settings.reducer.averages else bucket.divisor
        if param.layout.tp_grad == "partial" or index in accumulated.tp_partial:
            factor /= param.tp_size
        accumulated.with_reduced.add(index)
        first = bucket.axes.coordinate(bucket.axes.shard) * r
        target = accumulated.views[index].narrow(0, first, r)
        target.add_(reduced.views[index].reshape(target.shape), alpha=factor)
        reduced.reset(index)


def cut_over_replicate(
    name: str, param: nn.Parameter, requested: RequestedPlacement
) -> RequestedPlacement:
    """Returns ``requested`` changed so that ``param`` is sharded over replicate too.

    If no dim divides evenly, or ``param`` has an all-gather extension, returns it unchanged: HSDP.
    """
    axes = requested.axes
    if axes.size(axes.replicate) == 1 or axes.spmd is not None or is_extended(param):
        return requested
    cut = replace(axes, over_replicate=True)
    dims = ParamAxes(name, param, cut).dims(param.shape)
    possible = requested.dim in dims if requested.dim is not None else bool(dims and param.numel())
    return RequestedPlacement(cut, requested.dim) if possible else requested


class ReplicateScatter(Stage):
    """The second reduce-scatter of HFSDP, over replicate."""

    lane = Lane.REPLICATE
    is_collective = True

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def start(self, job: Reduction) -> Any:
        bucket = job.bucket
        reducer = bucket.reducer  # a collective of the user's is for shard
        if reducer.by_row and not reducer.averages:
            reducer = DEFAULT_REDUCER
        return reducer.reduce_scatter([job.tensor], self.group, unit=bucket.unit)

    def finish(self, job: Reduction, work: Any) -> None:
        job.tensor = work.wait()


class HybridBucket(Bucket):
    """A bucket of HFSDP: sharded over replicate x shard, and gathered from a copy that is sharded over shard.

    Attributes:
        copy: (R * S,) in compute dtype: the shards of the R ranks with this rank's shard coordinate.
        renewing: (work, inputs) of the all-gather into ``copy`` until it was waited for; else None.
        is_new: whether ``copy`` has no values yet.
    """

    gathers_shards = False  # the R shards of a parameter are not consecutive in ``copy``
    gathers_copy = True

    def _find_groups(self, params: list[ShardedParam]) -> None:
        super()._find_groups(params)
        axes = self.axes
        assert axes.replicate is not None
        self.replicate_scatter_group = group = axes.group(axes.replicate)
        self.replicate_groups = []
        self.over_replicate = [ReplicateScatter(group)]

    @property
    def gather_groups(self) -> list[ProcessGroup]:
        return [self.replicate_scatter_group, *super().gather_groups]

    def _describe(self, device: torch.device) -> None:
        super()._describe(device)
        self.grads = BucketGradients(self, HybridSums)

    def build_unsharded(self) -> None:
        super().build_unsharded()
        self.make_copy()

    def make_copy(self) -> None:
        """Allocates ``copy`` without values; ``renew`` fills it before the next all-gather."""
        size = self.replicate_scatter_group.size() * self.layout.numel
        self.copy = torch.empty(size, dtype=self.precision.compute_dtype, device=self.device)
        if self.shard_group is None:
            # Views are made here, as those made in inference mode could not be trained.
            self.settings.memory.allocate(self.precision.unsharded)
            self._copy_whole = plan_copy(self.copy.view(self.num_shards, -1), [self], [0])
            self.free_unsharded()
        self.renewing: tuple[Any, list[torch.Tensor]] | None = None
        self.is_new = True

    def leave_precision(self) -> None:
        self.finish_renewal()

    def enter_precision(self) -> None:
        self.make_copy()

    def note_weights(self, comm: Comm) -> None:
        """Renews ``copy`` if it has no values. (``renew`` records which weights ``copy`` holds.)"""
        if self.is_new:
            self.renew(comm)

    def renew(self, comm: Comm, *, if_changed: bool = False) -> None:
        """Issues the all-gather over replicate that updates ``copy``; ``if_changed``: see ``Bucket``."""
        if if_changed and not self.is_new and not self.versions.weights_changed():
            return
        self.finish_renewal()
        parts: list[torch.Tensor] = []

        def start() -> Any:
            parts.append(self.cast_shard(ON_DEMAND))  # all units' at once
            return all_gather([self.copy], parts, self.replicate_scatter_group, unit=self.unit)

        work = comm.run_over_replicate(start, reads_host=self.reads_host)
        # Only now, as after an exception the copy must still be renewed.
        self.renewing = (work, parts)
        self.is_new = False
        self.versions.note_weights()

    def finish_renewal(self) -> None:
        """Waits for the all-gather into ``copy``, if one is under way (the current stream does)."""
        if self.renewing is not None:
            work, _ = self.renewing
            if work is not None:
                work.wait()
            self.renewing = None

    def gather_input(self) -> torch.Tensor:
        if self.post_forward_shard is not None:
            return self.post_forward_shard
        self.finish_renewal()
        return self.copy

    def unshard_without_gather(self) -> None:
        """Fills the unsharded parameters from ``copy``, if nothing is sharded over ``shard``."""
        self.finish_renewal()
        self.settings.memory.allocate(self.precision.unsharded)
        self._copy_whole()
