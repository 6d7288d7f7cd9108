"""Checkpoints: saved by all ranks, loaded on any mesh, exchanged with Hugging Face and torch."""

from typing import TYPE_CHECKING

from parallel3d._lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.checkpoint.hf.load import load_hf
    from parallel3d.checkpoint.hf.save import save_hf

__all__ = ["load_hf", "save_hf"]

export_lazily(
    __name__,
    {
        "checkpoint.hf.load": "load_hf",
        "checkpoint.hf.save": "save_hf",
    },
)
