"""PrepareInput, PrepareInputOutput: a module's input, prepared once for all its children."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from parallel3d.errors import PlanError
from parallel3d.tp.checks import ParamRule
from parallel3d.tp.collectives import TpAxis, gather_from_tp
from parallel3d.tp.forwards import SequenceLength, TpState, bind_forward, map_first, take_input
from parallel3d.tp.styles.base import Style
from parallel3d.tp.styles.local_params import LocalParams
from parallel3d.tp.styles.output import PrepareOutput, give_output
from parallel3d.tp.styles.replicated import Replicated
from parallel3d.tp.styles.traffic import Traffic, entered

__all__ = ["PrepareInput", "PrepareInputOutput"]

Layout = Literal["replicate", "sequence"]


@dataclass(frozen=True)
class PrepareInput(Style):
    """Prepares a module's input once for all children that read it (q, k and v; gate and up), which
    then use ``Colwise(input="gathered")``. Modules that read the same tensor *object* share one collective
    by themselves; this is for those that are given views of it, or use it without a style.

    The first positional tensor, or the first argument when given by name, is prepared; so are the
    named arguments, however they are given. Everything else passes through.

    Attributes:
        layout: of the input: ``"replicate"``: whole. ``"sequence"``: a part, gathered.
        keywords: more arguments to prepare, by their names in the module's forward; ``(name, layout)``
            for one with another layout.
        sequence_dim: of the input, when ``layout="sequence"``.
        wanted: ``"copy"``: each rank computes something else from the input, so that its gradients are
            summed: all that the module computes from it must go through children that are split, what
            is computed alike on every rank would get ``tp`` times its gradient. ``"whole"``: each rank
            computes the same from it, and children that are split take copies of their own.
    """

    choices: ClassVar = {"layout": ("replicate", "sequence"), "wanted": ("copy", "whole")}

    layout: Layout = "replicate"
    keywords: tuple[str | tuple[str, Layout], ...] = ()
    sequence_dim: int = 1
    wanted: Literal["copy", "whole"] = "copy"
    params: tuple[tuple[str, Style], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, layout in self.named:
            if not isinstance(name, str) or layout not in ("replicate", "sequence"):
                raise PlanError(
                    f"keywords={self.keywords!r}: each is a name, or (name, layout) with the layout "
                    "'replicate' or 'sequence'"
                )

    @property
    def named(self) -> tuple[tuple[str, Layout], ...]:
        """(name, layout) of each keyword."""
        return tuple((k, self.layout) if isinstance(k, str) else k for k in self.keywords)

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        taken = inspect.signature(module.forward).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        for name, _ in self.named:
            if name not in taken and not open_ended:
                raise PlanError(
                    f"{type(module).__name__}.forward takes no {name!r}, but {', '.join(taken) or 'nothing'}"
                )
        whole = {name: Replicated() for name in module._parameters if self.wanted == "whole"}
        return LocalParams(tuple({**whole, **dict(self.params)}.items())).plan(module, tp)

    def with_params(self, params: dict[str, Style]) -> Style:
        return replace(self, params=(*self.params, *params.items()))

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        names = tuple(inspect.signature(module.forward).parameters)
        bind_forward(module, prepare_input, _PrepareState(self, axis, sequence, names=names))

    def traffic(self, module: nn.Module, tp: int) -> tuple[Traffic, ...]:
        layouts = [self.layout, *(layout for _, layout in self.named)]
        found = tuple(t for layout in layouts for t in entered(layout, None))
        if self.wanted == "whole":  # nothing that reads it gets only a part of the gradient
            return tuple(t for t in found if t.phase == "forward")
        return found

    @property
    def takes_parts(self) -> bool:
        return any(layout == "sequence" for layout in (self.layout, *(x for _, x in self.named)))


_SUMMED = PrepareOutput()


@dataclass(frozen=True)
class PrepareInputOutput(PrepareInput):
    """:class:`PrepareInput` and :class:`PrepareOutput` on one module.

    A mixture-of-experts block between sequence-parallel norms:
    ``PrepareInputOutput("sequence", wanted="whole", output=PrepareOutput("replicate", "sequence"))``.

    Attributes:
        output: what becomes of the output.
    """

    output: PrepareOutput = _SUMMED

    def traffic(self, module: nn.Module, tp: int) -> tuple[Traffic, ...]:
        return *super().traffic(module, tp), *self.output.traffic(module, tp)

    @property
    def random_after(self) -> Literal["", "features", "sequence", "whole"]:
        return self.output.random_after

    @property
    def splits_sequence(self) -> bool:
        return self.output.splits_sequence

    @property
    def takes_parts(self) -> bool:
        return super().takes_parts or self.output.takes_parts


@dataclass
class _PrepareState(TpState):
    """Attributes:
    names: of the arguments of the module's forward, in order.
    """

    names: tuple[str, ...] = ()


def prepare_input(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module on an input copied or gathered once for all its children."""
    tp: _PrepareState = self._parallel3d_tp
    style: Any = tp.style
    args, kwargs = map_first(tp, args, kwargs, _taker(tp, style.layout))
    given = list(args)
    first = next((i for i, value in enumerate(given) if isinstance(value, Tensor)), -1)
    for name, layout in style.named:
        take = _taker(tp, layout)
        place = tp.names.index(name) if name in tp.names else len(given)
        if place < len(given):
            if place != first and isinstance(given[place], Tensor):
                given[place] = take(given[place])
        elif (name != tp.first or first >= 0) and isinstance(kwargs.get(name), Tensor):
            kwargs = {**kwargs, name: take(kwargs[name])}
    y = tp.inner(self, *given, **kwargs)
    output = getattr(style, "output", None)
    return y if output is None else give_output(y, output, tp)


def _taker(tp: TpState, layout: str) -> Callable[[Tensor], Tensor]:
    style: Any = tp.style

    def take(x: Tensor) -> Tensor:
        if style.wanted == "copy":
            return take_input(x, layout, style.sequence_dim, tp)
        if layout == "replicate":
            return x
        dim = style.sequence_dim
        return gather_from_tp(x, dim, tp.sequence.of(x, dim, tp.axis), tp.axis)

    return take
