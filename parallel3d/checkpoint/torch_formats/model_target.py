"""ModelTarget: a model that a checkpoint is loaded into."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType

from parallel3d.checkpoint.format.boxes import Box, whole_box
from parallel3d.checkpoint.model_state import has_extra, plain_name
from parallel3d.checkpoint.pieces import check_own_memory, pieces_of
from parallel3d.checkpoint.torch_formats.archive import Entry
from parallel3d.checkpoint.torch_formats.folder import Source
from parallel3d.checkpoint.torch_formats.names import shown
from parallel3d.errors import CheckpointError
from parallel3d.fsdp import load_model_state_dict, model_state_dict
from parallel3d.fsdp.inspect import check_at_rest, to_rest, units_of

EXTRA_STATE = "_extra_state"
"""The key of a module's extra state, after the module's name."""
_SHARDED = StateDictType.SHARDED_STATE_DICT


def state_at_rest(model: nn.Module, what: str) -> dict[str, Any]:
    """Brings all units to rest and returns the model's state dict, of the Parameters themselves.

    Raises:
        StateError: in a forward or backward pass, or without values.
    """
    for unit in units_of(model, True):
        check_at_rest(unit, what)
        to_rest(unit)
    return model_state_dict(model, type=_SHARDED, offload_to_cpu=False)


def boxes_of(tensor: Tensor) -> list[Box]:
    """Returns the boxes that this rank holds of ``tensor``."""
    return [piece.box for piece in pieces_of(tensor)]


def fill(tensor: Tensor, source: Source) -> None:
    """Copies what this rank holds of ``tensor``."""
    for piece in pieces_of(tensor):
        source.copy(piece.box, piece.local)


class ModelTarget:
    """A model, and the values that it gets.

    Attributes:
        state: its state dict, of the Parameters themselves.
        copies: sources by name, to be copied into existing tensors.
        values: everything else by name.
    """

    def __init__(
        self, model: nn.Module, state: dict[str, Any], stored: Mapping[str, Any], cast: bool
    ) -> None:
        self.model, self.state = model, state
        self._undo: list[tuple[nn.Module, Any]] = []
        self.copies: dict[str, Source] = {}
        self.values: dict[str, Any] = {}
        for name, value in stored.items():
            if name not in state:
                continue
            if isinstance(value, Source) and not name.endswith(EXTRA_STATE):
                _check_fits(name, state[name], value, cast)
                self.copies[name] = value
                continue
            if isinstance(value, Source):
                value.take(name)
            elif isinstance(state[name], Tensor):
                raise CheckpointError(
                    f"{name} is a tensor in the model, and none in the checkpoint"
                )
            self.values[name] = value

    def entries(self) -> list[Entry]:
        """Returns the records that this rank reads."""
        sources = [(source, boxes_of(self.state[name])) for name, source in self.copies.items()]
        sources += [
            (v, [whole_box(v.shape)]) for v in self.values.values() if isinstance(v, Source)
        ]
        return [entry for source, boxes in sources for entry in source.entries(boxes)]

    def allocate(self) -> None:
        """Does nothing: all its tensors exist."""

    def read_new(self) -> None:
        """Does nothing: all its tensors exist."""

    def adopt(self) -> None:
        """Gives modules their extra state, for which their code may raise."""
        modules = {plain_name(name): module for name, module in self.model.named_modules()}
        for name, value in self.values.items():
            self.state[name] = value
            if isinstance(value, Source):
                self.state[name] = torch.empty(value.shape, dtype=value.dtype)
                fill(self.state[name], value)
            module_name, _, last = plain_name(name).rpartition(".")
            module = modules.get(module_name)
            if last == EXTRA_STATE and module is not None and has_extra(module):
                self._undo.append((module, copy.deepcopy(module.get_extra_state())))
                module.set_extra_state(copy.deepcopy(self.state[name]))

    def undo(self) -> None:
        """Undoes ``adopt``."""
        for module, value in reversed(self._undo):
            module.set_extra_state(value)

    def copy(self) -> None:
        """Copies into the model's tensors, and calls the load hooks."""
        for name, source in self.copies.items():
            fill(self.state[name], source)
        load_model_state_dict(self.model, self.state, type=_SHARDED)


def check_names(
    state: Mapping[str, Any], stored: Mapping[str, Any], unexpected: Collection[str]
) -> None:
    """Raises CheckpointError if names are unexpected, or names of ``state`` are missing from ``stored``."""
    if unexpected:
        raise CheckpointError(
            f"the checkpoint has {shown(unexpected)}, which the model hasn't; is it of another model? "
            "strict=False leaves them out"
        )
    present = {id(value) for name, value in state.items() if name in stored}
    missing = [
        name
        for name, value in state.items()
        if name not in stored
        and not (isinstance(value, Tensor) and id(value) in present)  # stored by a tied name
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
    if tuple(target.shape) != source.shape:
        raise CheckpointError(
            f"{name} has the shape {source.shape} in the checkpoint and {tuple(target.shape)} in the model"
        )
    if target.dtype != source.dtype and not cast:
        raise CheckpointError(
            f"{name} is {source.dtype} in the checkpoint and {target.dtype} in the model; cast=True converts"
        )
    check_own_memory(name, target)
