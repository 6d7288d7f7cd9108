"""ModelTarget: what of a checkpoint goes where in a model."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from heapq import nsmallest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType

from parallel3d.checkpoint.model_state import has_extra, plain_name
from parallel3d.checkpoint.pieces import pieces_of, shares_memory_within
from parallel3d.checkpoint.torch_formats.archive import Entry
from parallel3d.checkpoint.torch_formats.folder import Box, Source, whole
from parallel3d.errors import CheckpointError
from parallel3d.fsdp import load_model_state_dict, model_state_dict
from parallel3d.fsdp.inspect import check_at_rest, to_rest, units_of

# Where a model's and an optimizer's names are among those of a checkpoint.

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


EXTRA_STATE = "_extra_state"
"""What torch calls a module's, after its name."""
_SHARDED = StateDictType.SHARDED_STATE_DICT


def state_at_rest(model: nn.Module, what: str) -> dict[str, Any]:
    """The model's state dict, of the tensors it computes with; units come to rest.

    Raises:
        StateError: in a forward or backward, or without values.
    """
    for unit in units_of(model, True):
        check_at_rest(unit, what)
        to_rest(unit)
    return model_state_dict(model, type=_SHARDED, offload_to_cpu=False)


def boxes_of(tensor: Tensor) -> list[Box]:
    """What this rank holds of it."""
    return [(piece.offsets, piece.sizes) for piece in pieces_of(tensor)]


def fill(tensor: Tensor, source: Source) -> None:
    """Copies what this rank holds of ``tensor``."""
    for piece in pieces_of(tensor):
        source.copy((piece.offsets, piece.sizes), piece.local)


class ModelTarget:
    """A model and what it is to have.

    Attributes:
        state: its state dict: the very tensors.
        copies: names with a source. values: what isn't copied into a tensor that is there.
    """

    def __init__(
        self,
        model: nn.Module,
        state: dict[str, Any],
        stored: Mapping[str, Any],
        unexpected: Collection[str],
        *,
        strict: bool,
        cast: bool,
    ) -> None:
        self.model, self.state = model, state
        if strict:
            _check_names(state, stored, unexpected)
        self._undo: list[tuple[nn.Module, Any]] = []
        self.copies: dict[str, Source] = {}
        self.values: dict[str, Any] = {}
        for name, value in stored.items():
            if name not in state:
                continue
            if isinstance(value, Source) and name.endswith(EXTRA_STATE):
                value.take(name)
                self.values[name] = value
            elif isinstance(value, Source):
                _check_fits(name, state[name], value, cast)
                self.copies[name] = value
            elif isinstance(state[name], Tensor):
                raise CheckpointError(
                    f"{name} is a tensor in the model, and none in the checkpoint"
                )
            else:
                self.values[name] = value

    def entries(self) -> list[Entry]:
        """The records that this rank reads."""
        found: list[Entry] = []
        for name, source in self.copies.items():
            found += source.entries(boxes_of(self.state[name]))
        for value in self.values.values():
            if isinstance(value, Source):
                found += value.entries([whole(value)])
        return found

    def adopt(self) -> None:
        """Gives modules their extra state, which they may refuse."""
        modules = {plain_name(name): module for name, module in self.model.named_modules()}
        for name, value in self.values.items():
            if isinstance(value, Source):
                self.state[name] = torch.empty(value.shape, dtype=value.dtype)
                fill(self.state[name], value)
            else:
                self.state[name] = value
            of, _, last = plain_name(name).rpartition(".")
            module = modules.get(of)
            if last == EXTRA_STATE and module is not None and has_extra(module):
                self._undo.append((module, copy.deepcopy(module.get_extra_state())))
                module.set_extra_state(copy.deepcopy(self.state[name]))

    def undo(self) -> None:
        """What was before ``adopt``."""
        for module, value in reversed(self._undo):
            module.set_extra_state(value)

    def apply(self) -> None:
        """Copies into the model's tensors, and lets ``load_state_dict`` do what else it does."""
        for name, source in self.copies.items():
            fill(self.state[name], source)
        load_model_state_dict(self.model, self.state, type=_SHARDED)


def _check_names(
    state: Mapping[str, Any], stored: Mapping[str, Any], unexpected: Collection[str]
) -> None:
    if unexpected:
        raise CheckpointError(
            f"the checkpoint has {shown(unexpected)}, which the model hasn't; is it of another model? "
            "strict=False leaves them out"
        )
    there = {id(value) for name, value in state.items() if name in stored}
    missing = [
        name
        for name, value in state.items()
        if name not in stored
        and not (
            isinstance(value, Tensor) and id(value) in there
        )  # tied: it is there by another name
        and not name.endswith(EXTRA_STATE)
    ]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no {shown(missing)}, which the model has; strict=False leaves them alone"
        )


def _check_fits(name: str, target: Any, source: Source, cast: bool) -> None:
    if not isinstance(target, Tensor):
        raise CheckpointError(f"{name} is a tensor in the checkpoint, and none in the model")
    if target.is_meta:
        raise CheckpointError(
            f"{name} is on the meta device; call parallel3d.materialize or to_empty before loading"
        )
    if tuple(target.shape) != tuple(source.shape):
        raise CheckpointError(
            f"{name} has the shape {tuple(source.shape)} in the checkpoint and {tuple(target.shape)} in the "
            "model"
        )
    if target.dtype != source.dtype and not cast:
        raise CheckpointError(
            f"{name} is {source.dtype} in the checkpoint and {target.dtype} in the model; cast=True converts"
        )
    if shares_memory_within(target):
        raise CheckpointError(
            f"{name} can't be read into: its elements share memory, as after expand(); make it contiguous "
            "first"
        )
