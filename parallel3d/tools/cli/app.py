"""The command ``parallel3d``: a user's mistake is a line on stderr and exit code 2."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from parallel3d.errors import MistakesError, Parallel3dError
from parallel3d.planner.arguments import nearest
from parallel3d.tools.cli.audit import audit_command
from parallel3d.tools.cli.doctor import doctor_command
from parallel3d.tools.cli.dryrun import dryrun_command
from parallel3d.tools.cli.launch import launch_command
from parallel3d.tools.cli.planning import calibrate_command, plan_command, predict_command
from parallel3d.tools.launch import local
from parallel3d.tools.terminal import output, say, wrapped


class _Commands(TyperGroup):
    """All commands: this library's errors and OSErrors are printed as a line, others with a traceback."""

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
            lines = str(error).splitlines() if isinstance(error, MistakesError) else [str(error)]
            say("error: " + "\n  ".join(" ".join(line.split()) for line in lines))
            raise typer.Exit(2) from None


class Command(TyperCommand):
    """A command: help breaks no word, and one MistakesError names all options with wrong values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(args))
        except Exception as error:
            if not hasattr(error, "format_message"):  # of click: a mistake of the user's
                raise
            raise MistakesError(self._wrong(ctx, args) or [error.format_message()]) from None

    def _wrong(self, ctx: Any, args: list[str]) -> list[str]:
        """Returns a message for each unknown option and each option whose value is wrong."""
        parser, found = self.make_parser(ctx), []
        parser.ignore_unknown_options = True
        known = [name for param in self.params for name in (*param.opts, *param.secondary_opts)]
        try:
            given, left, _ = parser.parse_args(list(args))
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            return []  # an option without its value: what follows isn't known
        for word in (each.partition("=")[0] for each in left if each.startswith("--")):
            found.append(f"there is no option {word}; the nearest: {nearest(word, known)}")
        for param in self.params:
            try:
                param.process_value(ctx, param.consume_value(ctx, given)[0])
            except Exception as error:
                if not hasattr(error, "format_message"):
                    raise
                found.append(
                    f"{param.opts[0]} {given.get(param.name)}: {getattr(error, 'message', error)}"
                )
        return found

    def format_help(self, ctx: Any, formatter: Any) -> None:
        console = output()
        console.print(Text(f"Usage: {ctx.command_path} [OPTIONS]\n", "bold"))
        for paragraph in (self.help or "").split("\n\n"):
            console.print(Text(" ".join(paragraph.split()) + "\n"))
        panels: dict[str, list[Any]] = {}
        for param in self.get_params(ctx):
            if not getattr(param, "hidden", False):
                panels.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(
                    param
                )
        for name, params in panels.items():
            console.print(Text(name, "bold"))
            for param in params:
                _show(console, param)
            console.print()


def _show(console: Console, param: Any) -> None:
    """Prints the names of the option ``param`` and, beside or below them, its help."""
    takes = "" if getattr(param, "is_flag", False) else param.metavar or "VALUE"
    first = f"  {', '.join([*param.opts, *param.secondary_opts])} {takes}".rstrip()
    column = min(30, console.width // 3)
    if len(first) + 2 > column:
        console.print(Text(wrapped(first, console.width, "    "), "cyan"))
        first = ""
    text = f"{first:<{column}}{param.help or ''}{_default(param)}"
    shown = Text(wrapped(text, console.width, " " * column))
    shown.stylize("cyan", 0, len(first))
    console.print(shown)


def _default(param: Any) -> str:
    """Returns " [default: ...]" for the help of an option; "" if the default is None, False or computed."""
    value = param.default
    if value is None or callable(value) or (value is False and not param.secondary_opts):
        return ""
    if isinstance(value, bool):
        value = (param.opts if value else param.secondary_opts)[0]
    return f" [default: {value}]"


_HANDED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def run_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORDS", help="torchrun's options, a script, and its options."),
    ] = None,
) -> None:
    """Runs a program on several processes of this machine, with torchrun; an error ends in one line.

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

    If the options give the sizes of a mesh, as many processes start as it has ranks.
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
app.command("plan", cls=Command)(plan_command)
app.command("predict", cls=Command)(predict_command)
app.command("calibrate", cls=Command)(calibrate_command)
app.command("dryrun", context_settings={"allow_interspersed_args": False})(dryrun_command)
app.command("launch", context_settings={"allow_interspersed_args": False})(launch_command)
app.command("audit")(audit_command)
app.command("doctor")(doctor_command)
app.command("run", options_metavar="", context_settings=_HANDED_ON)(run_command)
app.command("demo", options_metavar="", context_settings=_HANDED_ON)(demo_command)
