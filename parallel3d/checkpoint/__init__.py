"""Checkpoints: saved by all ranks, loaded on any mesh, exchanged with Hugging Face and torch."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.checkpoint.dcp import load_dcp as load_dcp
    from parallel3d.checkpoint.dcp import save_dcp as save_dcp
    from parallel3d.checkpoint.format.storage import LoadPlanner as LoadPlanner
    from parallel3d.checkpoint.format.storage import Reader as Reader
    from parallel3d.checkpoint.format.storage import SavePlanner as SavePlanner
    from parallel3d.checkpoint.format.storage import Writer as Writer
    from parallel3d.checkpoint.hf.load import load_hf as load_hf
    from parallel3d.checkpoint.hf.peft import load_peft as load_peft
    from parallel3d.checkpoint.hf.peft import save_peft as save_peft
    from parallel3d.checkpoint.hf.save import save_hf as save_hf
    from parallel3d.checkpoint.hf.tensors import hf_shards as hf_shards
    from parallel3d.checkpoint.hf.tensors import hf_tensors as hf_tensors
    from parallel3d.checkpoint.loading import Info as Info
    from parallel3d.checkpoint.loading import latest as latest
    from parallel3d.checkpoint.loading import load as load
    from parallel3d.checkpoint.saving import save as save
    from parallel3d.checkpoint.stop import StopSignal as StopSignal
    from parallel3d.checkpoint.torch_file import load_torch as load_torch
    from parallel3d.checkpoint.torch_file import save_torch as save_torch
else:
    export_lazily(
        __name__,
        {
            ".dcp": "load_dcp save_dcp",
            ".format.storage": "LoadPlanner Reader SavePlanner Writer",
            ".hf.load": "load_hf",
            ".hf.peft": "load_peft save_peft",
            ".hf.save": "save_hf",
            ".hf.tensors": "hf_shards hf_tensors",
            ".loading": "Info latest load",
            ".saving": "save",
            ".stop": "StopSignal",
            ".torch_file": "load_torch save_torch",
        },
    )
