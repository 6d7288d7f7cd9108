"""LocalParams: a module with raw parameters that are split by rules of their own."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from parallel3d.errors import PlanError
from parallel3d.tp.checks import ParamRule, fit_rules, need_per_token
from parallel3d.tp.collectives import SequenceLength, TpAxis, gather_from_tp, scatter_sequence
from parallel3d.tp.forwards import TpState, bind_forward, map_first
from parallel3d.tp.styles.base import Style, Traffic


@dataclass(frozen=True)
class LocalParams(Style):
    """A module whose own parameters have rules of their own, such as attention sinks split by heads; its
    forward stays the plain one and computes with this rank's part of them.

    Attributes:
        params: the parameters' rules, (name, style); a plan gives them by the parameters' paths.
    """

    params: tuple[tuple[str, Style], ...] = ()

    def with_params(self, params: dict[str, Style]) -> Style:
        return replace(self, params=(*self.params, *params.items()))

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        given = dict(self.params)
        own = {name: p for name, p in module._parameters.items() if p is not None}
        # Used on this rank's heads, a parameter gets a part of its gradient; the module alone doesn't tell.
        missing = [name for name in own if name not in given]
        if missing:
            raise PlanError(
                f"{', '.join(missing)} of {type(module).__name__} has no rule: give it 'colwise', "
                "'replicate' (used alike on every rank) or 'replicated_with_grad_allreduce' (used with this "
                "rank's heads)"
            )
        return fit_rules(module, **{name: given[name].param_rule(p, tp) for name, p in own.items()})


# Replicated: parameters that stay whole on every rank.


@dataclass(frozen=True)
class Replicated(Style):
    """The module's own parameters stay whole on every rank and its forward is the plain one.

    Attributes:
        tp_grad: ``"whole"``: the ranks compute the same. ``"partial"``: each computes on other data
            (a norm on this rank's heads), so gradients are summed over ``tp``.
    """

    choices: ClassVar = {"tp_grad": ("whole", "partial")}

    tp_grad: Literal["whole", "partial"] = "whole"

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        own = [name for name, p in module._parameters.items() if p is not None]
        if not own and any(True for _ in module.parameters()):
            raise PlanError(
                f"{type(module).__name__} has no parameters of its own to keep replicated; name "
                "the modules inside it"
            )
        return fit_rules(module, **{name: ParamRule(Replicate(), self.tp_grad) for name in own})

    def param_rule(self, param: Tensor, tp: int) -> ParamRule:
        return ParamRule(Replicate(), self.tp_grad)


# LocalSizes: a module's own numbers, such as how many heads it has, become those of a rank's part.


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


# SequenceParallel: norms and dropout on this rank's part of the sequence.


@dataclass(frozen=True)
class SequenceParallel(Style):
    """A norm or dropout on this rank's part of the sequence; its parameters stay whole.

    For ``nn.LayerNorm`` and ``nn.RMSNorm`` over the last dim, ``nn.Dropout``, and any module of
    yours without children whose parameters are 1-D and elementwise on the last dim.

    Attributes:
        sequence_dim: of input and output.
        input: ``"sequence"``: a part. ``"replicate"``: whole, split here.
        output: ``"sequence"``: a part. ``"replicate"``: gathered, for what follows the last layer.
    """

    choices: ClassVar = {"input": ("sequence", "replicate"), "output": ("sequence", "replicate")}

    sequence_dim: int = 1
    input: Literal["sequence", "replicate"] = "sequence"
    output: Literal["sequence", "replicate"] = "sequence"

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        need_per_token(module)
        own = [name for name, p in module._parameters.items() if p is not None]
        return fit_rules(module, **{name: ParamRule(Replicate(), "partial") for name in own})

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        if "replicate" in (self.input, self.output):  # otherwise the plain forward is right
            bind_forward(module, sequence_parallel, TpState(self, axis, sequence))

    def traffic(self, module: nn.Module, tp: int) -> tuple[Traffic, ...]:
        sizes = [p.numel() for p in module._parameters.values() if p is not None]
        size = sizes[0] if sizes else None
        found: tuple[Traffic, ...] = ()
        if self.output == "replicate":
            found += (Traffic("all-gather", "forward", size),)
        if self.input == "replicate":
            found += (Traffic("all-gather", "backward", size),)
        return found

    @property
    def random_after(self) -> Literal["", "features", "sequence", "whole"]:
        return "sequence" if self.output == "sequence" else "whole"

    @property
    def random_before(self) -> bool:
        return True

    @property
    def splits_sequence(self) -> bool:
        return self.input == "replicate"

    @property
    def takes_parts(self) -> bool:
        # Without a gather it need not know the length, but without a split there are no parts.
        return self.input == "sequence"


def sequence_parallel(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module on this rank's part of the sequence; splits before and joins after as asked."""
    tp: TpState = self._parallel3d_tp
    style: Any = tp.style
    dim = style.sequence_dim

    def split(x: Tensor) -> Tensor:
        tp.sequence.length = x.shape[dim]
        return scatter_sequence(x, dim, tp.axis)

    if style.input == "replicate":
        args, kwargs = map_first(tp, args, kwargs, split)
    y = tp.inner(self, *args, **kwargs)
    if style.output == "replicate":
        y = gather_from_tp(y, dim, tp.sequence.of(y, dim, tp.axis), tp.axis)
    return y
