"""PrepareInput: a module's input, prepared once for all its children."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from parallel3d.tp.checks import ParamRule
from parallel3d.tp.collectives import TpAxis
from parallel3d.tp.forwards import SequenceLength, TpState, bind_forward, map_first, take_input
from parallel3d.tp.styles.base import Style

__all__ = ["PrepareInput"]


@dataclass(frozen=True)
class PrepareInput(Style):
    """Prepares a module's input once for all children that read it (q, k and v; gate and up), which
    then use ``Colwise(input="gathered")``. Modules that read the same tensor *object* share one collective
    by themselves; this is for those that are given views of it, or use it without a style.

    The first positional tensor, or the first argument when given by name, is prepared; so are the
    named keyword arguments. Everything else passes through. All that the module computes from the
    input must go through children that are split: what is computed alike on every rank would get
    ``tp`` times its gradient.

    Attributes:
        layout: of the input: ``"replicate"``: whole. ``"sequence"``: a part, gathered.
        keywords: more arguments to prepare when they are given by name.
        sequence_dim: of the input, when ``layout="sequence"``.
    """

    choices: ClassVar = {"layout": ("replicate", "sequence")}

    layout: Literal["replicate", "sequence"] = "replicate"
    keywords: tuple[str, ...] = ()
    sequence_dim: int = 1

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        return {}

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        bind_forward(module, prepare_input, TpState(self, axis, sequence))

    def communicates(self) -> tuple[str, str]:
        return (
            ("-", "all-reduce") if self.layout == "replicate" else ("all-gather", "reduce-scatter")
        )

    @property
    def takes_parts(self) -> bool:
        return self.layout == "sequence"


def prepare_input(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module on an input copied or gathered once for all its children."""
    tp: TpState = self._parallel3d_tp
    style: Any = tp.style

    def take(x: Tensor) -> Tensor:
        return take_input(x, style.layout, style.sequence_dim, tp)

    args, kwargs = map_first(tp, args, kwargs, take)
    for name in style.keywords:
        if name != tp.first and isinstance(kwargs.get(name), Tensor):
            kwargs[name] = take(kwargs[name])
    return tp.inner(self, *args, **kwargs)
