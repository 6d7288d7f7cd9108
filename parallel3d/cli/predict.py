"""``parallel3d predict``: memory and time of one layout, or of a table of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from parallel3d.cli import options as o
from parallel3d.cli import tables
from parallel3d.cli.models import read_model
from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.legality import refusal
from parallel3d.planner.mesh_plan import MeshPlan
from parallel3d.planner.prediction import Prediction, predict
from parallel3d.planner.runs import write_predictions
from parallel3d.planner.workload import Workload

__all__ = ["predict_command"]

_RUNS = "A table of runs instead"


def predict_command(
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
    checkpointing: o.Checkpointing = Workload.checkpointing,
    compile: o.Compile = Workload.compile,
    attention: o.AttentionKernel = None,
    fused_loss: o.FusedLoss = Workload.fused_loss,
    sequence_parallel: o.SequenceParallel = Workload.sequence_parallel,
    loss_parallel: o.LossParallel = Workload.loss_parallel,
    reshard: o.Reshard = Workload.reshard_after_forward,
    sharding: o.Sharding = Workload.sharding,
    replicate: o.Replicate = 1,
    shard: o.Shard = -1,
    tp: o.Tp = 1,
    runs: Annotated[
        Path | None, typer.Option(rich_help_panel=_RUNS, help="A CSV file, a run a row.")
    ] = None,
    models: Annotated[
        Path | None, typer.Option(rich_help_panel=_RUNS, help="A CSV file of the models' shapes.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(rich_help_panel=_RUNS, help="The CSV file to write.")
    ] = None,
    explain: o.Explain = False,
    as_json: o.Json = False,
    html: o.Html = None,
) -> None:
    """Predicts one layout: memory and time by component; with --runs a whole table."""
    if runs is not None or models is not None or out is not None:
        _predict_runs(runs, models, out, as_json)
        return
    cluster = o.cluster_of(ctx.params)
    work = o.workload_of(ctx.params, checkpointing, reshard)
    found = predict(read_model(model, seq_len), MeshLayout(replicate, shard, tp), cluster, work)
    refused = refusal(found.model, found.layout, cluster, work)
    if as_json:
        typer.echo(json.dumps(_as_json(found, refused, explain), indent=2, allow_nan=False))
    else:
        tables.show_prediction(found, refused, explain)
    if html is not None:
        from parallel3d.planner.report import write_report

        write_report(MeshPlan(found.model, cluster, work, (found,), ()), html)
        typer.echo(f"wrote {html}", err=True)


def _as_json(found: Prediction, refused: str | None, explain: bool) -> dict[str, object]:
    data: dict[str, object] = {**found.as_dict(), "refused": refused}
    if explain:
        data["explanation"] = found.explain().splitlines()
    return data


def _predict_runs(runs: Path | None, models: Path | None, out: Path | None, as_json: bool) -> None:
    if runs is None or models is None or out is None:
        lacking = [
            n for n, v in (("--runs", runs), ("--models", models), ("--out", out)) if v is None
        ]
        raise PlanningError(
            f"--runs, --models and --out go together; not given: {', '.join(lacking)}"
        )
    count = write_predictions(runs, models, out)
    if as_json:
        typer.echo(json.dumps({"rows": count, "out": str(out)}))
    else:
        typer.echo(f"{count} predictions in {out}")
