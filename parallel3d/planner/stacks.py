"""Stack: what a training software of some year reaches of a GPU. Stacks are data, in stacks.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

from parallel3d.errors import PlanningError
from parallel3d.planner.arguments import nearest, own_data
from parallel3d.planner.constants import CONSTANTS, Constant

OURS = "parallel3d"
_KEYS = {"value", "source", "moved_by"}


@dataclass(frozen=True)
class Stack:
    """Software that trains: the constants in which it differs from this library.

    Attributes:
        what: a description for people.
        attention: family of GPUs, or "other" -> the attention kernel that it uses if the workload names none.
            For families that are missing it uses the best kernel for the GPU.
        own: name of a constant -> its value here; all others are those of ``constants.toml``.
        words: words in a published run's source and notes by which ``runs.py`` recognizes the stack.
        measured_on: the GPU on which the constants were fitted to measured steps; "": they weren't.
    """

    name: str
    what: str = ""
    attention: Mapping[str, str] = field(default_factory=dict, hash=False)
    own: Mapping[str, Constant] = field(default_factory=dict, hash=False)
    words: tuple[str, ...] = ()
    measured_on: str = ""

    def constant(self, name: str) -> Constant:
        """The constant of this name."""
        return self.own.get(name) or CONSTANTS[name]

    def value(self, name: str) -> float:
        """The value of the constant of this name."""
        return self.constant(name).value

    def with_values(self, name: str, values: Mapping[str, float], source: str) -> Stack:
        """A stack ``name`` that is this one but for ``values``, which are from ``source``."""
        given = {
            key: replace(self.constant(key), value=value, source=source)
            for key, value in values.items()
        }
        return replace(self, name=name, own={**self.own, **given})


def stacks() -> dict[str, Stack]:
    """All stacks by name; the first is this library."""
    return dict(_built_in())


def stack_of(stack: str | Stack) -> Stack:
    """Returns the stack of this name; returns ``stack`` if it is a ``Stack``.

    Raises:
        PlanningError: no stack has this name; the message names the nearest.
    """
    if isinstance(stack, Stack):
        return stack
    known = _built_in()
    if not isinstance(stack, str) or stack not in known:
        raise PlanningError(
            f"there is no stack {stack!r}; the nearest: {nearest(str(stack), known)}"
        )
    return known[stack]


@lru_cache(maxsize=1)
def _built_in() -> dict[str, Stack]:
    entries = own_data("stacks.toml")["stack"]
    return {name: read_stack(name, entry, "stacks.toml") for name, entry in entries.items()}


def read_stack_file(path: str | PathLike[str]) -> Stack:
    """The stack of a TOML file, as ``calibrate --run`` writes.

    Raises:
        PlanningError: the file can't be read, or doesn't contain exactly one stack.
    """
    try:
        entries = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("stack", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanningError(f"the stack {path} can't be read: {error}") from error
    if len(entries) != 1:
        raise PlanningError(f"{path} has {len(entries)} tables [stack.NAME]; it must have one")
    ((name, entry),) = entries.items()
    return read_stack(name, entry, str(path))


def read_stack(name: str, entry: Mapping[str, Any], where: str) -> Stack:
    """A stack from a table of TOML.

    Args:
        entry: the table. Keys besides ``what``, ``attention``, ``words`` and ``measured_on`` are constants,
            {value = 1.0, source = "..."}.
        where: the file's name, for messages.

    Raises:
        PlanningError: the table has an unknown constant, or a value of another form.
    """
    given = dict(entry)
    plain = ("what", "attention", "measured_on")
    texts = {key: given.pop(key) for key in plain if key in given}
    words = tuple(given.pop("words", ()))
    own = {}
    for key, value in given.items():
        if key not in CONSTANTS:
            raise PlanningError(
                f"{where}: stack.{name} has {key!r}; the nearest constants: {nearest(key, CONSTANTS)}"
            )
        if not isinstance(value, dict) or not {"value", "source"} <= set(value) <= _KEYS:
            raise PlanningError(
                f"{where}: stack.{name}.{key} must be {{value = ..., source = ...}}, with moved_by or without"
            )
        moved_by = tuple(value.get("moved_by", ()))
        own[key] = Constant(
            key, float(value["value"]), CONSTANTS[key].unit, value["source"], moved_by
        )
    return Stack(name, own=own, words=words, **texts)
