"""``parallel3d plan``, ``parallel3d predict`` and ``parallel3d calibrate``."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from parallel3d._util.arguments import counted
from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.arguments import Mistakes, check_choice, check_number
from parallel3d.planner.cluster import DEVICES, Cluster, Gpu
from parallel3d.planner.cluster import gpu as resolve_gpu
from parallel3d.planner.comparison import PipelineComparison, compare_pipelines
from parallel3d.planner.constants import Term
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.planning import (
    SURE,
    MeshPlan,
    memory_groups,
    plan,
    reasons,
    refusal,
    setting,
    sizes_of,
)
from parallel3d.planner.prediction import Prediction, predict
from parallel3d.planner.recompute import KINDS, OWN
from parallel3d.planner.uncertainty import FAMILIARITY
from parallel3d.planner.workload import Workload
from parallel3d.tools.cli import options as o
from parallel3d.tools.cli.setup import check_folder, check_given, end, pipeline_of, setup
from parallel3d.tools.terminal import Busy, FittedTable, output, say, titled_table, wrapped


@o.takes(o.MODEL, o.CLUSTER, o.WORK_OR_TRIED, o.SIZES, o.TOP, o.SHOW)
def plan_command(top: int, explain: bool, as_json: bool, html: Path | None, **given: Any) -> None:
    """Predicts every legal layout on a cluster and ranks them: memory, speed, what is refused and why."""
    kinds, reshard = given["checkpointing"] or list(OWN), given["reshard_after_forward"]
    first = {"checkpointing": kinds[0], "reshard_after_forward": reshard is not False}
    spec, cluster, work, chosen = setup(
        given | first | {"html": html, "kinds": kinds[1:]}, several=True
    )
    found = plan(
        spec,
        cluster,
        work,
        **{axis: given[axis] or None for axis in o.LAYOUT},
        checkpointing=kinds,
        reshard_after_forward=(True, False) if reshard is None else None,
        chunked_loss=given["chunked_loss"],
        shard_optimizer_over_replicate=given["shard_optimizer_over_replicate"],
        memory_limit_gib=given["memory_limit"],
    )
    pipelines = compare_pipelines(found, given["memory_limit"])
    if as_json:
        data = {"pipeline": pipelines.as_dict() if pipelines is not None else None}
        _echo_json(_as_json(found, top, explain) | data)
    else:
        _show_plan(found, pipelines, top, explain, chosen)
        if found.candidates:
            _show_next(found)
    _write_page(found, html)
    if not found.candidates:
        _ = found.best  # raises an error that names the closest layout


def _echo_json(data: dict[str, Any]) -> None:
    typer.echo(json.dumps(data, indent=2, allow_nan=False))


def _write_page(found: MeshPlan, html: Path | None) -> None:
    if html is not None:
        from parallel3d.planner.report import write_report

        write_report(found, html)
        say(f"wrote {html}")


def _as_json(found: MeshPlan, top: int, explain: bool) -> dict[str, Any]:
    """Returns the plan as JSON values: the best of each layout, the Pareto front, and with ``explain`` the
    sensitivity."""
    best = found.best if found.candidates else None
    sensitivity = {} if best is None else found.sensitivity()
    data = found.as_dict(top) | {
        "layouts": [each.as_dict() for each in found.layouts[:top]],
        "pareto": [each.as_dict() for each in found.pareto()],
        "best": None if best is None else best.as_dict(),
        "recomputation": [] if best is None else [p.as_dict() for p in found.recomputation()],
        "sensitivity": {name: [v._asdict() for v in tried] for name, tried in sensitivity.items()},
    }
    if explain and best is not None:
        data["explanation"] = best.explain().splitlines()
    return data


@o.takes(o.MODEL, o.CLUSTER, o.WORK, o.LAYOUT, o.STAGES, o.SHOW)
def predict_command(explain: bool, as_json: bool, html: Path | None, **given: Any) -> None:
    """Predicts one layout: memory and time by component."""
    spec, cluster, work, chosen = setup(given | {"html": html}, several=False)
    layout = MeshLayout(**{axis: given[axis] for axis in o.LAYOUT})
    found = predict(spec, layout, cluster, work, pipeline_of(given))
    refused = refusal(found.model, found.layout, cluster, work)
    if found.pipeline.stages > 1:
        refused = f"parallelize has no pipelines; this one is {work.profile.name}'s"
    if as_json:
        explanation = {"explanation": found.explain().splitlines()} if explain else {}
        _echo_json({**found.as_dict(), "refused": refused, **explanation})
    else:
        _show_prediction(found, refused, explain, chosen)
    _write_page(MeshPlan(found.model, cluster, work, (found,), ()), html)


_LOG = (
    "A log of observability's JsonLines: a stack is fitted to its steps. Several of one machine by repeating "
    "it. The options below say what the log doesn't, the same for all."
)
_MEASURE = o.made(
    o.plain,
    {
        "out": (Path, Path("profile.toml"), "The profile to write."),
        "name": (str, None, "Of the GPU, the device's own by default; of the stack, calibrated."),
        "device": (str, None, "cuda or cpu; the device there is by default."),
        "largest": (int, 8192, "Rows of the largest matmul.", {"min": 512}),
        "seconds": (float, 60.0, "Seconds after which no more matmuls are measured."),
    },
) | o.made(o.panel("From a run's log instead"), {"run": (list[Path], None, _LOG)})


@o.takes(_MEASURE, o.MODEL, o.without(o.CLUSTER, "nodes"), o.without(o.WORK, "global_batch"))
def calibrate_command(
    out: Path,
    name: str | None,
    device: str | None,
    largest: int,
    seconds: float,
    run: list[Path] | None,
    **given: Any,
) -> None:
    """Measures matmuls, attention, memory and the host; under torchrun (-m parallel3d calibrate) collectives.

    With --run it fits a stack to measured steps of a run of yours, so that other layouts are predicted.
    """
    if run:
        _calibrate_runs(run, out, name or "calibrated", given)
        return
    mistakes = Mistakes()
    if device is not None:
        mistakes.of(lambda: check_choice("device", device, DEVICES))
    mistakes.of(lambda: check_number("seconds", seconds))
    mistakes.of(lambda: check_folder("out", out))
    end(mistakes, {"device": device, "seconds": seconds, "out": out})
    with Busy("importing torch"):
        from torch import distributed as dist

        from parallel3d.planner.calibrate import calibrate, write_profile

    joined = "RANK" in os.environ and not dist.is_initialized()
    if joined:
        dist.init_process_group()
    try:
        with Busy(f"measuring matmuls for {1.25 * seconds:g} s at most, and all else"):
            found = calibrate(name, device=device, largest=largest, seconds=seconds)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_profile(found, out)
            _show_gpu(found)
            say(f"wrote {out}: parallel3d plan --gpu {found.name} --profile {out} ...")
    finally:
        if joined:
            dist.destroy_process_group()


def _calibrate_runs(logs: list[Path], out: Path, name: str, options: Mapping[str, Any]) -> None:
    check_given({**options, "out": out, "run": logs})
    with Busy("fitting a stack"):
        from parallel3d.planner.measured import fit_stack, read_run, unlikely, write_stack

        measured, steps = [], []
        for log in logs:
            found = read_run(log)
            count, per_node = found.layout.world_size, options["gpus_per_node"]
            per_node = min(per_node or resolve_gpu(options["gpu"], options["profile"]).node, count)
            given = {**options, "nodes": count // per_node, "gpus_per_node": per_node}
            given |= {"global_batch": None, "micro_batch": options["micro_batch"] or 1}
            spec, cluster, work, _ = setup(given, several=False)
            batch, left = divmod(found.tokens_per_step, work.seq_len)
            if left:
                raise PlanningError(
                    f"{log}: {found.tokens_per_step} tokens a step are no multiple of --seq-len "
                    f"{work.seq_len}"
                )
            work = replace(work, global_batch=batch, micro_batch=options["micro_batch"])
            measured.append(
                (predict(spec, found.layout, cluster, work), found.tokens_per_second_per_gpu)
            )
            steps.append(found.steps)
        fitted = fit_stack(measured, name)
        base = measured[0][0].workload.profile
        write_stack(fitted, out)
    table = titled_table(f"{name}: {base.name} fitted to measured steps", "constant", "was", "is")
    for key, each in fitted.own.items():
        if each != base.constant(key):
            table.add_row(key, f"{base.value(key):.4g}", f"{each.value:.4g}")
    console = output()
    console.print(table)
    for (before, speed), log, count in zip(measured, logs, steps, strict=True):
        work = replace(before.workload, stack=fitted)
        after = predict(before.model, before.layout, before.cluster, work)
        line = (
            f"{log}, {before.layout}, {counted(count, 'step')}: measured {speed:,.1f} tokens/s/GPU, "
            f"predicted {before.tokens_per_second_per_gpu:,.1f} before and "
            f"{after.tokens_per_second_per_gpu:,.1f} now"
        )
        typer.echo(wrapped(line, console.width))
    if moved := unlikely(fitted, base):
        line = (
            f"unlikely: {', '.join(moved)} so far from before; are --model, --gpu, --seq-len and the other "
            "options those of the run?"
        )
        console.print(Text(line, style="bold yellow"))
    say(f"wrote {out}: parallel3d predict --stack {out} ...")


def _show_gpu(found: Gpu) -> None:
    table = titled_table(f"{found.name}: {found.source}", "measured", "")
    table.add_row("peak, TFLOP/s", f"{found.peak:.4g}")
    table.add_row("matmul efficiency", f"{found.gemm_efficiency:.3f}")
    table.add_row("matmul start, us", f"{found.gemm_start_us:.2f}")
    table.add_row("matmul efficiency under load", f"{found.sustained:.3f}")
    for head_dim, *rates in found.attention:
        both = " and ".join(f"{rate:.3g}" for rate in rates)
        table.add_row(f"{found.attention_kernel}, head_dim {head_dim}, TFLOP/s", both)
    for what, us in vars(found.host_times).items():
        table.add_row(f"host, {what}, us", f"{us:.1f}" if us else "not measured")
    table.add_row("memory, TB/s", f"{found.bandwidth:.4g}")
    table.add_row("memory, GiB", f"{found.capacity_gib:.1f}")
    for kind, sizes in found.collectives.items():
        for ranks, (start, bandwidth, _) in sizes.items():
            seconds = f"{start:.0f} us + bytes / {bandwidth:.3g} GB/s"
            table.add_row(f"{kind}, {ranks} ranks", seconds)
    output().print(table)


# What the commands print.

_GIB = 2**30
_BAR, _BY = 24, "\N{MULTIPLICATION SIGN}"
_PAIR = re.compile(r"(?<=\w) (?!--|train)")  # between an option and its value


def _show_plan(
    plan: MeshPlan, pipelines: PipelineComparison | None, top: int, explain: bool, chosen: str
) -> None:
    """Prints the ranked layouts, the refused ones, the best in detail, and what would change it."""
    console = output()
    console.print(_heading(plan.model, plan.cluster, plan.workload, chosen))
    if plan.candidates:
        console.print(_ranked(plan, top))
        for line in _beside(plan):
            console.print(Text(line))
    if pipelines is not None:
        console.print(Text(str(pipelines), style="bold" if pipelines.is_better else ""))
    if plan.refused:
        console.print(_refused(plan))
    if not plan.candidates:
        return
    best = plan.best
    _details(console, best, "the best: ")
    console.print(_recomputation(plan))
    console.print(_sensitivity(plan))
    if explain:
        _explanation(console, best)
        for other in plan.layouts[1:2]:
            console.print(Text("\ncompared with the second:", style="bold"))
            _lines(console, plan.explain(best, other))


def _show_next(found: MeshPlan) -> None:
    """Prints the code and commands that train with the best layout."""
    best, cluster = found.best, found.cluster
    mesh = " ".join(f"--{axis} {n}" for axis, n in best.layout.as_dict(views=True).items())
    arguments = "".join(f"      {name}={value},\n" for name, value in _arguments(best).items())
    many, each = cluster.nodes > 1, cluster.gpus_per_node
    nodes = f"--nnodes {cluster.nodes} " if many else ""
    meet = "--rdzv-backend c10d --rdzv-endpoint HOST:29500 " if many else ""
    to = f"slurm --nodes {cluster.nodes}" if many else "torchrun"
    run, launch = (
        wrapped(_PAIR.sub("\0", f"  {command}"), output().width, "    ", " \\").replace("\0", " ")
        for command in (
            f"torchrun {nodes}--nproc-per-node {each} {meet}train.py {mesh}",
            f"parallel3d launch --to {to} --gpus-per-node {each} {mesh} --out . -- train.py",
        )
    )
    before = ""
    if (lora := best.workload.lora) is not None:
        made = wrapped(f"  adapters = LoraConfig({lora.peft})", output().width, "      ")
        before = f"{made}\n  model = peft.get_peft_model(model, adapters)\n"
    if best.workload.float8:
        before += "  convert_to_float8_training(model)  # torchao.float8\n"
    call = f"{before}  parallelize(model, mesh,\n{arguments}  )"
    typer.echo(f"to run it:\n{call}\n{run}\nor:\n{launch}")


def _arguments(best: Prediction) -> dict[str, str]:
    """Returns the arguments of ``parallelize`` for this prediction: name -> value as Python text."""
    work, layout, kind = best.workload, best.layout, KINDS[best.workload.checkpointing]
    gib = ceil(best.memory.host / _GIB)
    recompute = f"ActivationOffload(pool_gib={gib})" if gib else repr(kind.argument)
    found = {} if kind.argument is None else {"activation_checkpointing": recompute}
    sharding = {}
    if layout.shard * layout.cp > 1:
        sharding["reshard_after_forward"] = work.reshard_after_forward
    if work.is_hybrid(layout.replicate):
        sharding["shard_optimizer_over_replicate"] = True
    if sharding:
        given = ", ".join(f"{name}={value}" for name, value in sharding.items())
        found["fsdp"] = f"Sharding({given})"
    if layout.cp > 1:
        found["context_parallel"] = repr(work.cp_attention)
    if work.chunked_loss:
        found["loss_parallel"] = '"chunked"'
    if work.memory == "static":
        found["memory"] = '"static"'
    return found


def _show_prediction(
    prediction: Prediction, refused: str | None, explain: bool, chosen: str
) -> None:
    """Prints one layout's memory and time, and why ``plan`` would refuse it, if it would."""
    console = output()
    console.print(_heading(prediction.model, prediction.cluster, prediction.workload, chosen))
    _details(console, prediction, "")
    if refused:
        console.print(Text(f"plan would refuse this layout: {refused}", style="bold red"))
    if explain:
        _explanation(console, prediction)


def _heading(model: ModelSpec, cluster: Cluster, work: Workload, chosen: str) -> Text:
    batch = f", global batch {work.global_batch:,}" if work.global_batch else ""
    return Text.assemble(
        (model.name, "bold"),
        f" ({model.size}) on ",
        (f"{cluster.world_size:,} x {cluster.gpu.name}", "bold"),
        f" ({counted(cluster.nodes, 'node')}), sequences of {work.seq_len:,}{batch}",
        f", {work.optimizer}{f', {work.lora}' if work.lora else ''}",
        f"\nby default: {chosen}" if chosen else "",
    )


def _beside(plan: MeshPlan) -> Iterator[str]:
    """Yields sentences on layouts as good as the best, faster but less sure, or with more free memory."""
    best, fastest, roomier = plan.best, plan.fastest, plan.roomier()
    if len(plan.close) > 1:
        yield (
            f"The first {len(plan.close)} can't be told apart: their tokens/s times probability to fit "
            "differ by less than predictions of one machine err."
        )
    if (gain := fastest.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu - 1) >= 0.01:
        yield f"{gain:.0%} faster, if it fits ({fastest.fits_probability:.0%}): {_one(fastest)}."
    if roomier is not None and best.memory.part() > 0.8:
        loss = 1 - roomier.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu
        yield (
            f"{max(loss, 0.0):.1%} slower at {roomier.memory.part():.0%} of memory instead of "
            f"{best.memory.part():.0%}: {_one(roomier)}."
        )


def _one(each: Prediction) -> str:
    return f"{sizes_of(each.layout, _BY)}, micro-batch {each.micro_batch}, checkpointing {setting(each)}"


def _ranked(plan: MeshPlan, top: int) -> FittedTable:
    """Returns a table with a row for each layout; on a narrow terminal it has memory without its parts."""
    shown = plan.layouts[:top]
    most = max(shown, key=lambda each: len(each.layout.axes))  # cp only if one has it
    lora = f"; LoRA r {plan.workload.lora.rank}" if plan.workload.lora else ""
    parts = ("state", "buffers", "activations", "logits")
    table = titled_table(
        f"{len(shown)} of {len(plan.layouts)} layouts that fit, by speed x probability to fit "
        f"({' x '.join(most.layout.axes)}; GiB{lora})",
        *("", "layout", "checkpointing", "micro-batch", *parts),
        *("memory", "fits", "tokens/s/GPU", "MFU", "step, s"),
        left=3,
        droppable=(parts, ("step, s",), ("MFU",), ("",), ("fits",)),
    )
    for place, each in enumerate(shown, 1):
        held = [value / _GIB for value in memory_groups(each).values()]
        memory = each.memory
        table.add_row(
            str(place),
            sizes_of(each.layout, _BY),
            setting(each),
            f"{each.micro_batch}\N{MULTIPLICATION SIGN}{each.accumulation}",
            *(f"{value:.1f}" for value in (sum(held[:3]), *held[3:6])),
            Text(f"{memory.needed / _GIB:.1f}", _heat(memory.needed / memory.capacity)),
            f"{each.fits_probability:.0%}",
            f"{each.tokens_per_second_per_gpu:,.0f}",
            f"{each.mfu:.1%}",
            f"{each.step_seconds:,.{2 if each.step_seconds >= 1 else 3}f}",
            style="bold" if place == 1 else "",
        )
    return table


def _heat(part: float) -> str:
    return "green" if part < 0.8 else "yellow" if part <= 1 else "bold red"


def _refused(plan: MeshPlan) -> FittedTable:
    title = f"{counted(len(plan.refused), 'layout')} refused"
    table = titled_table(title, "why (of the nearest to fit)", "how many", "layouts")
    for reason in reasons(plan.refused):
        table.add_row(Text(reason.text), str(reason.count), reason.examples)
    return table


def _details(console: Console, each: Prediction, lead: str) -> None:
    memory, layout = each.memory, each.layout
    mesh = f"{lead}{', '.join(f'{axis} {n}' for axis, n in layout.as_dict(views=True).items())}"
    mesh += f", {each.pipeline}" if each.pipeline.stages > 1 else ""
    low, high = each.speed_interval
    kind = f", attention over cp: {each.workload.cp_attention}" if layout.cp > 1 else ""
    console.print(
        Text.assemble(
            (mesh, "bold"),
            f"; micro-batch {each.micro_batch} x {each.accumulation}, checkpointing {setting(each)}{kind}: ",
            (f"{each.tokens_per_second_per_gpu:,.0f} tokens/s/GPU", "bold"),
            f" ({low:,.0f} to {high:,.0f} in 8 of 10 runs)",
            f", MFU {each.mfu:.1%} (HFU {each.hfu:.1%}, by 6N {each.mfu_6n:.1%})",
            f", {each.step_seconds:,.3f} s a step",
        )
    )
    allocated = f"memory at its peak ({memory.moment}): {memory.allocated / _GIB:.3f} GiB allocated"
    console.print(_components(allocated, "GiB", memory.terms, _GIB))
    console.print(_counted(each))
    step = f"step: {each.step_seconds:,.3f} s"
    console.print(_components(step, "ms", each.time.terms, 1e-3))
    if each.host_bound is not None:
        console.print(Text(str(each.host_bound), style="bold yellow"))
    console.print(
        f"stack {each.workload.profile.name}; {FAMILIARITY[each.familiarity]}", markup=False
    )


def _counted(each: Prediction) -> FittedTable:
    """Returns a table of memory: what must fit, torch's reserved, an upper bound, with their parts."""
    memory, names = each.memory, {"needed": "needed", "reserved": "reserved by torch"}
    names["upper_needed"] = "upper bound"
    verdict = "fits" if each.fits else "does not fit"
    table = titled_table(
        f"{verdict} in {memory.capacity / _GIB:.1f} GiB ({each.fits_probability:.0%} that it does; "
        f"{abs(each.reserve) / _GIB:.1f} {'to spare' if each.reserve >= 0 else 'too much'})",
        *("GiB", *names.values()),
    )
    table.heading_style = "bold green" if each.fits else "bold red"
    columns = [memory.counts[name] for name in names]
    for part in columns[0]:
        cells = (f"{column[part] / _GIB:.3f}" if part in column else "" for column in columns)
        table.add_row(part, *cells, end_section=part == "context")
    every = [sum(column.values()) for column in columns]
    table.add_row("all", *(f"{value / _GIB:.3f}" for value in every))
    ends = " to ".join(f"{end / _GIB:.1f}" for end in each.memory_interval)
    table.add_row(
        f"of {memory.capacity / _GIB:.1f}", *(f"{value / memory.capacity:.0%}" for value in every)
    )
    table.add_row("8 of 10 runs", "", ends, "")
    if memory.host:
        of = f"the host's memory, of {memory.host_capacity / _GIB:.0f} a GPU"
        table.add_row(of, f"{memory.host / _GIB:.3f}", "", "")
    return table


def _components(title: str, unit: str, terms: Mapping[str, Term], scale: float) -> FittedTable:
    """Returns a table of the terms that aren't 0, in ``unit``; ``scale``: bytes or seconds of one unit."""
    table = titled_table(title, "component", unit, "share", "", droppable=[("",)])
    table.columns[-1].justify = "left"
    whole = sum(term.value for term in terms.values()) or 1.0
    for name, term in terms.items():
        if term.value:
            part, value = term.value / whole, f"{term.value / scale:,.3f}"
            table.add_row(name.replace("_", "-"), value, f"{part:.1%}", _bar(part))
    return table


def _bar(part: float) -> Text:
    full = min(part, 1.0) * _BAR
    half = "\N{LEFT HALF BLOCK}" if full % 1 >= 0.5 else ""
    return Text("\N{FULL BLOCK}" * int(full) + half, _heat(part) if part > 0.8 else "cyan")


def _recomputation(plan: MeshPlan) -> FittedTable:
    """Returns a table of the best layout with each kind of checkpointing: memory, time and speed."""
    table = titled_table(
        f"the best layout with each kind of checkpointing (GiB of {plan.cluster.gpu.capacity_gib:g})",
        *("kind", "memory", "on the host"),
        *("computed again, ms", "waits for the host, ms", "tokens/s/GPU"),
    )
    for each in plan.recomputation():
        memory, terms, kind = each.memory, each.time.terms, KINDS[each.workload.checkpointing]
        is_best = kind.name == plan.best.workload.checkpointing
        table.add_row(
            kind.name.replace("_", " "),
            Text(f"{memory.needed / _GIB:.1f}", _heat(memory.needed / memory.capacity)),
            f"{memory.host / _GIB:.1f}" if memory.host else "",
            f"{terms['recompute'].value * 1e3:,.1f}",
            f"{terms['exposed offload'].value * 1e3:,.1f}",
            Text.assemble(
                f"{each.tokens_per_second_per_gpu:,.0f}", *_doubt(each.fits, each.fits_probability)
            ),
            style="bold" if is_best else "",
        )
    return table


def _doubt(fits: bool, probability: float) -> list[tuple[str, str]]:
    """Returns what follows a speed, as (text, style), if the layout doesn't or may not fit."""
    if not fits:
        return [(", does not fit", "red")]
    return [(f", {probability:.0%} to fit", "yellow")] if probability < SURE else []


def _sensitivity(plan: MeshPlan) -> FittedTable:
    table = titled_table("tokens/s/GPU of the best, if this were", "", "half", "as it is", "twice")
    for name, tried in plan.sensitivity().items():
        now = tried[1][1]
        cells = []
        for value, speed, fits, probability in tried:
            change = f" ({speed / now - 1:+.1%})" if speed != now else ""
            cell = Text(f"{value}: {speed:,.0f}{change}")
            cells.append(Text.assemble(cell, *_doubt(fits, probability)))
        table.add_row(name.replace("memory_", "memory ").replace("_", "-"), *cells)
    return table


def _explanation(console: Console, each: Prediction) -> None:
    console.print(Text("\nhow each number is computed:", style="bold"))
    _lines(console, each.explain())


def _lines(console: Console, text: str) -> None:
    """Prints ``text``, which is indented by level; the rest of a long line is indented more."""
    for line in text.splitlines():
        start = line[: len(line) - len(line.lstrip())]
        typer.echo(wrapped(line, console.width, f"{start}    ") or line)
