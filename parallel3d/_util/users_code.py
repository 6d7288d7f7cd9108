"""The user's own code: which line of it is running, or has raised an error, and the syntax of a function."""

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

_OURS = frozenset({"parallel3d", "torch", *sys.stdlib_module_names})


def caller() -> str:
    """Returns ``file:line, in function`` of the user's code that is running."""
    return _users_line(walk_stack(sys._getframe(1))) or "?"


def raised_at(error: BaseException) -> str:
    """Returns ``file:line, in function`` of the user's innermost line in the traceback of ``error``.

    It is "" if there is none.
    """
    return _users_line(reversed(list(walk_tb(error.__traceback__))))


def _users_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The first line outside parallel3d, torch and Python's own library, which the user's code may call."""
    for frame, line in frames:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _OURS:
            return f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    return ""


@functools.cache
def syntax_of(function: Callable[..., Any]) -> ast.Module | None:
    """Returns the parsed source of ``function``; None if there is none, as of what was typed into an
    interpreter."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
