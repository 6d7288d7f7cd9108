"""What several packages ask of the user's arguments."""

import math
from contextlib import suppress
from operator import index

from parallel3d.errors import Parallel3dError, WrongTypeError


def as_bool(name: str, value: object) -> bool:
    """``value``, which may also be 0 or 1.

    Raises:
        WrongTypeError: no bool and no integer.
        Parallel3dError: another integer.
    """
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    kind = Parallel3dError if isinstance(value, int) else WrongTypeError
    raise kind(f"{name} is {value!r}; it must be True or False")


def is_positive(value: object) -> bool:
    """Whether ``value`` is a finite number above 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]


def as_count(name: str, value: object, least: int = 0) -> int:
    """``value``, an integer of at least ``least``, also numpy's or a tensor of one, as an ``int``.

    Raises:
        WrongTypeError: no integer, or a boolean.
        Parallel3dError: below ``least``.
    """
    if not isinstance(value, bool) and "bool" not in str(getattr(value, "dtype", "")):
        with suppress(TypeError):
            count = index(value)  # type: ignore[arg-type]
            if count >= least:
                return count
            raise Parallel3dError(f"{name} is {value!r}; it must be an integer, {least} or more")
    raise WrongTypeError(f"{name} is {value!r}; it must be an integer, {least} or more")


def text_of(error: BaseException) -> str:
    """``str(error)``; where that raises itself, which exception it raises."""
    try:
        return str(error)
    except Exception as another:
        return f"its text can't be read: __str__ raises {type(another).__name__}"
