"""The command ``parallel3d``: a user's mistake is one line on stderr and exit code 2."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from parallel3d.errors import Parallel3dError
from parallel3d.tools.cli.audit import audit_command
from parallel3d.tools.cli.doctor import doctor_command
from parallel3d.tools.cli.dryrun import dryrun_command
from parallel3d.tools.cli.launch import launch_command
from parallel3d.tools.cli.planning import calibrate_command, plan_command, predict_command
from parallel3d.tools.launch import local


class _Commands(TyperGroup):
    """Prints errors that say what to do as one line; others keep their traceback."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[:1] == ["verify"]:
            typer.echo("parallel3d verify is now parallel3d audit --relation plain", err=True)
            args = ["audit", "--relation", "plain", *args[1:]]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # an OSError: the reader of the pipe has gone
            raise
        except (Parallel3dError, OSError) as error:
            typer.echo("error: " + " ".join(str(error).split()), err=True)
            raise typer.Exit(2) from None


_HANDED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def run_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORDS", help="torchrun's options, a script, and its options."),
    ] = None,
) -> None:
    """Runs a program on several processes of this machine: torchrun, that ends in one line.

    For example parallel3d run --nproc-per-node 8 train.py --lr 1e-3; -h lists torchrun's options.

    Exit code 130 after Ctrl-C, else that of the first process that failed.
    """
    raise typer.Exit(local.run(arguments or []))


def demo_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORDS", help="Options of train.py; -h lists them."),
    ] = None,
) -> None:
    """Trains a small Llama on a (2, 2, 2) mesh of eight local processes, compared with the plain model.

    It is examples/llama/train.py, and takes its options, for example parallel3d demo --shard 4 --steps 100.

    With a mesh of its own as many processes start as that has ranks.
    """
    raise typer.Exit(local.demo(arguments or []))


app = typer.Typer(
    cls=_Commands,
    name="parallel3d",
    help="Plan, check, start and verify a training on a (replicate, shard, tp) mesh.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command("plan")(plan_command)
app.command("predict")(predict_command)
app.command("calibrate")(calibrate_command)
app.command("dryrun", context_settings={"allow_interspersed_args": False})(dryrun_command)
app.command("launch", context_settings={"allow_interspersed_args": False})(launch_command)
app.command("audit")(audit_command)
app.command("doctor")(doctor_command)
app.command("run", options_metavar="", context_settings=_HANDED_ON)(run_command)
app.command("demo", options_metavar="", context_settings=_HANDED_ON)(demo_command)
