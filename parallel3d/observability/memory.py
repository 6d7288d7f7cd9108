"""What a step's memory was, and a snapshot of it where there was not enough."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch

from parallel3d._compat_snapshot import dump_snapshot, record_history

__all__ = ["OomSnapshots", "read_memory", "reset_memory", "total_memory"]


def reset_memory(device_type: str) -> None:
    """A step begins: what was before it, an evaluation say, is not its peak. On a CPU nothing forgets."""
    if device_type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def read_memory(device_type: str) -> dict[str, int]:
    """The memory fields of a record, of this rank, since ``reset_memory``; counts since the process began.

    On a CPU there is the most that was ever resident.
    """
    if device_type == "cuda":
        stats = torch.cuda.memory_stats()
        return {
            "memory_peak": stats.get("allocated_bytes.all.peak", 0),
            "memory_reserved_peak": stats.get("reserved_bytes.all.peak", 0),
            "alloc_retries": stats.get("num_alloc_retries", 0),
            "ooms": stats.get("num_ooms", 0),
        }
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:  # Windows
        return {}
    peak = getrusage(RUSAGE_SELF).ru_maxrss
    return {"memory_peak": peak if sys.platform == "darwin" else peak * 1024}


def total_memory(device_type: str) -> int | None:
    """Of this process's device, bytes; None on a CPU."""
    if device_type != "cuda":
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


class OomSnapshots:
    """Where a step runs out of CUDA memory, writes ``folder/oom-step-7-rank-00003.pickle``.

    Open it in pytorch.org/memory_viz. From ``start`` on every allocation notes its stack, which takes about
    a microsecond each.

    Args:
        folder: made when it is needed.
        entries: allocations and frees of the history.
    """

    def __init__(self, folder: str | os.PathLike[str], *, entries: int = 100_000) -> None:
        self.folder, self.entries = Path(folder), entries

    def start(self) -> None:
        """Begins the history, on CUDA."""
        if torch.cuda.is_available():
            record_history(self.entries)

    def save(self, step: int, rank: int) -> Path | None:
        """Writes the file; a failure is a warning, as there is an error on its way already."""
        path = self.folder / f"oom-step-{step}-rank-{rank:05d}.pickle"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            dump_snapshot(str(path))
        except Exception as error:
            with suppress(OSError):
                path.unlink()  # a part of one
            warnings.warn(f"the memory snapshot {path} could not be written: {error}", stacklevel=2)
            return None
        return path
