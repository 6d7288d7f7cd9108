"""SavedOptimizer: an optimizer's state and options as a checkpoint has them, and what they are for ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.checkpoint.torch_formats.names import shown
from parallel3d.errors import CheckpointError

__all__ = ["SavedGroup", "SavedOptimizer", "saved_in_dict", "saved_in_names"]

_MOST_ENTRIES = 4_000_000

Key = str | int
"""A parameter: its name, or its place in the order of the optimizer's groups."""


@dataclass(frozen=True)
class SavedGroup:
    """One param group: options without ``params``, and these."""

    options: dict[str, Any]
    params: tuple[Key, ...]


@dataclass(frozen=True)
class SavedOptimizer:
    """As a checkpoint has it.

    Attributes:
        state: by parameter, then by what it is (``exp_avg``).
    """

    state: dict[Key, dict[str, Any]]
    groups: tuple[SavedGroup, ...]

    def for_names(self, names: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(state, options) for each of the parameters ``names``, which are in our optimizer's order.

        Raises:
            CheckpointError: the parameters are others.
        """
        saved = [key for group in self.groups for key in group.params]
        numbers = [key for key in saved if isinstance(key, int)]
        keys: list[Key] = list(names)
        if numbers:
            _check_numbers(numbers, len(saved))  # before they are keys of a dict
            keys = self._numbered(saved, names)
        options: dict[Key, dict[str, Any]] = {}
        for group in self.groups:
            for key in group.params:
                if key in options:
                    raise CheckpointError(
                        f"parameter {key!r} is in two groups of the saved optimizer"
                    )
                options[key] = group.options
        missing = [str(key) for key in keys if key not in options]
        known = set(keys)
        unknown = [str(key) for key in [*options, *self.state] if key not in known]
        for found, what in (
            (missing, "has no {}, which the optimizer has"),
            (unknown, "has {}, which the optimizer hasn't"),
        ):
            if found:
                raise CheckpointError(f"the saved optimizer {what.format(shown(set(found)))}")
        return [self.state.get(key, {}) for key in keys], [options[key] for key in keys]

    def _numbered(self, saved: list[Key], names: list[str]) -> list[Key]:
        """The saved numbers of ``names``, by their order."""
        if len(saved) != len(names):
            raise CheckpointError(
                f"the saved optimizer has {len(saved)} parameters, by number, and the optimizer has "
                f"{len(names)}; make it of the same ones"
            )
        return saved


def _check_numbers(numbers: list[int], count: int) -> None:
    """That they are what ``optimizer.state_dict()`` has: all of 0 to ``count`` - 1, once."""
    ordered = sorted(numbers)
    for number, found in enumerate(ordered):
        if number and found == ordered[number - 1]:
            raise CheckpointError(f"parameter {found} is in two groups of the saved optimizer")
        if found != number:
            break
    else:
        if len(numbers) == count:
            return
    raise CheckpointError(
        f"the saved optimizer's groups have {count} parameters, of other numbers than 0 to {count - 1}"
    )


def saved_in_dict(value: Any) -> SavedOptimizer:
    """From ``{"state": ..., "param_groups": ...}``, keyed by name or by number.

    Raises:
        CheckpointError: it is something else.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"the saved optimizer is a {type(value).__name__}; it must be a dict")
    if "param_groups" not in value:
        raise CheckpointError(f"the saved optimizer has no param_groups; it has {shown(value)}")
    states, groups = value.get("state", {}), value["param_groups"]
    well = isinstance(states, Mapping) and isinstance(groups, (list, tuple))
    if not well or not all(isinstance(each, Mapping) for each in (*states.values(), *groups)):
        raise CheckpointError("the saved optimizer's state and param_groups are no dicts")
    # A file may refer to one dict or list very often.
    lists = [p for g in groups if isinstance(p := g.get("params"), (list, tuple))]
    if sum(map(len, (*states.values(), *groups, *lists))) > _MOST_ENTRIES:
        raise CheckpointError(f"the saved optimizer has more than {_MOST_ENTRIES} entries")
    found = []
    for group in groups:
        params = group.get("params")
        if not isinstance(params, (list, tuple)) or not all(type(p) in (str, int) for p in params):
            raise CheckpointError("a group of the saved optimizer has no params")
        found.append(SavedGroup({k: v for k, v in group.items() if k != "params"}, tuple(params)))
    by_key = {_key(key): _by_text(key, state) for key, state in states.items()}
    return SavedOptimizer(by_key, tuple(found))


def saved_in_names(stored: Mapping[str, Any], names: Iterable[str]) -> SavedOptimizer:
    """From flat names of any of torch's forms: ``state.NAME.exp_avg`` and ``param_groups.0.lr`` or,
    flattened, ``param_groups.NAME.lr``.

    Args:
        stored: values after the optimizer's prefix.
        names: the parameters' there may be.
    """
    known = set(names)
    state: dict[Key, dict[str, Any]] = {}
    by_number: dict[int, dict[str, Any]] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for flat, value in stored.items():
        head, _, rest = flat.partition(".")
        if head == "state" and rest:
            key, what = _split(rest, known)
            state.setdefault(key, {})[what] = value
        elif flat == "param_groups":  # before torch 2.4, in one
            return saved_in_dict({"state": state_of(stored, known), "param_groups": value})
        elif head == "param_groups" and rest:
            name, what = _split(rest, known)
            if isinstance(name, int):
                by_number.setdefault(name, {})[what] = value
            else:
                by_name.setdefault(name, {})[what] = value
    if by_number and by_name:
        raise CheckpointError("the saved optimizer's param_groups are by number and by name")
    if by_name:
        groups = [SavedGroup(options, (name,)) for name, options in by_name.items()]
        return SavedOptimizer(state, tuple(groups))
    ordered = [by_number[number] for number in sorted(by_number)]
    return saved_in_dict({"state": state, "param_groups": ordered})


def state_of(stored: Mapping[str, Any], known: set[str]) -> dict[Key, dict[str, Any]]:
    """The state alone."""
    state: dict[Key, dict[str, Any]] = {}
    for flat, value in stored.items():
        if flat.startswith("state."):
            key, what = _split(flat.removeprefix("state."), known)
            state.setdefault(key, {})[what] = value
    return state


def _split(rest: str, known: set[str]) -> tuple[Key, str]:
    """``NAME.what`` -> (NAME, what), the longest known name; else (a number, what)."""
    end = len(rest)
    while (end := rest.rfind(".", 0, end)) > 0:
        if rest[:end] in known:
            return rest[:end], rest[end + 1 :]
    head, _, what = rest.partition(".")
    if head.isdecimal() and len(head) < 10 and "." not in what and what:
        return int(head), what
    name, _, what = rest.rpartition(".")
    return name, what


def _by_text(key: Key, state: Mapping[Any, Any]) -> dict[str, Any]:
    for each in state:
        if not isinstance(each, str):
            raise CheckpointError(
                f"the saved optimizer's state of {key!r:.80} has the key {each!r:.80}, which is no string"
            )
    return dict(state)


def _key(key: Any) -> Key:
    if type(key) not in (str, int):
        raise CheckpointError(f"the saved optimizer has state of {type(key).__name__} {key!r:.80}")
    return key
