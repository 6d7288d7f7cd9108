"""``parallel3d verify``: is the parallel model the plain one, and if not, which module differs first?"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parallel3d.errors import Parallel3dError
from parallel3d.mesh.axes import AXES

if TYPE_CHECKING:
    from parallel3d.testing import Verification


_WHAT, _LAYOUT, _HOW, _SHOW = "What", "Layout", "How", "Output"
_NAME = "PACKAGE.MODULE:NAME"


def _option(*names: str, panel: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help, metavar=metavar)


def verify_command(
    model: Annotated[
        str,
        typer.Argument(metavar=_NAME, help="A function without arguments that builds the model."),
    ],
    input: Annotated[
        str,
        _option(
            "--input",
            panel=_WHAT,
            metavar=_NAME,
            help="A function: number of a sample -> its inputs, a tensor, a tuple or a dict of tensors.",
        ),
    ],
    loss: Annotated[
        str | None,
        _option(
            "--loss",
            panel=_WHAT,
            metavar=_NAME,
            help="loss(model, *inputs) -> scalar; by default the model's own, or the mean square of its "
            "output.",
        ),
    ] = None,
    plan: Annotated[
        str | None,
        _option(
            "--plan",
            panel=_WHAT,
            metavar=f"auto|{_NAME}",
            help="The tensor-parallel plan; auto where --tp is above 1.",
        ),
    ] = None,
    parallelize: Annotated[
        str | None,
        _option(
            "--parallelize",
            panel=_WHAT,
            metavar=_NAME,
            help="A function (model, mesh) -> model of yours, in place of parallel3d.parallelize.",
        ),
    ] = None,
    seed_of: Annotated[
        str | None,
        _option(
            "--seed-of",
            panel=_WHAT,
            metavar=_NAME,
            help="seed_of(layout, rank, step): what your training seeds a rank with, for dropout; by "
            "default what parallel3d.seed_step does.",
        ),
    ] = None,
    replicate: Annotated[
        int, _option("--replicate", panel=_LAYOUT, help="Copies of the sharded model.")
    ] = 1,
    shard: Annotated[int, _option("--shard", panel=_LAYOUT, help="Ranks that share a copy.")] = 1,
    tp: Annotated[
        int, _option("--tp", panel=_LAYOUT, help="Ranks that share each layer's computation.")
    ] = 1,
    steps: Annotated[int, _option("--steps", panel=_HOW, help="Optimizer steps (AdamW).")] = 2,
    micro_batches: Annotated[
        int, _option("--micro-batches", panel=_HOW, help="Micro-batches of each step.")
    ] = 1,
    tolerance: Annotated[
        float,
        _option("--tolerance", panel=_HOW, help="Relative, in float64; of weights ten times that."),
    ] = 1e-9,
    fp32: Annotated[
        bool, _option("--fp32/--no-fp32", panel=_HOW, help="Compare in float32 too, with SGD.")
    ] = False,
    loss_parallel: Annotated[
        bool, _option("--loss-parallel", panel=_HOW, help="parallelize(loss_parallel=True).")
    ] = False,
    activation_checkpointing: Annotated[
        bool,
        _option("--activation-checkpointing", panel=_HOW, help="Recompute blocks in backward."),
    ] = False,
    seed: Annotated[int, _option("--seed", panel=_HOW, help="Of the initial weights.")] = 0,
    as_json: Annotated[bool, _option("--json", panel=_SHOW, help="JSON alone on stdout.")] = False,
) -> None:
    """Trains the plain and the parallel model side by side on simulated ranks and compares them.

    Exit code 0: equal. 1: they differ, and the first module that does is named. 2: it can't be tried.
    Started by torchrun, each process is a rank, and none is simulated.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # what lies in the current directory, as with python -m
    given: dict[str, Any] = {"tp_plan": _plan(plan, tp)}
    given |= {"loss_parallel": loss_parallel, "activation_checkpointing": activation_checkpointing}
    if parallelize is not None:
        _check_alone(plan, loss_parallel, activation_checkpointing)
        given = {"apply": _function("--parallelize", parallelize)}
    options = {
        "loss": None if loss is None else _function("--loss", loss),
        "seed_of": None if seed_of is None else _function("--seed-of", seed_of),
        "steps": steps,
        "micro_batches": micro_batches,
        "tolerance": tolerance,
        "fp32": fp32,
        "seed": seed,
    }
    build, batch = _function("the model", model), _function("--input", input)
    found, first = _run(build, batch, (replicate, shard, tp), {**options, **given})
    if first:
        if as_json:
            typer.echo(json.dumps(_as_json(found), indent=2, allow_nan=False))
        else:
            from parallel3d.tools.cli.verify_report import show

            show(found, model, parallelize or "parallel3d.parallelize")
    if found.difference is not None:
        raise typer.Exit(1)


def _run(
    build: Any, batch: Any, sizes: tuple[int, int, int], options: dict[str, Any]
) -> tuple[Verification, bool]:
    """What was found, and whether this process is the one that says so."""
    for name, size in zip(AXES, sizes, strict=True):
        if size < 1:
            raise Parallel3dError(f"--{name} {size}: a mesh axis has at least 1 rank")
    from torch import distributed as dist

    from parallel3d.mesh import MeshLayout
    from parallel3d.testing import verify

    layout = MeshLayout(*sizes)
    started = int(os.environ.get("WORLD_SIZE", "0"))
    if started <= 1 or dist.is_initialized():
        return verify(build, batch, layout, **options), True
    if started != layout.world_size:
        raise Parallel3dError(
            f"torchrun has started {started} processes, but {sizes[0]} x {sizes[1]} x {sizes[2]} are "
            f"{layout.world_size} ranks"
        )
    dist.init_process_group("gloo")
    try:
        return verify(build, batch, layout, **options), dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def _plan(text: str | None, tp: int) -> Any:
    if text is None:
        return "auto" if tp > 1 else None
    if text == "auto":
        return text
    value = _object("--plan", text)
    if not isinstance(value, Mapping | str):
        raise Parallel3dError(
            f"--plan {text} is a {type(value).__name__}: a dict of pattern -> style is needed, or auto"
        )
    return value


def _check_alone(plan: str | None, loss_parallel: bool, checkpointing: bool) -> None:
    """What only parallel3d.parallelize would read."""
    idle = (
        ("--plan", plan is not None),
        ("--loss-parallel", loss_parallel),
        ("--activation-checkpointing", checkpointing),
    )
    for name, used in idle:
        if used:
            raise Parallel3dError(
                f"{name} is for parallel3d.parallelize: leave it out with --parallelize"
            )


def _function(what: str, text: str) -> Any:
    value = _object(what, text)
    if not callable(value):
        raise Parallel3dError(f"{what}: {text} is a {type(value).__name__}, which can't be called")
    return value


def _object(what: str, text: str) -> Any:
    """What ``package.module:name`` names."""
    module_name, colon, path = text.partition(":")
    if not colon or not module_name or not path:
        raise Parallel3dError(f"{what}: {text!r} must be package.module:name")
    try:
        value: Any = importlib.import_module(module_name)
    except Exception as error:
        raise Parallel3dError(
            f"{what}: importing {module_name!r} raised {type(error).__name__}: {error}"
        ) from error
    for part in path.split("."):
        if not hasattr(value, part):
            near = get_close_matches(part, dir(value), n=3, cutoff=0.5)
            meant = f"; the nearest: {', '.join(near)}" if near else ""
            raise Parallel3dError(f"{what}: {module_name!r} has no {part!r}{meant}")
        value = getattr(value, part)
    return value


def _as_json(found: Verification) -> dict[str, Any]:
    layout, parity = found.layout, found.parity
    return {
        "layout": dict(zip(AXES, layout.sizes, strict=True)),
        "equal": found.difference is None,
        "difference": None if found.difference is None else found.difference.as_dict(),
        "largest": {"loss": parity.loss, "gradients": parity.grads, "weights": parity.weights},
        "dropouts": found.dropouts,
        "without_gradient": list(found.without_gradient),
    }
