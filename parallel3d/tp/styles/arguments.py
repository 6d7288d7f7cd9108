"""HeadArguments: what attention gets for each head as an argument, cut to a rank's heads."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from parallel3d._packing import cut_sections
from parallel3d.errors import PlanError
from parallel3d.tp.checks import ParamRule
from parallel3d.tp.collectives import TpAxis
from parallel3d.tp.comm.packed import split_packed
from parallel3d.tp.forwards import SequenceLength, TpState, bind_forward
from parallel3d.tp.styles.base import Style
from parallel3d.tp.styles.traffic import Traffic

__all__ = ["HeadArguments"]


@dataclass(frozen=True)
class HeadArguments(Style):
    """For an attention module that is given something for each head (ALiBi, a bias of positions) and whose
    heads are split: each rank uses its heads' part. The gradient of the whole is complete on each rank.

    Attributes:
        heads: of the plain module. Ranks hold them in order, the first ones one more where they don't divide.
        arguments: (name, dim): the forward's arguments to cut, and the dim that counts heads; it may be a
            multiple, of a batch's heads one sample after the other.
    """

    heads: int
    arguments: tuple[tuple[str, int], ...]

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        known = inspect.signature(module.forward).parameters
        unknown = [name for name, _ in self.arguments if name not in known]
        if unknown:
            raise PlanError(
                f"{type(module).__name__}'s forward has no argument {unknown[0]!r}; it has "
                f"{', '.join(known) or 'none'}"
            )
        if self.heads < tp:
            raise PlanError(f"{self.heads} heads are too few for {tp} tp ranks")
        return {}

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        names = tuple(inspect.signature(module.forward).parameters)
        bind_forward(module, head_arguments, _State(self, axis, sequence, names=names))

    def traffic(self, module: nn.Module, tp: int) -> tuple[Traffic, ...]:
        return (Traffic("all-gather", "backward", None),) * len(self.arguments)


@dataclass
class _State(TpState):
    """With the names of the forward's arguments, in their order."""

    names: tuple[str, ...] = ()


def head_arguments(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's forward on this rank's part of some arguments."""
    tp: Any = self._parallel3d_tp
    given = list(args)
    for name, dim in tp.style.arguments:
        place = tp.names.index(name)
        if place < len(given):
            given[place] = _cut(given[place], dim, tp)
        elif name in kwargs:
            kwargs = {**kwargs, name: _cut(kwargs[name], dim, tp)}
    return tp.inner(self, *given, **kwargs)


def _cut(value: Any, dim: int, tp: TpState) -> Any:
    if not isinstance(value, Tensor):
        return value
    heads = tp.style.heads  # type: ignore[attr-defined]
    packing = cut_sections(dim + 1, (heads,), tp.axis.size)
    part = split_packed(value.unflatten(dim, (-1, heads)), packing, tp.axis)
    return part.flatten(dim, dim + 1)
