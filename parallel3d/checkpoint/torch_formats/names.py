"""Where a model's and an optimizer's names are among those of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from heapq import nsmallest
from typing import Any

from parallel3d.errors import CheckpointError

__all__ = ["cleaned", "find_model", "find_optimizer", "others", "shown"]

# What wrappers put into names, which torch's get_model_state_dict leaves out.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)

# Where torch's examples and torchtitan put a model.
_USUAL = ("model.", "", "app.model.", "state_dict.", "module.")


def cleaned(stored: Mapping[str, Any]) -> dict[str, Any]:
    """``stored`` under names without those of wrappers."""
    found: dict[str, Any] = {}
    for name, value in stored.items():
        plain = _WRAPPERS.sub("", name)
        if plain in found:
            raise CheckpointError(
                f"the checkpoint has {plain} twice, with and without a wrapper's name"
            )
        found[plain] = value
    return found


def find_model(names: Collection[str], stored: Collection[str], *, given: str | None) -> str:
    """What ``stored`` names have before the model's ``names``.

    Args:
        given: what the caller says; None: to be found.

    Raises:
        CheckpointError: the names are at several places, or at none.
    """
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
    best = max(counts.values(), default=0)
    found = [prefix for prefix, count in counts.items() if count == best]
    if not found:
        raise CheckpointError(
            f"the checkpoint has none of the model's names ({shown(names)}); it has {shown(stored)}. Is it "
            "of another model?"
        )
    for prefix in _USUAL:
        if prefix in found:
            return prefix
    if len(found) > 1:
        raise CheckpointError(
            f"the model's names are at several places of the checkpoint, after {shown(found)}; say after "
            f"which: model_prefix={sorted(found)[0]!r}"
        )
    return found[0]


def find_optimizer(stored: Collection[str], *, given: str | None, model: str) -> str:
    """What ``stored`` names have before "state." and "param_groups." of an optimizer.

    Args:
        model: the model's prefix: an optimizer beside it is preferred.

    Raises:
        CheckpointError: there are several, or none.
    """
    if given is not None:
        return _dotted(given)
    found = {
        name[:start]
        for name in stored
        for start in _starts(name)
        if name.startswith("param_groups.", start) or name[start:] == "param_groups"
    }
    if len(found) == 1:
        return found.pop()
    beside = model[: model.rstrip(".").rfind(".") + 1]
    for last in ("optimizer.", "optim.", ""):
        if beside + last in found:
            return beside + last
    if not found:
        raise CheckpointError(
            f"the checkpoint has no state of an optimizer; it has {shown(stored)}. Leave the optimizer out "
            "to load the model alone"
        )
    raise CheckpointError(
        f"the checkpoint has state of several optimizers, after {shown(found)}; say after which: "
        f"optimizer_prefix={sorted(found)[0]!r}"
    )


def others(stored: Iterable[str], names: Collection[str], *, beside: bool) -> list[str]:
    """Those of ``stored`` that are no ``names`` of the model, but would be of another model.

    Args:
        beside: whether things that belong to no model may be among them: at the top of a checkpoint.
    """
    heads = {name.split(".", 1)[0] for name in names}
    return [
        name
        for name in stored
        if name not in names and not (beside and name.split(".", 1)[0] not in heads)
    ]


def shown(names: Iterable[str], count: int = 4) -> str:
    """The first few, for an error."""
    everything = list(names)
    first = nsmallest(count, map(repr, everything))
    more = f" and {len(everything) - count} more" if len(everything) > count else ""
    return (", ".join(name[:120] for name in first) + more) or "nothing"


def _dotted(prefix: str) -> str:
    return prefix if not prefix or prefix.endswith(".") else f"{prefix}."


def _starts(name: str) -> list[int]:
    """Where a name may begin after a prefix."""
    return [0, *(match.end() for match in re.finditer(r"\.", name))]
