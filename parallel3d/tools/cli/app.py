"""The command ``parallel3d``: a user's mistake is one line on stderr and exit code 2."""

from typing import Any

import typer
from typer.core import TyperGroup

from parallel3d.errors import Parallel3dError
from parallel3d.tools.cli.doctor import doctor_command
from parallel3d.tools.cli.dryrun import dryrun_command
from parallel3d.tools.cli.launch import launch_command
from parallel3d.tools.cli.planning import calibrate_command, plan_command, predict_command
from parallel3d.tools.cli.verify import verify_command


class _Commands(TyperGroup):
    """Prints errors that say what to do as one line; others keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # an OSError: the reader of the pipe has gone
            raise
        except (Parallel3dError, OSError) as error:
            typer.echo("error: " + " ".join(str(error).split()), err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    name="parallel3d",
    help="Which (replicate, shard, tp) mesh, does it fit, how fast, and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command("plan")(plan_command)
app.command("predict")(predict_command)
app.command("calibrate")(calibrate_command)
app.command("dryrun", context_settings={"allow_interspersed_args": False})(dryrun_command)
app.command("launch", context_settings={"allow_interspersed_args": False})(launch_command)
app.command("verify")(verify_command)
app.command("doctor")(doctor_command)
