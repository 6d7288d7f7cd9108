"""``parallel3d plan``, ``parallel3d predict`` and ``parallel3d calibrate``."""

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from configparser import ConfigParser
from dataclasses import replace
from difflib import get_close_matches
from math import ceil
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallel3d._util.arguments import counted
from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.cluster import Cluster, Gpu
from parallel3d.planner.cluster import gpu as resolve_gpu
from parallel3d.planner.constants import Term
from parallel3d.planner.decoder import spec_from_shapes
from parallel3d.planner.hf_config import spec_from_hf_config
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.planning import (
    MeshPlan,
    memory_groups,
    plan,
    reasons,
    refusal,
    setting,
    short,
)
from parallel3d.planner.prediction import Prediction, predict
from parallel3d.planner.recompute import KINDS, OWN
from parallel3d.planner.stacks import Stack, read_stack_file
from parallel3d.planner.uncertainty import FAMILIARITY
from parallel3d.planner.workload import Workload
from parallel3d.tools.cli import options as o
from parallel3d.tools.terminal import Busy, output, titled_table

# ``--model``: a name, a config.json, or shapes.

_KINDS: dict[Any, tuple[Callable[[str], Any], str]] = {
    str: (str, "text"),
    bool: (lambda text: ConfigParser.BOOLEAN_STATES[text.lower()], "true or false"),
}


def read_model(text: str, seq_len: int | None = None) -> ModelSpec:
    """Returns the model that ``text`` describes, with ``seq_len`` learned positions if shapes have none."""
    if "=" in text:
        return spec_from_shapes(**{"seq_len": seq_len or 0, **_shapes(text)})
    return _of_module(text, seq_len) if ":" in text else spec_from_hf_config(text)


def _of_module(text: str, seq_len: int | None) -> ModelSpec:
    """The own model that the function ``package.module:name`` builds, alone or with an example."""
    build = o.function_named("--model", text)
    import torch

    from parallel3d.planner.from_module import spec_from_module
    from parallel3d.testing.samples import errors_named

    with errors_named(f"--model: {text}"), torch.device("meta"):
        made = build()
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    try:
        return spec_from_module(model, example, seq_len=seq_len, name=text)
    except PlanningError as error:
        if example is not None:
            raise
        raise PlanningError(f"{error}. For --model, {text} may return (model, example)") from error


_ASKED = {
    "model": "which model? Give --model a name (llama-3.1-8b), a config.json, package.module:function or "
    "layers=32,hidden=4096,...",
    "gpu": "which GPU? Give --gpu a name, for example h100-80gb-sxm",
    "seq_len": "how long are the sequences? Give --seq-len, for example 4096",
}
_LENGTH, _LONGEST, _STEP = 4096, 8192, 2**22  # where no config says; of a config; tokens of a step


def _setup(
    options: Mapping[str, Any], *, several: bool
) -> tuple[ModelSpec, Cluster, Workload, str]:
    """Returns the setup that a command's options describe, and texts that name the defaults in use.

    ``several``: whether layouts and micro-batches are tried; else a micro-batch of 1 is the default.
    """
    _check_given(options)
    text, seq_len = options["model"], options["seq_len"]
    names = ("gpu", "nodes", "gpus_per_node", "nic", "profile")
    cluster = Cluster.of(*(options[name] for name in names))
    with Busy(f"reading {text}"):
        model = read_model(text, seq_len)
    chosen, said = {}, []
    if seq_len is None:
        chosen["seq_len"] = seq_len = min(model.seq_len or _LENGTH, _LONGEST)
        longest = f"the model takes {model.seq_len:,}" if model.seq_len else "no config says"
        said.append(f"--seq-len {seq_len} ({longest})")
    if options["micro_batch"] is None and options["global_batch"] is None:
        if several:
            chosen["global_batch"] = batch = _usual_batch(seq_len, cluster.world_size)
            said.append(f"--global-batch {batch} ({batch * seq_len / 1e6:.2f} M tokens a step)")
        else:
            chosen["micro_batch"] = 1
            said.append("--micro-batch 1")
    given = o.fields_among(Workload, options) | {"stack": _stack(options["stack"])}
    tried = ("chunked_loss", "shard_optimizer_over_replicate")
    given |= {name: False for name in tried if given[name] is None}
    work = Workload(**given | chosen)
    return model, cluster, work, ", ".join(said)


def _check_given(options: Mapping[str, Any]) -> None:
    """Raises PlanningError for all that is missing at once, before anything is imported or read."""
    text = options["model"] or ""
    missing = [name for name in ("model", "gpu") if not options[name]]
    if options["seq_len"] is None and "=" in text and "seq_len=" not in text:
        missing.append("seq_len")
    asked = [_ASKED[name] for name in missing]
    needed = [n for n, p in _known_shapes().items() if p.default is inspect.Parameter.empty]
    if "=" in text and (lacking := [name for name in needed if name not in _shapes(text)]):
        asked.append(f"--model lacks {', '.join(lacking)}: shapes need {', '.join(needed)}")
    if asked:
        raise PlanningError("; ".join(asked))


def _stack(text: str) -> str | Stack:
    """A name, or the stack of a file."""
    return read_stack_file(text) if text.endswith(".toml") else text


def _usual_batch(seq_len: int, ranks: int) -> int:
    """Sequences of about 4M tokens, a multiple of as many ranks as can have one each."""
    wanted = max(_STEP // seq_len, 1)
    by = max(n for n in range(1, min(ranks, wanted) + 1) if ranks % n == 0)
    return round(wanted / by) * by


def _known_shapes() -> Mapping[str, inspect.Parameter]:
    return inspect.signature(spec_from_shapes, eval_str=True).parameters


def _shapes(text: str) -> dict[str, Any]:
    """What ``text`` gives to ``spec_from_shapes``."""
    known = _known_shapes()
    shapes: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = (p.strip() for p in part.partition("="))
        if not equals or name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.4) or list(known)
            raise PlanningError(
                f"--model has {part!r}; shapes are name=value, the nearest: {', '.join(near)}"
            )
        convert, what = _KINDS.get(known[name].annotation, (int, "an int"))
        try:
            shapes[name] = convert(value)
        except (ValueError, KeyError):
            raise PlanningError(f"--model has {name}={value}; it must be {what}") from None
    return shapes


@o.takes(o.MODEL, o.CLUSTER, o.WORK_OR_TRIED, o.SIZES, o.TOP, o.SHOW)
def plan_command(top: int, explain: bool, as_json: bool, html: Path | None, **given: Any) -> None:
    """Predicts every legal layout on a cluster and ranks them: memory, speed, what is refused and why."""
    kinds, reshard = given["checkpointing"] or list(OWN), given["reshard_after_forward"]
    first = {"checkpointing": kinds[0], "reshard_after_forward": reshard is not False}
    spec, cluster, work, chosen = _setup(given | first, several=True)
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
    if as_json:
        _echo_json(_as_json(found, top, explain))
    else:
        _show_plan(found, top, explain, chosen)
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
        typer.echo(f"wrote {html}", err=True)


def _as_json(found: MeshPlan, top: int, explain: bool) -> dict[str, Any]:
    """``MeshPlan.as_dict`` with the best of each layout, the Pareto front and the sensitivity."""
    data = found.as_dict(top)
    data["layouts"] = [each.as_dict() for each in found.layouts[:top]]
    data["pareto"] = [each.as_dict() for each in found.pareto()]
    data["best"] = found.best.as_dict() if found.candidates else None
    data["recomputation"] = [
        each.as_dict() for each in (found.recomputation() if found.candidates else ())
    ]
    data["sensitivity"] = {
        name: [{"value": v, "tokens_per_second_per_gpu": s, "fits": fits} for v, s, fits in rows]
        for name, rows in (found.sensitivity() if found.candidates else {}).items()
    }
    if explain and found.candidates:
        data["explanation"] = found.best.explain().splitlines()
    return data


@o.takes(o.MODEL, o.CLUSTER, o.WORK, o.LAYOUT, o.SHOW)
def predict_command(explain: bool, as_json: bool, html: Path | None, **given: Any) -> None:
    """Predicts one layout: memory and time by component."""
    spec, cluster, work, chosen = _setup(given, several=False)
    found = predict(spec, MeshLayout(**{axis: given[axis] for axis in o.LAYOUT}), cluster, work)
    refused = refusal(found.model, found.layout, cluster, work)
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
    """Measures matmuls and memory; under torchrun (-m parallel3d calibrate) collectives too.

    With --run it fits a stack to measured steps of a run of yours, so that other layouts are predicted.
    """
    if run:
        _calibrate_runs(run, out, name or "calibrated", given)
        return
    with Busy("importing torch"):
        from torch import distributed as dist

        from parallel3d.planner.calibrate import calibrate, write_profile

    joined = "RANK" in os.environ and not dist.is_initialized()
    if joined:
        dist.init_process_group()
    try:
        with Busy(f"measuring matmuls for {seconds:g} s at most, memory and collectives"):
            found = calibrate(name, device=device, largest=largest, seconds=seconds)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_profile(found, out)
            _show_gpu(found)
            typer.echo(
                f"wrote {out}: parallel3d plan --gpu {found.name} --profile {out} ...", err=True
            )
    finally:
        if joined:
            dist.destroy_process_group()


def _calibrate_runs(logs: list[Path], out: Path, name: str, options: Mapping[str, Any]) -> None:
    _check_given(options)
    with Busy("fitting a stack"):
        from parallel3d.planner.measured import fit_stack, read_run, write_stack

        measured, steps = [], []
        for log in logs:
            found = read_run(log)
            count, per_node = found.layout.world_size, options["gpus_per_node"]
            per_node = min(per_node or resolve_gpu(options["gpu"], options["profile"]).node, count)
            given = {**options, "nodes": count // per_node, "gpus_per_node": per_node}
            given |= {"global_batch": None, "micro_batch": options["micro_batch"] or 1}
            spec, cluster, work, _ = _setup(given, several=False)
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
    output().print(table)
    for (before, speed), log, count in zip(measured, logs, steps, strict=True):
        work = replace(before.workload, stack=fitted)
        after = predict(before.model, before.layout, before.cluster, work)
        typer.echo(
            f"{log}, {before.layout}, {counted(count, 'step')}: measured {speed:,.1f} tokens/s/GPU, "
            f"predicted {before.tokens_per_second_per_gpu:,.1f} before and "
            f"{after.tokens_per_second_per_gpu:,.1f} now"
        )
    typer.echo(f"wrote {out}: parallel3d predict --stack {out} ...", err=True)


def _show_gpu(found: Gpu) -> None:
    table = titled_table(f"{found.name}: {found.source}", "measured", "")
    table.add_row("peak, TFLOP/s", f"{found.peak:.4g}")
    table.add_row("matmul efficiency", f"{found.gemm_efficiency:.3f}")
    table.add_row("matmul start, us", f"{found.gemm_start_us:.2f}")
    table.add_row("memory, TB/s", f"{found.bandwidth:.4g}")
    table.add_row("memory, GiB", f"{found.capacity_gib:.1f}")
    for kind, sizes in found.collectives.items():
        for ranks, (start, bandwidth, _) in sizes.items():
            seconds = f"{start:.0f} us + bytes / {bandwidth:.3g} GB/s"
            table.add_row(f"{kind}, {ranks} ranks", seconds)
    output().print(table)


# What the commands print.

_GIB = 2**30
_BAR = 24


def _show_plan(plan: MeshPlan, top: int, explain: bool, chosen: str) -> None:
    """Prints the ranked layouts, the refused ones, the best in detail, and what would change it."""
    console = output()
    console.print(_heading(plan.model, plan.cluster, plan.workload, chosen))
    if plan.candidates:
        console.print(_ranked(plan, top, console.width >= 112))
        if len(plan.close) > 1:
            console.print(
                f"The first {len(plan.close)} can't be told apart: their speeds differ by less than "
                "predictions of one machine err."
            )
    if plan.refused:
        console.print(_refused(plan))
    if not plan.candidates:
        return
    best = plan.best
    _details(console, best, "the fastest: ")
    console.print(_recomputation(plan))
    console.print(_sensitivity(plan))
    if explain:
        _explanation(console, best)
        for other in plan.layouts[1:2]:
            console.print(Text("\ncompared with the second:", style="bold"))
            console.print(Text(plan.explain(best, other)), soft_wrap=True)


def _show_next(found: MeshPlan) -> None:
    """Prints how to run the best."""
    best, cluster = found.best, found.cluster
    mesh = " ".join(f"--{axis} {n}" for axis, n in best.layout.as_dict(views=True).items())
    arguments = "".join(f"      {name}={value},\n" for name, value in _arguments(best).items())
    many, each = cluster.nodes > 1, cluster.gpus_per_node
    nodes = f"--nnodes {cluster.nodes} " if many else ""
    meet = "--rdzv-backend c10d --rdzv-endpoint HOST:29500 \\\n    " if many else ""
    to = f"slurm --nodes {cluster.nodes}" if many else "torchrun"
    typer.echo(
        f"\nto run it:\n  parallelize(model, mesh,\n{arguments}  )\n"
        f"  torchrun {nodes}--nproc-per-node {each} \\\n    {meet}train.py {mesh}\nor:\n"
        f"  parallel3d launch --to {to} --gpus-per-node {each} \\\n    {mesh} --out . -- train.py"
    )


def _arguments(best: Prediction) -> dict[str, str]:
    """What ``parallelize`` takes for it, as Python text."""
    work, layout, kind = best.workload, best.layout, KINDS[best.workload.checkpointing]
    gib = ceil(best.memory.host / _GIB)
    recompute = f"ActivationOffload(pool_gib={gib})" if gib else repr(kind.argument)
    found = {} if kind.argument is None else {"activation_checkpointing": recompute}
    if layout.shard * layout.cp > 1:
        found["fsdp"] = f"Sharding(reshard_after_forward={work.reshard_after_forward})"
    if layout.cp > 1:
        found["context_parallel"] = repr(work.cp_attention)
    if work.chunked_loss:
        found["loss_parallel"] = '"chunked"'
    if work.is_hybrid(layout.replicate):
        found["shard_optimizer_over_replicate"] = "True"
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
        f", {work.optimizer}",
        f"\nby default: {chosen}" if chosen else "",
    )


def _ranked(plan: MeshPlan, top: int, wide: bool) -> Table:
    """One row for each layout; where it isn't ``wide``, memory is one number."""
    shown = plan.layouts[:top]
    table = titled_table(
        f"{len(shown)} of {len(plan.layouts)} layouts that fit, by speed ({_names(shown)}; GiB)",
        *("", "layout", "checkpointing", "batch"),
        *(("state", "buffers", "activ.", "logits") if wide else ()),
        *("memory", "tok/s/GPU", "MFU", "step s"),
        left=3,
    )
    for place, each in enumerate(shown, 1):
        parts = [value / _GIB for value in memory_groups(each).values()]
        memory = each.memory
        table.add_row(
            str(place),
            short(each),
            setting(each),
            f"{each.micro_batch}\N{MULTIPLICATION SIGN}{each.accumulation}",
            *((f"{value:.1f}" for value in (sum(parts[:3]), *parts[3:6])) if wide else ()),
            Text(f"{memory.needed / _GIB:.1f}", _heat(memory.needed / memory.capacity)),
            f"{each.tokens_per_second_per_gpu:,.0f}",
            f"{each.mfu:.1%}",
            f"{each.step_seconds:,.2f}",
            style="bold" if place == 1 else "",
        )
    return table


def _names(shown: Sequence[Prediction]) -> str:
    """Returns the heading for layouts: the names of the axes, with cp only if a layout has it."""
    most = max(shown, key=lambda each: len(each.layout.axes))
    return " x ".join(most.layout.axes)


def _heat(part: float) -> str:
    return "green" if part < 0.8 else "yellow" if part <= 1 else "bold red"


def _refused(plan: MeshPlan) -> Table:
    title = f"{len(plan.refused)} layouts refused"
    table = titled_table(title, "why (of the nearest to fit)", "how many", "layouts")
    for reason in reasons(plan.refused):
        table.add_row(Text(reason.text), str(reason.count), reason.examples)
    return table


def _details(console: Console, each: Prediction, lead: str) -> None:
    memory, layout = each.memory, each.layout
    mesh = f"\n{lead}{', '.join(f'{axis} {n}' for axis, n in layout.as_dict(views=True).items())}"
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
    beyond = {term.name: term for term in memory.beyond}
    title = f"memory at its peak ({memory.moment})"
    sizes = _components(title, "GiB", {**memory.terms, **beyond}, _GIB)
    verdict = Text(
        f"{'fits' if each.fits else 'does not fit'} ({each.fits_probability:.0%} that it does; "
        f"{abs(each.reserve) / _GIB:.1f} GiB {'to spare' if each.reserve >= 0 else 'too much'})",
        "green" if each.fits else "bold red",
    )
    reserved = [f"{end / _GIB:.1f}" for end in each.memory_interval]
    sizes.add_section()
    sizes.add_row(
        Text.assemble("needed of ", f"{memory.capacity / _GIB:.1f}: ", verdict),
        f"{memory.needed / _GIB:.3f}",
        f"{memory.needed / memory.capacity:.0%}",
        _bar(memory.needed / memory.capacity),
    )
    sizes.add_row(
        f"reserved by torch beside the context, if there is room ({' to '.join(reserved)} in 8 of 10 runs)",
        *(f"{memory.reserved / _GIB:.3f}", "", ""),
    )
    sizes.add_row("upper bound of needed", f"{memory.upper_needed / _GIB:.3f}", "", "")
    if memory.host:
        part = memory.host / memory.host_capacity
        of = f"in the host's memory, of {memory.host_capacity / _GIB:.0f} a GPU"
        sizes.add_row(of, f"{memory.host / _GIB:.3f}", f"{part:.0%}", _bar(part))
    console.print(sizes)
    console.print(_components("step", "ms", each.time.terms, 1e-3))
    console.print(
        f"stack {each.workload.profile.name}; {FAMILIARITY[each.familiarity]}", markup=False
    )


def _components(title: str, unit: str, terms: Mapping[str, Term], scale: float) -> Table:
    """The terms above zero, in ``unit`` of ``scale``."""
    table = titled_table(title, "component", unit, "share", "")
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


def _recomputation(plan: MeshPlan) -> Table:
    """What each kind of recomputation costs the fastest layout."""
    table = titled_table(
        f"the fastest layout with each kind of checkpointing (GiB of {plan.cluster.gpu.capacity_gib:g})",
        *(
            "kind",
            "memory",
            "on the host",
            "computed again, ms",
            "waits for the host, ms",
            "tok/s/GPU",
        ),
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
            f"{each.tokens_per_second_per_gpu:,.0f}" + ("" if each.fits else ", does not fit"),
            style="bold" if is_best else "",
        )
    return table


def _sensitivity(plan: MeshPlan) -> Table:
    table = titled_table(
        "tokens/s/GPU of the fastest, if this were", "", "half", "as it is", "twice"
    )
    for name, tried in plan.sensitivity().items():
        now = tried[1][1]
        cells = []
        for value, speed, fits in tried:
            change = f" ({speed / now - 1:+.1%})" if speed != now else ""
            cell = Text(f"{value}: {speed:,.0f}{change}")
            if not fits:
                cell.append(" does not fit", "red")
            cells.append(cell)
        table.add_row(name.replace("_", " "), *cells)
    return table


def _explanation(console: Console, each: Prediction) -> None:
    console.print(Text("\nhow each number is computed:", style="bold"))
    console.print(Text(each.explain()), soft_wrap=True)
