"""Models to measure, and the same model under our engine and under torch's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh, fsdp
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import parallel3d as p3d
from parallel3d.fsdp import fully_shard

__all__ = [
    "MlpBlock",
    "SmallBlock",
    "Stack",
    "local_gradients",
    "local_parameters",
    "ours",
    "ours_tp",
    "torchs",
    "torchs_tp",
    "torchs_tp_alone",
]

PLAN = {
    "blocks.*.w1": "colwise",
    "blocks.*.w2": "rowwise",
    "blocks.*.w3": "colwise",
    "blocks.*.w4": "rowwise",
}


class SmallBlock(nn.Module):
    """Ten small parameters and next to no computation: what is left is the engine's own time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.w1, self.w2 = nn.Linear(width, width), nn.Linear(width, width)
        self.w3, self.w4 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.w2(torch.relu(self.w1(self.norm(x))))
        return x + self.w4(torch.relu(self.w3(h)))


class MlpBlock(nn.Module):
    """The larger half of a transformer's block."""

    def __init__(self, width: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 4 * width
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks one after another."""

    def __init__(self, block: Callable[[int], nn.Module], depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def ours(model: Stack, mesh: DeviceMesh, *, mixed: bool = False) -> Stack:
    """``model`` under our engine, on the three-axis ``mesh``."""
    policy = _policy(p3d.MixedPrecisionPolicy, mixed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def torchs(model: Stack, mesh: DeviceMesh, *, mixed: bool = False) -> Stack:
    """``model`` under torch's FSDP2, on the axes of ``mesh`` that it takes."""
    hsdp = mesh.shape[0] > 1
    data = mesh["replicate", "shard"] if hsdp else mesh["shard"]
    policy = _policy(fsdp.MixedPrecisionPolicy, mixed)
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=data, mp_policy=policy)
    fsdp.fully_shard(model, mesh=data, mp_policy=policy)
    return model


def _policy(kind: Callable[..., Any], mixed: bool) -> Any:
    return kind(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else kind()


def torchs_tp(model: Stack, mesh: DeviceMesh, *, mixed: bool = False) -> Stack:
    """torch's tensor parallelism of ``PLAN`` under its FSDP2."""
    return torchs(torchs_tp_alone(model, mesh), mesh, mixed=mixed)


def torchs_tp_alone(model: Stack, mesh: DeviceMesh, *, mixed: bool = False) -> Stack:
    """torch's tensor parallelism of ``PLAN``; it has no policy of dtypes."""
    assert not mixed
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    # A style each, as torch's docs do; None: every rank has the same values, nothing to send.
    plan = {name: styles[style]() for name, style in PLAN.items()}
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    return model


def ours_tp(model: Stack, mesh: DeviceMesh, *, mixed: bool = False) -> Stack:
    """The same in our one call, which shards each block and then the root."""
    policy = _policy(p3d.MixedPrecisionPolicy, mixed)
    return p3d.parallelize(model, mesh, tp_plan=PLAN, mp_policy=policy)


def local_parameters(model: nn.Module) -> list[torch.Tensor]:
    """What this rank holds of each parameter."""
    return [_local(param) for param in model.parameters()]


def local_gradients(model: nn.Module) -> list[torch.Tensor | None]:
    """What it holds of each gradient."""
    grads = [param.grad for param in model.parameters()]
    return [None if grad is None else _local(grad) for grad in grads]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
