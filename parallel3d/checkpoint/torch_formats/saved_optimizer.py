"""SavedOptimizer: the state and options of an optimizer in torch's files, in any of torch's forms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.checkpoint.torch_formats.names import shown
from parallel3d.errors import CheckpointError

_MAX_ENTRIES = 4_000_000

Key = str | int
"""A parameter: its name, or its number in the order of the optimizer's groups."""


@dataclass(frozen=True)
class SavedGroup:
    """A param group: its options without ``params``, and the parameters."""

    options: dict[str, Any]
    params: tuple[Key, ...]


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer as it was saved.

    Attributes:
        state: parameter -> key such as ``exp_avg`` -> value.
    """

    state: dict[Key, dict[str, Any]]
    groups: tuple[SavedGroup, ...]

    def for_names(self, names: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns (state, options) of each of the parameters ``names``, in the order of our optimizer's
        groups.

        Raises:
            CheckpointError: if the saved optimizer has other parameters.
        """
        saved = [key for group in self.groups for key in group.params]
        keys: list[Key] = list(names)
        if any(isinstance(key, int) for key in saved):
            _check_numbers(saved)  # before they are keys of a dict
            if len(saved) != len(names):
                raise CheckpointError(
                    f"the saved optimizer has {len(saved)} parameters, by number, and the optimizer has "
                    f"{len(names)}; make it of the same ones"
                )
            keys = saved
        options: dict[Key, dict[str, Any]] = {}
        for group in self.groups:
            for key in group.params:
                if key in options:
                    raise CheckpointError(
                        f"parameter {key!r} is in two groups of the saved optimizer"
                    )
                options[key] = group.options
        known = set(keys)
        missing = {str(key) for key in keys if key not in options}
        unknown = {str(key) for key in [*options, *self.state] if key not in known}
        for keys_of, text in (
            (missing, "has no {}, which the optimizer has"),
            (unknown, "has {}, which the optimizer hasn't"),
        ):
            if keys_of:
                raise CheckpointError(f"the saved optimizer {text.format(shown(keys_of))}")
        return [self.state.get(key, {}) for key in keys], [options[key] for key in keys]


def _check_numbers(saved: list[Key]) -> None:
    """Raises unless they are as in ``optimizer.state_dict()``: all integers from 0 on, once."""
    numbers = sorted(key for key in saved if isinstance(key, int))
    for number, key in enumerate(numbers):
        if number and key == numbers[number - 1]:
            raise CheckpointError(f"parameter {key} is in two groups of the saved optimizer")
        if key != number:
            break
    else:
        if len(numbers) == len(saved):
            return
    raise CheckpointError(
        f"the saved optimizer's groups have {len(saved)} parameters, of other numbers than 0 to "
        f"{len(saved) - 1}"
    )


def saved_in_dict(value: Any) -> SavedOptimizer:
    """Parses ``{"state": ..., "param_groups": ...}``, keyed by name or number; raises for anything else."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"the saved optimizer is a {type(value).__name__}; it must be a dict")
    if "param_groups" not in value:
        raise CheckpointError(f"the saved optimizer has no param_groups; it has {shown(value)}")
    states, groups = value.get("state", {}), value["param_groups"]
    valid = isinstance(states, Mapping) and isinstance(groups, (list, tuple))
    if not valid or not all(isinstance(item, Mapping) for item in (*states.values(), *groups)):
        raise CheckpointError("the saved optimizer's state and param_groups are no dicts")
    # A file may refer to one dict or list very often.
    lists = [p for g in groups if isinstance(p := g.get("params"), (list, tuple))]
    if sum(map(len, (*states.values(), *groups, *lists))) > _MAX_ENTRIES:
        raise CheckpointError(f"the saved optimizer has more than {_MAX_ENTRIES} entries")
    result = []
    for group in groups:
        params = group.get("params")
        if not isinstance(params, (list, tuple)) or not all(type(p) in (str, int) for p in params):
            raise CheckpointError("a group of the saved optimizer has no params")
        result.append(SavedGroup({k: v for k, v in group.items() if k != "params"}, tuple(params)))
    for key, state in states.items():
        if type(key) not in (str, int):
            raise CheckpointError(
                f"the saved optimizer has state of {type(key).__name__} {key!r:.80}"
            )
        for entry in state:
            if not isinstance(entry, str):
                raise CheckpointError(
                    f"the saved optimizer's state of {key!r:.80} has the key {entry!r:.80}, which is no "
                    "string"
                )
    return SavedOptimizer({key: dict(state) for key, state in states.items()}, tuple(result))


def saved_in_names(stored: Mapping[str, Any], names: Iterable[str]) -> SavedOptimizer:
    """Parses flat names in any of torch's forms: ``state.NAME.exp_avg`` and ``param_groups.0.lr`` or, with
    ``flatten_optimizer_state_dict``, ``param_groups.NAME.lr``.

    Args:
        stored: values by name, after the optimizer's prefix.
        names: of the parameters there may be.
    """
    known = set(names)
    state: dict[Key, dict[str, Any]] = {}
    by_number: dict[Key, dict[str, Any]] = {}
    by_name: dict[Key, dict[str, Any]] = {}
    for flat, value in stored.items():
        head, _, rest = flat.partition(".")
        if head == "state" and rest:
            key, what = _split(rest, known)
            state.setdefault(key, {})[what] = value
        elif head == "param_groups" and rest:
            key, what = _split(rest, known)
            groups = by_number if isinstance(key, int) else by_name
            groups.setdefault(key, {})[what] = value
    if "param_groups" in stored:  # one value, before torch 2.4
        return saved_in_dict({"state": state, "param_groups": stored["param_groups"]})
    if by_number and by_name:
        raise CheckpointError("the saved optimizer's param_groups are by number and by name")
    if by_name:
        return SavedOptimizer(state, tuple(SavedGroup(v, (key,)) for key, v in by_name.items()))
    ordered = [by_number[number] for number in sorted(by_number)]
    return saved_in_dict({"state": state, "param_groups": ordered})


def _split(rest: str, known: set[str]) -> tuple[Key, str]:
    """``NAME.what`` -> (NAME, what) for the longest known name, else (a number, what)."""
    end = len(rest)
    while (end := rest.rfind(".", 0, end)) > 0:
        if rest[:end] in known:
            return rest[:end], rest[end + 1 :]
    head, _, what = rest.partition(".")
    if head.isdecimal() and len(head) < 10 and "." not in what and what:
        return int(head), what
    name, _, what = rest.rpartition(".")
    return name, what
