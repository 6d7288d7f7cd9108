"""``parallel3d doctor``: finds what is wrong with this machine, or with the nodes of a job."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import typer

from parallel3d.tools.cli import options as o

_FOLDER = o.made(o.plain, {"checkpoint": (Path, None, "The folder for checkpoints.")})
_GPU = {name: o.CLUSTER[name] for name in ("gpu", "profile", "nic")}
_SIZE = "Size of the measured tensors; 256 on CUDA, 4 on the CPU."
_MEASURED = o.made(
    o.plain,
    {
        "collectives": (bool, True, "Time collectives on every axis of the mesh."),
        "megabytes": (float, None, _SIZE, {"min": 0.01}),
        "timeout": (float, 60.0, "Seconds that ranks wait for each other.", {"min": 1}),
    },
)


@o.takes(o.LAYOUT, _FOLDER, _GPU, _MEASURED, {"json_only": (o.Json, False)})
def doctor_command(json_only: bool, **given: Any) -> None:
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

        layout = MeshLayout(**{axis: given[axis] for axis in o.LAYOUT})
        options = Options(layout=layout, **o.fields_among(Options, given))

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
