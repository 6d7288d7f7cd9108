"""What a checkpoint holds of optimizers: by parameters' names, as they lie; and back, on any mesh."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel3d.checkpoint.model_state import Contents, parameter_names
from parallel3d.checkpoint.pieces import shares_memory_within
from parallel3d.checkpoint.stored import Stored
from parallel3d.checkpoint.values import decode, encode, keeper
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.optim.step_in_backward import StepInBackward

# The options of an optimizer's groups, as they were stored, for groups that may be other ones now.

_SAME = {"AdamW": "Adam"}  # state and options are the same; one goes on with the other's


def kind_of(optimizer: Optimizer) -> str:
    """The name of the class that says what an optimizer's state means.

    That is the first one derived from ``Optimizer``: a user's subclass of AdamW, or what ``optim.local``
    makes of one, goes on with AdamW's state; and ``step_in_backward``'s is the one that steps for it.
    """
    while isinstance(optimizer, StepInBackward):
        optimizer = optimizer.optimizer
    of = [c for c in type(optimizer).__mro__ if issubclass(c, Optimizer) and c is not Optimizer]
    name = of[-1].__name__ if of else Optimizer.__name__
    return _SAME.get(name, name)


class LoadedGroups:
    """What ``save`` kept of ``param_groups``.

    Attributes:
        names: of the parameters -> their group's number.
    """

    def __init__(self, contents: Contents, stored: Stored) -> None:
        self._same_torch = contents.versions.get("torch") == torch.__version__
        self.names: dict[str, int] = {}
        self._options: list[tuple[Any, dict[str, Any]]] = []  # (encoded, decoded)
        self._kinds: list[str | None] = []
        for number, (names, encoded, kind) in enumerate(contents.groups or ()):
            self._kinds.append(kind)
            self.names.update(dict.fromkeys(names, number))
            options = decode(encoded, stored.reader(f"optimizer.group {number}["))
            wrong = [key for key in options if key in ("params", "param_names")]
            if wrong or not all(isinstance(key, str) for key in options):
                raise CorruptCheckpointError(
                    f"{stored.folder}: checkpoint.json is damaged: an optimizer's group has wrong options"
                )
            self._options.append((encoded, options))

    def options(self, optimizer: Optimizer, number: int, names: Sequence[str]) -> dict[str, Any]:
        """Those that the parameters ``names``, of the group ``number`` now, were saved with.

        Raises:
            CheckpointError: they have none, different ones, or another optimizer's.
        """
        missing = [name for name in names if name not in self.names]
        if missing:
            raise CheckpointError(
                f"the checkpoint has no optimizer state of {len(missing)} parameters of the optimizer's "
                f"group {number}, the first {missing[0]!r}; give the optimizer the parameters that it had"
            )
        if not names:
            return {}
        of = [self.names[name] for name in names]
        kind = kind_of(optimizer)
        for group in of:
            if self._kinds[group] not in (kind, None):
                raise CheckpointError(
                    f"the optimizer's group {number} was saved from another optimizer than "
                    f"{type(optimizer).__name__}: it was {self._class_of(group):.80}'s"
                )
        encoded, options = self._options[of[0]]
        for name, group in zip(names, of, strict=True):
            if group != of[0] and self._options[group][0] != encoded:
                raise CheckpointError(
                    f"the optimizer's group {number} has {names[0]!r} and {name!r}, which were saved in "
                    "groups with different options; divide the parameters into the groups that they had"
                )
        self._check(optimizer, number, options)
        now = optimizer.param_groups[number]
        return {key: _own(value, now.get(key)) for key, value in options.items()}

    def _class_of(self, group: int) -> str:
        """The optimizer that saved it; AdamW's kind is Adam's, from which it differs by an option."""
        decoupled = self._options[group][1].get("decoupled_weight_decay") is True
        kind = str(self._kinds[group])
        return "AdamW" if kind == "Adam" and decoupled else kind

    def _check(self, optimizer: Optimizer, number: int, options: dict[str, Any]) -> None:
        now = optimizer.param_groups[number]
        # A newer torch has options that an older one had not; a scheduler adds some.
        lacks = [key for key in optimizer.defaults if key in now and key not in options]
        if lacks and (self._same_torch or any(key not in now for key in options)):
            raise CheckpointError(
                f"the optimizer's group {number} has the option {lacks[0]!r}, which was not saved: the "
                f"checkpoint is of another optimizer than {type(optimizer).__name__}"
            )
        for key, value in options.items():
            if key in now and not alike(now[key], value):
                raise CheckpointError(
                    f"the optimizer's group {number} has {key}={now[key]!r:.80}; saved was {value!r:.80}, "
                    "which is of another kind"
                )


def _own(value: Any, now: Any) -> Any:
    """A copy, as two groups may get it; a tensor where the group has its own."""
    if isinstance(value, Tensor):
        return value.to(now.device, copy=True) if isinstance(now, Tensor) else value.clone()
    return copy.deepcopy(value)


def alike(now: Any, stored: Any) -> bool:
    """Whether an option can have become the other."""
    if now is None or stored is None:
        return True
    if _is_number(now) and _is_number(stored):
        return True
    if isinstance(now, (list, tuple)) and isinstance(stored, (list, tuple)):
        same = len(now) == len(stored)
        return same and all(alike(a, b) for a, b in zip(now, stored, strict=True))
    return type(now) is type(stored)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
