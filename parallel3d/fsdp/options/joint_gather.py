"""JointGather: one all-gather for several buckets of a unit, such as a frozen one and its adapters'.

Buckets are apart for the sake of their gradients; on the wire their shards go together. It has the side
of a ``Bucket`` that a comm's all-gather deals with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from parallel3d._torch.kernels import foreach_copy_
from parallel3d._util.storage import allocate
from parallel3d.fsdp.collectives import all_gather

if TYPE_CHECKING:
    from parallel3d.fsdp.bucket import Bucket

__all__ = ["JointGather", "plan_gathers"]


class JointGather:
    """Buckets that compute in one dtype and are sharded over one group.

    Attributes:
        unit: name of the unit, for the record.
        gathering: the all-gather under way; see ``Bucket``.
    """

    reads_host = False

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self.shard_group: ProcessGroup | None = buckets[0].shard_group
        self.packed = sum(bucket.packed for bucket in buckets)
        self.unit = buckets[0].unit
        self.gathering: Any = None
        self._output: torch.Tensor | None = None

    def start_gather(self, outputs: list[torch.Tensor], parts: list[torch.Tensor]) -> Any:
        """Issues the all-gather; returns what to wait for."""
        assert self.shard_group is not None
        return all_gather(outputs, parts, self.shard_group, unit=self.unit)

    def gather_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs and inputs of the all-gather, in compute dtype: what travels in place, and of all buckets
        together what is packed."""
        first = self.buckets[0]
        outputs, inputs, packed = [], [], []
        for bucket in self.buckets:
            if bucket.in_place:
                allocate(bucket.unsharded)
            mine = bucket.members(bucket.flat.to(first.compute_dtype))
            inputs += mine[: bucket.in_place]
            packed += mine[bucket.in_place :]
            outputs += bucket.gather_outputs[: bucket.in_place]
        if packed:
            part = torch.cat(packed)
            self._output = part.new_empty(first.parts * self.packed)
            inputs.append(part)
            outputs.append(self._output)
        return outputs, inputs

    def copy_out(self) -> None:
        """The gathered rows into the parameters' places."""
        if self._output is None:
            return
        with torch.inference_mode(False), torch.no_grad():  # whichever mode gathered, and this is
            sizes = [bucket.packed for bucket in self.buckets]
            columns = self._output.view(-1, self.packed).split(sizes, dim=1)
        for bucket, held in zip(self.buckets, columns, strict=True):
            if not bucket.in_place:
                allocate(bucket.unsharded)
            if bucket.packed:
                pairs = bucket.copy_pairs(held, since=bucket.in_place)
                foreach_copy_([region for region, _ in pairs], [part for _, part in pairs])

    def free_gathered(self) -> None:
        """After ``copy_out``."""
        self._output = None

    def cast_whole(self) -> None:
        """Nothing here is whole at rest: what isn't sharded is gathered by itself."""

    def free_unsharded(self) -> None:
        """Frees what the unsharded parameters live in."""
        for bucket in self.buckets:
            bucket.free_unsharded()


def plan_gathers(buckets: Sequence[Bucket]) -> list[Bucket | JointGather]:
    """What to gather by one call each: buckets joined where they can be, in order of their first."""
    joined: dict[object, list[Bucket]] = {}
    for bucket in buckets:
        alone = (
            not bucket.joinable
            or bucket.shard_group is None
            or bucket.gather_comm is not None
            or bucket.part is not None
            or bucket.reads_host
        )
        key = id(bucket) if alone else (bucket.compute_dtype, bucket.shard_group, bucket.device)
        joined.setdefault(key, []).append(bucket)
    return [each[0] if len(each) == 1 else JointGather(each) for each in joined.values()]
