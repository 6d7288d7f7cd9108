"""Styles of modules whose own parameters are whole or split by rules, while their forward stays plain."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from parallel3d.errors import PlanError
from parallel3d.tp.checks import ParamRule, fit_rules, need_per_token, own_params
from parallel3d.tp.collectives import SequenceLength, TpAxis, gather_from_tp, scatter_sequence
from parallel3d.tp.forwards import TpState, bind_forward, map_first
from parallel3d.tp.styles.base import LayoutStyle, Style, Traffic


@dataclass(frozen=True)
class LocalParams(Style):
    """Splits a module's own parameters by rules, such as attention sinks by heads; its plain forward computes
    with this rank's part of them.

    Attributes:
        params: the rules, (parameter's name, style); a plan gives them by the parameters' paths.
    """

    params: tuple[tuple[str, Style], ...] = ()

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        styles, own = dict(self.params), own_params(module)
        # A parameter used with this rank's heads gets a part of its gradient; the module doesn't show that.
        missing = [name for name in own if name not in styles]
        if missing:
            raise PlanError(
                f"{', '.join(missing)} of {type(module).__name__} has no rule: give it 'colwise', "
                "'replicate' (used alike on every rank) or 'replicated_with_grad_allreduce' (used with this "
                "rank's heads)"
            )
        return fit_rules(
            module, **{name: styles[name].param_rule(p, tp) for name, p in own.items()}
        )


@dataclass(frozen=True)
class Replicated(Style):
    """Keeps the module's own parameters whole on every rank, and its forward plain.

    Attributes:
        tp_grad: ``"whole"``: the ranks compute the same. ``"partial"``: each computes on other data (a norm
            on this rank's heads), so gradients are summed over ``tp``.
    """

    choices: ClassVar = {"tp_grad": ("whole", "partial")}

    tp_grad: Literal["whole", "partial"] = "whole"

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        own = own_params(module)
        if not own and any(True for _ in module.parameters()):
            raise PlanError(
                f"{type(module).__name__} has no parameters of its own to keep replicated; name "
                "the modules inside it"
            )
        return fit_rules(module, **dict.fromkeys(own, ParamRule(Replicate(), self.tp_grad)))

    def param_rule(self, param: Tensor, tp: int) -> ParamRule:
        return ParamRule(Replicate(), self.tp_grad)


@dataclass(frozen=True)
class LocalSizes(Style):
    """For a module whose forward uses sizes that it has as attributes (``num_heads``, ``split_size``) on
    outputs of its children: where these are split, the attributes become the sizes of a rank's part.

    Attributes:
        names: the module's int attributes, each of which is divided by the number of ranks.
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


@dataclass(frozen=True)
class SequenceParallel(LayoutStyle):
    """Runs a norm or dropout on this rank's part of the sequence; its parameters stay whole.

    For ``nn.LayerNorm`` and ``nn.RMSNorm`` over the last dim, ``nn.Dropout``, and any module of
    yours without children whose parameters are 1-D and elementwise on the last dim.

    Attributes:
        sequence_dim: the sequence dim of input and output.
        input: ``"sequence"``: a part. ``"replicate"``: whole, split here.
        output: ``"sequence"``: a part. ``"replicate"``: gathered, for the modules after the last layer.
    """

    choices: ClassVar = {"input": ("sequence", "replicate"), "output": ("sequence", "replicate")}
    random_before: ClassVar = True

    sequence_dim: int = 1
    input: Literal["sequence", "replicate"] = "sequence"
    output: Literal["sequence", "replicate"] = "sequence"

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        need_per_token(module)
        return fit_rules(
            module, **dict.fromkeys(own_params(module), ParamRule(Replicate(), "partial"))
        )

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        if "replicate" in (self.input, self.output):  # otherwise the plain forward is right
            bind_forward(module, sequence_parallel, TpState(self, axis, sequence))

    def traffic(self, module: nn.Module, tp: int) -> tuple[Traffic, ...]:
        size = next((p.numel() for p in own_params(module).values()), None)
        gather = (Traffic("all-gather", "forward", size),) * (self.output == "replicate")
        return gather + (Traffic("all-gather", "backward", size),) * (self.input == "replicate")

    @property
    def splits_sequence(self) -> bool:
        return self.input == "replicate"


def sequence_parallel(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's forward on this rank's part of the sequence."""
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
