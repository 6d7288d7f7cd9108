"""CPU offload: a bucket's shards, gradients and optimizer state live on the CPU, it computes elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket

__all__ = ["copy_home", "places_of"]


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


def copy_home(bucket: Bucket, tensor: torch.Tensor, *, final: bool = True) -> torch.Tensor:
    """``tensor`` at its home, in the gradients' dtype, or if not ``final`` in that of sums that wait; not
    there yet if the memory is pinned.
    """
    dtype = bucket.grad_dtype if final else bucket.sum_dtype
    host = torch.empty(tensor.shape, dtype=dtype, device=bucket.home, pin_memory=bucket.pin)
    # Cast first: a copy that also casts is staged in pageable memory, and blocks.
    return host.copy_(tensor.to(dtype), non_blocking=bucket.pin)
