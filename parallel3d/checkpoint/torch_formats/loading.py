"""Loading of torch's formats in two passes: all ranks verify what they need and agree, then they copy."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel3d.checkpoint.ranks import ranks_of
from parallel3d.checkpoint.torch_formats.archive import Entry
from parallel3d.checkpoint.torch_formats.model_target import ModelTarget, check_names, state_at_rest
from parallel3d.checkpoint.torch_formats.names import (
    find_model,
    find_optimizer,
    unexpected_names,
)
from parallel3d.checkpoint.torch_formats.optimizer_target import OptimizerTarget
from parallel3d.checkpoint.torch_formats.saved_optimizer import SavedOptimizer


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
    """An opened checkpoint.

    Attributes:
        names: its flat names, without those of wrappers.
        shared: whether all ranks need the same records, which the ranks of a host then verify together.
    """

    names: Mapping[str, Any]
    shared = False

    @abstractmethod
    def value(self, name: str) -> Any:
        """Returns a Source for a tensor, the value itself for anything else."""

    @abstractmethod
    def optimizer(self, prefix: str, params: Mapping[str, Any]) -> SavedOptimizer:
        """Returns the optimizer after ``prefix``; ``params`` has the names that its parameters may have."""


def load(
    call: str,
    model: nn.Module,
    optimizer: Any,
    open_checkpoint: Callable[[LoadOptions], Checkpoint],
    options: LoadOptions,
) -> None:
    """Loads the checkpoint that ``open_checkpoint`` returns; every rank of the model's mesh must call it.

    Args:
        call: the function that the user has called.

    Raises:
        CheckpointError: on all ranks, with model and optimizer unchanged.
    """
    ranks = ranks_of(model, call)
    job = ranks.on_each(lambda: _Job(model, optimizer, open_checkpoint(options), options))
    own = slice(None)  # the records that this rank verifies
    if job.shared:
        hosts = ranks.all(socket.gethostname)
        peers = [rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank]]
        own = slice(peers.index(ranks.rank), None, len(peers))
    ranks.all(lambda: job.verify(own))
    ranks.all(job.read_new)
    ranks.with_undo(job.adopt, lambda: None, job.undo)
    ranks.all(job.copy)


class _Job:
    """What one rank does in one load; the values of tensors change only in ``copy``."""

    def __init__(
        self, model: nn.Module, optimizer: Any, saved: Checkpoint, options: LoadOptions
    ) -> None:
        self.shared = saved.shared
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
        self.targets: list[ModelTarget | OptimizerTarget] = [
            ModelTarget(model, state, values, options.cast)
        ]
        if saved_optimizer is not None:
            self.targets.append(OptimizerTarget(model, optimizer, saved_optimizer, options.cast))
        entries = [entry for target in self.targets for entry in target.entries()]
        self.entries: list[Entry] = list(dict.fromkeys(entries))

    def verify(self, own: slice) -> None:
        """Verifies checksums of this rank's share of the records, and allocates all memory."""
        for entry in self.entries[own]:
            entry.verify()
        for target in self.targets:
            target.allocate()

    @torch.no_grad()
    def read_new(self) -> None:
        """Reads what the optimizer does not have yet."""
        for target in self.targets:
            target.read_new()

    @torch.no_grad()
    def adopt(self) -> None:
        """Calls the user's code, which may raise, before the values of tensors change."""
        for target in self.targets:
            target.adopt()

    def undo(self) -> None:
        """Undoes ``adopt``."""
        for target in reversed(self.targets):
            target.undo()

    @torch.no_grad()
    def copy(self) -> None:
        """Copies into existing tensors, after all ranks have agreed."""
        for target in self.targets:
            target.copy()
