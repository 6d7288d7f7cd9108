"""HybridGradients: HFSDP's sums between micro-batches.

``set_requires_all_reduce(False)`` puts off the second reduce-scatter: a rank then holds, of each parameter,
what an HSDP rank does, the R parts of its place on the shard axis. They arrive as R rows of S (see
``hybrid_bucket``); ``.grad`` must be a DTensor, so they wait by parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallel3d._compat import foreach_copy_, get_local_tensor, make_dtensor
from parallel3d.fsdp.buckets.grads import GradientSlots
from parallel3d.fsdp.buckets.held_sum import HeldSum

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.hybrid_bucket import HybridBucket

__all__ = ["HybridGradients"]


class HybridGradients(GradientSlots):
    """Of a ``HybridBucket``, whose parameters are all cut evenly. R: the size of replicate."""

    def __init__(self, bucket: HybridBucket) -> None:
        super().__init__(bucket)
        assert bucket.second_group is not None
        self.replicas = bucket.second_group.size()

    def _zero_partial(self) -> HeldSum:
        """Parts are (R, *chunk); their memory is that of what an HSDP rank holds, in its shape."""
        bucket, r = self.bucket, self.replicas
        flat = torch.zeros(r * bucket.numel, dtype=bucket.sum_dtype, device=bucket.home)
        regions = flat.split([r * size for size in bucket.slot_sizes])
        parts, marks = [], []
        for param, region in zip(bucket.params, regions, strict=True):
            assert param.dim is not None
            shape = list(param.chunk_shape)
            shape[param.dim] *= r
            held = param.shaped(region, shape)
            parts.append(held.unflatten(param.dim, (r, -1)).movedim(param.dim, 0))
            marks.append(make_dtensor(held, param.unreduced_spec(flat.dtype, over_shard=False)))
        return HeldSum(flat, parts, marks)

    def _rows(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in (R * S,), each (R, *chunk)."""
        columns = flat.view(self.replicas, -1).split(self.bucket.slot_sizes, dim=1)
        return [
            p.slots_by_rank(c).reshape(self.replicas, *p.chunk_shape)
            for p, c in zip(self.bucket.params, columns, strict=True)
        ]

    def _waiting(self, held: HeldSum) -> torch.Tensor:
        flat = torch.empty_like(held.flat)
        foreach_copy_(self._rows(flat), held.parts)
        return flat

    def _hold_partial(self, flat: torch.Tensor, used: list[int]) -> None:
        bucket = self.bucket
        if self.partial is None:
            self.partial = self._zero_partial()
        held = self.partial
        row = bucket.axes.coordinate(bucket.axes.replicate)
        # This rank alone has it: the reduce-scatter to come sums it with zeros, or a hook takes the mean.
        times = 1.0 if bucket.comm_hook is None else self.replicas
        for index in used:
            before = held.place(index, bucket.params[index].sharded)
            if before is not None:
                held.parts[index].select(0, row).add_(get_local_tensor(before), alpha=times)
        for part, rows in zip(held.parts, self._rows(flat), strict=True):
            part.add_(rows)

    def _fold_into_whole(self, index: int, grad: torch.Tensor) -> None:
        if self.partial is None or grad is not self.partial.marks[index]:
            super()._fold_into_whole(index, grad)
            return
        assert self.whole is not None
        bucket, param, r = self.bucket, self.bucket.params[index], self.replicas
        factor = bucket.divisor if bucket.comm_hook is None else bucket.parts / r
        if param.layout.tp_grad == "partial" or index in self.whole.over_tp:
            factor /= param.tp_size
        self.whole.folded.add(index)
        first = bucket.axes.coordinate(bucket.axes.shard) * r
        mine = self.whole.parts[index].narrow(0, first, r)
        mine.add_(self.partial.parts[index].reshape(mine.shape), alpha=factor)
        self.partial.drop(index)
