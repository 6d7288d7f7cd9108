"""``parallel3d dryrun``: runs a training script as one rank of any world, without its hardware."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parallel3d.errors import DryRunError
from parallel3d.tools.cli.options import Html, Json, panel
from parallel3d.tools.launch.local import example
from parallel3d.tools.terminal import Busy

if TYPE_CHECKING:
    from parallel3d.tools.dryrun.result import DryRun

_world, _costs, _show = map(panel, ("World", "Predicted durations", "Output"))


def dryrun_command(
    script: Annotated[str, typer.Argument(help="The script, after --.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments.", show_default=False)
    ] = None,
    world_size: Annotated[int | None, _world("Ranks; by default nodes x GPUs per node.")] = None,
    rank: Annotated[int, _world("The rank to run as.")] = 0,
    against: Annotated[int | None, _world("Run as this rank too, and compare the two.")] = None,
    nodes: Annotated[int | None, _world("Number of nodes; 1 by default.", min=1)] = None,
    gpus_per_node: Annotated[int, _world("Ranks of a node.", min=1)] = 8,
    steps: Annotated[int | None, _world("Optimizer steps until the script is ended.", min=1)] = 2,
    backend: Annotated[str, _world("Backend of the collectives: nccl or gloo.")] = "nccl",
    check_streams: Annotated[
        bool, _world("Look for memory that two streams use with no wait between.")
    ] = False,
    check_capture: Annotated[
        bool, _world("Look for what keeps a training step out of a CUDA graph; at least 4 steps.")
    ] = False,
    gpu: Annotated[str, _costs("For example h100-80gb-sxm, a100, h200.")] = "h100-80gb-sxm",
    nic: Annotated[float | None, _costs("GB/s from each GPU to other nodes.")] = None,
    profile: Annotated[Path | None, _costs("A TOML file with more GPUs, from calibrate.")] = None,
    json: Json = False,
    html: Html = None,
    trace: Annotated[Path | None, _show("Write a trace for Perfetto or chrome://tracing.")] = None,
) -> None:
    """Runs the program as one rank of any world: no hardware, no weights, no communication.

    Shows every collective, memory over time with its peak explained, parameters and placements, predicted
    durations, and what is likely to be wrong. Exit code 1 if two ranks diverge, streams race, or a step
    can't be captured.
    """
    with Busy("importing torch") as busy:
        from parallel3d.planner import Cluster
        from parallel3d.testing.worlds import check_rank
        from parallel3d.tools.dryrun import record, to_json
        from parallel3d.tools.dryrun.compare import compare
        from parallel3d.tools.dryrun.report import write_report
        from parallel3d.tools.dryrun.summary import print_summary
        from parallel3d.tools.dryrun.timeline import timeline
        from parallel3d.tools.dryrun.trace import write_trace
        from parallel3d.tools.dryrun.warnings import all_warnings
        from parallel3d.tools.dryrun.world import script as as_program

        product = (nodes or 1) * gpus_per_node
        world = product if world_size is None else world_size
        if nodes is not None and world != product:
            raise DryRunError(
                f"--world-size {world} is not --nodes {nodes} x --gpus-per-node {gpus_per_node} = "
                f"{product}; leave one out"
            )
        check_rank(rank, world)
        if against == rank:
            raise DryRunError(
                f"--against {against} is the same rank as --rank {rank}; give another"
            )
        if against is not None and not 0 <= against < world:
            raise DryRunError(f"--against {against}: it must be a rank from 0 to {world - 1}")
        _check_files(html=html, trace=trace)
        if check_capture and steps is not None:
            steps = max(steps, 4)  # two warm up, and the fourth reads what the third has left
        program = as_program(found := example(script), arguments or [])
        cluster = Cluster.of(gpu, max(-(-world // gpus_per_node), 1), gpus_per_node, nic, profile)
        busy.say(f"running {found} as rank {rank} of {world:,}")
        with redirect_stdout(sys.stderr):  # stdout is for the command's own output
            run = record(
                program,
                world,
                rank,
                steps=steps,
                gpus_per_node=gpus_per_node,
                backend=backend,
                check_streams=check_streams,
                check_capture=check_capture,
            )
        other = divergence = None
        if against is not None:
            options = ["--gpus-per-node", str(gpus_per_node), "--backend", backend]
            options += ["--world-size", str(world), "--rank", str(against)]
            options += ["--steps", str(steps)] if steps is not None else []
            busy.stop()  # that process has its own
            other = _in_another_process(options, [found, *(arguments or [])])
            divergence = compare(run, other)
        busy.say("predicting durations")
        times = timeline(run, cluster)
        run = replace(run, warnings=all_warnings(run, times, divergence))
        if trace is not None:
            write_trace(run, trace, times)
        if html is not None:
            busy.say(f"writing {html}")
            write_report(run, html, times, divergence=divergence, other=other)
    if json:
        typer.echo(to_json(run))
    else:
        print_summary(run, times, divergence)
        if other is not None and divergence is None:
            typer.echo(f"ranks {run.rank} and {other.rank} communicate alike")
    if divergence is not None or run.races or run.obstacles:
        raise typer.Exit(1)


def _check_files(**files: Path | None) -> None:
    """Raises, before the program runs, if one of the files (option -> path) can't be written."""
    for option, path in files.items():
        if path is None:
            continue
        if path.is_dir():
            raise DryRunError(
                f"--{option} {path} is a folder; give a file, such as {path / option}"
            )
        if not path.parent.is_dir():
            raise DryRunError(f"--{option} {path}: there is no folder {path.parent}; make it first")


def _in_another_process(options: Sequence[str], command: Sequence[str]) -> DryRun:
    """Returns the dry run of another rank: runs this command, with ``options``, in a new process."""
    from parallel3d.tools.dryrun.result import from_json

    with tempfile.TemporaryFile("w+") as out:
        dryrun = [sys.executable, "-m", "parallel3d", "dryrun", "--json", *options, "--", *command]
        if subprocess.run(dryrun, stdout=out, check=False).returncode:
            shown = shlex.join([*options, "--", *command])
            raise DryRunError(f"the dry run of the other rank failed: parallel3d dryrun {shown}")
        out.seek(0)
        return from_json(out.read())
