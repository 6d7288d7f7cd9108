"""``parallel3d doctor``: what is wrong with this machine, or with the nodes of a job."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parallel3d.tools.cli.options import GpuName, Json, Nic, Profile, Replicate, Shard, Tp

if TYPE_CHECKING:
    from parallel3d.tools.doctor import Diagnosis


def doctor_command(
    replicate: Replicate = 1,
    shard: Shard = -1,
    tp: Tp = 1,
    checkpoint: Annotated[
        Path | None, typer.Option(help="The folder that checkpoints are to go to.")
    ] = None,
    gpu: GpuName = None,
    profile: Profile = None,
    nic: Nic = None,
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives/--no-collectives", help="Measure on every axis of the mesh; with ranks."
        ),
    ] = True,
    megabytes: Annotated[
        float | None, typer.Option(help="Of a tensor; 256 on CUDA, 4 on the CPU.", min=0.01)
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that ranks wait for each other.", min=1)
    ] = 60.0,
    json_only: Json = False,
) -> None:
    """Versions, variables, network, limits, devices, clocks, collectives: each finding says what to do.

    Alone it looks at this machine. Started on all ranks by torchrun (--no-python parallel3d doctor) or
    srun, at all nodes, what differs between them, and what collectives take on every axis of the mesh.
    Ends with 1 if there is an error, 0 if not.
    """
    from parallel3d.mesh import MeshLayout
    from parallel3d.tools.doctor import Options, doctor

    options = Options(
        layout=MeshLayout(replicate, shard, tp),
        checkpoint=checkpoint,
        gpu=gpu,
        profile=profile,
        nic=nic,
        collectives=collectives,
        megabytes=megabytes,
        timeout=timeout,
    )
    raise typer.Exit(int(doctor(options, _as_json if json_only else _as_tables).failed))


def _as_json(found: Diagnosis) -> None:
    typer.echo(json.dumps(found.to_json(), indent=1))
    sys.stdout.flush()


def _as_tables(found: Diagnosis) -> None:
    from rich.console import Console

    from parallel3d.tools.doctor.report import render

    console = Console()
    wide = console.is_terminal or "COLUMNS" in os.environ
    render(found, console if wide else Console(width=140))
    sys.stdout.flush()
