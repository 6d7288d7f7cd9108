"""The private torch names of the CUDA allocator's history."""

import torch

__all__ = ["dump_snapshot", "record_history"]


def record_history(entries: int) -> None:
    """Notes the last ``entries`` allocations and frees, with their stacks."""
    torch.cuda.memory._record_memory_history(max_entries=entries)


def dump_snapshot(path: str) -> None:
    """Writes what is allocated, and that history, for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)
