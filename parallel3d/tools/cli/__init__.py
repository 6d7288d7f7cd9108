"""The command ``parallel3d``. Needs the ``cli`` extra (typer, rich); torch only where a command uses it."""

import sys

from parallel3d.tools.launch.local import demo, run

__all__ = ["main"]

LOCAL = {"run": run, "demo": demo}
"""Commands that hand their arguments on, and need no extra."""


def main() -> None:
    """The entry point: runs the command in ``sys.argv``; exits with 2 for a user's mistake."""
    command, *arguments = sys.argv[1:] or [""]
    if command in LOCAL and arguments[:1] != ["--help"]:
        sys.exit(LOCAL[command](arguments))
    try:
        from parallel3d.tools.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.exit(
            f"parallel3d's command line needs {error.name}, which isn't installed: "
            "pip install typer rich, or, in a checkout of parallel3d, pip install -e '.[cli]'"
        )
    app()
