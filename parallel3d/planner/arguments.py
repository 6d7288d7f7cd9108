"""Checks of the planner's arguments, which word the same mistake alike, and the loader of its TOML files."""

import tomllib
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib.resources import files
from typing import Any, TypeVar

from parallel3d._util.arguments import is_positive
from parallel3d.errors import MistakesError, Parallel3dError, PlanningError

T = TypeVar("T")


class Mistakes:
    """Runs several checks and collects their error messages, so that one error names all mistakes.

    Attributes:
        each: the messages collected so far.
    """

    def __init__(self) -> None:
        self.each: list[str] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """Returns the result of ``check()``; if it raises, collects the message and returns None."""
        try:
            return check()
        except MistakesError as error:
            self.each += error.each
        except (Parallel3dError, OSError) as error:
            self.each.append(str(error))
        return None

    def end(self) -> None:
        """Raises one MistakesError with all collected messages, if there are any."""
        if self.each:
            raise MistakesError(self.each)


def check_size(name: str, value: Any) -> int:
    """Returns ``value``; raises unless it is an int of at least 1."""
    if type(value) is not int or value < 1:
        raise PlanningError(f"{name} is {value!r}; it must be an int, 1 or more")
    return value


def check_number(name: str, value: Any, unit: str = "") -> None:
    """Raises unless ``value`` is a finite number above 0; ``unit`` ("GB/s ") is for the message."""
    if not is_positive(value):
        raise PlanningError(f"{name} is {value!r}; it must be a number {unit}above 0")


def check_flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise PlanningError(f"{name} is {value!r}; it must be True or False")


def check_choice(name: str, value: Any, known: Iterable[Any]) -> None:
    if value not in (known := tuple(known)):
        choices = ", ".join(map(str, known))
        raise PlanningError(f"{name} is {value!r}; it must be one of {choices}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the names in ``known`` most similar to ``name`` (or all), joined by commas, for a message."""
    return ", ".join(
        get_close_matches(name, known := list(known), n=3, cutoff=0.3) or sorted(known)
    )


def own_data(file: str) -> dict[str, Any]:
    """Reads a TOML file that lies in the planner's package, such as "constants.toml"."""
    return tomllib.loads(files("parallel3d.planner").joinpath(file).read_text(encoding="utf-8"))
