"""Style: how one module is tensor-parallel, and what styles share: rules of parameters, checks, traffic.

A style is a frozen value that refers to no module and no mesh. :meth:`Style.plan` is pure: it returns the
placement on the ``tp`` axis of each of a module's parameters, or raises. :meth:`Style.install` mutates: it
gives the module instance a forward on local tensors. :meth:`~parallel3d.tp.ResolvedPlan.apply` replaces the
parameters, because it knows which are shared.
"""

import ast
import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from parallel3d._layout.packing import Packing
from parallel3d._layout.param_layout import local_chunk
from parallel3d._util.users_code import syntax_of
from parallel3d.errors import PlanError
from parallel3d.tp.collectives import SequenceLength, TpAxis
from parallel3d.tp.float8 import has_own_forward, is_float8
from parallel3d.tp.forwards import TpState, bind_forward
from parallel3d.tp.styles.casts import casts_weight


@dataclass(frozen=True)
class ParamRule:
    """How one parameter is split over ``tp``. ``packing`` says which rows of ``placement.dim`` each rank has;
    None: those of ``torch.chunk``. For ``tp_grad`` and ``compute`` see ``ParamLayout``."""

    placement: Shard | Replicate
    tp_grad: Literal["whole", "partial"] = "whole"
    packing: Packing | None = None
    compute: Literal["local", "dtensor"] = "local"

    def part(self, whole: Tensor, size: int, rank: int) -> Tensor:
        """Returns the part of ``whole``, a parameter or its gradient, on ``rank`` of ``size`` ranks."""
        if self.packing is not None:
            return self.packing.take(whole, rank)
        if isinstance(self.placement, Shard):
            return local_chunk(whole, self.placement.dim, size, rank)
        return whole

    def describe(self) -> str:
        """Returns the rule in words for messages, such as "split along dim 0"."""
        kind = " (a DTensor)" if self.compute == "dtensor" else ""
        if isinstance(self.placement, Shard):
            packed = "" if self.packing is None else f" as {self.packing.rows}"
            return f"split along dim {self.placement.dim}{packed}{kind}"
        return ("whole" if self.tp_grad == "whole" else "whole with its gradient summed") + kind


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether ``module`` is of class ``kind`` and runs the forward of ``kind``, not an override."""
    # Not a subclass or an instance with another forward, nor MultiheadAttention's projection, which is never
    # called.
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and "forward" not in module.__dict__
        and not isinstance(module, NonDynamicallyQuantizableLinear)
    )


def refuse_lookup_options(module: Any, *, scale_grad_by_freq: bool) -> None:
    """Raises PlanError for options of an embedding that can't be split: those that need whole rows
    (``max_norm``), sparse gradients, and, unless ``scale_grad_by_freq`` allows it, counts of ids."""
    refused = {
        "max_norm": module.max_norm is not None,
        "scale_grad_by_freq": module.scale_grad_by_freq and not scale_grad_by_freq,
        "sparse": module.sparse,
    }
    options = [name for name, is_on in refused.items() if is_on]
    if options:
        raise PlanError(f"an nn.Embedding with {', '.join(options)} can't be split over tp")


def own_params(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the module's parameters by name, without those of its children."""
    return {name: p for name, p in module._parameters.items() if p is not None}


def fit_rules(module: nn.Module, **rules: ParamRule) -> dict[str, ParamRule]:
    """Returns ``rules`` (parameter's name -> rule) for the parameters that the module has. Raises PlanError
    for a parameter without a rule, one that can't be split, or a missing weight."""
    own = own_params(module)
    extra = [name for name in own if name not in rules]
    if extra or ("weight" in rules and "weight" not in own):
        raise PlanError(
            f"{type(module).__name__} has the parameters {', '.join(own) or 'none'}, where "
            f"{', '.join(rules)} are expected; is it parametrized?"
        )
    for name, param in own.items():
        if isinstance(param, DTensor):
            raise PlanError(f"{name} is a DTensor already: the module is parallel")
        if is_lazy(param):
            raise PlanError(f"{name} has no size yet: run a batch through the model first")
        if not param.is_floating_point():
            raise PlanError(f"{name} is {param.dtype}; only floating-point parameters can be split")
        if type(param).__module__.startswith("torchao.prototype.quantized_training"):
            raise PlanError(
                f"{name} is torchao's {type(param).__name__}, whose products have a scale for each row of "
                "what they sum over; such a layer can't be split over tp: use fsdp alone, or convert the "
                "layers that have no style"
            )
    return {name: rules[name] for name in own}


def whole_params(
    module: nn.Module, tp_grad: Literal["whole", "partial"] = "whole"
) -> dict[str, ParamRule]:
    """Returns rules that keep all of the module's own parameters whole on every rank."""
    return fit_rules(module, **dict.fromkeys(own_params(module), ParamRule(Replicate(), tp_grad)))


# torch's modules that treat each token by itself. Modules of other packages are judged by their parameters.
_PER_TOKEN = (nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity)


def need_per_token(module: nn.Module) -> None:
    """Raises PlanError for a module that may combine tokens: a part of a sequence isn't enough for it."""
    kind = type(module).__name__
    unknown = type(module).__module__.split(".")[0] == "torch" and type(module) not in _PER_TOKEN
    if unknown or any(module.children()):
        raise PlanError(f"SequenceParallel is for norms over the last dim and dropout, not {kind}")
    normalized = getattr(module, "normalized_shape", (0,))
    if isinstance(normalized, tuple) and len(normalized) > 1:
        raise PlanError(
            f"{kind} normalizes over the dims {normalized}, and the sequence is one of them"
        )
    wrong = [f"{name} {tuple(p.shape)}" for name, p in own_params(module).items() if p.dim() != 1]
    if wrong:
        raise PlanError(
            "SequenceParallel needs parameters of one dim, elementwise on the last dim of the "
            f"input; {kind} has {', '.join(wrong)}"
        )


class LinearKind(NamedTuple):
    """Describes a module that computes ``x @ weight + bias``: ``nn.Linear``, torchao's ``Float8Linear``, or
    transformers' ``Conv1D``, which holds the weight transposed.

    Attributes:
        out_name, in_name: the module's attributes with the numbers of features.
        out_dim, in_dim: the weight's dims with these features.
        base: the class whose forward computes the product.
    """

    out_features: int
    in_features: int
    out_name: str
    in_name: str
    out_dim: int
    in_dim: int
    base: type[nn.Module]


def linear_kind(style: object, module: Any) -> LinearKind:
    """Returns ``module`` described as a linear layer; PlanError, which names ``style``, if it is none."""
    float8 = is_float8(module) and not has_own_forward(module)
    is_linear = is_plain(module, nn.Linear) or calls_forward_of(module, nn.Linear)
    if float8 or is_linear or casts_weight(module):
        names, base = ("out_features", "in_features"), type(module) if float8 else nn.Linear
        return LinearKind(module.out_features, module.in_features, *names, 0, 1, base)
    for cls in type(module).__mro__:
        is_conv1d = (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")
        if is_conv1d and (is_plain(module, cls) or calls_forward_of(module, cls)):
            return LinearKind(module.nf, module.nx, "nf", "nx", 1, 0, cls)
    raise PlanError(
        f"{type(style).__name__} is for nn.Linear, nn.Embedding and transformers' Conv1D with their own "
        f"forward, not {type(module).__name__}"
    )


def is_embedding(module: nn.Module) -> bool:
    """Whether ``module`` is an ``nn.Embedding``, or a subclass whose forward changes only the input or output
    of ``super().forward``."""
    return is_plain(module, nn.Embedding) or calls_forward_of(module, nn.Embedding)


def calls_forward_of(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether ``module`` is of a subclass of ``base`` whose forward calls ``super().forward`` once and reads
    no parameters, so that a style can replace the forward of ``base``."""
    cls = type(module)
    if not isinstance(module, base) or cls.forward is base.forward or "forward" in module.__dict__:
        return False
    return all(map(_is_transparent, _forwards_over(module, base)))


def works_by_element(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether ``module`` is a plain ``base``, or of a subclass that adds to ``super().forward`` only
    elementwise arithmetic with numbers, which is right on a part of input or output too."""
    if type(module).forward is base.forward or casts_weight(module):
        return True
    return calls_forward_of(module, base) and all(
        _is_arithmetic(forward, module) for forward in _forwards_over(module, base)
    )


def _forwards_over(module: nn.Module, base: type[nn.Module]) -> Iterator[Any]:
    """Yields the forwards that subclasses of ``base`` among the module's classes define."""
    mro = type(module).__mro__
    return (c.__dict__["forward"] for c in mro[: mro.index(base)] if "forward" in c.__dict__)


# Attributes that a style changes: a forward that reads them would compute with a part.
_CHANGED = {"weight", "bias", "_parameters", "parameters", "named_parameters", "state_dict"}
# In these the call might run twice or never; a nested function might read anything.
_BRANCHES = (
    *(ast.If, ast.IfExp, ast.BoolOp, ast.Match, ast.Assert, ast.For, ast.While, ast.comprehension),
    *(ast.Try, ast.TryStar, ast.With, ast.FunctionDef, ast.ClassDef, ast.Lambda),
)


@cache
def _nodes_of(forward: Callable[..., Any]) -> tuple[ast.AST, ...]:
    """Returns the syntax nodes of a forward's body; none if the source is missing or has a decorator."""
    match None if hasattr(forward, "__wrapped__") else syntax_of(forward):
        case ast.Module(body=[ast.FunctionDef(decorator_list=[], body=body)]):
            return tuple(node for statement in body for node in ast.walk(statement))
    return ()


def _is_transparent(forward: Callable[..., Any]) -> bool:
    nodes = _nodes_of(forward)
    reads = [node for node in nodes if isinstance(node, ast.Attribute)]
    harmless = [node.value for node in reads if node.attr in ("dtype", "device")]
    calls = [node for node in reads if node.attr == "forward"]
    return (
        len(calls) == 1
        and ast.unparse(calls[0]).startswith("super(")
        and not any(isinstance(node, _BRANCHES) for node in nodes)
        and not any(node.attr in _CHANGED and node not in harmless for node in reads)
    )


_OF_ELEMENTS = {"super", "forward", "to", "dtype", "device", "weight", "type_as"}
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_SELECTING = (ast.Subscript, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.JoinedStr)


def _is_arithmetic(forward: Callable[..., Any], module: nn.Module) -> bool:
    for name in set(forward.__code__.co_names) - _OF_ELEMENTS:
        value = getattr(module, name, None)
        one = isinstance(value, Tensor) and not (value.dim() or isinstance(value, nn.Parameter))
        if not one and not isinstance(value, (int, float)):
            return False
    other = (node for node in _nodes_of(forward) if not isinstance(node, _ARITHMETIC))
    return not any(isinstance(node, (ast.operator, *_SELECTING)) for node in other)


@dataclass(frozen=True)
class StyleTraffic:
    """One collective over ``tp`` of a module's forward or backward, for the report.

    Attributes:
        op: the collective; ``"torch's own"``: those that torch's DTensors issue.
        elements: elements per token of the whole tensor that is reduced or gathered; None if that depends on
            the input.
    """

    op: Literal["all-reduce", "all-gather", "reduce-scatter", "torch's own"]
    phase: Literal["forward", "backward"]
    elements: int | None


def input_traffic(layout: str, elements: int | None) -> tuple[StyleTraffic, ...]:
    """Returns the collectives for the input of a column-parallel module. ``layout``: that of the input;
    ``elements``: its size per token."""
    if layout == "replicate":
        return (StyleTraffic("all-reduce", "backward", elements),)
    gather = StyleTraffic("all-gather", "forward", elements)
    scatter = StyleTraffic("reduce-scatter", "backward", elements)
    return (gather, scatter) if layout == "sequence" else ()


def sum_traffic(layout: str, elements: int | None) -> tuple[StyleTraffic, ...]:
    """Returns the collectives that sum the ranks' outputs. ``layout``: ``"replicate"``: into the whole
    tensor, ``"sequence"``: into parts of the sequence; ``elements``: the size per token."""
    if layout == "replicate":
        return (StyleTraffic("all-reduce", "forward", elements),)
    scatter = StyleTraffic("reduce-scatter", "forward", elements)
    return scatter, StyleTraffic("all-gather", "backward", elements)


RandomLayout = Literal["", "features", "sequence", "whole"]
_RANDOM_LAYOUTS: dict[str, RandomLayout] = {
    "replicate": "whole",
    "sequence": "sequence",
    "shard": "features",
}


@dataclass(frozen=True)
class Style(ABC):
    """Base class of the styles. ``str()`` shows the fields that differ from their defaults. A field whose
    type is a ``Literal`` is checked when a style is made (PlanError).

    Attributes:
        random_before: whether random numbers must differ by rank already within the module's forward, because
            it computes on parts although its input is whole.
    """

    random_before: ClassVar[bool] = False
    # Called with the module's ``TpState``, the module and its arguments.
    forward: ClassVar[Callable[..., Any] | None] = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value, allowed = getattr(self, f.name), get_args(f.type)
            if get_origin(f.type) is Literal and value not in allowed:
                near = difflib.get_close_matches(str(value), allowed, 1, 0.0)[0]
                raise PlanError(
                    f"{type(self).__name__}({f.name}={value!r}): {f.name} must be one of "
                    f"{', '.join(map(repr, allowed))}. Did you mean {near!r}?"
                )

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = [f.name for f in fields(self) if values[f.name] != f.default]
        shown = ", ".join(f"{name}={_shown(values[name])}" for name in changed)
        return f"{type(self).__name__}({shown})"

    def for_module(self, module: nn.Module) -> "Style":
        """Returns the style that this one stands for on ``module``: itself, or another one where a style name
        has two meanings (``Rowwise`` on an embedding is ``VocabParallel``)."""
        return self

    def in_model(self, model: nn.Module, name: str) -> "Style":
        """Returns the style with fields filled in from ``model``, such as a size from its config; ``name`` is
        the module's path."""
        return self

    def inside(self, module: nn.Module) -> dict[str, "Style"]:
        """Returns further styles, for modules inside ``module`` that must be split with it: path from
        ``module`` -> style."""
        return {}

    def attributes(self, module: nn.Module, tp: int) -> dict[str, tuple[int, ...]]:
        """Returns the module's int attributes that must change with the split: name -> value on each rank."""
        return {}

    def with_params(self, params: dict[str, "Style"]) -> "Style":
        """Returns this style with ``params``, rules for some of its module's own parameters, by name;
        PlanError if styles of this class take none."""
        if "params" in self.__dataclass_fields__:
            return replace(self, params=(*self.params, *params.items()))  # type: ignore[attr-defined,call-arg]
        raise PlanError(
            f"{self} takes no rules for single parameters ({', '.join(params)}); give their module "
            "the style 'local_params' or 'moe_tp_experts'"
        )

    def param_rule(self, param: Tensor, tp: int) -> ParamRule:
        """Returns the rule for a single parameter, where a plan gives this style to a parameter's path;
        PlanError if the style is for modules only."""
        raise PlanError(f"{self} is a style for modules, not for a parameter")

    @abstractmethod
    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        """Returns the rule of each of the module's own parameters, by name; PlanError if the style can't
        split this type of module, or this size over ``tp`` ranks."""

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        """Gives ``module`` its tensor-parallel forward: the style's method ``forward``, if it has one."""
        if self.forward is not None:
            bind_forward(module, TpState(self, axis, sequence))

    def traffic(self, module: nn.Module, tp: int) -> tuple[StyleTraffic, ...]:
        """Returns the collectives of the module's forward and backward, with sizes per token."""
        return ()

    @property
    def ends(self) -> tuple[str, str]:
        """Layouts of the module's input and output, such as ``"sequence"``; ``""``: left as it is."""
        return "", ""

    @property
    def parts(self) -> tuple[bool, bool]:
        """Whether each rank has only its part of the module's input, and whether of its output."""
        return self.ends[0] in ("shard", "sequence"), self.ends[1] in ("shard", "sequence")

    @property
    def random_after(self) -> RandomLayout:
        """How random numbers must differ by rank after the module (``tp/random.py``), by the layout of its
        output; ``""``: as before it."""
        return _RANDOM_LAYOUTS.get(self.ends[1], "")

    @property
    def splits_sequence(self) -> bool:
        """Whether the style makes parts of a sequence, one on each rank, from a whole one or from sums."""
        return self.ends[1] == "sequence"

    @property
    def takes_parts(self) -> bool:
        """Whether the input is a part of the sequence: the forward then needs the global length."""
        return self.ends[0] == "sequence"


class LayoutStyle(Style):
    """A style with a field ``output``, the layout of its output, and perhaps a field ``input``."""

    @property
    def ends(self) -> tuple[str, str]:
        return getattr(self, "input", ""), self.output  # type: ignore[attr-defined]


def _shown(value: object) -> str:
    return f"{value.lengths} by rank" if isinstance(value, Packing) else repr(value)
