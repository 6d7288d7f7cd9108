"""Gradients sent in one dtype and summed in another; see ``wire_dtype`` of ``MixedPrecisionPolicy``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from parallel3d.fsdp import collectives
from parallel3d.fsdp.collectives import ScatterWork
from parallel3d.fsdp.reduction import Reducer


@dataclass(frozen=True)
class WireReducer(Reducer):
    """Sends gradients in dtype ``wire``, and each rank sums its shard of them in ``dtype``, in rank order.

    An all-reduce is such a reduce-scatter and an all-gather of the sums in dtype ``wire``. A rank takes its
    own sums from the all-gather as well, so that results are equal on all ranks.
    """

    wire: torch.dtype
    dtype: torch.dtype

    def reduce_scatter(
        self, inputs: list[torch.Tensor], group: ProcessGroup, *, unit: str, scale: float = 1.0
    ) -> ScatterWork:
        sent = [tensor.to(self.wire) for tensor in inputs]
        kind = sent[0].device.type
        return collectives.reduce_scatter(
            sent, group, unit=unit, device_type=kind, dtype=self.dtype
        )

    def all_reduce(self, tensor: torch.Tensor, group: ProcessGroup, *, unit: str) -> WiredSum:
        return WiredSum(self, tensor, group, unit)


class WiredSum:
    """The work of ``WireReducer.all_reduce``; its reduce-scatter is issued when it is made."""

    def __init__(
        self, reducer: WireReducer, tensor: torch.Tensor, group: ProcessGroup, unit: str
    ) -> None:
        self._tensor, self._group, self._unit, self._wire = tensor, group, unit, reducer.wire
        n = group.size()
        sent = tensor.new_zeros(-(-tensor.numel() // n) * n, dtype=reducer.wire)
        sent[: tensor.numel()].copy_(tensor)
        self._scattered = reducer.reduce_scatter([sent], group, unit=unit)

    @property
    def work(self) -> Any:
        """The work of the reduce-scatter's all-to-all; None after it was waited for."""
        return self._scattered.work

    def wait(self) -> None:
        """Waits for the sums, or lets the current stream wait, and all-gathers them into the tensor."""
        part = self._scattered.wait().to(self._wire)
        whole = part.new_empty(part.numel() * self._group.size())
        work = collectives.all_gather([whole], [part], self._group, unit=self._unit)
        if work is not None:
            work.wait()
        self._tensor.copy_(whole[: self._tensor.numel()])
