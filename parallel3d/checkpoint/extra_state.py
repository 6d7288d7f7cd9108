"""What modules keep beside tensors, by ``get_extra_state`` and ``set_extra_state``."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from parallel3d.checkpoint.contents import Contents
from parallel3d.checkpoint.model_state import PREFIX, has_extra, plain_name
from parallel3d.checkpoint.stored import Stored
from parallel3d.checkpoint.values import decode
from parallel3d.errors import CheckpointError

__all__ = ["LoadedExtraState"]


class LoadedExtraState:
    """What modules' ``set_extra_state`` is to be given; can be undone.

    Attributes:
        any: whether there is something.
    """

    def __init__(self, model: nn.Module, contents: Contents, stored: Stored) -> None:
        modules = {plain_name(n): m for n, m in model.named_modules() if has_extra(m)}
        wanted = modules if contents.only is None else {}
        wrong = sorted(wanted.keys() ^ contents.extra_state.keys())
        if wrong:
            here, there = "the model", str(stored.folder)
            has, lacks = (here, there) if wrong[0] in wanted else (there, here)
            raise CheckpointError(
                f"{has} has extra state of the module {wrong[0]!r}, which {lacks} hasn't"
            )
        self.any = bool(wanted)
        self._before: list[tuple[nn.Module, Any]] = []
        self._values = []
        for name, value in contents.extra_state.items():
            module, at = modules[name], f"{PREFIX}{name}." if name else PREFIX
            if type(module).set_extra_state is nn.Module.set_extra_state:
                raise CheckpointError(
                    f"the module {name!r} has get_extra_state, but no set_extra_state"
                )
            self._values.append((module, decode(value, stored.reader(f"{at}_extra_state"))))

    def apply(self) -> None:
        """Calls ``set_extra_state``."""
        for module, value in self._values:
            self._before.append((module, copy.deepcopy(module.get_extra_state())))
            module.set_extra_state(value)

    def undo(self) -> None:
        """Gives back to modules what they had."""
        for module, value in reversed(self._before):
            module.set_extra_state(value)
