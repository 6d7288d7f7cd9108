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

__all__ = ["LoadedGroups"]


class LoadedGroups:
    """What ``save`` kept of ``param_groups``.

    Attributes:
        names: of the parameters -> their group's number.
    """

    def __init__(self, contents: Contents, stored: Stored) -> None:
        self._same_torch = contents.versions.get("torch") == torch.__version__
        self.names: dict[str, int] = {}
        self._options: list[tuple[Any, dict[str, Any]]] = []  # (encoded, decoded)
        for number, (names, encoded) in enumerate(contents.groups or ()):
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
            if key in now and not _alike(now[key], value):
                raise CheckpointError(
                    f"the optimizer's group {number} has {key}={now[key]!r:.80}; saved was {value!r:.80}, "
                    "which is of another kind"
                )


def _own(value: Any, now: Any) -> Any:
    """A copy, as two groups may get it; a tensor where the group has its own."""
    if isinstance(value, Tensor):
        return value.to(now.device, copy=True) if isinstance(now, Tensor) else value.clone()
    return copy.deepcopy(value)


def _alike(now: Any, stored: Any) -> bool:
    """Whether an option can have become the other."""
    if now is None or stored is None:
        return True
    if _is_number(now) and _is_number(stored):
        return True
    if isinstance(now, (list, tuple)) and isinstance(stored, (list, tuple)):
        same = len(now) == len(stored)
        return same and all(_alike(a, b) for a, b in zip(now, stored, strict=True))
    return type(now) is type(stored)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)
