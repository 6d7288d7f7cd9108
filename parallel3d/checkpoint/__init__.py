"""Checkpoints: saved by all ranks, loaded on any mesh, exchanged with Hugging Face and torch."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.checkpoint.dcp import load_dcp, save_dcp
    from parallel3d.checkpoint.format.storage import LoadPlanner, Reader, SavePlanner, Writer
    from parallel3d.checkpoint.hf.load import load_hf
    from parallel3d.checkpoint.hf.save import save_hf
    from parallel3d.checkpoint.loading import Info, latest, load
    from parallel3d.checkpoint.saving import save
    from parallel3d.checkpoint.stop import StopSignal
    from parallel3d.checkpoint.torch_file import load_torch, save_torch

_EXPORTS = {
    "checkpoint.dcp": "load_dcp save_dcp",
    "checkpoint.format.storage": "LoadPlanner Reader SavePlanner Writer",
    "checkpoint.hf.load": "load_hf",
    "checkpoint.hf.save": "save_hf",
    "checkpoint.loading": "Info latest load",
    "checkpoint.saving": "save",
    "checkpoint.stop": "StopSignal",
    "checkpoint.torch_file": "load_torch save_torch",
}
__all__ = [name for names in _EXPORTS.values() for name in names.split()]

export_lazily(__name__, _EXPORTS)
