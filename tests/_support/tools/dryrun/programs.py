"""What the programs of the dry run's tests are made of."""

from __future__ import annotations

import os

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import parallel3d as p3d
from _support.models import LM_PLAN, TORCHS_PLAN, VOCAB, Lm
from parallel3d.tools.dryrun.result import DryRun, MemorySample

WORLD = 8
AXES = ("replicate", "shard", "tp")


def own_mesh(*shape: int) -> DeviceMesh:
    """As a program of this package makes it."""
    return p3d.build_mesh(p3d.MeshLayout(*(shape or (2, 2, 2))))


def cuda_mesh(*shape: int) -> DeviceMesh:
    """As torch's examples make it."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return init_device_mesh("cuda", shape or (2, 2, 2), mesh_dim_names=AXES)


def own(model: nn.Module | None = None, mesh: DeviceMesh | None = None, **options) -> nn.Module:
    """``Lm``, parallel by this package."""
    return p3d.parallelize(model or Lm(), mesh or own_mesh(), LM_PLAN, **options)


def torchs(mesh: DeviceMesh, model: nn.Module | None = None) -> nn.Module:
    """``Lm``, parallel by torch."""
    model = model or Lm()
    parallelize_module(model, mesh["tp"], TORCHS_PLAN)
    for block in model.layers:
        fully_shard(block, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    return model


def tied_lm() -> Lm:
    """Embedding and head share their weight."""
    return Lm(tied=True)


def batch() -> torch.Tensor:
    """(4, 6) token ids."""
    return torch.randint(0, VOCAB, (4, 6))


def at_rest(run: DryRun) -> MemorySample:
    """Memory when the program was over."""
    return run.memory[-1]


def by_axis(run: DryRun, op: str) -> dict[str | None, list[int]]:
    """Bytes of the collectives ``op``, in order, by axis."""
    found: dict[str | None, list[int]] = {}
    for call in run.collectives:
        if call.op == op:
            found.setdefault(call.axis, []).append(call.bytes)
    return found
