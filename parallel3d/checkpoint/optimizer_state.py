"""What a checkpoint holds of optimizers: by parameters' names, as they lie; and back, on any mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel3d.checkpoint.format.index import Index
from parallel3d.checkpoint.model_state import parameter_names
from parallel3d.checkpoint.values import decode, encode
from parallel3d.errors import CheckpointError, CorruptCheckpointError

__all__ = ["LoadedOptimizers", "as_optimizers", "optimizer_state"]

PREFIX = "optimizer."


def as_optimizers(given: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """One optimizer, several or none, as a list.

    Raises:
        CheckpointError: something else.
    """
    if given is None:
        return []
    found = [given] if isinstance(given, Optimizer) else list(given)
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise CheckpointError(
                f"optimizer is {optimizer!r}; it must be a torch.optim.Optimizer, or several"
            )
    return found


def optimizer_state(
    model: nn.Module, optimizers: Sequence[Optimizer], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Puts the state's tensors into ``tensors``; returns the rest, and how it goes together, encoded.

    Raises:
        CheckpointError: a parameter isn't the model's, or a value can't be kept.
    """
    names = parameter_names(model)

    def keep(tensor: Tensor, where: str) -> str:
        tensors[where] = tensor
        return where

    groups, state = [], {}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            mine = _names_of(group, number, names)
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            groups.append({"params": mine, "options": encode(options, f"group {number}", keep)})
            for name, param in zip(mine, group["params"], strict=True):
                entry = optimizer.state.get(param)
                if entry:
                    where = f"{PREFIX}{name}"
                    state[name] = {k: encode(v, f"{where}.{k}", keep) for k, v in entry.items()}
    return {"groups": groups, "state": state}


def _names_of(group: dict[str, Any], number: int, names: dict[int, str]) -> list[str]:
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
        stored: Any,
        index: Index,
        *,
        partial: bool,
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._index = index
        self._states: list[tuple[Optimizer, dict[Tensor, dict[str, Any]]]] = []
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []
        names = parameter_names(model)
        state, options_of = _read(stored)
        wanted: set[str] = set()
        for optimizer in optimizers:
            entries: dict[Tensor, dict[str, Any]] = {}
            for number, group in enumerate(optimizer.param_groups):
                mine = _names_of(group, number, names)
                wanted.update(mine)
                self._options.append((group, _options_for(number, mine, options_of)))
                for name, param in zip(mine, group["params"], strict=True):
                    if name in state:
                        old = optimizer.state.get(param) or {}
                        entries[param] = self._entry(name, param, state[name], old)
            self._states.append((optimizer, entries))
        lost = [name for name in options_of if name not in wanted]
        if lost and not partial:
            raise CheckpointError(
                f"the checkpoint has optimizer state of {len(lost)} parameters that the optimizer doesn't "
                f"have, the first {lost[0]!r}; give it the same parameters"
            )

    def _entry(
        self, name: str, param: Tensor, stored: dict[str, Any], old: dict[str, Any]
    ) -> dict[str, Any]:
        entry = {}
        for key, value in stored.items():
            found = self._in_place(value, old.get(key), param)
            entry[key] = (
                decode(value, lambda at: self._target(at, param)) if found is None else found
            )
        return entry

    def _in_place(self, value: Any, old: Any, param: Tensor) -> Tensor | None:
        """The tensor that is there already, if it is as the stored one will be."""
        at = value.get("$tensor") if isinstance(value, dict) else None
        if not isinstance(at, str) or at not in self._index.tensors or not isinstance(old, Tensor):
            return None
        entry = self._index.tensors[at]
        fits = tuple(old.shape) == entry.shape and old.dtype == entry.dtype
        if not fits or old.is_inference() or old.requires_grad:
            return None
        self.tensors[at] = old.detach()
        return old

    def _target(self, at: Any, param: Tensor) -> Tensor:
        """Memory for the stored tensor ``at``."""
        if not isinstance(at, str) or at not in self._index.tensors:
            raise CorruptCheckpointError(
                f"checkpoint.json names the tensor {at!r:.80}, which isn't stored"
            )
        entry = self._index.tensors[at]
        if entry.shape == tuple(param.shape):
            made = torch.empty_like(param.detach(), dtype=entry.dtype)
        else:
            whole = len(entry.chunks) <= 1
            if not whole:
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


def _read(stored: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(parameter -> its encoded state, parameter -> its group's options)."""
    try:
        state = {str(name): dict(entry) for name, entry in stored["state"].items()}
        options = {
            str(name): group["options"] for group in stored["groups"] for name in group["params"]
        }
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise CorruptCheckpointError(
            f"checkpoint.json is damaged: its optimizer isn't one ({error!r:.80})"
        ) from None
    return state, options


def _options_for(
    number: int, names: list[str], stored: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The options that the parameters of a group were saved with.

    Raises:
        CheckpointError: they have none, or different ones.
    """
    missing = [name for name in names if name not in stored]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no optimizer state of {len(missing)} parameters of the optimizer's group "
            f"{number}, the first {missing[0]!r}; give the optimizer the parameters that it had"
        )
    found = [stored[name] for name in names]
    different = next((n for n, o in zip(names, found, strict=True) if o != found[0]), None)
    if different is not None:
        raise CheckpointError(
            f"the optimizer's group {number} has {names[0]!r} and {different!r}, which were saved in groups "
            "with different options; divide the parameters into the groups that they had"
        )
    options = decode(found[0]) if found else {}
    if not isinstance(options, dict):
        raise CorruptCheckpointError("checkpoint.json is damaged: a group has no options")
    return options
