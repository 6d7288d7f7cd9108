"""Styles of modules whose forward stays plain: rules for their own parameters, and the layout of their inputs
and outputs."""

import inspect
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from parallel3d.errors import PlanError, StateError
from parallel3d.tp.collectives import (
    SequenceLength,
    TpAxis,
    copy_to_tp,
    gather_from_tp,
    reduce_from_tp,
    split_to_tp,
)
from parallel3d.tp.forwards import (
    TpState,
    finish_sum,
    gather_parts,
    map_first,
    split_sequence,
    take_input,
)
from parallel3d.tp.styles.base import (
    LayoutStyle,
    ParamRule,
    Style,
    StyleTraffic,
    fit_rules,
    input_traffic,
    need_per_token,
    own_params,
    sum_traffic,
    whole_params,
)
from parallel3d.tp.styles.experts import Experts


@dataclass(frozen=True)
class LocalParams(Style):
    """Splits a module's own parameters, such as attention sinks by heads; its forward stays plain and
    computes with this rank's part of them.

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
        rules = {name: styles[name].param_rule(p, tp) for name, p in own.items()}
        return fit_rules(module, **rules)


@dataclass(frozen=True)
class Replicated(Style):
    """Keeps the module's own parameters whole on every rank; its forward stays plain.

    Attributes:
        tp_grad: ``"whole"``: the ranks compute the same. ``"partial"``: each computes on other data (a norm
            on this rank's heads), so gradients are summed over ``tp``.
    """

    tp_grad: Literal["whole", "partial"] = "whole"

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        own = own_params(module)
        if not own and any(True for _ in module.parameters()):
            raise PlanError(
                f"{type(module).__name__} has no parameters of its own to keep replicated; name "
                "the modules inside it"
            )
        return whole_params(module, self.tp_grad)

    def param_rule(self, param: Tensor, tp: int) -> ParamRule:
        return ParamRule(Replicate(), self.tp_grad)


@dataclass(frozen=True)
class LocalSizes(Style):
    """Style for a module whose forward reshapes or cuts its children's outputs to sizes that its attributes
    hold (``num_heads``, ``split_size``). If these outputs are split, the attributes must have this rank's
    sizes.

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

    random_before: ClassVar = True

    sequence_dim: int = 1
    input: Literal["sequence", "replicate"] = "sequence"
    output: Literal["sequence", "replicate"] = "sequence"

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        need_per_token(module)
        return whole_params(module, "partial")

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        if "replicate" in (self.input, self.output):  # otherwise the plain forward is right
            super().install(module, axis, sequence)

    def traffic(self, module: nn.Module, tp: int) -> tuple[StyleTraffic, ...]:
        size = next((p.numel() for p in own_params(module).values()), None)
        gather = (StyleTraffic("all-gather", "forward", size),) * (self.output == "replicate")
        back = (StyleTraffic("all-gather", "backward", size),) * (self.input == "replicate")
        return gather + back

    @property
    def splits_sequence(self) -> bool:
        return self.input == "replicate"

    def forward(self, tp: TpState, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's forward on this rank's part of the sequence, with the input split and the output
        gathered where the style says so."""
        dim = self.sequence_dim
        if self.input == "replicate":
            args, kwargs = map_first(tp, args, kwargs, lambda x: split_sequence(x, dim, tp))
        y = tp.inner(module, *args, **kwargs)
        return gather_parts(y, dim, tp) if self.output == "replicate" else y


@dataclass(frozen=True)
class PrepareOutput(Style):
    """Changes the layout of a module's output; if that is a tuple or list, of its first tensor.

    The module's own parameters stay whole, and its forward plain.

    Attributes:
        given: the layout of the output: ``"partial"``: partial sums. ``"replicate"``: whole.
            ``"sequence"``: a part along ``sequence_dim``. ``"shard"``: a part of the last dim.
        wanted: the layout to change it to: ``"replicate"``, ``"sequence"`` or ``"shard"``.
        features: the size of the last dim of the whole, when ``given="shard"``.
        sequence_dim: the sequence dim of the output.
    """

    given: Literal["partial", "replicate", "sequence", "shard"] = "partial"
    wanted: Literal["replicate", "sequence", "shard"] = "replicate"
    features: int = 0
    sequence_dim: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.given, self.wanted) not in _TRAFFIC:
            raise PlanError(
                f"PrepareOutput(given={self.given!r}, wanted={self.wanted!r}) is not possible; it can be "
                f"{', '.join(f'{a} -> {b}' for a, b in _TRAFFIC)}"
            )
        if (self.given == "shard") != (self.features > 0):
            raise PlanError(
                f"PrepareOutput(given={self.given!r}, features={self.features}): features is the size of the "
                'whole last dim, for given="shard" only'
            )

    def with_params(self, params: dict[str, Style]) -> Style:
        if self == PrepareOutput():  # a module with split parameters whose output is summed
            return Experts(tuple(params.items()))
        return super().with_params(params)

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        own = own_params(module)
        if own and self.given != "replicate":
            raise PlanError(
                f"{type(module).__name__} has the parameters {', '.join(own)}, which are used on parts; "
                "give them rules or its modules styles"
            )
        return whole_params(module)

    def traffic(self, module: nn.Module, tp: int) -> tuple[StyleTraffic, ...]:
        return _TRAFFIC[self.given, self.wanted]

    @property
    def ends(self) -> tuple[str, str]:
        return self.given, self.wanted

    @property
    def parts(self) -> tuple[bool, bool]:
        return False, self.wanted != "replicate"

    def forward(self, tp: TpState, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's forward and changes the layout of its output from ``given`` to ``wanted``."""
        return _change_layout(tp.inner(module, *args, **kwargs), self, tp)


_TRAFFIC: dict[tuple[str, str], tuple[StyleTraffic, ...]] = {
    ("partial", "replicate"): sum_traffic("replicate", None),
    ("partial", "sequence"): sum_traffic("sequence", None),
    ("replicate", "sequence"): (StyleTraffic("all-gather", "backward", None),),
    ("replicate", "shard"): (StyleTraffic("all-gather", "backward", None),),
    ("sequence", "replicate"): (StyleTraffic("all-gather", "forward", None),),
    ("shard", "replicate"): (StyleTraffic("all-gather", "forward", None),),
}


def _change_layout(y: Any, style: PrepareOutput, tp: TpState) -> Any:
    if not isinstance(y, Tensor):
        parts = y if type(y) in (tuple, list) else ()
        first = next((i for i, part in enumerate(parts) if isinstance(part, Tensor)), None)
        if first is None:
            kind = type(y).__name__
            raise StateError(f"{tp.style} got a {kind}; it takes a tensor, or a tuple with one")
        return type(y)([*y[:first], _change_layout(y[first], style, tp), *y[first + 1 :]])
    dim = style.sequence_dim
    if style.given == "partial" and style.wanted == "replicate":
        return reduce_from_tp(y, tp.axis)  # not in place: the module may keep it
    if style.given == "partial":
        return finish_sum(y, "sequence", dim, tp)
    if style.given == "sequence":
        return gather_parts(y, dim, tp)
    if style.given == "shard":
        return gather_from_tp(y, -1, style.features, tp.axis)
    if style.wanted == "shard":
        return split_to_tp(y, -1, tp.axis)
    return split_sequence(y, dim, tp)


@dataclass(frozen=True)
class RopeOutput(Style):
    """Style for a linear layer (or any module) that every rank computes whole, and whose last output features
    go directly to this rank's heads, not through a column-parallel layer. The gradient of these features is
    summed over ``tp``.

    An example is the layer that computes the compressed keys and values of multi-head latent attention,
    ``[kv_lora_rank | qk_rope_head_dim]``.

    Attributes:
        features: number of these last features; 0: the ``qk_rope_head_dim`` of the module around it, or of
            the model's config.
    """

    features: int = 0

    def in_model(self, model: nn.Module, name: str) -> Style:
        if self.features:
            return self
        around = model.get_submodule(name.rpartition(".")[0])
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        for place in (around, getattr(around, "config", None), text, config):
            size = getattr(place, "qk_rope_head_dim", None)
            if isinstance(size, int) and size > 0:
                return replace(self, features=size)
        return self

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        if not self.features:
            raise PlanError(
                "neither the module around it nor the model's config has a qk_rope_head_dim; give "
                "RopeOutput(features=...)"
            )
        return whole_params(module)

    def traffic(self, module: nn.Module, tp: int) -> tuple[StyleTraffic, ...]:
        return (StyleTraffic("all-reduce", "backward", self.features),)

    def forward(self, tp: TpState, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's forward; in the backward the gradient of the last ``features`` of the output is
        summed over tp."""
        y = tp.inner(module, *args, **kwargs)
        whole, rope = y[..., : -self.features], y[..., -self.features :]
        return torch.cat([whole, copy_to_tp(rope, tp.axis)], -1)


Layout = Literal["replicate", "sequence"]


@dataclass(frozen=True)
class PrepareInput(Style):
    """Prepares a module's input once for all children that read it (q, k and v; gate and up), which then use
    ``Colwise(input="gathered")``. Modules that read the same tensor *object* share one collective without
    it; this is for children that get views of it, or use it without a style.

    It prepares the first positional tensor, or the first argument if given by name, and the arguments
    ``keywords``. All others pass through.

    Attributes:
        layout: the layout of the input: ``"replicate"``: whole. ``"sequence"``: a part, gathered.
        keywords: more arguments to prepare, by their names in the module's forward; ``(name, layout)``
            for one with another layout.
        sequence_dim: the sequence dim of the input, when ``layout="sequence"``.
        wanted: ``"copy"``: each rank computes something else from the input, so that its gradients are
            summed. Everything that the module computes from it must go through children that are split; the
            gradient of anything else would be ``tp`` times too large. ``"whole"``: each rank computes the
            same from it, and children that are split make their own copies.
        params: the rules of the module's own parameters, (name, style).
    """

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
        """The arguments to prepare besides the first, as (name, layout)."""
        return tuple((k, self.layout) if isinstance(k, str) else k for k in self.keywords)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of all arguments that are prepared, the first one's first."""
        return self.layout, *(layout for _, layout in self.named)

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        taken = inspect.signature(module.forward).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        for name, _ in self.named:
            if name not in taken and not open_ended:
                raise PlanError(
                    f"{type(module).__name__}.forward has no argument {name!r}; it has "
                    f"{', '.join(taken) or 'none'}"
                )
        whole = {name: Replicated() for name in module._parameters if self.wanted == "whole"}
        return LocalParams(tuple({**whole, **dict(self.params)}.items())).plan(module, tp)

    def traffic(self, module: nn.Module, tp: int) -> tuple[StyleTraffic, ...]:
        found = [t for layout in self.layouts for t in input_traffic(layout, None)]
        # A whole input's gradient is whole too.
        return tuple(t for t in found if self.wanted == "copy" or t.phase == "forward")

    @property
    def ends(self) -> tuple[str, str]:
        return "sequence" if "sequence" in self.layouts else "", ""

    def forward(self, tp: TpState, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's forward on inputs that are copied or gathered once for all its children."""
        args, kwargs = map_first(tp, args, kwargs, lambda x: self._prepare(x, self.layout, tp))
        positional = list(args)
        first = next((i for i, value in enumerate(positional) if isinstance(value, Tensor)), -1)
        for name, layout in self.named:
            place = tp.names.index(name) if name in tp.names else len(positional)
            if place < len(positional):
                if place != first and isinstance(positional[place], Tensor):
                    positional[place] = self._prepare(positional[place], layout, tp)
            elif (name != tp.first or first >= 0) and isinstance(kwargs.get(name), Tensor):
                kwargs = {**kwargs, name: self._prepare(kwargs[name], layout, tp)}
        y = tp.inner(module, *positional, **kwargs)
        return _change_layout(y, self.output, tp) if isinstance(self, PrepareInputOutput) else y

    def _prepare(self, x: Tensor, layout: str, tp: TpState) -> Tensor:
        if self.wanted == "copy":
            return take_input(x, layout, self.sequence_dim, tp)
        return x if layout == "replicate" else gather_parts(x, self.sequence_dim, tp)


@dataclass(frozen=True)
class PrepareInputOutput(PrepareInput):
    """:class:`PrepareInput` and :class:`PrepareOutput` on one module.

    For example, on a mixture-of-experts block between sequence-parallel norms:
    ``PrepareInputOutput("sequence", wanted="whole", output=PrepareOutput("replicate", "sequence"))``.

    Attributes:
        output: what is done with the module's output.
    """

    output: PrepareOutput = PrepareOutput()

    def traffic(self, module: nn.Module, tp: int) -> tuple[StyleTraffic, ...]:
        return *super().traffic(module, tp), *self.output.traffic(module, tp)

    @property
    def ends(self) -> tuple[str, str]:
        given, wanted = self.output.ends
        return super().ends[0] or given, wanted

    @property
    def parts(self) -> tuple[bool, bool]:
        return "sequence" in self.layouts, self.output.parts[1]
