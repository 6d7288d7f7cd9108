"""Private torch names of memory for collectives: a process group's allocator, and symmetric memory."""

import importlib
from typing import Any

import torch
from torch.distributed import ProcessGroup


def has_group_memory(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the backend of ``group`` has an allocator for ``device`` (NCCL has)."""
    return group._get_backend(device).supports_tensor_alloc(device)


def group_memory(
    group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns a tensor from the allocator of ``group``'s backend."""
    return group._get_backend(device).allocate_tensor(numel, dtype=dtype, device=device)


def use_symmetric_memory(backend: str) -> None:
    """Sets the backend of symmetric memory in this process."""
    _symmetric_memory().set_backend(backend)


def symmetric_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor from the pool of symmetric memory, which reuses what was freed."""
    with torch.cuda.use_mem_pool(_symmetric_memory().get_mem_pool(device)):
        return torch.empty(numel, dtype=dtype, device=device)


def make_symmetric(tensor: torch.Tensor, group: ProcessGroup) -> None:
    """Registers ``tensor``, from ``symmetric_memory``, with the other ranks of ``group``. Collective."""
    _symmetric_memory().rendezvous(tensor, group=group.group_name)


def _symmetric_memory() -> Any:
    return importlib.import_module("torch.distributed._symmetric_memory")  # a slow import


def record_history(entries: int) -> None:
    """Records the last ``entries`` allocations and frees, with their stacks."""
    torch.cuda.memory._record_memory_history(max_entries=entries)


def dump_snapshot(path: str) -> None:
    """Writes the present allocations and the recorded history, for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)
