"""Collectives in place of the engine's: what they must have, and those the engine brings along.

A custom collective is what ``torch.distributed.fsdp`` takes: an object that allocates its own buffers and is
called with them. Ours differ from the default only in where the memory comes from.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from parallel3d._compat import all_gather_single, reduce_scatter_single
from parallel3d._compat_memory import (
    group_memory,
    make_symmetric,
    symmetric_memory,
    use_symmetric_memory,
)
from parallel3d.errors import Parallel3dError

__all__ = [
    "GroupAllGather",
    "GroupReduceScatter",
    "OwnMemory",
    "SymmetricAllGather",
    "SymmetricReduceScatter",
    "check_comm",
]


def check_comm(method: str, comm: Any) -> None:
    """Raises unless ``comm`` is a collective as torch's ``AllGather`` and ``ReduceScatter`` are, or None."""
    if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise Parallel3dError(
            f"{method} was given {comm!r}; it takes an object with allocate(size, *, dtype, device) and "
            "__call__(output_tensor, input_tensor, group, ...), as torch.distributed.fsdp's, or None "
            "for the default"
        )


class OwnMemory(ABC):
    """A collective of the engine's whose buffers come from a special allocator.

    Attributes:
        group: whose allocator it is.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    @abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer of ``size``, one number."""


class _GroupMemory(OwnMemory):
    """Memory of the process group's own allocator, which NCCL registers for zero-copy transfers."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """See ``OwnMemory``."""
        return group_memory(self.group, math.prod(size), dtype, device)


class GroupAllGather(_GroupMemory):
    """An all-gather between buffers of the group's allocator."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Issues it."""
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class GroupReduceScatter(_GroupMemory):
    """A reduce-scatter between buffers of the group's allocator."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Issues it."""
        return reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


class _SymmetricMemory(OwnMemory):
    """Symmetric memory, which NCCL reads and writes on other ranks' devices directly."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        use_symmetric_memory("NCCL")
        dist.barrier(group=group)  # the communicator must be there when memory is made known to it

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """See ``OwnMemory``."""
        return symmetric_memory(math.prod(size), dtype, device)


class SymmetricAllGather(_SymmetricMemory):
    """An all-gather into symmetric memory; the input is a part of the output."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Issues it."""
        make_symmetric(output_tensor, group)
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class SymmetricReduceScatter(_SymmetricMemory):
    """A reduce-scatter between buffers of symmetric memory; NCCL has one for sums only."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Issues it."""
        make_symmetric(input_tensor, group)
        make_symmetric(output_tensor, group)
        return reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
