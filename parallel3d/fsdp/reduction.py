"""Reduction: how a bucket's gradients become their sum over the ranks, stage by stage.

A reduction is a list of stages: the reduce-scatter over shard, the sum of partial gradients over tp, adding
what earlier micro-batches have accumulated, the all-reduce over replicate; options put others among them
(HFSDP's second reduce-scatter, hooks, the copy to the CPU's memory). Each stage names the lane that it runs
on. A comm (``comm.py``) runs lanes as streams, or as asynchronous works, and knows no stage by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from parallel3d._torch.kernels import foreach_copy_
from parallel3d.fsdp import collectives
from parallel3d.fsdp.collectives import ScatterWork


class Lane(Enum):
    """What a stage runs on; stages on one lane run in the order in which they are issued."""

    SCATTER = "scatter"
    """Reduce-scatters over shard."""
    TP = "tp"
    """Sums over tp, on the communicator that the layers use too: issued late, so as not to hold these up."""
    REPLICATE = "replicate"
    """What is summed over replicate, beside the next bucket's reduce-scatter."""
    SAME = "same"
    """That of the stage before."""


class Reducer:
    """The collectives on a bucket's gradients. An option may give the bucket others.

    Attributes:
        by_row: whether the reduce-scatter wants one buffer with a row for each shard rank, so that no
            gradient is reduced from where autograd has put it.
        averages: whether the collectives divide by themselves.
    """

    by_row = False
    averages = False

    def reduce_scatter(
        self, inputs: list[torch.Tensor], group: ProcessGroup, *, unit: str
    ) -> ScatterWork:
        """(n * S,) of every rank, in pieces -> (S,) of the sum."""
        return collectives.reduce_scatter(
            inputs, group, unit=unit, device_type=inputs[0].device.type
        )

    def all_reduce(self, tensor: torch.Tensor, group: ProcessGroup, *, unit: str) -> Any:
        """Sums ``tensor`` in place; returns what there is to wait for, if anything."""
        return collectives.all_reduce(tensor, group, unit=unit)

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the input of a reduce-scatter."""
        return torch.empty(size, dtype=dtype, device=device)


SUMS = Reducer()


class Reduced(Protocol):
    """What a reduction asks of the bucket whose gradients it sums; see ``Bucket``.

    Attributes:
        on_reduced: called with the bucket and the indices of its parameters that have got a gradient, as soon
            as they have.
    """

    unit: str
    numel: int
    slot_sizes: list[int]
    partial_start: int
    tp_group: ProcessGroup | None
    scatter_group: ProcessGroup | None
    reducer: Reducer
    on_reduced: Callable[..., None] | None
    pin: bool

    @property
    def grads(self) -> Any: ...


@dataclass(eq=False)
class Reduction:
    """One reduction under way.

    Attributes:
        inputs: of the reduce-scatter: of each parameter reduced in place its gradient (n * slots), and of the
            others one row of slots per shard rank; in reduce dtype. Empty once they have been read.
        tensor: the result of the stages so far: after the reduce-scatter (S,); before, and where nothing is
            scattered, the input. With HFSDP (R * S,) in between.
        used: indices of the parameters that got a gradient.
        scale: what the sum over shard is multiplied by.
        final: whether the result is the gradient, and not a sum that waits for its all-reduce.
        earlier: (S,) sums that earlier micro-batches have put off, to be all-reduced with this one.
        tp_partial: indices of the parameters whose gradients have turned out to be partial over tp, beside
            those that always are.
        rest: what the sum over replicate is multiplied by; the sum over shard if that one is put off.
        stages: what is still to be done.
        on_host: whether the result is a copy in the CPU's memory, which an accelerator makes.
    """

    bucket: Reduced
    inputs: list[torch.Tensor]
    used: Any
    scale: float = 1.0
    final: bool = True
    earlier: torch.Tensor | None = None
    tp_partial: Collection[int] = ()
    rest: float = 1.0
    stages: list[Stage] = field(default_factory=list)
    on_host: bool = False

    def __post_init__(self) -> None:
        self.tensor = self.inputs[0]

    def take(self) -> torch.Tensor:
        """The result, which this does not hold any longer."""
        tensor = self.tensor
        del self.tensor
        return tensor


class Stage:
    """One step of a reduction.

    Attributes:
        lane: what it runs on.
        stream: an accelerator's stream to use instead.
        is_collective: whether ``start`` may return before it is done.
    """

    lane = Lane.SAME
    stream: Any = None
    is_collective = False

    def start(self, job: Reduction) -> Any:
        """Issues the stage's collective, if it has one; returns what to wait for."""
        return None

    def finish(self, job: Reduction, work: Any) -> None:
        """Waits for ``work``, and does the rest."""


class ReduceScatter(Stage):
    """The sum over shard, scaled; where nothing is sharded the scaling alone."""

    lane = Lane.SCATTER
    is_collective = True

    def start(self, job: Reduction) -> ScatterWork | None:
        bucket = job.bucket
        if bucket.scatter_group is None:
            return None
        return bucket.reducer.reduce_scatter(job.inputs, bucket.scatter_group, unit=bucket.unit)

    def finish(self, job: Reduction, work: ScatterWork | None) -> None:
        """No collective in here: when it is called depends on sizes, which differ over tp."""
        if work is not None:
            job.tensor = work.wait()
        job.inputs = []
        if job.scale != 1.0:
            job.tensor.mul_(job.scale)


class SumOverTp(Stage):
    """The sum of partial gradients over tp.

    Our own styles say beforehand which gradients are partial. With torch's styles a replicated parameter is a
    DTensor in forward, and autograd decides: its gradient may come as ``Partial()`` from one use and as
    ``Replicate()`` from another. As soon as one part comes, a parameter's sum is a sum of parts, to which a
    whole gradient contributes the same on each of the n tp ranks: one n-th of itself.
    """

    lane = Lane.TP

    def finish(self, job: Reduction, work: Any) -> None:
        sum_over_tp(job.bucket, job.tensor, job.tp_partial)


class AddAccumulated(Stage):
    """Adds what earlier micro-batches have put off: sums over shard."""

    def finish(self, job: Reduction, work: Any) -> None:
        assert job.earlier is not None
        earlier = job.earlier.to(job.tensor.device, non_blocking=job.bucket.pin)
        job.tensor.add_(earlier, alpha=1 / job.rest)  # it has been divided by all


class AllReduce(Stage):
    """The sum over one replicate axis."""

    lane = Lane.REPLICATE
    is_collective = True

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def start(self, job: Reduction) -> Any:
        bucket = job.bucket
        return bucket.reducer.all_reduce(job.tensor, self.group, unit=bucket.unit)

    def finish(self, job: Reduction, work: Any) -> None:
        if work is not None:
            work.wait()


class DivideTheRest(Stage):
    """What was not divided before the sums; see ``divisor_before_sum``."""

    def finish(self, job: Reduction, work: Any) -> None:
        job.tensor.mul_(job.rest)


def stages_of(
    job: Reduction,
    over_replicate: Sequence[Stage],
    on_result: Sequence[Stage],
    to_rest: Sequence[Stage],
) -> list[Stage]:
    """What is to be done for ``job``, in order.

    Args:
        over_replicate: the sum over replicate; not made where it is put off.
        on_result: what options do to gradients that are final.
        to_rest: what options do to any result.
    """
    stages: list[Stage] = [ReduceScatter()]
    if job.bucket.tp_group is not None:
        stages.append(SumOverTp())
    if job.earlier is not None:
        stages.append(AddAccumulated())
    if job.final:
        stages += over_replicate
        if job.rest != 1.0:
            stages.append(DivideTheRest())
        stages += on_result
    return [*stages, *to_rest]


def sum_over_tp(bucket: Reduced, tensor: torch.Tensor, found: Collection[int]) -> None:
    """Sums partial gradients in a sharded buffer over tp, by one collective in the buffer's dtype.

    Args:
        tensor: (S,), or rows of it: (R * S,).
        found: indices of those that have turned out to be partial, beside those that always are.
    """
    assert bucket.tp_group is not None
    runs = _runs(bucket, found)
    rows = tensor.view(-1, bucket.numel)
    pieces = [row.narrow(0, start, length) for row in rows.unbind() for start, length in runs]
    if not pieces:
        return
    packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    work = collectives.all_reduce(packed, bucket.tp_group, unit=bucket.unit)
    if work is not None:
        work.wait()
    if len(pieces) > 1:
        foreach_copy_(pieces, list(packed.split([piece.numel() for piece in pieces])))


def _runs(bucket: Reduced, found: Collection[int]) -> list[tuple[int, int]]:
    """(start, length) of what is to be summed, neighbours joined."""
    runs: list[tuple[int, int]] = []
    start = 0
    for index, size in enumerate(bucket.slot_sizes if found else ()):
        if index in found:
            if runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + size)
            else:
                runs.append((start, size))
        start += size
    tail = bucket.numel - bucket.partial_start
    if tail:  # always partial, and last
        if runs and sum(runs[-1]) == bucket.partial_start:
            runs[-1] = (runs[-1][0], runs[-1][1] + tail)
        else:
            runs.append((bucket.partial_start, tail))
    return runs


def divisor_before_sum(divisor: float, dtype: torch.dtype) -> float:
    """What gradients are divided by before they are summed; the rest of ``divisor`` comes after.

    Float16 ends at 65504: a sum of many may overflow, and parts divided by all ranks may underflow. So each
    division takes about the root of the number, a power of two, which rounds nothing, as torch's DDP and
    FSDP do it. Other dtypes have the range.
    """
    before = 1.0
    if dtype is torch.float16:
        while divisor / before > before:
            before *= 2
    return before
