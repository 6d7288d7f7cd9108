"""``parallel3d plan``: every legal layout, ranked."""

from __future__ import annotations

import json
from typing import Any

import typer

from parallel3d.cli import options as o
from parallel3d.cli import tables
from parallel3d.cli.models import read_model
from parallel3d.planner.mesh_plan import MeshPlan
from parallel3d.planner.planning import plan
from parallel3d.planner.workload import CHECKPOINTING, Workload

__all__ = ["plan_command"]


def plan_command(
    ctx: typer.Context,
    model: o.ModelName = None,
    gpu: o.GpuName = None,
    nodes: o.Nodes = 1,
    gpus_per_node: o.GpusPerNode = None,
    nic: o.Nic = None,
    profile: o.Profile = None,
    seq_len: o.SeqLen = None,
    global_batch: o.GlobalBatch = None,
    micro_batch: o.MicroBatch = None,
    precision: o.Precision = Workload.precision,
    param_dtype: o.ParamDtype = Workload.param_dtype,
    reduce_dtype: o.ReduceDtype = Workload.reduce_dtype,
    optimizer: o.Optimizer = Workload.optimizer,
    checkpointing: o.CheckpointingKinds = None,
    compile: o.Compile = Workload.compile,
    attention: o.AttentionKernel = None,
    fused_loss: o.FusedLoss = Workload.fused_loss,
    sequence_parallel: o.SequenceParallel = Workload.sequence_parallel,
    loss_parallel: o.LossParallel = Workload.loss_parallel,
    reshard: o.ReshardOrBoth = None,
    sharding: o.Sharding = Workload.sharding,
    replicate: o.ReplicateSizes = None,
    shard: o.ShardSizes = None,
    tp: o.TpSizes = None,
    memory_limit: o.MemoryLimit = None,
    top: o.Top = 10,
    explain: o.Explain = False,
    as_json: o.Json = False,
    html: o.Html = None,
) -> None:
    """Predicts every legal layout on a cluster and ranks them: memory, speed, what is refused and why."""
    kinds = checkpointing or list(CHECKPOINTING)
    found = plan(
        read_model(model, seq_len),
        o.cluster_of(ctx.params),
        o.workload_of(ctx.params, kinds[0], reshard is not False),
        replicate=replicate or None,
        shard=shard or None,
        tp=tp or None,
        checkpointing=kinds,
        reshard_after_forward=(True, False) if reshard is None else None,
        memory_limit_gib=memory_limit,
    )
    if as_json:
        typer.echo(json.dumps(_as_json(found, top, explain), indent=2, allow_nan=False))
    else:
        tables.show_plan(found, top, explain)
    if html is not None:
        from parallel3d.planner.report import write_report

        write_report(found, html)
        typer.echo(f"wrote {html}", err=True)
    if not found.candidates:
        _ = found.best  # raises, and says what comes closest


def _as_json(found: MeshPlan, top: int, explain: bool) -> dict[str, Any]:
    """What ``MeshPlan.as_dict`` has, the best of each layout, the Pareto front, sensitivity."""
    data = found.as_dict(top)
    data["layouts"] = [each.as_dict() for each in found.layouts[:top]]
    data["pareto"] = [each.as_dict() for each in found.pareto()]
    data["best"] = found.best.as_dict() if found.candidates else None
    data["sensitivity"] = {
        name: [{"value": v, "tokens_per_second_per_gpu": s, "fits": fits} for v, s, fits in rows]
        for name, rows in (found.sensitivity() if found.candidates else {}).items()
    }
    if explain and found.candidates:
        data["explanation"] = found.best.explain().splitlines()
    return data
