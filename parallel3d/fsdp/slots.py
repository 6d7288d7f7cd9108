"""Where a module's parameters are put: in its ``_parameters``, or by its own ``__setattr__``."""

import weakref
from typing import Any

from torch import nn

__all__ = ["OwnSetattr", "Slots", "holder_of", "of"]


class OwnSetattr:
    """Stands for the ``_parameters`` of a module whose class has a ``__setattr__`` of its own, which must see
    each parameter that is put there: such modules keep lists of theirs (``nn.LSTM``)."""

    __slots__ = ("module",)
    is_putting = False  # whether one is being put there, by us

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)

    def get(self, name: str) -> Any:
        """As ``dict.get``."""
        module = self.module()
        return None if module is None else module._parameters.get(name)

    def __setitem__(self, name: str, value: nn.Parameter) -> None:
        module = self.module()
        if module is not None:
            OwnSetattr.is_putting = True
            try:
                setattr(module, name, value)
            finally:
                OwnSetattr.is_putting = False

    def update(self, values: dict[str, nn.Parameter]) -> None:
        """As ``dict.update``."""
        for name, value in values.items():
            self[name] = value


def holder_of(module: nn.Module) -> Any:
    """Where parameters of ``module`` are read and put."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        return module._parameters
    return OwnSetattr(module)


def of(holder: Any) -> dict[str, nn.Parameter | None] | None:
    """The ``_parameters`` that ``holder`` stands for; None if its module is gone."""
    if not isinstance(holder, OwnSetattr):
        return holder
    module = holder.module()
    return None if module is None else module._parameters


Slots = list[tuple[Any, str]]  # (a ``module._parameters`` or an ``OwnSetattr``, name)
