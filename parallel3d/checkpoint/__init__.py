"""Checkpoints: saved by all ranks, loaded on any mesh, exchanged with Hugging Face and torch."""

from typing import TYPE_CHECKING

from parallel3d._lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.checkpoint.format.planners import LoadPlanner, SavePlanner
    from parallel3d.checkpoint.format.reader import Reader
    from parallel3d.checkpoint.format.writer import Writer
    from parallel3d.checkpoint.loading import Info, latest, load
    from parallel3d.checkpoint.saving import save
    from parallel3d.checkpoint.stop import StopSignal

__all__ = [
    "Info",
    "LoadPlanner",
    "Reader",
    "SavePlanner",
    "StopSignal",
    "Writer",
    "latest",
    "load",
    "save",
]

export_lazily(
    __name__,
    {
        "checkpoint.format.planners": "LoadPlanner SavePlanner",
        "checkpoint.format.reader": "Reader",
        "checkpoint.format.writer": "Writer",
        "checkpoint.loading": "Info latest load",
        "checkpoint.saving": "save",
        "checkpoint.stop": "StopSignal",
    },
)
