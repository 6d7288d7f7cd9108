"""Stack: how fast a training software is on a GPU. Stacks are read from stacks.toml."""

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
from parallel3d.planner.constants import CONSTANTS, Constant, read_constant

OURS = "parallel3d"
PLAIN = ("what", "cp_attention", "fused", "frees_first", "measured_on")
"""Fields of a ``Stack`` that its TOML table has as they are."""
_KEYS = {"value", "source", "moved_by", "chosen_with"}


@dataclass(frozen=True)
class Stack:
    """A training software, by the constants of the time model in which it differs from this library.

    Attributes:
        what: a description to be shown.
        attention: family of GPUs, or "other" -> the attention kernel that it uses if the workload names none.
            Families that are in neither use the GPU's fastest kernel.
        cp_attention: its kind of attention over ``cp`` if the workload says "auto"; "auto": what this library
            chooses.
        fused: whether its elementwise kernels are fused without torch.compile.
        frees_first: whether a backward waits for the reduction before, frees its input and only then issues
            the next gather (``fsdp/context.py``); False: the input is held beside the next gather.
        own: name of a constant -> its value for this stack; all others are those of ``constants.toml``.
        measured_on: the GPU on which the constants were fitted to measured steps; "": they weren't.
    """

    name: str
    what: str = ""
    attention: Mapping[str, str] = field(default_factory=dict, hash=False)
    cp_attention: str = "auto"
    fused: bool = False
    frees_first: bool = True
    own: Mapping[str, Constant] = field(default_factory=dict, hash=False)
    measured_on: str = ""

    def constant(self, name: str) -> Constant:
        return self.own.get(name) or CONSTANTS[name]

    def value(self, name: str) -> float:
        return self.constant(name).value

    def with_values(self, name: str, values: Mapping[str, float], source: str) -> Stack:
        """Returns this stack as ``name``, with other ``values`` of constants and their ``source``."""
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
    found: dict[str, Stack] = {}
    for name, entry in own_data("stacks.toml")["stack"].items():
        found[name] = read_stack(name, entry, "stacks.toml", found)
    return found


def read_stack_file(path: str | PathLike[str]) -> Stack:
    """Reads the stack in a TOML file, as ``calibrate --run`` writes.

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


def read_stack(
    name: str, entry: Mapping[str, Any], where: str, known: Mapping[str, Stack] | None = None
) -> Stack:
    """Makes a ``Stack`` called ``name`` of its TOML table.

    Args:
        entry: the table. Keys besides ``like`` and the fields of ``Stack`` are constants, {value = 1.0,
            source = "..."}.
        where: the file's name, for messages.
        known: the stacks that ``like`` may name; by default the built-in ones.

    Raises:
        PlanningError: the table has an unknown constant, or a value of another form.
    """
    given = dict(entry)
    base = Stack(name)
    if (like := given.pop("like", None)) is not None:
        known = _built_in() if known is None else known
        if like not in known:
            raise PlanningError(
                f"{where}: stack.{name} is like {like!r}; the nearest stack: {nearest(str(like), known)}"
            )
        base = known[like]
    texts = {key: given.pop(key) for key in ("attention", *PLAIN) if key in given}
    own = dict(base.own)
    for key, value in given.items():
        if key not in CONSTANTS:
            raise PlanningError(
                f"{where}: stack.{name} has {key!r}; the nearest constants: {nearest(key, CONSTANTS)}"
            )
        if not isinstance(value, dict) or not {"value", "source"} <= set(value) <= _KEYS:
            raise PlanningError(
                f"{where}: stack.{name}.{key} must be {{value = ..., source = ...}}, with moved_by or without"
            )
        own[key] = read_constant(key, value, CONSTANTS[key].unit)
    return replace(base, name=name, own=own, **texts)
