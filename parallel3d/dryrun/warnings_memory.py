"""Warnings on memory: what doesn't fit, what is held whole, what checkpointing would save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from parallel3d.dryrun.result import DryRun, DryRunWarning, ParameterPlacement
from parallel3d.dryrun.timeline import Timeline
from parallel3d.dryrun.wording import in_bytes, some
from parallel3d.fsdp.running.members import units_of
from parallel3d.planner.constants import constant

__all__ = ["memory_warnings", "needed_bytes", "not_played"]

_LARGE = 16 * 2**20
_AGAIN = 2.3  # matmul FLOPs of backward over those of forward, from which on some of it is computed again
_CHANGES = {
    "activations": "checkpoint activations, take a smaller micro-batch, or divide them by tp",
    "inputs": "take a smaller micro-batch",
    "parameters": "shard over more ranks, or over tp",
    "gradients": "shard over more ranks, or over tp",
    "optimizer state": "shard over more ranks, or keep its state in bfloat16",
    "unsharded parameters": "make smaller units, or reshard after forward",
    "communication": "make smaller units, or limit what is gathered ahead",
    "buffers": "don't register large tables as buffers",
    "temporaries": "divide the largest tensors (the logits: loss parallel), or compute them in pieces",
}


def needed_bytes(run: DryRun) -> float:
    """The peak with what a dry run doesn't see: gaps of the allocator, workspaces, context."""
    beside = constant("workspace").value + constant("context").value
    return run.peak.bytes * (1 + constant("gaps").value) + beside


def memory_warnings(run: DryRun, times: Timeline) -> Iterator[DryRunWarning]:
    """On the peak, checkpointing, parameters that are not divided."""
    yield from _capacity(run, times)
    yield from _checkpointing(run, times)
    yield from _whole(run)


def not_played(models: Iterable[nn.Module]) -> Iterator[DryRunWarning]:
    """On what the models ask for and a dry run does not do, seen when the program is over."""
    units = [unit for model in models for unit in units_of(model, recurse=True)]
    buckets = [bucket for unit in units for bucket in unit.group.buckets]
    if any(isinstance(bucket.offload, CPUOffloadPolicy) for bucket in buckets):
        yield DryRunWarning(
            "offload not played",
            "the model offloads to the CPU, and a dry run has only one memory: the shards, their gradients "
            "and the optimizer's state are counted as if they stayed on the GPU, and the copies between the "
            "two are neither listed nor timed.",
        )


def _capacity(run: DryRun, times: Timeline) -> Iterator[DryRunWarning]:
    gpu, peak = times.cluster.gpu, run.peak
    capacity, needed = gpu.capacity_gib * 2**30, needed_bytes(run)
    if needed <= capacity:
        return
    kind, size = max(peak.by_kind.items(), key=lambda item: item[1], default=("", 0))
    where = f"{peak.name} of {peak.module or 'no module'}, {peak.phase}"
    fits = "does not fit" if peak.bytes > capacity else "fits by itself, but not with the rest"
    yield DryRunWarning(
        "memory above capacity",
        f"the peak of {in_bytes(peak.bytes)} (at {where}) {fits} into the {in_bytes(capacity)} of "
        f"{gpu.name}: with gaps, workspaces and context about {in_bytes(needed)} are needed, "
        f"{in_bytes(needed - capacity)} too much. Most of it is {kind} ({in_bytes(size)}): "
        f"{_CHANGES.get(kind, 'look at the largest tensors')}.",
    )


def _checkpointing(run: DryRun, times: Timeline) -> Iterator[DryRunWarning]:
    """Only where memory is scarce: else it would be slower for nothing."""
    at = run.step_peak or run.peak
    kept, peak = at.by_kind.get("activations", 0), at.bytes
    capacity = times.cluster.gpu.capacity_gib * 2**30
    flops = {
        phase: sum(o.flops for o in run.operations if o.kind == "matmul" and o.phase == phase)
        for phase in ("forward", "backward")
    }
    again = flops["backward"] > _AGAIN * flops["forward"]
    if kept <= peak / 2 or peak < capacity / 2 or again or not flops["backward"]:
        return
    yield DryRunWarning(
        "no checkpointing",
        f"{in_bytes(kept)} of the peak's {in_bytes(peak)} ({kept / peak:.0%}) are activations, and nothing "
        "is computed again in backward. parallelize(..., activation_checkpointing=True) keeps a block's "
        "inputs only, for about a third more computation; or take a smaller micro-batch.",
    )


def _whole(run: DryRun) -> Iterator[DryRunWarning]:
    for axis, size in run.mesh.items():
        if size < 2 or axis not in ("shard", "dp_shard", "tp"):
            continue
        each = [p for p in run.parameters if p.bytes >= _LARGE and not _divided(p, axis)]
        if not each:
            continue
        held = sum(p.bytes for p in each)
        named = some(f"{p.name} {tuple(p.shape)}" for p in sorted(each, key=lambda p: -p.bytes))
        todo = (
            "give their modules to fully_shard, or to parallelize, which takes all"
            if axis != "tp"
            else "add rules for their modules to the tp plan (colwise, rowwise, embedding)"
        )
        yield DryRunWarning(
            f"whole on {axis}",
            f"{len(each)} large parameters are not divided over {axis} ({size} ranks): every rank holds "
            f"{in_bytes(held)} of them, {in_bytes(held * (size - 1) / size)} more than its part, and as much "
            f"of gradients and optimizer state: {named}. To divide them, {todo}.",
        )


def _divided(parameter: ParameterPlacement, axis: str) -> bool:
    return "S" in parameter.placements.get(axis, "") or "Shard" in parameter.placements.get(
        axis, ""
    )
