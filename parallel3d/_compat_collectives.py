"""The private torch names that make one call of several collectives, in one place.

Checked on torch 2.13.0 by the tests; on 2.11 by reading. ``_compat.py`` has all others.
"""

from collections.abc import Sequence

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from parallel3d._compat import backend_name

__all__ = [
    "all_gather_members",
    "groups_members",
    "reduce_scatter_members",
]

# Of gloo, the call with several members copies all of them into one buffer and out of it.
_GROUPING_BACKENDS = ("nccl", "fake")


def groups_members(group: ProcessGroup, device_type: str) -> bool:
    """Whether the backend launches several all-gathers or reduce-scatters as one, each in its own memory."""
    return backend_name(group, device_type) in _GROUPING_BACKENDS


def all_gather_members(
    outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: ProcessGroup
) -> dist.Work:
    """Several all-gathers as one asynchronous call."""
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = True
    return group.allgather_into_tensor_coalesced(list(outputs), list(parts), options)


def reduce_scatter_members(
    outputs: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], group: ProcessGroup
) -> dist.Work:
    """Several reduce-scatters, which sum, as one asynchronous call."""
    options = dist.distributed_c10d.ReduceScatterOptions()
    options.asyncOp = True
    return group.reduce_scatter_tensor_coalesced(list(outputs), list(wholes), options)
