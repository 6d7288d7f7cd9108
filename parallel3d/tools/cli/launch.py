"""``parallel3d launch``: the file that starts a job with torchrun, SLURM, Kubernetes, SkyPilot or Ray."""

from pathlib import Path
from typing import Annotated

import typer

from parallel3d.tools.cli.options import fields_among, panel, plain
from parallel3d.tools.launch.job import LaunchError, LaunchJob, mesh_of
from parallel3d.tools.launch.targets import MARK, TARGETS, launch_file, missing, target_named

_mesh, _place = panel("Mesh"), panel("For some targets")


def launch_command(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After --: the script and its arguments, or -m and a module."),
    ] = None,
    to: Annotated[str, plain(f"{', '.join(TARGETS)}; kubernetes is jobset.")] = "torchrun",
    nodes: Annotated[int, plain("Number of machines.")] = 1,
    gpus_per_node: Annotated[int, plain("Processes on each machine.")] = 8,
    device: Annotated[str, plain("cuda or cpu; cpu requests no GPUs.")] = "cuda",
    replicate: Annotated[int | None, _mesh("Copies of the sharded model.")] = None,
    shard: Annotated[int | None, _mesh("Ranks that share a copy; -1: all that are left.")] = None,
    cp: Annotated[int | None, _mesh("Ranks that share each sequence.")] = None,
    tp: Annotated[int | None, _mesh("Ranks that share each layer's computation.")] = None,
    ep: Annotated[int | None, _mesh("Ranks that share the experts; it divides the others.")] = None,
    domain: Annotated[int | None, _mesh("GPUs joined by fast links, if not a node's.")] = None,
    name: Annotated[str, plain("Name of the job and of its file.")] = "train",
    max_restarts: Annotated[int, plain("Restarts of all processes after a failure.")] = 0,
    grace: Annotated[int, plain("Seconds for a last checkpoint before the job is stopped.")] = 120,
    env: Annotated[list[str] | None, plain("NAME=VALUE; several by repeating it.")] = None,
    image: Annotated[str | None, _place("The container's image.")] = None,
    gpu: Annotated[str | None, _place("The GPU's name, such as H100.")] = None,
    partition: Annotated[str | None, _place("SLURM's partition.")] = None,
    account: Annotated[str | None, _place("SLURM's account.")] = None,
    time: Annotated[str | None, _place("Time limit: 90, 12:00:00, 2-00:00:00.")] = None,
    setup: Annotated[
        list[str] | None,
        _place(
            "Shell line that runs first: module load ..., source .../activate; several by repeating it."
        ),
    ] = None,
    out: Annotated[str | None, plain("File or folder to write to instead of stdout.")] = None,
) -> None:
    """Prints or writes the launch file of a training script, with a reason for each setting."""
    given = fields_among(LaunchJob, ctx.params)
    given |= {"command": tuple(command or ()), "env": _variables(env or [])}
    given |= {"setup": "\n".join(setup) if setup else None}
    sizes = {"replicate": replicate, "shard": shard, "cp": cp, "tp": tp, "ep": ep}
    job = LaunchJob(layout=mesh_of(sizes), **given)
    text = launch_file(to, job)
    for line in missing(to, job):
        typer.echo(line, err=True)
    if out is None:
        typer.echo(text, nl=False)
        return
    target = target_named(to)
    path = _write(out, f"{name}{target.suffix}", text, executable=bool(target.head))
    typer.echo(f"wrote {path}; start it with: {target.start.format(file=path)}", err=True)


def _variables(settings: list[str]) -> dict[str, str]:
    for setting in settings:
        if "=" not in setting:
            raise LaunchError(f"--env {setting!r} has no '='; give NAME=VALUE, such as {setting}=1")
    return dict(setting.split("=", 1) for setting in settings)


def _write(out: str, name: str, text: str, *, executable: bool) -> Path:
    """Writes ``text`` to the file ``out`` (if that is a folder, to ``name`` in it) and returns the path;
    raises if it is a file that this command hasn't written."""
    path = Path(out)
    if path.is_dir() or out.endswith("/"):
        path = path / name
    if path.exists() and MARK not in path.read_text(errors="replace")[:200]:
        raise LaunchError(
            f"--out {out}: {path} is there already and was not written by this command; give another "
            "name, or remove it first"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if executable:
        path.chmod(path.stat().st_mode | 0o111)
    return path
