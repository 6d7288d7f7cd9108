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

_LIBRARIES = frozenset({"torch", *sys.stdlib_module_names})


def is_users(frame: FrameType, *, ours: bool = False) -> bool:
    """Whether ``frame`` runs the user's code: outside of torch and Python's library, and outside of
    parallel3d unless ``ours``."""
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package not in _LIBRARIES and (ours or package != "parallel3d")


def caller() -> str:
    """Returns ``file:line, in function`` of the user's code that is running."""
    return _users_line(walk_stack(sys._getframe(1))) or "?"


def raised_at(error: BaseException) -> str:
    """Returns ``file:line, in function`` of the user's innermost line in a traceback, "" without one."""
    return _users_line(reversed(list(walk_tb(error.__traceback__))))


def _users_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    for frame, line in frames:
        if is_users(frame):
            return f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    return ""


@functools.cache
def syntax_of(function: Callable[..., Any]) -> ast.Module | None:
    """Returns the parsed source of ``function``; None if its source is not available."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
