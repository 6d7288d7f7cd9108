"""ReduceJob: one bucket's reduction, and what is done to its sum on the way."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from parallel3d.fsdp.buckets.tp_sums import sum_over_tp
from parallel3d.fsdp.collectives import ScatterWork

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket

__all__ = ["ReduceJob", "divisor_before_sum"]


@dataclass(eq=False)
class ReduceJob:
    """One reduction under way.

    Attributes:
        inputs: of the reduce-scatter: of each parameter reduced in place its gradient (n * slots), and of the
            others one row of slots per shard rank; in reduce dtype. Empty once they have been read.
        tensor: its result (S,); before, where nothing is scattered, the input. With HFSDP (R * S,) in
            between.
        used: indices of the parameters that got a gradient.
        scale: what the sum over ranks is multiplied by.
        all_reduce: whether the replicate axis is summed too, or put off.
        over_tp: indices of the parameters whose gradients have turned out to be partial over tp, beside those
            that always are.
        earlier: (S,) sums that earlier micro-batches have put off, to be all-reduced with this one.
        rest: what the sum over replicate is multiplied by; the sum over shard if that one is put off.
    """

    bucket: Bucket
    inputs: list[torch.Tensor]
    used: list[int]
    scale: float
    all_reduce: bool
    earlier: torch.Tensor | None
    over_tp: Collection[int] = ()
    rest: float = 1.0

    def __post_init__(self) -> None:
        self.tensor = self.inputs[0]

    @property
    def final(self) -> bool:
        """Whether the result is the gradient, and not a sum that waits for its all-reduce."""
        bucket = self.bucket
        return self.all_reduce or not (bucket.replicate_groups or bucket.second_group)

    def take(self) -> torch.Tensor:
        """The result, which the job does not hold any longer."""
        tensor = self.tensor
        del self.tensor
        return tensor

    def free_inputs(self, work: ScatterWork | None) -> None:
        """Waits for the reduce-scatter, if that is still to be done. No collective: when it is called depends
        on sizes, which differ over tp."""
        if not self.inputs:
            return
        if work is not None:
            self.tensor = work.wait()
        self.inputs = []

    def finish_scatter(self, work: ScatterWork | None) -> None:
        """After the reduce-scatter: scale, sum partial gradients over tp, add earlier partial sums."""
        bucket = self.bucket
        self.free_inputs(work)
        if self.scale != 1.0:
            self.tensor.mul_(self.scale)
        if bucket.tp_group is not None:
            sum_over_tp(bucket, self.tensor, self.over_tp)
        if self.earlier is not None:
            earlier = self.earlier
            if bucket.offloaded:
                earlier = earlier.to(bucket.device, non_blocking=bucket.pin)
            self.tensor.add_(earlier, alpha=1 / self.rest)  # it has been divided by all

    def finish_sum(self) -> None:
        """After the sum over replicate, where there is one."""
        if self.final and self.rest != 1.0:
            self.tensor.mul_(self.rest)


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
