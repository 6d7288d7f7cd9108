"""Checks of the planner's arguments, with one wording for the same mistake; its own data files."""

import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

from parallel3d._util.arguments import is_positive
from parallel3d.errors import PlanningError


def check_size(name: str, value: Any) -> int:
    """Returns ``value``; raises unless it is an int of at least 1."""
    if type(value) is not int or value < 1:
        raise PlanningError(f"{name} is {value!r}; it must be an int, 1 or more")
    return value


def check_number(name: str, value: Any, unit: str = "") -> None:
    """Raises unless ``value`` is a finite number above 0; ``unit``: such as "GB/s "."""
    if not is_positive(value):
        raise PlanningError(f"{name} is {value!r}; it must be a number {unit}above 0")


def check_choice(name: str, value: Any, known: Iterable[Any]) -> None:
    """Raises unless ``value`` is in ``known``."""
    if value not in (known := tuple(known)):
        choices = ", ".join(map(str, known))
        raise PlanningError(f"{name} is {value!r}; it must be one of {choices}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The names of ``known`` that are most similar to ``name``, for messages; all if none is similar."""
    return ", ".join(
        get_close_matches(name, known := list(known), n=3, cutoff=0.3) or sorted(known)
    )


def own_data(file: str) -> dict[str, Any]:
    """What is in one of the planner's own TOML files."""
    return tomllib.loads(files("parallel3d.planner").joinpath(file).read_text(encoding="utf-8"))
