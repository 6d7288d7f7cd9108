"""``parallel3d doctor``: finds what is wrong with this machine, or with the nodes of a job."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from parallel3d.tools.cli import options as o


def doctor_command(
    ctx: typer.Context,
    replicate: o.Replicate = 1,
    shard: o.Shard = -1,
    cp: o.Cp = 1,
    tp: o.Tp = 1,
    checkpoint: Annotated[Path | None, o.plain("The folder for checkpoints.")] = None,
    gpu: o.GpuName = None,
    profile: o.Profile = None,
    nic: o.Nic = None,
    collectives: Annotated[bool, o.plain("Time collectives on every axis of the mesh.")] = True,
    megabytes: Annotated[
        float | None, o.plain("Size of the measured tensors; 256 on CUDA, 4 on the CPU.", min=0.01)
    ] = None,
    timeout: Annotated[float, o.plain("Seconds that ranks wait for each other.", min=1)] = 60.0,
    json_only: o.Json = False,
) -> None:
    """Checks versions, variables, network, limits, devices, clocks and collectives, with advice.

    Alone it examines this machine. Started on all ranks by torchrun (--no-python parallel3d doctor) or srun,
    it examines all nodes, what differs between them, and the speed of collectives on every axis of the mesh.
    Exit code 1 if there is an error, otherwise 0.
    """
    from parallel3d.tools.terminal import Busy, output

    with Busy("importing torch") as busy:
        from parallel3d.mesh import MeshLayout
        from parallel3d.tools.doctor import Diagnosis, Options, doctor
        from parallel3d.tools.doctor.report import render

        layout = MeshLayout(replicate, shard, tp, cp=cp)
        options = Options(layout=layout, **o.fields_among(Options, ctx.params))

        def show(found: Diagnosis) -> None:
            busy.stop()
            if json_only:
                typer.echo(json.dumps(found.to_json(), indent=1))
            else:
                render(found, output(width=140))
            sys.stdout.flush()

        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        busy.say(f"examining {f'{ranks} ranks' if ranks > 1 else 'this machine'}")
        found = doctor(options, show)
    raise typer.Exit(int(found.failed))
