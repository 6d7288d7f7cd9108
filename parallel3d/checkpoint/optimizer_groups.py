"""The options of an optimizer's groups, as they were stored, for groups that may be other ones now."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallel3d.checkpoint.contents import Contents
from parallel3d.checkpoint.stored import Stored
from parallel3d.checkpoint.values import decode
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.optim.step_in_backward import StepInBackward

__all__ = ["LoadedGroups", "alike", "kind_of"]

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
