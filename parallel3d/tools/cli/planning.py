"""``parallel3d plan``: every legal layout, ranked."""

from __future__ import annotations

import inspect
import json
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.cluster import Gpu
from parallel3d.planner.hf_config import spec_from_hf_config
from parallel3d.planner.model_spec import ModelSpec, spec_from_shapes
from parallel3d.planner.planning import MeshPlan, plan, refusal
from parallel3d.planner.prediction import Prediction, predict
from parallel3d.planner.runs import write_predictions
from parallel3d.planner.workload import CHECKPOINTING, Workload
from parallel3d.tools.cli import options as o
from parallel3d.tools.cli import tables

# What ``--model`` may be: a name, a config.json, shapes.

_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def read_model(text: str | None, seq_len: int | None = None) -> ModelSpec:
    """The model that ``text`` names.

    Args:
        seq_len: rows of a table of learned positions, for shapes that don't say it.

    Raises:
        PlanningError: no such model, or shapes that can't be.
    """
    if not text:
        raise PlanningError(
            "which model? Give --model a name (llama-3.1-8b), a config.json or layers=32,hidden=4096,..."
        )
    if "=" in text:
        return _of_shapes(text, seq_len)
    return spec_from_hf_config(text)


def _of_shapes(text: str, seq_len: int | None) -> ModelSpec:
    known = inspect.signature(spec_from_shapes).parameters
    given: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = (p.strip() for p in part.partition("="))
        if not equals or name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.4) or list(known)
            raise PlanningError(
                f"--model has {part!r}; shapes are name=value, the nearest: {', '.join(near)}"
            )
        given[name] = _value(name, value, known[name].annotation)
    needed = [n for n, p in known.items() if p.default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in given]:
        raise PlanningError(f"--model lacks {', '.join(missing)}: shapes need {', '.join(needed)}")
    given.setdefault("seq_len", seq_len or 0)
    return spec_from_shapes(**given)


def _value(name: str, text: str, kind: str) -> int | bool | str:
    if kind == "str":
        return text
    if kind == "bool":
        if text.lower() not in _FLAGS:
            raise PlanningError(f"--model has {name}={text}; it must be true or false")
        return _FLAGS[text.lower()]
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise PlanningError(f"--model has {name}={text}; it must be an int") from None


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


# ``parallel3d predict``: memory and time of one layout, or of a table of runs.

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
        typer.echo(
            json.dumps(_prediction_as_json(found, refused, explain), indent=2, allow_nan=False)
        )
    else:
        tables.show_prediction(found, refused, explain)
    if html is not None:
        from parallel3d.planner.report import write_report

        write_report(MeshPlan(found.model, cluster, work, (found,), ()), html)
        typer.echo(f"wrote {html}", err=True)


def _prediction_as_json(found: Prediction, refused: str | None, explain: bool) -> dict[str, object]:
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


# ``parallel3d calibrate``: measures this machine and writes a profile for ``--profile``.


def calibrate_command(
    out: Annotated[Path, typer.Option(help="The profile to write.")] = Path("profile.toml"),
    name: Annotated[
        str | None, typer.Option(help="Of the profile's GPU; the device's own by default.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; what there is by default.")
    ] = None,
    largest: Annotated[int, typer.Option(help="Rows of the largest matmul.", min=512)] = 8192,
    seconds: Annotated[float, typer.Option(help="Stop measuring matmuls after this long.")] = 60.0,
) -> None:
    """Measures matmuls and memory; under torchrun (-m parallel3d calibrate) collectives too."""
    from torch import distributed as dist

    from parallel3d.planner.calibrate import calibrate, write_profile

    joined = "RANK" in os.environ and not dist.is_initialized()
    if joined:
        dist.init_process_group()
    try:
        found = calibrate(name, device=device, largest=largest, seconds=seconds)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_profile(found, out)
            _show(found)
            typer.echo(
                f"wrote {out}: parallel3d plan --gpu {found.name} --profile {out} ...", err=True
            )
    finally:
        if joined:
            dist.destroy_process_group()


def _show(found: Gpu) -> None:
    table = Table(title=f"{found.name}: {found.source}")
    table.add_column("measured")
    table.add_column("", justify="right")
    table.add_row("peak, TFLOP/s", f"{found.peak:.4g}")
    table.add_row("matmul efficiency", f"{found.gemm_efficiency:.3f}")
    table.add_row("matmul start, us", f"{found.gemm_start_us:.2f}")
    table.add_row("memory, TB/s", f"{found.bandwidth:.4g}")
    table.add_row("memory, GiB", f"{found.capacity_gib:.1f}")
    for kind, sizes in found.collectives.items():
        for ranks, (start, bandwidth, _) in sizes.items():
            table.add_row(
                f"{kind}, {ranks} ranks", f"{start:.0f} us + bytes / {bandwidth:.3g} GB/s"
            )
    Console().print(table)
