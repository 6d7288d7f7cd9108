"""CPU offload: a bucket's shards, gradients and optimizer state live on the CPU, it computes elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from parallel3d.fsdp.reduction import Reduction, Stage


class CpuOffload:
    """What ``CPUOffloadPolicy`` asks of a bucket; see ``bucket.Offload``."""

    def __init__(self, policy: CPUOffloadPolicy) -> None:
        self.policy = policy
        self.stages: Sequence[Stage] = [CopyHome()]

    def places(
        self, given: torch.device, mesh: DeviceMesh
    ) -> tuple[torch.device, torch.device, bool]:
        """See ``bucket.Offload``."""
        return places_of(given, mesh, self.policy)


def places_of(
    given: torch.device, mesh: DeviceMesh, policy: Any
) -> tuple[torch.device, torch.device, bool]:
    """(device to compute on, device of the shards at rest, whether these are in pinned memory).

    On a CPU mesh there is nothing to offload, and without an accelerator nothing to pin memory for.

    Args:
        given: where the parameters are now, or ``meta``.
    """
    if given.type == "meta" or not isinstance(policy, CPUOffloadPolicy):
        return given, given, False
    device = given if given.type == mesh.device_type else torch.device(mesh.device_type)
    if device.type == "cpu":
        return device, device, False
    return device, torch.device("cpu"), policy.pin_memory


class CopyHome(Stage):
    """Copies the result to the CPU's memory, in the gradients' dtype, or in that of sums that wait."""

    def finish(self, job: Reduction, work: Any) -> None:
        bucket: Any = job.bucket
        dtype = bucket.grad_dtype if job.final else bucket.sum_dtype
        shape = job.tensor.shape
        host = torch.empty(shape, dtype=dtype, device=bucket.storage_device, pin_memory=bucket.pin)
        # Cast first: a copy that also casts is staged in pageable memory, and blocks.
        job.tensor = host.copy_(job.tensor.to(dtype), non_blocking=bucket.pin)
        job.on_host = True
