"""Checkpoints: saved by all ranks, loaded on any mesh, exchanged with Hugging Face and torch."""

from typing import TYPE_CHECKING

from parallel3d._lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.checkpoint.dcp import load_dcp, save_dcp
    from parallel3d.checkpoint.torch_file import load_torch, save_torch

__all__ = ["load_dcp", "load_torch", "save_dcp", "save_torch"]

export_lazily(
    __name__,
    {
        "checkpoint.dcp": "load_dcp save_dcp",
        "checkpoint.torch_file": "load_torch save_torch",
    },
)
