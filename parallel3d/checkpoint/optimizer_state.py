"""What a checkpoint holds of optimizers: by parameters' names, as they lie; and back, on any mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel3d.checkpoint.contents import Contents
from parallel3d.checkpoint.model_state import parameter_names
from parallel3d.checkpoint.optimizer_groups import LoadedGroups, kind_of
from parallel3d.checkpoint.pieces import shares_memory_within
from parallel3d.checkpoint.stored import Stored
from parallel3d.checkpoint.values import decode, encode, keeper
from parallel3d.errors import CheckpointError

__all__ = ["LoadedOptimizers", "as_optimizers", "optimizer_state"]

PREFIX = "optimizer."
_NO_OPTIONS = ("params", "param_names")


def as_optimizers(given: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """One optimizer, several or none, as a list.

    Raises:
        CheckpointError: something else.
    """
    if given is None:
        return []
    several = isinstance(given, Iterable) and not isinstance(given, Optimizer)
    found: list[Any] = list(given) if several else [given]  # type: ignore[arg-type]
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise CheckpointError(
                f"optimizer is {optimizer!r}; it must be a torch.optim.Optimizer, or several"
            )
    return found


def optimizer_state(
    names: Mapping[int, str], optimizers: Sequence[Optimizer], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Puts the state's tensors into ``tensors``; returns the rest, and how it goes together, encoded.

    Args:
        names: of the model's parameters, by id.

    Raises:
        CheckpointError: a parameter isn't the model's, or a value can't be kept.
    """
    keep = keeper(tensors)
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    known: set[str] = set()
    for optimizer in optimizers:
        _check_keys(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            mine = _names_of(group, number, names)
            twice = next((name for name in mine if name in known), None)
            known.update(mine)
            if twice is not None or len(set(mine)) != len(mine):
                raise CheckpointError(f"parameter {twice or mine[0]!r} is in two of the optimizers")
            options = {k: v for k, v in group.items() if k not in _NO_OPTIONS}
            options = encode(options, f"{PREFIX}group {len(groups)}", keep)
            groups.append({"params": mine, "options": options, "kind": kind_of(optimizer)})
            for name, param in zip(mine, group["params"], strict=True):
                entry = optimizer.state.get(param)
                if entry:
                    where = f"{PREFIX}{name}"
                    state[name] = {k: encode(v, f"{where}.{k}", keep) for k, v in entry.items()}
    return {"groups": groups, "state": state}


def _check_keys(optimizer: Optimizer) -> None:
    for key in optimizer.state:
        if not isinstance(key, Tensor) and optimizer.state[key]:
            raise CheckpointError(
                f"the optimizer has state for {key!r:.80}, which is no parameter; a checkpoint holds state "
                "of parameters: put that into extra"
            )


def _names_of(group: dict[str, Any], number: int, names: Mapping[int, str]) -> list[str]:
    found = []
    for place, param in enumerate(group["params"]):
        name = names.get(id(param))
        if name is None:
            raise CheckpointError(
                f"parameter {place} of the optimizer's group {number}, of shape {tuple(param.shape)}, isn't "
                "one of the model's; make the optimizer after parallelize, from model.parameters()"
            )
        found.append(name)
    return found


class LoadedOptimizers:
    """Where the stored state is read to, and how it becomes the optimizers'.

    State that is there and fits is read in place. Else it is made: laid out as its parameter, where it has
    the parameter's shape; whole on each rank otherwise.

    Attributes:
        tensors: what is to be read, by the name it is stored under.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        contents: Contents,
        stored: Stored,
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._stored = stored
        self._states: list[tuple[Optimizer, dict[Tensor, dict[str, Any]]]] = []
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []
        if not optimizers:
            return
        if contents.groups is None:
            raise CheckpointError(
                f"{stored.folder} was saved without an optimizer; load it without one"
            )
        names = parameter_names(model)
        loaded = LoadedGroups(contents, stored)
        wanted: set[str] = set()
        for optimizer in optimizers:
            entries: dict[Tensor, dict[str, Any]] = {}
            for number, group in enumerate(optimizer.param_groups):
                mine = _names_of(group, number, names)
                wanted.update(mine)
                self._options.append((group, loaded.options(optimizer, number, mine)))
                for name, param in zip(mine, group["params"], strict=True):
                    if name in contents.state:
                        old = optimizer.state.get(param) or {}
                        entries[param] = self._entry(name, param, contents.state[name], old)
            self._states.append((optimizer, entries))
        lost = [name for name in loaded.names if name not in wanted]
        if lost:
            raise CheckpointError(
                f"the checkpoint has optimizer state of {len(lost)} parameters that the optimizer doesn't "
                f"have, the first {lost[0]!r}; give it the same parameters"
            )

    def _entry(
        self, name: str, param: Tensor, stored: dict[str, Any], old: dict[str, Any]
    ) -> dict[str, Any]:
        entry = {}
        for key, value in stored.items():
            where = f"{PREFIX}{name}.{key}"
            at = value.get("$tensor") if isinstance(value, dict) and len(value) == 1 else None
            found = self._in_place(at, old.get(key), where) if isinstance(at, str) else None
            if found is None:
                found = decode(value, partial(self._target, param=param, where=where))
            entry[key] = found
        return entry

    def _in_place(self, at: str, old: Any, where: str) -> Tensor | None:
        """The tensor that is there already, if it is as the stored one will be."""
        entry = self._stored.index.tensors.get(at)
        if entry is None or not isinstance(old, Tensor):
            return None
        if old.dim() and tuple(old.shape) != entry.shape:
            raise CheckpointError(
                f"{where.removeprefix(PREFIX)} of the optimizer has the shape {tuple(old.shape)}, in the "
                f"checkpoint {entry.shape}"
            )
        fits = tuple(old.shape) == entry.shape and old.dtype == entry.dtype
        if not fits or old.is_inference() or old.requires_grad or shares_memory_within(old):
            return None
        self._stored.take(at, where)
        self.tensors[at] = old.detach()
        return old

    def _target(self, at: str, *, param: Tensor, where: str) -> Tensor:
        """Memory for the stored tensor ``at``."""
        entry = self._stored.take(at, where)
        if entry.shape == tuple(param.shape):
            made = torch.empty_like(param.detach(), dtype=entry.dtype)
        else:
            if len(entry.chunks) > 1:
                raise CheckpointError(
                    f"{at} is stored in parts, of shape {entry.shape}, other than its parameter's "
                    f"{tuple(param.shape)}: how it is to lie on this mesh isn't known before the optimizer "
                    "has made it. Let it make its state (a step) before load"
                )
            device = param.device
            if isinstance(param, DTensor):
                device = torch.device(param.device_mesh.device_type)
            made = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        self.tensors[at] = made
        return made

    def commit(self) -> None:
        """Gives the optimizers what has been read."""
        for optimizer, entries in self._states:
            mine = {param for group in optimizer.param_groups for param in group["params"]}
            for param in mine:
                optimizer.state.pop(param, None)
            for param, entry in entries.items():
                optimizer.state[param] = entry
        for group, options in self._options:
            group.update(options)
