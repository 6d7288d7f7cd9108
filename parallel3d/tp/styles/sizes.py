"""LocalSizes: a module's own numbers, such as how many heads it has, become those of a rank's part."""

from dataclasses import dataclass

from torch import nn

from parallel3d.errors import PlanError
from parallel3d.tp.checks import ParamRule
from parallel3d.tp.styles.base import Style

__all__ = ["LocalSizes"]


@dataclass(frozen=True)
class LocalSizes(Style):
    """For a module whose forward uses sizes it has as attributes (``num_heads``, ``split_size``) on what its
    children put out: where these are split, the sizes must be those of a rank's part.

    Attributes:
        names: of the module's attributes, ints, each divided by the number of ranks.
    """

    names: tuple[str, ...] = ()

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        for name in self.names:
            value = getattr(module, name, None)
            if type(value) is not int:
                raise PlanError(f"{type(module).__name__}.{name} is {value!r}, not an int")
            if value % tp:
                raise PlanError(
                    f"{type(module).__name__}.{name} is {value}, which {tp} tp ranks can't share equally"
                )
        return {}

    def attributes(self, module: nn.Module, tp: int) -> dict[str, tuple[int, ...]]:
        return {name: (getattr(module, name) // tp,) * tp for name in self.names}
