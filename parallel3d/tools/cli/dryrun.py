"""``parallel3d dryrun``: a training script as one rank of any world, without its hardware."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parallel3d.errors import DryRunError
from parallel3d.tools.cli import tables

if TYPE_CHECKING:
    from parallel3d.planner import Cluster
    from parallel3d.tools.dryrun.result import DryRun


_WORLD, _COSTS, _SHOW = "World", "Predicted durations", "Output"


def dryrun_command(
    script: Annotated[str, typer.Argument(help="The script, after --.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments.", show_default=False)
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(rich_help_panel=_WORLD, help="Ranks; --nodes x --gpus-per-node if not given."),
    ] = None,
    rank: Annotated[int, typer.Option(rich_help_panel=_WORLD, help="The rank that is played.")] = 0,
    against: Annotated[
        int | None,
        typer.Option(rich_help_panel=_WORLD, help="Play this rank too, and compare the two."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(rich_help_panel=_WORLD, min=1, help="How many nodes; 1 by default."),
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option(rich_help_panel=_WORLD, min=1, help="Ranks of a node.")
    ] = 8,
    steps: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_WORLD, min=1, help="Optimizer steps, then the script is ended."
        ),
    ] = 2,
    backend: Annotated[
        str, typer.Option(rich_help_panel=_WORLD, help="Whose collectives: nccl or gloo.")
    ] = "nccl",
    gpu: Annotated[
        str, typer.Option(rich_help_panel=_COSTS, help="For example h100-80gb-sxm, a100, h200.")
    ] = "h100-80gb-sxm",
    nic: Annotated[
        float | None,
        typer.Option(rich_help_panel=_COSTS, help="GB/s from each GPU to other nodes."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_COSTS, help="A TOML file with more GPUs, as calibrate writes."
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_SHOW, help="JSON alone on stdout.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(rich_help_panel=_SHOW, help="Write a page with charts that needs no network."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(rich_help_panel=_SHOW, help="Write a trace for Perfetto or chrome://tracing."),
    ] = None,
) -> None:
    """Run the real program as one rank of any world: no hardware, no weights, no communication.

    Shows every collective, memory over time with its peak explained, parameters and placements, what is
    predicted to take how long, and what is likely to be wrong. Exits with 1 if two ranks diverge.
    """
    from parallel3d.testing.worlds import check_rank
    from parallel3d.tools.dryrun.record import record
    from parallel3d.tools.dryrun.world import script as as_program

    world = _world(world_size, nodes, gpus_per_node)
    check_rank(rank, world)
    _check_against(against, rank, world)
    _check_folders(html=html, trace=trace)
    program = as_program(script, arguments or [])
    cluster = _cluster(gpu, world, gpus_per_node, nic, profile)
    if sys.stderr.isatty():  # it may take a minute
        typer.echo(f"playing rank {rank} of {world:,}: {script}", err=True)
    with redirect_stdout(sys.stderr):  # of the script, so that ours is ours
        run = record(
            program, world, rank, steps=steps, gpus_per_node=gpus_per_node, backend=backend
        )
    other = None
    if against is not None:
        options = ["--gpus-per-node", str(gpus_per_node), "--backend", backend]
        options += ["--world-size", str(world), "--rank", str(against)]
        options += ["--steps", str(steps)] if steps is not None else []
        other = _in_another_process(options, [script, *(arguments or [])])
    _show(run, other, cluster, json=json, html=html, trace=trace)


def _world(world_size: int | None, nodes: int | None, gpus_per_node: int) -> int:
    product = (nodes or 1) * gpus_per_node
    if world_size is None:
        return product
    if nodes is not None and world_size != product:
        raise DryRunError(
            f"--world-size {world_size} is not --nodes {nodes} x --gpus-per-node {gpus_per_node} = "
            f"{product}; leave one out"
        )
    return world_size


def _check_against(against: int | None, rank: int, world: int) -> None:
    """Before the program is played, which may take a minute."""
    if against is None:
        return
    if not 0 <= against < world:
        raise DryRunError(f"--against {against}: it must be a rank from 0 to {world - 1}")
    if against == rank:
        raise DryRunError(
            f"--against {against} is the rank that is played (--rank {rank}); give another"
        )


def _check_folders(**files: Path | None) -> None:
    """What can't be written is said before the program is played."""
    for option, path in files.items():
        if path is None:
            continue
        if path.is_dir():
            raise DryRunError(
                f"--{option} {path} is a folder; give a file, such as {path / option}"
            )
        if not path.parent.is_dir():
            raise DryRunError(f"--{option} {path}: there is no folder {path.parent}; make it first")


def _cluster(
    gpu: str, world: int, gpus_per_node: int, nic: float | None, profile: Path | None
) -> Cluster:
    from parallel3d.planner import Cluster

    return Cluster.of(gpu, max(-(-world // gpus_per_node), 1), gpus_per_node, nic, profile)


def _in_another_process(options: Sequence[str], command: Sequence[str]) -> DryRun:
    """What this command says of another rank: the script begins anew there."""
    from parallel3d.tools.dryrun.as_json import from_json

    with tempfile.TemporaryFile("w+") as out:
        asked = [sys.executable, "-m", "parallel3d", "dryrun", "--json", *options, "--"]
        done = subprocess.run([*asked, *command], stdout=out, check=False)
        if done.returncode:
            shown = [*options, "--", *command]
            raise DryRunError(
                f"the dry run of the other rank failed: parallel3d dryrun {shlex.join(shown)}"
            )
        out.seek(0)
        return from_json(out.read())


def _show(
    run: DryRun,
    other: DryRun | None,
    cluster: Cluster,
    *,
    json: bool,
    html: Path | None,
    trace: Path | None,
) -> None:
    from dataclasses import replace

    from parallel3d.tools.dryrun.as_json import to_json
    from parallel3d.tools.dryrun.compare import compare
    from parallel3d.tools.dryrun.report import write_report
    from parallel3d.tools.dryrun.summary import print_summary
    from parallel3d.tools.dryrun.timeline import timeline
    from parallel3d.tools.dryrun.trace import write_trace
    from parallel3d.tools.dryrun.warnings import all_warnings

    divergence = compare(run, other) if other is not None else None
    times = timeline(run, cluster)
    run = replace(run, warnings=all_warnings(run, times, divergence))
    if trace is not None:
        write_trace(run, trace, times)
    if html is not None:
        write_report(run, html, times, divergence=divergence, other=other)
    if json:
        typer.echo(to_json(run))
    else:
        print_summary(run, times, divergence, console=tables.output())
        if other is not None and divergence is None:
            typer.echo(f"ranks {run.rank} and {other.rank} communicate alike")
    if divergence is not None:
        raise typer.Exit(1)
