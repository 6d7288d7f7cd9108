"""Loading in two passes: all ranks look at all that they need and agree that it is whole, then they copy."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel3d.checkpoint.ranks import Ranks, ranks_of
from parallel3d.checkpoint.torch_formats.archive import Entry
from parallel3d.checkpoint.torch_formats.model_target import ModelTarget, state_at_rest
from parallel3d.checkpoint.torch_formats.optimizer_target import OptimizerTarget, SavedOptimizer
from parallel3d.errors import CheckpointError


@dataclass(frozen=True)
class Contents:
    """What a checkpoint has for a model and an optimizer.

    Attributes:
        model: a Source for each tensor, values for the rest, by the model's names.
        unexpected: names that a model of this kind would have, and this one hasn't.
        optimizer: None where none is asked for.
    """

    model: Mapping[str, Any]
    unexpected: Collection[str]
    optimizer: SavedOptimizer | None


def load(
    model: nn.Module,
    optimizer: Any,
    read: Callable[[dict[str, Any]], Contents],
    *,
    strict: bool,
    cast: bool,
    share: bool,
) -> None:
    """Loads what ``read(the model's state dict)`` returns; every rank of the model's mesh must call it.

    Args:
        strict: all of the model's names must be there, and no others.
        cast: whether stored values may be of another dtype.
        share: whether all ranks need the same records, which those on one host then verify together.

    Raises:
        CheckpointError: on all ranks, with model and optimizer as they were.
    """
    ranks = ranks_of(model, "load_torch" if share else "load_dcp")
    jobs: list[_Job] = []  # one, if it can be done

    def plan() -> str:
        jobs.append(_Job(model, optimizer, read, strict=strict, cast=cast))
        return socket.gethostname()

    hosts = ranks.all(plan)
    ranks.all(lambda: jobs[0].make_sure(_share(ranks, hosts) if share else slice(None)))
    job = jobs[0]
    ranks.all(job.read_new)
    ranks.undone_unless(job.adopt, lambda: None, job.undo)
    ranks.all(job.carry_out)


def _share(ranks: Ranks, hosts: Sequence[str]) -> slice:
    """Which records this rank verifies of those that all ranks of its host read."""
    mine = [rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank]]
    return slice(mine.index(ranks.rank), None, len(mine))


class _Job:
    """What one rank does in one load; nothing is changed until ``carry_out``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        read: Callable[[dict[str, Any]], Contents],
        *,
        strict: bool,
        cast: bool,
    ) -> None:
        state = state_at_rest(model, "loading a checkpoint")
        contents = read(state)
        self.model = ModelTarget(
            model, state, contents.model, contents.unexpected, strict=strict, cast=cast
        )
        self.optimizer: OptimizerTarget | None = None
        if optimizer is not None:
            if contents.optimizer is None:
                raise CheckpointError(
                    "the checkpoint has no state of an optimizer; leave it out to load the model alone"
                )
            self.optimizer = OptimizerTarget(model, optimizer, contents.optimizer, cast=cast)
        entries = self.model.entries()
        if self.optimizer is not None:
            entries += self.optimizer.entries()
        self.entries: list[Entry] = list(dict.fromkeys(entries))

    def make_sure(self, share: slice) -> None:
        """That every byte is as it was written, and that there is memory for all."""
        for entry in self.entries[share]:
            entry.verify()
        if self.optimizer is not None:
            self.optimizer.allocate()

    def read_new(self) -> None:
        """What the optimizer doesn't have yet."""
        if self.optimizer is not None:
            with torch.no_grad():
                self.optimizer.read_new()

    def adopt(self) -> None:
        """What runs code that may raise; no tensor's values change."""
        with torch.no_grad():
            self.model.adopt()
            if self.optimizer is not None:
                self.optimizer.adopt()

    def undo(self) -> None:
        """What was before ``adopt``."""
        if self.optimizer is not None:
            self.optimizer.undo()
        self.model.undo()

    def carry_out(self) -> None:
        """On the word of all ranks that everything is there."""
        with torch.no_grad():
            self.model.apply()
            if self.optimizer is not None:
                self.optimizer.read()
