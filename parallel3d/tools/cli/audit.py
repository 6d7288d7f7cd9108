"""``parallel3d audit``: checks relations between trainings of a program, and names what differs first."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from parallel3d.errors import Parallel3dError
from parallel3d.tools.cli.options import Json, function_named, object_named, panel
from parallel3d.tools.terminal import Busy, output

if TYPE_CHECKING:
    from parallel3d.mesh import MeshLayout
    from parallel3d.testing import AuditTable, Difference, Verification

_what, _layout, _how = map(panel, ("What", "Layout", "How"))
_NAME = "PACKAGE.MODULE:NAME"
_function_of = partial(_what, metavar=_NAME)


class Recompute(StrEnum):
    """The values of ``--activation-checkpointing``."""

    none, full, selective, offload = "none", "full", "selective", "offload"


_RECOMPUTED = {each: each.value for each in Recompute} | {
    Recompute.none: False,
    Recompute.full: True,
}
_NAMES = 4  # parameters to name, before "more"
_WORDS = {
    "the model": ("build", "build_model", "make_model", "get_model", "create_model"),
    "--input": ("batch", "sample", "make_batch", "get_batch", "example"),
    "--loss": ("loss", "loss_fn", "loss_of", "compute_loss"),
    "--step": ("training_step", "train_step", "step"),
    "--plan": ("PLAN", "plan", "TP_PLAN", "tp_plan"),
}
"""What each function of a program is usually named."""


def audit_command(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar=f"{_NAME}|FILE.py",
            help="A function without arguments that builds the model; or a file, in which functions named "
            "build, batch, loss, training_step and a plan named PLAN are looked for.",
        ),
    ],
    relation: Annotated[
        list[str] | None,
        _what(
            "What must hold: plain, accumulation, rotated, frozen, resumed, norm, exported, recomputed, "
            "repeated, compiled; several by repeating it; all but compiled if not given. plain alone, of "
            "parallel3d alone, runs on simulated ranks and names the first module that differs."
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        _what(
            "parallel3d, torch, accelerate, transformers, megatron_fsdp; several by repeating it; "
            "parallel3d if not given."
        ),
    ] = None,
    step: Annotated[
        str | None,
        _function_of(
            "step(model, optimizer, micro_batches) -> loss or (loss, gradient norm): your training's own "
            "step; by default the engine's usual one."
        ),
    ] = None,
    input: Annotated[
        str | None,
        _function_of(
            "A batch (a tensor, a tuple or a dict of tensors), or a function that makes one, without "
            "arguments or of a sample's number. By default made as the model's config or first layer says."
        ),
    ] = None,
    loss: Annotated[
        str | None,
        _function_of(
            "loss(model, *inputs) -> scalar; by default the model's own, or its output's mean square."
        ),
    ] = None,
    plan: Annotated[
        str | None,
        _what("The tensor-parallel plan; auto if --tp is above 1.", metavar=f"auto|{_NAME}"),
    ] = None,
    parallelize: Annotated[
        str | None,
        _function_of("(model, mesh) -> model, to use instead of parallel3d.parallelize."),
    ] = None,
    shard_batch: Annotated[
        str | None,
        _function_of(
            "(inputs, mesh) -> a cp rank's part of its data rank's inputs, with --cp; by default "
            "parallel3d.cp.shard_batch."
        ),
    ] = None,
    seed_of: Annotated[
        str | None,
        _function_of(
            "seed_of(layout, rank, step): your training's seed of a rank, for dropout; by default that of "
            "parallel3d.seed_step."
        ),
    ] = None,
    replicate: Annotated[int, _layout("Copies of the sharded model.")] = 1,
    shard: Annotated[int, _layout("Ranks that share a copy.")] = 1,
    cp: Annotated[int, _layout("Ranks that share each sequence.")] = 1,
    tp: Annotated[int, _layout("Ranks that share each layer's computation.")] = 1,
    ep: Annotated[int, _layout("Ranks that share the experts; it divides shard x cp x tp.")] = 1,
    steps: Annotated[int, _how("Optimizer steps.")] = 3,
    micro_batches: Annotated[int, _how("Micro-batches of each step.")] = 1,
    tolerance: Annotated[float, _how("Relative, in float64; ten times that for weights.")] = 1e-9,
    fp32: Annotated[bool, _how("Compare in float32 too, with SGD.")] = False,
    loss_parallel: Annotated[
        bool, _how("parallelize(loss_parallel=True).", "--loss-parallel")
    ] = False,
    activation_checkpointing: Annotated[
        Recompute, _how("What blocks keep for backward: parallelize(activation_checkpointing=).")
    ] = Recompute.none,
    seed: Annotated[int, _how("Seed of the initial weights.")] = 0,
    as_json: Json = False,
) -> None:
    """Trains a model several times on local processes, and checks what must hold between these runs.

    Exit code 0: all that could be run holds. 1: something fails; parameters, factor and step are named, and
    the first module that differs. 2: it can't be run. Started by torchrun, each process is a rank.
    """
    sizes = {"replicate": replicate, "shard": shard, "cp": cp, "tp": tp, "ep": ep}
    for name, size in sizes.items():
        if size < 1:
            raise Parallel3dError(f"--{name} {size}: a mesh axis has at least 1 rank")
    alone = relation == ["plain"] and not (engine or step)
    with Busy(f"importing {model}") as busy:
        named = {"--input": input, "--loss": loss, "--step": step, "--plan": plan}
        if model.endswith(".py"):
            model, named = _found_in(Path(model), named, tp)
            input, loss, step, plan = named.values()
        own = ("steps", "micro_batches", "tolerance", "fp32", "seed")
        options: dict[str, Any] = {name: ctx.params[name] for name in own}
        options |= {
            "loss": function_named("--loss", loss),
            "seed_of": function_named("--seed-of", seed_of),
            "shard_batch": function_named("--shard-batch", shard_batch),
        }
        theirs = {
            "loss_parallel": loss_parallel,
            "activation_checkpointing": _RECOMPUTED[activation_checkpointing],
        }
        if parallelize is None:
            options |= {"tp_plan": _plan(plan, tp), **theirs}
        else:
            for name, value in {"plan": plan, **theirs}.items():
                if value:
                    raise Parallel3dError(
                        f"--{name.replace('_', '-')} is for parallel3d.parallelize: leave it out with "
                        "--parallelize"
                    )
            options |= {"apply": function_named("--parallelize", parallelize)}
        build, batch = function_named("the model", model), input and object_named("--input", input)
        from parallel3d.mesh import MeshLayout

        if not alone and replicate * shard * cp * tp == 1:
            sizes["shard"] = 2
        layout = MeshLayout(**sizes)
        if alone:
            busy.say(f"{model}: training it plain and on {layout.world_size} ranks, and comparing")
            found, is_first = _verified(build, batch, layout, options)
        else:
            busy.say(f"{model}: training it several times on {layout.world_size} processes")
            asked = {"relations": relation, "engines": engine}
            given: dict[str, Any] = {name: value for name, value in asked.items() if value}
            given |= {"step": function_named("--step", step), "layout": layout}
            found, is_first = _audited(build, batch, options, given)
    if is_first and as_json:
        data = _as_json(found) if alone else found.as_dict()
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
    elif is_first and alone:
        _show(found, model, parallelize or "parallel3d.parallelize")
    elif is_first:
        _show_table(found, model)
        failed = {(each.relation, each.engine) for each in found.failed}
        if ("plain", "parallel3d") in failed and "WORLD_SIZE" not in os.environ:
            first, _ = _verified(build, batch, layout, options)
            if first.difference is not None:
                output(width=100).print(_difference(first.difference))
    wrong = found.difference if alone else found.failed
    if wrong:
        raise typer.Exit(1)


def _found_in(
    file: Path, given: dict[str, str | None], tp: int
) -> tuple[str, dict[str, str | None]]:
    """Imports ``file``, and returns ("FILE:NAME" of the function that builds the model, ``given`` with such
    texts for options that are None). ``given``: option -> text; ``_WORDS``: what names to look for. With
    ``tp`` 1 no plan is looked for."""
    if not file.is_file():
        raise Parallel3dError(f"{file} is no file; give FILE.py, or {_NAME}")
    sys.path.insert(0, str(file.resolve().parent))
    try:
        module = importlib.import_module(file.stem)
    except Exception as error:
        raise Parallel3dError(f"importing {file} raised {type(error).__name__}: {error}") from error

    def first(what: str) -> str | None:
        name = next((word for word in _WORDS[what] if hasattr(module, word)), None)
        return None if name is None else f"{file.stem}:{name}"

    model = first("the model")
    if model is None:
        functions = [
            name
            for name, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == file.stem
        ]
        raise Parallel3dError(
            f"{file} has no function named {', '.join(_WORDS['the model'])}: give the one that builds the "
            f"model as {file.stem}:NAME; there are {', '.join(functions) or 'none'}"
        )
    found = {what: text or first(what) for what, text in given.items()}
    if tp == 1 and given["--plan"] is None:
        found["--plan"] = None
    return model, found


def _on_ranks(examine: Callable[[], Any]) -> tuple[Any, bool]:
    """Returns (``examine()``, whether this process prints it); under torchrun within a gloo process group."""
    from torch import distributed as dist

    if int(os.environ.get("WORLD_SIZE", "0")) <= 1 or dist.is_initialized():
        return examine(), True
    dist.init_process_group("gloo")
    try:
        return examine(), dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def _audited(
    build: Any, batch: Any, options: dict[str, Any], given: dict[str, Any]
) -> tuple[Any, bool]:
    from parallel3d.testing import audit

    if "apply" in options:
        raise Parallel3dError("--parallelize is for --relation plain alone")
    names = ("loss", "shard_batch", "seed", "steps", "tp_plan")
    given |= {name: options[name] for name in names}
    if options["loss_parallel"]:
        given["loss_parallel"] = True
    return _on_ranks(lambda: audit(build, batch, **given))


def _show_table(found: AuditTable, model: str) -> None:
    """Prints a table of the audit: a row with the outcome for each relation and engine."""
    from parallel3d.testing import RELATIONS

    console, sizes = output(width=100), _sizes(found.layout)
    console.print(Text.assemble((model, "bold"), f" on {sizes}, float64, in {found.seconds:.0f} s"))
    if found.made:
        console.print(f"inputs: {found.made}")
    styles = {"holds": "green", "fails": "bold red", "not run": "yellow"}
    table = Table("what must hold", "engine", "", box=box.SIMPLE_HEAD)
    for each in found.outcomes:
        says = f"{each.relation}: {RELATIONS[each.relation].says}"
        table.add_row(says, each.engine, Text(str(each), style=styles[each.verdict]))
    console.print(table)


def _sizes(layout: MeshLayout) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in layout.as_dict(views=True).items())


def _verified(
    build: Any, batch: Any, layout: MeshLayout, options: dict[str, Any]
) -> tuple[Any, bool]:
    import torch

    from parallel3d.testing import verify

    started = int(os.environ.get("WORLD_SIZE", "0"))
    if started <= 1:
        # Simulated ranks are threads, which compute at once.
        torch.set_num_threads(max(1, torch.get_num_threads() // layout.world_size))
    elif started != layout.world_size:
        raise Parallel3dError(
            f"torchrun has started {started} processes, but {' x '.join(map(str, layout.sizes))} are "
            f"{layout.world_size} ranks"
        )
    return _on_ranks(lambda: verify(build, batch, layout, **options))


def _plan(text: str | None, tp: int) -> Any:
    if text is None:
        return "auto" if tp > 1 else None
    if text == "auto":
        return text
    value = object_named("--plan", text)
    if not isinstance(value, Mapping | str):
        raise Parallel3dError(
            f"--plan {text} is a {type(value).__name__}: a dict of pattern -> style is needed, or auto"
        )
    return value


def _as_json(found: Verification) -> dict[str, Any]:
    layout, parity = found.layout, found.parity
    return {
        "layout": layout.as_dict(views=True),
        "equal": found.difference is None,
        "difference": None if found.difference is None else found.difference.as_dict(),
        "largest": {"loss": parity.loss, "gradients": parity.grads, "weights": parity.weights},
        "dropouts": found.dropouts,
        "without_gradient": list(found.without_gradient),
        "inputs": found.made or None,
    }


def _show(found: Verification, model: str, parallelize: str) -> None:
    """Prints the first module that differs from the plain model; if none does, the largest differences."""
    console, layout, parity = output(width=100), found.layout, found.parity
    made = f"({layout.world_size} ranks), made parallel by {parallelize}"
    console.print(Text.assemble((model, "bold"), f" on {_sizes(layout)} {made}"))
    if found.difference is not None:
        console.print(_difference(found.difference))
        return
    if found.made:
        console.print(f"inputs: {found.made}")
    console.print(Text("equal to the plain model", style="bold green"))
    for dtype, loss in parity.loss.items():
        console.print(
            f"largest relative differences in {dtype}: loss {loss:.1e}, gradients "
            f"{parity.grads[dtype]:.1e}, weights {parity.weights[dtype]:.1e}"
        )
    if calls := found.dropouts:
        one = "1 call of dropout draws as it must"
        console.print(one if calls == 1 else f"{calls} calls of dropout draw as they must")
    if names := found.without_gradient:
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        text = (
            f"not compared: gradients of {', '.join(names[:_NAMES])}{more}, which the loss doesn't reach, "
            "and outputs that it doesn't read (--loss)"
        )
        console.print(Text(text, style="yellow"))


def _difference(found: Difference) -> Panel:
    rows = Table.grid(Column(style="dim"), Column(overflow="fold"), padding=(0, 2))
    kind = f" ({found.module_type})" if found.module_type else ""
    rows.add_row("module", Text(f"{found.module or '(the model itself)'}{kind}", style="bold red"))
    rows.add_row("what", Text(found.what))
    if math.isfinite(found.difference):
        rows.add_row("differs by", f"{found.difference:.3g} (relative; {found.bound:g} is allowed)")
    if found.hint:
        rows.add_row("looks like", Text(found.hint))
    rows.add_row("where", f"step {found.step}, rank {found.rank}")
    return Panel(
        rows,
        title=Text("first difference from the plain model", style="bold red"),
        title_align="left",
        box=box.ROUNDED,
        border_style="red",
        expand=False,
    )
