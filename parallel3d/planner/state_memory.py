"""Bytes of parameters, gradients, optimizer state, whole groups and buffers, as the engine allocates them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil

from parallel3d.mesh import MeshLayout
from parallel3d.planner.model_spec import ModelSpec, Parameter, Unit
from parallel3d.planner.workload import Workload

__all__ = ["StateMemory", "state_memory"]


@dataclass(frozen=True)
class StateMemory:
    """Bytes on the fullest rank.

    Attributes:
        parameters, gradients, optimizer: at rest, after a step.
        gradients_whole: gradients are there during the whole step (ZeRO-1, DDP).
        unsharded: whole groups at the peak of backward. unsharded_at_loss: those at the end of forward.
        buffers: of gathers and reductions under way at the peak.
        step: what the optimizer's step allocates.
        inputs: what these were computed from.
    """

    parameters: int
    gradients: int
    optimizer: int
    gradients_whole: bool
    unsharded: int
    unsharded_at_loss: int
    buffers: int
    step: int
    inputs: dict[str, int] = field(default_factory=dict, hash=False)


def state_memory(model: ModelSpec, layout: MeshLayout, work: Workload) -> StateMemory:
    """Of ``model`` on ``layout``."""
    if work.sharding == "fsdp":
        return _sharded(model, layout.shard, layout.tp, work)
    return _whole(model, layout, work)


@lru_cache(maxsize=65536)
def _numel(unit: Unit, shard: int, tp: int) -> int:
    """Elements of a unit's parameters on the fullest rank."""
    return sum(_part(p, shard, tp) for p in unit.parameters)


def _part(parameter: Parameter, shard: int, tp: int) -> int:
    sizes = list(parameter.shape) or [1]
    if parameter.tp_dim is not None:
        sizes[parameter.tp_dim] = ceil(sizes[parameter.tp_dim] / tp)
    sizes[0] = ceil(sizes[0] / shard)
    found = 1
    for size in sizes:
        found *= size
    return found


def _sharded(model: ModelSpec, shard: int, tp: int, work: Workload) -> StateMemory:
    mine = sum(u.count * _numel(u, shard, tp) for u in model.units)
    width, reduce = work.compute_itemsize, work.reduce_itemsize
    blocks = [_numel(u, 1, tp) for u in model.units if u.kind == "block"]
    largest = max(blocks, default=0)
    others = [_numel(u, 1, tp) for u in model.units if u.kind != "block"]
    kept = [_numel(u, 1, tp) for u in model.units if u.kind in ("tail", "root")]
    all_blocks = sum(u.count * _numel(u, 1, tp) for u in model.units if u.kind == "block")
    if shard == 1 and width == work.param_itemsize:
        unsharded = at_loss = buffers = 0
    else:
        whole = largest if work.reshard_after_forward else all_blocks
        unsharded = width * (whole + (largest if work.reshard_after_forward else 0) + sum(kept))
        at_loss = width * ((0 if work.reshard_after_forward else all_blocks) + sum(kept))
        biggest = max([largest, *others], default=0)
        buffers = reduce * biggest if shard > 1 else 0
    return StateMemory(
        parameters=mine * work.param_itemsize,
        gradients=mine * work.param_itemsize,
        optimizer=mine * work.optimizer_bytes,
        gradients_whole=False,
        unsharded=unsharded,
        unsharded_at_loss=at_loss,
        buffers=buffers,
        step=0,
        inputs={"parameters of a rank": mine, "shard": shard, "tp": tp, "largest block": largest},
    )


def _whole(model: ModelSpec, layout: MeshLayout, work: Workload) -> StateMemory:
    """ZeRO-1: whole parameters and gradients; fp32 copies and optimizer state over ``replicate``."""
    numel = sum(u.count * _numel(u, 1, layout.tp) for u in model.units)
    over = layout.replicate if work.sharding == "zero1" else 1
    part = ceil(numel / over)
    master = work.param_itemsize if work.compute_itemsize != work.param_itemsize else 0
    return StateMemory(
        parameters=numel * work.compute_itemsize + part * master,
        gradients=numel * work.reduce_itemsize,
        optimizer=part * work.optimizer_bytes,
        gradients_whole=True,
        unsharded=0,
        unsharded_at_loss=0,
        buffers=0,
        step=0,
        inputs={"parameters": numel, "of them with optimizer state": part},
    )
