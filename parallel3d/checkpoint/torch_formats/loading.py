"""Loads torch's formats in two passes: first all ranks verify what they need and agree, then they copy."""

from __future__ import annotations

import copy
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType

from parallel3d._torch.fully_shard import plain_name
from parallel3d._util import dry_run
from parallel3d.checkpoint.pieces import boxes_of, check_own_memory, whole_box
from parallel3d.checkpoint.ranks import ranks_of
from parallel3d.checkpoint.state import ExtraState, bring_to_rest, has_extra
from parallel3d.checkpoint.torch_formats.names import (
    find_model,
    find_optimizer,
    shown,
    unexpected_names,
)
from parallel3d.checkpoint.torch_formats.optimizer import OptimizerTarget, SavedOptimizer
from parallel3d.checkpoint.torch_formats.sources import Archive, Source, Verify
from parallel3d.errors import CheckpointError
from parallel3d.fsdp import load_model_state_dict, model_state_dict
from parallel3d.materialize import give_memory


@dataclass(frozen=True)
class LoadOptions:
    """The options of ``load_dcp`` and ``load_torch``."""

    model_prefix: str | None
    optimizer_prefix: str | None
    strict: bool
    cast: bool
    checksums: bool
    trusted: bool


class Checkpoint(ABC):
    """A checkpoint in one of torch's formats, opened for loading."""

    names: Mapping[str, Any]  # flat, without those of wrappers
    shared: Archive | None = None
    """What all ranks need, which the ranks of a host verify together."""

    @abstractmethod
    def value(self, name: str) -> Any:
        """Returns what is stored as ``name``: a Source for a tensor, any other value itself."""

    @abstractmethod
    def optimizer(self, prefix: str, params: Mapping[str, Any]) -> SavedOptimizer:
        """Returns the optimizer stored under ``prefix``; the keys of ``params`` are parameters' names."""


@torch.no_grad()
def load(
    call: str,
    model: nn.Module,
    optimizer: Any,
    open_checkpoint: Callable[[LoadOptions], Checkpoint],
    options: LoadOptions,
) -> None:
    """Loads the checkpoint that ``open_checkpoint`` opens; ``call``: the function that the user called.
    Collective.

    A CheckpointError is raised on all ranks, with model and optimizer unchanged.
    """
    if dry_run.active():  # nothing is read, but memory is allocated
        give_memory(model, ())
        return
    ranks = ranks_of(model, call)
    targets, checks, shared = ranks.on_each(
        lambda: _prepare(model, optimizer, open_checkpoint(options), options)
    )
    hosts = ranks.all(socket.gethostname)
    if shared is not None:
        peers = [rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank]]
        own = list(shared.sizes)[peers.index(ranks.rank) :: len(peers)]
        checks.append(partial(shared.verify, {*own}))
    ranks.all(lambda: _call_each(checks))
    ranks.all(lambda: _call_each(target.read_new for target in targets))
    ranks.with_undo(
        lambda: _call_each(target.adopt for target in targets),
        lambda: None,
        lambda: _call_each(target.undo for target in reversed(targets)),
    )
    ranks.all(lambda: _call_each(target.copy for target in targets))


def _call_each(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _prepare(
    model: nn.Module, optimizer: Any, saved: Checkpoint, options: LoadOptions
) -> tuple[list[ModelTarget | OptimizerTarget], list[Verify], Archive | None]:
    """Returns (what to load into, functions that verify this rank's bytes, archive that all ranks read)."""
    state = state_at_rest(model, "loading a checkpoint")
    prefix = find_model(list(state), saved.names, given=options.model_prefix)
    own = {name.removeprefix(prefix): name for name in saved.names if name.startswith(prefix)}
    values = {name: saved.value(own[name]) for name in state if name in own}
    unexpected = unexpected_names(own, state, top_level=not prefix)
    saved_optimizer = None
    if optimizer is not None:
        at = find_optimizer(saved.names, given=options.optimizer_prefix, model=prefix)
        parts = (f"{at}state.", f"{at}param_groups")
        unexpected = [name for name in unexpected if not own[name].startswith(parts)]
        saved_optimizer = saved.optimizer(at, state)
    if options.strict:
        check_names(state, values, unexpected)
    targets: list[ModelTarget | OptimizerTarget] = [ModelTarget(model, state, values, options.cast)]
    if saved_optimizer is not None:
        targets.append(OptimizerTarget(model, optimizer, saved_optimizer, options.cast))
    return targets, [each for target in targets for each in target.checks()], saved.shared


EXTRA_STATE = "_extra_state"
"""The key of a module's extra state, after the module's name."""
_SHARDED = StateDictType.SHARDED_STATE_DICT


def state_at_rest(model: nn.Module, what: str) -> dict[str, Any]:
    """Reshards all units, and returns the model's state dict, with the Parameters themselves as values."""
    bring_to_rest(model, what)
    return model_state_dict(model, type=_SHARDED, offload_to_cpu=False)


class ModelTarget:
    """The model to load. ``copies``: stored tensors for its own; ``values``: all else, as extra state."""

    def __init__(
        self, model: nn.Module, state: dict[str, Any], stored: Mapping[str, Any], cast: bool
    ) -> None:
        self.model, self.state = model, state
        self._extra = ExtraState()
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

    def checks(self) -> list[Verify]:
        sources = [(source, boxes_of(self.state[name])) for name, source in self.copies.items()]
        sources += [
            (v, [whole_box(v.shape)]) for v in self.values.values() if isinstance(v, Source)
        ]
        return [each for source, boxes in sources for each in source.checks(boxes)]

    def read_new(self) -> None:
        """Reads ``values`` into memory, without changing the model."""
        for name, value in self.values.items():
            self.state[name] = value.whole() if isinstance(value, Source) else value

    def adopt(self) -> None:
        """Calls ``set_extra_state`` of modules, whose code may raise; ``undo`` restores what was before."""
        modules = {plain_name(name): module for name, module in self.model.named_modules()}
        for name in self.values:
            module_name, _, last = plain_name(name).rpartition(".")
            module = modules.get(module_name)
            if last == EXTRA_STATE and module is not None and has_extra(module):
                self._extra.values.append((module, copy.deepcopy(self.state[name])))
        self._extra.apply()

    def undo(self) -> None:
        self._extra.undo()

    def copy(self) -> None:
        """Copies stored values into the model's tensors, and calls its load_state_dict hooks."""
        for name, source in self.copies.items():
            source.fill(self.state[name])
        load_model_state_dict(self.model, self.state, type=_SHARDED)


def check_names(
    state: Mapping[str, Any], stored: Mapping[str, Any], unexpected: Collection[str]
) -> None:
    """Raises CheckpointError if there are ``unexpected`` names, or ``stored`` lacks names in ``state``."""
    if unexpected:
        raise CheckpointError(
            f"the checkpoint has {shown(unexpected)}, which the model doesn't have; is it of another model? "
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
