"""What a checkpoint holds of optimizers: state by parameter name, and options; and loading it on any mesh."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel3d._torch.dtensor import get_local_tensor, make_dtensor, make_spec
from parallel3d._util.arguments import counted
from parallel3d._util.quantised import wrapper_kind
from parallel3d.checkpoint.model_state import Contents, StoredNames, parameter_names
from parallel3d.checkpoint.pieces import shares_memory_within
from parallel3d.checkpoint.values import decode, encode, keeper
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.optim.step_in_backward import StepInBackward

PREFIX = "optimizer."
NO_OPTIONS = ("params", "param_names")
_SAME = {"AdamW": "Adam"}  # their state and options are the same, so one can load the other's


def stateful(optimizer: Any) -> Any:
    """Returns the optimizer that has the state: ``optimizer``, or the one that ``step_in_backward`` made."""
    while isinstance(optimizer, StepInBackward):
        optimizer = optimizer.optimizer
    return optimizer


def kind_of(optimizer: Optimizer) -> str:
    """Returns the name of the class that defines an optimizer's state, the first derived from ``Optimizer``:
    a user's subclass of AdamW, or what ``optim.local`` makes of one, can load AdamW's state."""
    mro = type(stateful(optimizer)).__mro__
    classes = [c for c in mro if issubclass(c, Optimizer) and c is not Optimizer]
    name = classes[-1].__name__ if classes else Optimizer.__name__
    return _SAME.get(name, name)


def as_optimizers(optimizer: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """Converts a user's argument; raises CheckpointError unless it is one optimizer, several or None."""
    if optimizer is None:
        return []
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, Optimizer)
    result: list[Any] = list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
    for item in result:
        if not isinstance(item, Optimizer):
            raise CheckpointError(
                f"optimizer is {item!r}; it must be a torch.optim.Optimizer, or several"
            )
    return result


def optimizer_state(
    names: Mapping[int, str], optimizers: Sequence[Optimizer], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Puts the tensors of the state into ``tensors``; returns groups and state, encoded; ``names``: by id."""
    keep = keeper(tensors)
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    known: set[str] = set()
    for optimizer in optimizers:
        for key in optimizer.state:
            if not isinstance(key, Tensor) and optimizer.state[key]:
                raise CheckpointError(
                    f"the optimizer has state for {key!r:.80}, which is not a parameter; a checkpoint holds "
                    "state of parameters: put that into extra"
                )
        for number, group in enumerate(optimizer.param_groups):
            own = _names_of(group, number, names)
            twice = next((name for name in own if name in known), None)
            known.update(own)
            if twice is not None or len(set(own)) != len(own):
                raise CheckpointError(f"parameter {twice or own[0]!r} is in two of the optimizers")
            options = {k: v for k, v in group.items() if k not in NO_OPTIONS}
            options = encode(options, f"{PREFIX}group {len(groups)}", keep)
            groups.append({"params": own, "options": options, "kind": kind_of(optimizer)})
            for name, param in zip(own, group["params"], strict=True):
                if entry := optimizer.state.get(param):
                    where = f"{PREFIX}{name}"
                    state[name] = {k: encode(v, f"{where}.{k}", keep) for k, v in entry.items()}
    return {"groups": groups, "state": state}


def _names_of(group: dict[str, Any], number: int, names: Mapping[int, str]) -> list[str]:
    result = []
    for place, param in enumerate(group["params"]):
        name = names.get(id(param))
        if name is None:
            raise CheckpointError(
                f"parameter {place} of the optimizer's group {number}, of shape {tuple(param.shape)}, isn't "
                "one of the model's; make the optimizer after parallelize, from model.parameters()"
            )
        result.append(name)
    return result


class _LoadedGroups:
    """The stored ``param_groups``, for an optimizer that may group its parameters in another way."""

    def __init__(self, contents: Contents, stored: StoredNames) -> None:
        self._same_torch = contents.versions.get("torch") == torch.__version__
        # By parameter name: (encoded options, decoded ones, kind of optimizer).
        self.of: dict[str, tuple[Any, dict[str, Any], str | None]] = {}
        for number, (names, encoded, kind) in enumerate(contents.groups or ()):
            options = decode(encoded, stored.reader(f"optimizer.group {number}["))
            if any(not isinstance(key, str) or key in NO_OPTIONS for key in options):
                raise CorruptCheckpointError(
                    f"{stored.folder}: checkpoint.json is damaged: an optimizer's group has invalid options"
                )
            self.of |= dict.fromkeys(names, (encoded, options, kind))

    def options(self, optimizer: Optimizer, number: int, names: Sequence[str]) -> dict[str, Any]:
        """Returns the stored options of the parameters ``names``, the optimizer's group ``number``."""
        missing = [name for name in names if name not in self.of]
        if missing:
            raise CheckpointError(
                f"the checkpoint has no optimizer state of {counted(len(missing), 'parameter')} of "
                f"the optimizer's group {number}, the first {missing[0]!r}; give the optimizer the "
                "parameters that it had"
            )
        if not names:
            return {}
        class_name = type(optimizer).__name__
        encoded, options, _ = self.of[names[0]]
        for name in names:
            other, own, kind = self.of[name]
            if kind not in (kind_of(optimizer), None):
                if kind == "Adam" and own.get("decoupled_weight_decay") is True:
                    kind = "AdamW"
                raise CheckpointError(
                    f"the optimizer's group {number} was saved from another optimizer than {class_name}: it "
                    f"was {kind:.80}'s"
                )
            if other != encoded:
                raise CheckpointError(
                    f"the optimizer's group {number} has {names[0]!r} and {name!r}, which were saved in "
                    "groups with different options; divide the parameters into the groups that they had"
                )
        current = optimizer.param_groups[number]
        # A newer torch has options that an older one had not; a scheduler adds some.
        lacking = [key for key in optimizer.defaults if key in current and key not in options]
        if lacking and (self._same_torch or any(key not in current for key in options)):
            raise CheckpointError(
                f"the optimizer's group {number} has the option {lacking[0]!r}, which was not saved: the "
                f"checkpoint is of another optimizer than {class_name}"
            )
        for key, value in options.items():
            if key in current and not alike(current[key], value):
                raise CheckpointError(
                    f"the optimizer's group {number} has {key}={current[key]!r:.80}; saved was "
                    f"{value!r:.80}, which is of another type"
                )
        return {key: _copied(value, current.get(key)) for key, value in options.items()}


def _copied(value: Any, current: Any) -> Any:
    """Returns a copy, because two groups may get the option; a tensor on the device of the current one."""
    if isinstance(value, Tensor):
        return value.to(current.device, copy=True) if isinstance(current, Tensor) else value.clone()
    return copy.deepcopy(value)


def alike(current: Any, stored: Any) -> bool:
    """Returns whether an option may change from one value to the other."""
    if current is None or stored is None or (_is_number(current) and _is_number(stored)):
        return True
    if isinstance(current, (list, tuple)) and isinstance(stored, (list, tuple)):
        return len(current) == len(stored) and all(map(alike, current, stored))
    return type(current) is type(stored)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def empty_state(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns memory for state of the parameter: an ordinary tensor, also for float8 weights."""
    if not wrapper_kind(param):
        return torch.empty_like(param.detach(), dtype=dtype)
    if not isinstance(param, DTensor):
        return torch.empty(param.shape, dtype=dtype, device=param.device)
    local = get_local_tensor(param)
    empty = torch.empty(local.shape, dtype=dtype, device=local.device)
    return make_dtensor(empty, make_spec(param.device_mesh, param.placements, param.shape, dtype))


class LoadedOptimizers:
    """The tensors that stored state is read into, by name, and how they become the optimizers' state.

    State that exists and fits is read in place. Otherwise it is allocated: with the parameter's placements if
    it has the parameter's shape, whole on each rank if not.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        contents: Contents,
        stored: StoredNames,
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
        loaded = _LoadedGroups(contents, stored)
        wanted: set[str] = set()
        for optimizer in optimizers:
            entries: dict[Tensor, dict[str, Any]] = {}
            for number, group in enumerate(optimizer.param_groups):
                own = _names_of(group, number, names)
                wanted.update(own)
                self._options.append((group, loaded.options(optimizer, number, own)))
                for name, param in zip(own, group["params"], strict=True):
                    if name in contents.state:
                        old = optimizer.state.get(param) or {}
                        entries[param] = self._entry(name, param, contents.state[name], old)
            self._states.append((optimizer, entries))
        lost = [name for name in loaded.of if name not in wanted]
        if lost:
            raise CheckpointError(
                f"the checkpoint has optimizer state of {counted(len(lost), 'parameter')} that the "
                f"optimizer doesn't have, the first {lost[0]!r}; give it the same parameters"
            )

    def _entry(
        self, name: str, param: Tensor, stored: dict[str, Any], old: dict[str, Any]
    ) -> dict[str, Any]:
        entry = {}
        for key, value in stored.items():
            where = f"{PREFIX}{name}.{key}"
            at = value.get("$tensor") if isinstance(value, dict) and len(value) == 1 else None
            target = self._in_place(at, old.get(key), where) if isinstance(at, str) else None
            if target is None:
                target = decode(value, partial(self._allocate, param=param, where=where))
            entry[key] = target
        return entry

    def _in_place(self, at: str, old: Any, where: str) -> Tensor | None:
        """Returns the existing tensor ``old`` if the stored one ``at`` can be read into it."""
        entry = self._stored.index.tensors.get(at)
        if entry is None or not isinstance(old, Tensor):
            return None
        if old.dim() and tuple(old.shape) != entry.shape:
            raise CheckpointError(
                f"{where.removeprefix(PREFIX)} of the optimizer has the shape {tuple(old.shape)}, in the "
                f"checkpoint {entry.shape}"
            )
        fits = tuple(old.shape) == entry.shape and old.dtype == entry.dtype
        if not fits or wrapper_kind(old) or old.is_inference() or old.requires_grad:
            return None
        if shares_memory_within(old):
            return None
        self._stored.take(at, where)
        self.tensors[at] = old.detach()
        return old

    def _allocate(self, at: str, *, param: Tensor, where: str) -> Tensor:
        """Allocates memory for the stored tensor ``at``."""
        entry = self._stored.take(at, where)
        if entry.shape == tuple(param.shape):
            target = empty_state(param, entry.dtype)
        elif len(entry.chunks) > 1:
            raise CheckpointError(
                f"{at} is stored in parts, of shape {entry.shape}, other than its parameter's "
                f"{tuple(param.shape)}: its placements on this mesh aren't known before the optimizer has "
                "made its state; take a step before load"
            )
        else:
            sharded = isinstance(param, DTensor)
            device = torch.device(param.device_mesh.device_type) if sharded else param.device  # type: ignore[attr-defined]
            target = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        self.tensors[at] = target
        return target

    def commit(self) -> None:
        """Gives the optimizers the state and options that have been read."""
        for optimizer, entries in self._states:
            for param in {param for group in optimizer.param_groups for param in group["params"]}:
                optimizer.state.pop(param, None)
            for param, entry in entries.items():
                optimizer.state[param] = entry
        for group, options in self._options:
            group.update(options)
