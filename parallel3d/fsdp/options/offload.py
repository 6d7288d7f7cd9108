"""CpuOffload: keeps a bucket's shards, their gradients and so the optimizer's state in CPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from parallel3d._util import dry_run
from parallel3d.fsdp.reduction import Reduction, Stage


class CpuOffload:
    """Implements ``CPUOffloadPolicy`` for a bucket; see ``Bucket.offload``."""

    def __init__(self, policy: CPUOffloadPolicy) -> None:
        self.policy = policy
        self.stages: Sequence[Stage] = [CopyToHost()]

    def places(
        self, given: torch.device, mesh: DeviceMesh
    ) -> tuple[torch.device, torch.device, bool]:
        """See ``Bucket.offload``. On a CPU mesh there is nothing to offload, and no memory to pin.

        In a dry run of GPUs the mesh is one of CPUs, and the CPU's memory has a device of its own.
        """
        if given.type == "meta":
            return given, given, False
        device = given if given.type == mesh.device_type else torch.device(mesh.device_type)
        if dry_run.accelerator() is not None:
            return torch.device("cpu"), dry_run.HOST_DEVICE, self.policy.pin_memory
        if device.type == "cpu":
            return device, device, False
        return device, torch.device("cpu"), self.policy.pin_memory


class CopyToHost(Stage):
    """Copies a reduction's result to CPU memory, in the dtype of gradients or of accumulated sums."""

    def finish(self, job: Reduction, work: Any) -> None:
        bucket: Any = job.bucket
        dtype = bucket.precision.grad_dtype if job.final else bucket.precision.sum_dtype
        shape = job.tensor.shape
        host = torch.empty(shape, dtype=dtype, device=bucket.storage_device, pin_memory=bucket.pin)
        # Cast first: a copy that also casts goes through pageable memory and blocks.
        job.tensor = host.copy_(job.tensor.to(dtype), non_blocking=bucket.pin)
        job.on_host = True
