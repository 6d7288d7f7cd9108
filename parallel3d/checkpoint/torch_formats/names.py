"""Finds the names of a model and an optimizer among the flat names of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from heapq import nsmallest
from itertools import islice
from typing import Any

from parallel3d._torch.fully_shard import plain_name
from parallel3d.errors import CheckpointError

MAX_NAME = 2000
"""Characters of a name: searching it for prefixes takes time that grows with its square."""
_SHOWN = 4  # names in an error
# Where torch's examples and torchtitan put a model.
_USUAL = ("model.", "", "app.model.", "state_dict.", "module.")


def without_wrappers(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``stored`` with wrappers' parts of its names removed, as torch's get_model_state_dict does."""
    result: dict[str, Any] = {}
    for name, value in stored.items():
        plain = plain_name(name)
        if plain in result:
            raise CheckpointError(
                f"the checkpoint has {plain} twice, with and without a wrapper's name"
            )
        result[plain] = value
    return result


def find_model(names: Collection[str], stored: Collection[str], *, given: str | None) -> str:
    """Returns the prefix of the model's ``names`` in ``stored``: ``given`` by the user, or the best match."""
    if given is not None:
        return _dotted(given)
    if not names:
        return ""
    counts: dict[str, int] = {}
    wanted = set(names)
    for name in stored:
        for start in _starts(name):
            if name[start:] in wanted:
                counts[name[:start]] = counts.get(name[:start], 0) + 1
    most = max(counts.values(), default=0)
    prefixes = [prefix for prefix, count in counts.items() if count == most]
    if not prefixes:
        raise CheckpointError(
            f"the checkpoint has none of the model's names ({shown(names)}); it has {shown(stored)}. Is it "
            "of another model?"
        )
    usual = [prefix for prefix in _USUAL if prefix in prefixes]
    if usual or len(prefixes) == 1:
        return (usual or prefixes)[0]
    raise CheckpointError(
        f"the model's names are at several places of the checkpoint, after {shown(prefixes)}; say after "
        f"which: model_prefix={min(prefixes)!r}"
    )


def find_optimizer(stored: Collection[str], *, given: str | None, model: str) -> str:
    """Returns the prefix before an optimizer's "state." and "param_groups." in ``stored``: ``given`` by the
    user, or found, preferably next to the model's prefix ``model``."""
    if given is not None:
        return _dotted(given)
    prefixes = {
        name[:start]
        for name in stored
        for start in _starts(name)
        if name.startswith("param_groups.", start) or name[start:] == "param_groups"
    }
    if len(prefixes) == 1:
        return prefixes.pop()
    parent = model[: model.rstrip(".").rfind(".") + 1]
    for last in ("optimizer.", "optim.", ""):
        if parent + last in prefixes:
            return parent + last
    if not prefixes:
        raise CheckpointError(
            f"the checkpoint has no state of an optimizer; it has {shown(stored)}. Leave the optimizer out "
            "to load the model alone"
        )
    raise CheckpointError(
        f"the checkpoint has state of several optimizers, after {shown(prefixes)}; say after which: "
        f"optimizer_prefix={min(prefixes)!r}"
    )


def unexpected_names(
    stored: Iterable[str], names: Collection[str], *, top_level: bool
) -> list[str]:
    """Returns the names in ``stored`` that the model doesn't have. At the ``top_level`` of a checkpoint,
    which may have other values too, these are only names with the same first part as one of the model's."""
    heads = {name.split(".", 1)[0] for name in names}
    return [
        name
        for name in stored
        if name not in names and not (top_level and name.split(".", 1)[0] not in heads)
    ]


def shown(names: Iterable[str], among: Iterable[str] = ()) -> str:
    """Returns a text for an error: the first few names, each with the nearest one in ``among``."""
    all_names, among = list(names), list(islice(among, 5000))
    parts = []
    for name in nsmallest(_SHOWN, all_names):
        nearest = get_close_matches(name, among, n=1, cutoff=0.6)
        parts.append(f"{name!r:.120}" + (f" (nearest: {nearest[0]!r:.120})" if nearest else ""))
    more = f" and {len(all_names) - _SHOWN} more" if len(all_names) > _SHOWN else ""
    return (", ".join(parts) + more) or "nothing"


def _dotted(prefix: str) -> str:
    return prefix if not prefix or prefix.endswith(".") else f"{prefix}."


def _starts(name: str) -> list[int]:
    """Returns the positions in ``name`` after each prefix that it may have: 0, and after each dot."""
    return [0, *(match.end() for match in re.finditer(r"\.", name))]
