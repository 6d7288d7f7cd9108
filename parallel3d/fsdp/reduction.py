"""Reduction: a bucket's gradients are summed over the ranks by a list of stages.

The stages are the reduce-scatter over shard, the sum over tp of gradients that are partial there, the sum
with what earlier micro-batches have accumulated, and the all-reduce over replicate. Options add others:
HFSDP's second reduce-scatter, hooks, the copy to the CPU's memory. Each stage names the lane that it runs
on. A ``Comm`` runs lanes as streams or as asynchronous works, and knows no stage by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from parallel3d._torch.kernels import foreach_copy_
from parallel3d.fsdp import collectives
from parallel3d.fsdp.collectives import ScatterWork
from parallel3d.fsdp.records import BufferLayout


class Lane(Enum):
    """What a stage runs on. Stages of one lane run in the order in which they are issued."""

    SCATTER = "scatter"  # reduce-scatters over shard
    TP = "tp"  # sums over tp; issued late, as the layers' collectives are on the same communicator
    REPLICATE = "replicate"  # sums over replicate, beside the next bucket's reduce-scatter
    SAME = "same"  # the lane of the stage before


class Reducer:
    """The collectives on a bucket's gradients. An option may set another one.

    Attributes:
        by_row: whether the reduce-scatter takes one buffer with a row per shard rank, so that no gradient is
            zero-copy.
        averages: whether the collectives divide, and the engine does not.
        is_exact: whether it gives the sum; a communication hook may compress gradients.
    """

    by_row = averages = False
    is_exact = True

    def reduce_scatter(
        self, inputs: list[torch.Tensor], group: ProcessGroup, *, unit: str, scale: float = 1.0
    ) -> ScatterWork:
        """Issues a reduce-scatter of ``inputs``, together (n * S,), of every rank; its result is (S,).

        It may multiply the sum by ``scale`` too; see ``ScatterWork.is_scaled``.
        """
        return collectives.reduce_scatter(
            inputs, group, unit=unit, device_type=inputs[0].device.type, scale=scale
        )

    def all_reduce(self, tensor: torch.Tensor, group: ProcessGroup, *, unit: str) -> Any:
        """Issues an all-reduce of ``tensor`` in place. Returns the work to wait for, or None."""
        return collectives.all_reduce(tensor, group, unit=unit)

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns memory of ``size`` elements for the input of a reduce-scatter."""
        return torch.empty(size, dtype=dtype, device=device)


DEFAULT_REDUCER = Reducer()


@dataclass(frozen=True)
class BucketSettings:
    """Settings of a bucket by the user and by options. ``Bucket.change`` replaces them.

    Attributes:
        divide_factor: divisor of gradients; None: the number of data ranks.
        reduce_unused: whether parameters without a gradient are reduced as zeros.
        reducer: the collectives on gradients.
        scatter_group: process group of the reduce-scatter; None: that of the all-gather.
        on_result: stages that options add at a reduction's end; see ``stages_of``.
        on_reduced: called with the bucket and the indices of the parameters whose ``.grad`` is complete.
        gather_comm: the user's collective in place of the all-gather.
        max_inputs: how many inputs of reduce-scatters may be in flight.
        force_sum: whether the user has asked for plain sums, which no collective scales.
        keep_storage: whether the unsharded parameters keep their memory while the unit is sharded.
    """

    divide_factor: float | None = None
    reduce_unused: bool = False
    reducer: Reducer = DEFAULT_REDUCER
    scatter_group: ProcessGroup | None = None
    on_result: tuple[Stage, ...] = ()
    on_reduced: Callable[..., None] | None = None
    gather_comm: Any = None
    max_inputs: int = 1
    force_sum: bool = False
    keep_storage: bool = False


class Reduced(Protocol):
    """What is reduced: a ``bucket.Bucket``, or an ``options.merged.MergedBucket`` of several."""

    unit: str
    layout: BufferLayout
    settings: BucketSettings
    pin: bool
    tp_group: ProcessGroup | None

    @property
    def scatter_group(self) -> ProcessGroup | None: ...
    @property
    def grads(self) -> ReducedGradients: ...


class ReducedGradients(Protocol):
    """The gradients of what is reduced; see ``gradients.BucketGradients``."""

    in_flight: weakref.ref[Any] | None

    def start(self, *, all_reduce: bool) -> Reduction: ...
    def finish(self, job: Reduction) -> None: ...


@dataclass(eq=False)
class Reduction:
    """One reduction under way.

    Attributes:
        inputs: the inputs of the reduce-scatter in the reduce dtype: (n * segment) for each zero-copy
            gradient, and one buffer with a row per shard rank for the others. Empty when they have been read.
        used: indices of the parameters that got a gradient.
        scale: factor of the sum over shard.
        final: whether the result is the gradient. False: it is accumulated, its all-reduce is deferred.
        earlier: (S,), the sum that earlier micro-batches have accumulated, to be all-reduced with this; or
            None.
        tp_partial: indices of the parameters whose gradients are partial over tp in this backward, beside
            those that always are.
        final_scale: factor of the result, applied at the end.
        stages: the stages that are still to run.
        on_host: whether the result is being copied to the CPU's memory by an accelerator.
        tensor: the result of the stages so far: the input, then (S,). With HFSDP (R * S,) in between.
    """

    bucket: Reduced
    inputs: list[torch.Tensor]
    used: Any
    scale: float = 1.0
    final: bool = True
    earlier: torch.Tensor | None = None
    tp_partial: Collection[int] = ()
    final_scale: float = 1.0
    stages: list[Stage] = field(default_factory=list)
    on_host: bool = False

    def __post_init__(self) -> None:
        self.tensor = self.inputs[0]

    def take(self) -> torch.Tensor:
        """Returns the result, and drops the reference to it."""
        tensor = self.tensor
        del self.tensor
        return tensor


class Stage:
    """One step of a reduction.

    Attributes:
        lane: the lane that it runs on.
        stream: an accelerator's stream to run on instead; None: the lane's.
        is_collective: whether ``start`` issues a collective.
    """

    lane = Lane.SAME
    stream: Any = None
    is_collective = False

    def start(self, job: Reduction) -> Any:
        """Issues the stage's collective. Returns the work to wait for, or None."""
        return None

    def finish(self, job: Reduction, work: Any) -> None:
        """Waits for ``work`` if it is not None, and computes what follows the collective."""


class ReduceScatter(Stage):
    """The reduce-scatter over shard, if something is sharded, and the scaling of its result."""

    lane = Lane.SCATTER
    is_collective = True

    def start(self, job: Reduction) -> ScatterWork | None:
        bucket = job.bucket
        if bucket.scatter_group is None:
            return None
        scale = 1.0 if bucket.settings.force_sum else job.scale
        return bucket.settings.reducer.reduce_scatter(
            job.inputs, bucket.scatter_group, unit=bucket.unit, scale=scale
        )

    def finish(self, job: Reduction, work: ScatterWork | None) -> None:
        """Issues no collective: when it is called depends on sizes, which may differ between tp ranks."""
        if work is not None:
            job.tensor = work.wait()
        job.inputs = []
        if job.scale != 1.0 and (work is None or not work.is_scaled):
            job.tensor.mul_(job.scale)


class SumOverTp(Stage):
    """The sum over tp of the gradients that are partial there.

    parallel3d's styles declare which gradients are partial. With torch's styles a replicated parameter is a
    DTensor in forward, and autograd decides: its gradient may be ``Partial()`` from one use and
    ``Replicate()`` from another. If one is partial, the parameter's gradient is summed over the n tp ranks,
    and each of them contributes one n-th of a replicated gradient.
    """

    lane = Lane.TP

    def finish(self, job: Reduction, work: Any) -> None:
        sum_over_tp(job.bucket, job.tensor, job.tp_partial)


class AddAccumulated(Stage):
    """Adds the reduce-scattered sum that earlier micro-batches have accumulated."""

    def finish(self, job: Reduction, work: Any) -> None:
        assert job.earlier is not None
        earlier = job.earlier.to(job.tensor.device, non_blocking=job.bucket.pin)
        job.tensor.add_(earlier, alpha=1 / job.final_scale)  # it is divided already


class AllReduce(Stage):
    """The all-reduce over one replicate axis."""

    lane = Lane.REPLICATE
    is_collective = True

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def start(self, job: Reduction) -> Any:
        bucket = job.bucket
        return bucket.settings.reducer.all_reduce(job.tensor, self.group, unit=bucket.unit)

    def finish(self, job: Reduction, work: Any) -> None:
        if work is not None:
            work.wait()


class ScaleResult(Stage):
    """The second part of a division in two; see ``divisor_before_sum``."""

    def finish(self, job: Reduction, work: Any) -> None:
        job.tensor.mul_(job.final_scale)


def stages_of(
    job: Reduction,
    over_replicate: Sequence[Stage],
    on_result: Sequence[Stage],
    to_rest: Sequence[Stage],
) -> list[Stage]:
    """Returns the stages of ``job``.

    Args:
        over_replicate: the sums over replicate, which a job that is not final leaves out.
        on_result: stages of options for the result of a final job.
        to_rest: stages of options for any result.
    """
    stages: list[Stage] = [ReduceScatter()]
    if job.bucket.tp_group is not None:
        stages.append(SumOverTp())
    if job.earlier is not None:
        stages.append(AddAccumulated())
    if job.final:
        stages += over_replicate
        if job.final_scale != 1.0:
            stages.append(ScaleResult())
        stages += on_result
    return [*stages, *to_rest]


def sum_over_tp(bucket: Reduced, tensor: torch.Tensor, tp_partial: Collection[int]) -> None:
    """Sums partial gradients in a sharded buffer over tp, by one all-reduce in the buffer's dtype.

    Args:
        tensor: (S,), or (R * S,): R rows.
        tp_partial: indices of the parameters to sum beside those whose gradient is always partial.
    """
    assert bucket.tp_group is not None
    runs = _runs(bucket, tp_partial)
    rows = tensor.view(-1, bucket.layout.numel)
    pieces = [row.narrow(0, start, length) for row in rows.unbind() for start, length in runs]
    if not pieces:
        return
    packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    work = collectives.all_reduce(packed, bucket.tp_group, unit=bucket.unit)
    if work is not None:
        work.wait()
    if len(pieces) > 1:
        foreach_copy_(pieces, list(packed.split([piece.numel() for piece in pieces])))


def _runs(bucket: Reduced, tp_partial: Collection[int]) -> list[tuple[int, int]]:
    """Returns (start, length) of what is summed over tp in a buffer (S,); neighbours are joined."""
    starts = [0, *accumulate(bucket.layout.segment_sizes)] if tp_partial else []
    segments = [(starts[index], bucket.layout.segment_sizes[index]) for index in sorted(tp_partial)]
    if (
        bucket.layout.partial_start < bucket.layout.numel
    ):  # the bucket's last parameters are always partial
        segments.append(
            (bucket.layout.partial_start, bucket.layout.numel - bucket.layout.partial_start)
        )
    runs: list[tuple[int, int]] = []
    for start, length in segments:
        if runs and sum(runs[-1]) == start:
            start, joined = runs.pop()
            length += joined
        runs.append((start, length))
    return runs


def divisor_before_sum(divisor: float, dtype: torch.dtype) -> float:
    """Returns the divisor of gradients before the sum. After it they are divided by ``divisor`` over this.

    The largest float16 is 65504: a sum over many ranks may overflow, and summands divided by the number of
    ranks may underflow. So each division is by about the square root, as in torch's DDP and FSDP; a power of
    two is exact. Other dtypes are divided only after the sum.
    """
    before = 1.0
    if dtype is torch.float16:
        while divisor / before > before:
            before *= 2
    return before
