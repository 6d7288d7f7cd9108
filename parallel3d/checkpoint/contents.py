"""What checkpoint.json says, taken apart: anybody may have written it, so all of it is looked at first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.format.index import Index, shown
from parallel3d.checkpoint.model_state import PREFIX
from parallel3d.errors import CorruptCheckpointError

__all__ = ["Contents", "read_contents"]

_LARGEST = 1 << 62


@dataclass(frozen=True)
class Contents:
    """Of one checkpoint, beside its tensors.

    Attributes:
        step: how many steps had been done.
        mesh: axis -> size; None for a plain model.
        versions: of torch and the like.
        ranks: how many saved.
        step_seed: what ``seed_step`` was last given, by name; None if it wasn't used.
        only: as ``save`` was given.
        ties: other names of stored tensors -> theirs.
        extra_state: of modules, encoded, by their names.
        groups: of optimizers: (parameters' names, options encoded, kind of optimizer: as ``kind_of`` names
            it, None in what earlier versions wrote); None if none were saved.
        state: parameter's name -> key -> value, encoded.
        extra: encoded.
    """

    step: int
    mesh: dict[str, int] | None
    versions: dict[str, str]
    ranks: int
    step_seed: dict[str, int] | None
    only: str | None
    ties: dict[str, str]
    extra_state: dict[str, Any]
    groups: list[tuple[list[str], Any, str | None]] | None
    state: dict[str, dict[str, Any]]
    extra: dict[str, Any]


def read_contents(folder: Path, info: dict[str, Any], index: Index) -> Contents:
    """Takes checkpoint.json's object apart.

    Raises:
        CorruptCheckpointError: ``save`` can't have written it.
    """
    if not info:
        raise CorruptCheckpointError(
            f"{folder}: checkpoint.json is empty: it was written by torch.distributed.checkpoint.save with "
            "a Writer, and is read by its load with a Reader"
        )
    try:
        return _contents(info, index)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{folder}: checkpoint.json is damaged: {error}") from None


def _contents(info: dict[str, Any], index: Index) -> Contents:
    model = _get(info, "model", dict)
    only = model.get("only")
    if only not in (None, "trainable") or "only" not in model:
        raise CorruptCheckpointError(f"only is {shown(only)}")
    mesh = None if info.get("mesh") is None else _get(info, "mesh", dict)
    versions = _get(info, "versions", dict)
    if not all(isinstance(text, str) for text in versions.values()):
        raise CorruptCheckpointError(f"versions is {shown(versions)}")
    groups, state = _optimizer(info)
    return Contents(
        step=_count(info, "step"),
        mesh=None if mesh is None else {axis: _count(mesh, axis, 1) for axis in mesh},
        versions=versions,
        ranks=_count(info, "ranks", 1),
        step_seed=_step_seed(_get(info, "rng", dict)),
        only=only,
        ties=_ties(_get(model, "ties", dict), index),
        extra_state=_get(model, "extra_state", dict),
        groups=groups,
        state=state,
        extra=_get(info, "extra", dict),
    )


def _step_seed(rng: dict[str, Any]) -> dict[str, int] | None:
    if rng.get("step_seed") is None:
        return None
    seed = _get(rng, "step_seed", dict)
    return {name: _count(seed, name, most=1 << 256) for name in ("seed", "step", "micro_batch")}


def _ties(ties: dict[str, Any], index: Index) -> dict[str, str]:
    for alias, name in ties.items():
        known = isinstance(name, str) and name.startswith(PREFIX) and name in index.tensors
        if not known or not alias.startswith(PREFIX) or alias in index.tensors:
            raise CorruptCheckpointError(f"it ties {alias!r:.80} to {shown(name)}")
    return ties


def _optimizer(
    info: dict[str, Any],
) -> tuple[list[tuple[list[str], Any, str | None]] | None, dict[str, dict[str, Any]]]:
    if info.get("optimizer") is None:
        return None, {}
    stored = _get(info, "optimizer", dict)
    groups = []
    known: set[str] = set()
    for group in _get(stored, "groups", list):
        names = _get(group, "params", list)
        if not all(isinstance(name, str) for name in names):
            raise CorruptCheckpointError(f"a group's params are {shown(names)}")
        twice = len(names) + len(known) != len(known | set(names))
        known.update(names)
        if twice:
            raise CorruptCheckpointError("a parameter is twice in the optimizer's groups")
        kind = None if group.get("kind") is None else _get(group, "kind", str)
        groups.append((names, _get(group, "options", dict), kind))
    state = _get(stored, "state", dict)
    for name in state:
        _get(state, name, dict)
        if name not in known:
            raise CorruptCheckpointError(f"it has state of {name!r:.80}, which is in no group")
    return groups, state


def _get(holder: Any, key: str, kind: type) -> Any:
    found = holder.get(key) if isinstance(holder, dict) else None
    if type(found) is not kind:
        raise CorruptCheckpointError(f"{key} is {shown(found)}")
    return found


def _count(holder: dict[str, Any], key: str, least: int = 0, most: int = _LARGEST) -> int:
    found = _get(holder, key, int)
    if not least <= found < most:
        raise CorruptCheckpointError(f"{key} is {shown(found)}")
    return int(found)
