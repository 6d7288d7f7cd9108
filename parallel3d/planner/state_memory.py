"""Bytes of parameters, gradients, optimizer state, unsharded groups and buffers, as the engine allocates."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil

from parallel3d.mesh import MeshLayout
from parallel3d.planner.engine_layout import ACCELERATOR_BYTES, UnitLayout, unit_layout
from parallel3d.planner.engine_residents import Widths
from parallel3d.planner.engine_timeline import run_backward
from parallel3d.planner.model_spec import ModelSpec, Unit
from parallel3d.planner.workload import Workload

__all__ = ["StateMemory", "state_memory"]


@dataclass(frozen=True)
class StateMemory:
    """Bytes on the fullest rank, which is the first.

    Attributes:
        parameters, gradients, optimizer: at rest, after a step. Optimizer's counters of steps, which are on
            the CPU, are not in.
        gradients_whole: gradients are there during the whole step (ZeRO-1, DDP).
        unsharded, buffers: at the moment of a backward at which their sum is largest: unsharded parameters;
            buffers of gathers, gradients that have come and are not reduced yet, inputs of reductions.
        unsharded_at_loss: unsharded parameters at the end of forward.
        results: what a backward's end needs beyond ``gradients``: results of reductions in another dtype.
        results_again: the same where there are gradients of an earlier micro-batch, to be added to.
        waiting: gradients of tied weights, which autograd holds from the head's backward to the embedding's.
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
    results: int = 0
    results_again: int = 0
    waiting: int = 0
    inputs: dict[str, int] = field(default_factory=dict, hash=False)


def state_memory(
    model: ModelSpec,
    layout: MeshLayout,
    work: Workload,
    *,
    in_place_bytes: int = ACCELERATOR_BYTES,
    streams: bool = True,
) -> StateMemory:
    """Of ``model`` on ``layout``, which is resolved.

    Args:
        in_place_bytes: from which a parameter is gathered into its place: the engine's for accelerators.
        streams: whether the device has streams, as accelerators have.
    """
    if work.sharding != "fsdp":
        return _whole(model, layout, work)
    found = _sharded(
        model.units,
        layout.shard,
        layout.tp,
        Widths(work.param_itemsize, work.compute_itemsize, work.reduce_itemsize),
        work.sequence_parallel,
        work.reshard_after_forward,
        in_place_bytes,
        streams,
    )
    state, step = _optimizer(work)
    waiting = 0
    if model.tied:
        waiting = _tied(model.units) // layout.tp * work.compute_itemsize
    return StateMemory(
        parameters=found.elements * work.param_itemsize,
        gradients=found.trained * work.param_itemsize,
        optimizer=found.trained * state,
        gradients_whole=False,
        unsharded=found.unsharded,
        unsharded_at_loss=found.at_loss,
        buffers=found.buffers,
        step=found.trained * step,
        results=found.results,
        results_again=found.results_again,
        waiting=waiting,
        inputs={
            "parameters of a rank": found.elements,
            "of them trained": found.trained,
            "shard": layout.shard,
            "tp": layout.tp,
            "unsharded block": found.block,
        },
    )


def _optimizer(work: Workload) -> tuple[int, int]:
    """Bytes a parameter of the optimizer's state, and of what its step allocates beside.

    AdamW's foreach implementation, which is the default on accelerators, makes the square roots of all second
    moments at once; SGD's nothing.
    """
    step = work.param_itemsize if work.optimizer in ("adam", "adamw") else 0
    return work.optimizer_bytes, step


def _tied(units: tuple[Unit, ...]) -> int:
    """Elements of the embedding that is the head's weight as well."""
    return max(
        (p.numel for u in units if u.kind == "root" for p in u.parameters if p.trainable), default=0
    )


@dataclass(frozen=True, slots=True)
class _Sharded:
    """Elements of a rank at rest, and bytes of the rest."""

    elements: int
    trained: int
    unsharded: int
    buffers: int
    at_loss: int
    results: int
    results_again: int
    block: int


@lru_cache(maxsize=4096)
def _sharded(
    units: tuple[Unit, ...],
    shard: int,
    tp: int,
    widths: Widths,
    sequence_parallel: bool,
    reshard: bool,
    in_place_bytes: int,
    streams: bool,
) -> _Sharded:
    layouts = [
        unit_layout(unit, shard, tp, widths.rest, sequence_parallel, in_place_bytes)
        for unit in units
    ]
    buckets = [(u.count, b) for u in layouts for b in u.buckets]
    backward = run_backward(layouts, widths, reshard_after_forward=reshard, streams=streams)
    return _Sharded(
        elements=sum(count * b.numel for count, b in buckets),
        trained=sum(count * b.numel for count, b in buckets if b.trainable),
        unsharded=backward.unsharded,
        buffers=backward.buffers,
        at_loss=backward.at_loss,
        results=_results(layouts, widths),
        results_again=_results(layouts, widths, again=True),
        block=max((_whole_unit(u) for u in layouts if u.kind == "block"), default=0),
    )


def _whole_unit(unit: UnitLayout) -> int:
    return sum(b.parts * b.numel for b in unit.buckets)


def _results(layouts: list[UnitLayout], widths: Widths, *, again: bool = False) -> int:
    """Bytes beyond the gradients: all results wait for the backward's end, when each becomes a gradient, of
    another dtype, and only then is freed. ``again``: each is added to the gradient that is there."""
    rest, reduce = widths.rest, widths.reduce
    sizes = [
        b.numel
        for unit in reversed(layouts)
        for _ in range(unit.count)
        for b in unit.buckets
        if b.trainable
    ]
    total = most = reduce * sum(sizes)
    if rest == reduce:
        return most if again else 0
    for size in sizes:
        most = max(most, total + rest * size)
        total -= reduce * size if again else (reduce - rest) * size
    return most if again else max(0, most - rest * sum(sizes))


def _whole(model: ModelSpec, layout: MeshLayout, work: Workload) -> StateMemory:
    """ZeRO-1: whole parameters and gradients; fp32 copies and optimizer state over ``replicate``.

    Not our engine's. Frameworks that shard so (Megatron-LM, DeepSpeed) step by fused kernels, in place.
    """
    layouts = [
        unit_layout(u, 1, layout.tp, work.param_itemsize, work.sequence_parallel, ACCELERATOR_BYTES)
        for u in model.units
    ]
    numel = sum(u.count * _whole_unit(u) for u in layouts)
    over = layout.replicate if work.sharding == "zero1" else 1
    part = ceil(numel / over)
    master = work.param_itemsize if work.compute_itemsize != work.param_itemsize else 0
    state, _ = _optimizer(work)
    return StateMemory(
        parameters=numel * work.compute_itemsize + part * master,
        gradients=numel * work.reduce_itemsize,
        optimizer=part * state,
        gradients_whole=True,
        unsharded=0,
        unsharded_at_loss=0,
        buffers=0,
        step=0,
        inputs={"parameters": numel, "of them with optimizer state": part},
    )
