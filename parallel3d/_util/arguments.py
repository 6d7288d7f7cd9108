"""Checks of the user's arguments that several packages share."""

import math
import re
from contextlib import suppress
from operator import index

from parallel3d.errors import Parallel3dError, WrongTypeError


def as_bool(name: str, value: object) -> bool:
    """Returns ``value``, a bool, 0 or 1, as a bool; raises for any other value."""
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    kind = Parallel3dError if isinstance(value, int) else WrongTypeError
    raise kind(f"{name} is {value!r}; it must be True or False")


def is_positive(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]


def as_count(name: str, value: object, least: int = 0) -> int:
    """Returns ``value``, an integer of at least ``least``, numpy's or a tensor too, as an ``int``."""
    count = None
    if not isinstance(value, bool) and "bool" not in str(getattr(value, "dtype", "")):
        with suppress(TypeError):
            count = index(value)  # type: ignore[arg-type]
    if count is not None and count >= least:
        return count
    kind = WrongTypeError if count is None else Parallel3dError
    raise kind(f"{name} is {value!r}; it must be an integer, {least} or more")


def counted(number: int, noun: str) -> str:
    """Returns a text such as ``1 gather`` or ``2,000 gathers``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


_OF_GLOO = re.compile(
    r"\[\S*/gloo/\S*\] | This is typically caused by a remote worker.*?GLHF!( \S+)?", re.DOTALL
)


def without_gloo(text: str) -> str:
    """Returns the text of a gloo error without gloo's source location and advice."""
    return _OF_GLOO.sub("", text)


def text_of(error: BaseException) -> str:
    """Returns ``str(error)``; if that raises, a text that names the exception."""
    try:
        return str(error)
    except Exception as another:
        return f"its text can't be read: __str__ raises {type(another).__name__}"
