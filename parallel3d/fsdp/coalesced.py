"""CoalescedGather: all-gathers of several buckets of a unit by one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.collectives import all_gather
from parallel3d.fsdp.records import plan_copy


class CoalescedGather:
    """One all-gather call for several buckets of a unit: frozen parameters and adapters, say.

    The buckets have the same compute dtype and shard group; they are separate as their gradients are treated
    differently. A ``Comm`` gathers this as it does a ``Bucket``.

    Attributes:
        packed: elements of this rank's shards that are not of zero-copy parameters, of all buckets.
        unit: name of the unit, for the recorder.
        gathering: the all-gather under way; see ``Bucket``.
    """

    reads_host = False

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self.shard_group: ProcessGroup | None = buckets[0].shard_group
        self.packed = sum(bucket.layout.packed for bucket in buckets)
        self.unit = buckets[0].unit
        self.gathering: Any = None
        self._output: torch.Tensor | None = None

    def start_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        assert self.shard_group is not None
        return all_gather(outputs, inputs, self.shard_group, unit=self.unit)

    def gather_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the outputs and inputs of the all-gather, in compute dtype.

        There is one pair for each zero-copy parameter, and one pair for all other parameters together.
        """
        first = self.buckets[0]
        outputs, inputs, packed = [], [], []
        for bucket in self.buckets:
            if bucket.layout.zero_copy:
                bucket.settings.memory.allocate(bucket.precision.unsharded)
            shards = bucket.members(bucket.flat.to(first.precision.compute_dtype))
            inputs += shards[: bucket.layout.zero_copy]
            packed += shards[bucket.layout.zero_copy :]
            outputs += bucket.precision.gather_outputs[: bucket.layout.zero_copy]
        if packed:
            inputs.append(torch.cat(packed))
            self._output = inputs[-1].new_empty(first.num_shards * self.packed)
            outputs.append(self._output)
        return outputs, inputs

    def copy_out(self) -> None:
        if self._output is None:
            return
        for bucket in self.buckets:
            if not bucket.layout.zero_copy:
                bucket.settings.memory.allocate(bucket.precision.unsharded)
        with torch.inference_mode(False), torch.no_grad():  # in whichever mode it was issued
            rows = self._output.view(-1, self.packed)
        plan_copy(rows, self.buckets, [bucket.layout.zero_copy for bucket in self.buckets])()

    def unshard_without_gather(self) -> None:
        """Does nothing: buckets that are not sharded are never coalesced."""

    def free_gathered(self) -> None:
        self._output = None

    def free_unsharded(self) -> None:
        for bucket in self.buckets:
            bucket.free_unsharded()


def plan_gathers(buckets: Sequence[Bucket]) -> list[Bucket | CoalescedGather]:
    """Groups ``buckets`` by the all-gather call that gathers them, one alone or several together."""
    coalesced: dict[object, list[Bucket]] = {}
    for bucket in buckets:
        alone = (
            not bucket.gathers_shards
            or bucket.shard_group is None
            or bucket.settings.gather_comm is not None
            or bucket.post_forward_shard is not None
            or bucket.reads_host
            or bucket.settings.memory.is_fixed  # each has the memory that its own all-gather needs
        )
        key = bucket.precision.compute_dtype, bucket.shard_group, bucket.device
        coalesced.setdefault(id(bucket) if alone else key, []).append(bucket)
    return [b[0] if len(b) == 1 else CoalescedGather(b) for b in coalesced.values()]
