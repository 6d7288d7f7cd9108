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
from typing import Any, ClassVar, Literal, get_args, get_origin

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
    """The placement of one parameter on ``tp``. For ``tp_grad`` and ``compute`` see ``ParamLayout``.
    ``packing`` says which rows of ``placement.dim`` each rank has; None: those of ``torch.chunk``."""

    placement: Shard | Replicate
    tp_grad: Literal["whole", "partial"] = "whole"
    packing: Packing | None = None
    compute: Literal["local", "dtensor"] = "local"

    def part(self, whole: Tensor, size: int, rank: int) -> Tensor:
        """Returns the part of a parameter, or of its gradient, that ``rank`` of ``size`` holds."""
        if self.packing is not None:
            return self.packing.take(whole, rank)
        if isinstance(self.placement, Shard):
            return local_chunk(whole, self.placement.dim, size, rank)
        return whole

    def describe(self) -> str:
        """Returns the rule in words."""
        kind = " (a DTensor)" if self.compute == "dtensor" else ""
        if isinstance(self.placement, Shard):
            packed = "" if self.packing is None else f" as {self.packing.rows}"
            return f"split along dim {self.placement.dim}{packed}{kind}"
        return ("whole" if self.tp_grad == "whole" else "whole with its gradient summed") + kind


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling ``module`` runs the forward of ``kind``."""
    # Not a subclass or an instance with another forward, nor MultiheadAttention's projection, which is never
    # called.
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and "forward" not in module.__dict__
        and not isinstance(module, NonDynamicallyQuantizableLinear)
    )


def refuse_lookup_options(module: Any, *, scale_grad_by_freq: bool) -> None:
    """Raises PlanError for embedding options that need whole rows, or counts of ids on other ranks."""
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
    """Returns the rules of the parameters that the module has; PlanError for a parameter without a rule or
    that can't be split, or if there is no weight."""
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
    """Returns the rules that keep the module's own parameters whole."""
    return fit_rules(module, **dict.fromkeys(own_params(module), ParamRule(Replicate(), tp_grad)))


# torch's modules that treat each token by itself. Modules of other packages are judged by their parameters.
_PER_TOKEN = (nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity)


def need_per_token(module: nn.Module) -> None:
    """Raises PlanError for a module that doesn't treat each token of the sequence by itself."""
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


@dataclass(frozen=True)
class LinearKind:
    """A module that computes ``x @ weight + bias``: ``nn.Linear``, torchao's ``Float8Linear``, or
    transformers' ``Conv1D``, which holds the weight transposed.

    Attributes:
        out_name, in_name: the module's attributes with its numbers of features.
        out_dim, in_dim: the weight's dims of these sizes.
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
    """Returns ``module`` as a linear layer, for ``style``; PlanError if it computes something else."""
    float8 = is_float8(module) and not has_own_forward(module)
    is_linear = is_plain(module, nn.Linear) or calls_forward_of(module, nn.Linear)
    if float8 or is_linear or casts_weight(module):
        base = type(module) if float8 else nn.Linear
        return LinearKind(
            module.out_features, module.in_features, "out_features", "in_features", 0, 1, base
        )
    for cls in type(module).__mro__:
        is_conv1d = (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")
        if is_conv1d and (is_plain(module, cls) or calls_forward_of(module, cls)):
            return LinearKind(module.nf, module.nx, "nf", "nx", 1, 0, cls)
    raise PlanError(
        f"{type(style).__name__} is for nn.Linear, nn.Embedding and transformers' Conv1D with their own "
        f"forward, not {type(module).__name__}"
    )


def is_embedding(module: nn.Module) -> bool:
    """Whether ``module`` is an ``nn.Embedding``, or a subclass that changes the result of its forward."""
    return is_plain(module, nn.Embedding) or calls_forward_of(module, nn.Embedding)


def calls_forward_of(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether ``module`` is a subclass of ``base`` whose forward calls ``super().forward`` once and reads
    nothing else that a style changes, so that its other code sees the activations of the plain model."""
    cls = type(module)
    if not isinstance(module, base) or cls.forward is base.forward or "forward" in module.__dict__:
        return False
    return all(map(_is_transparent, _forwards_over(module, base)))


def works_by_element(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether ``module`` is a plain ``base``, or a subclass that applies to the input and output of
    ``super().forward`` only elementwise arithmetic with Python numbers, which is right on any part too."""
    if type(module).forward is base.forward or casts_weight(module):
        return True
    return calls_forward_of(module, base) and all(
        _is_arithmetic(forward, module) for forward in _forwards_over(module, base)
    )


def _forwards_over(module: nn.Module, base: type[nn.Module]) -> Iterator[Any]:
    """The forwards of the subclasses of ``base`` that ``module`` is an instance of."""
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
    """Returns the syntax in a forward's body; nothing where it can't be read, or has a decorator."""
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
    nodes = _nodes_of(forward)
    operators = (node for node in nodes if isinstance(node, ast.operator))
    return not any(isinstance(node, _SELECTING) for node in nodes) and all(
        isinstance(operator, _ARITHMETIC) for operator in operators
    )


@dataclass(frozen=True)
class StyleTraffic:
    """One collective of a module's forward or backward over ``tp``, for the report.

    Attributes:
        op: ``"torch's own"``: the collectives of DTensors.
        elements: elements per token of the whole tensor that is reduced or gathered; None if that depends on
            the input.
    """

    op: Literal["all-reduce", "all-gather", "reduce-scatter", "torch's own"]
    phase: Literal["forward", "backward"]
    elements: int | None


def input_traffic(layout: str, elements: int | None) -> tuple[StyleTraffic, ...]:
    """The collectives for an input of column-parallel modules that is whole, or a part of the sequence."""
    if layout == "replicate":
        return (StyleTraffic("all-reduce", "backward", elements),)
    gather = StyleTraffic("all-gather", "forward", elements)
    scatter = StyleTraffic("reduce-scatter", "backward", elements)
    return (gather, scatter) if layout == "sequence" else ()


def sum_traffic(layout: str, elements: int | None) -> tuple[StyleTraffic, ...]:
    """The collectives that sum the ranks' outputs into the whole, or into parts of the sequence."""
    if layout == "replicate":
        return (StyleTraffic("all-reduce", "forward", elements),)
    scatter = StyleTraffic("reduce-scatter", "forward", elements)
    return scatter, StyleTraffic("all-gather", "backward", elements)


RandomLayout = Literal["", "features", "sequence", "whole"]
RANDOM_LAYOUTS: dict[str, RandomLayout] = {
    "replicate": "whole",
    "sequence": "sequence",
    "shard": "features",
}
"""Layout of an output -> ``Style.random_after``."""


@dataclass(frozen=True)
class Style(ABC):
    """Base class of the styles. ``str()`` shows the fields that differ from their defaults; fields whose type
    is a ``Literal`` are checked.

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
        """Returns the style that this one means on ``module``: itself, unless a name has two meanings."""
        return self

    def in_model(self, model: nn.Module, name: str) -> "Style":
        """Returns the style with what it takes from the ``model`` around its module, at the path ``name``."""
        return self

    def inside(self, module: nn.Module) -> dict[str, "Style"]:
        """Returns the styles that modules inside ``module`` get with this one, by path from ``module``."""
        return {}

    def attributes(self, module: nn.Module, tp: int) -> dict[str, tuple[int, ...]]:
        """Returns the module's attributes that depend on its local sizes: name -> value on each rank."""
        return {}

    def with_params(self, params: dict[str, "Style"]) -> "Style":
        """Returns this style with rules for some of its module's own parameters, by name; PlanError if it
        has no field ``params``."""
        if "params" in self.__dataclass_fields__:
            return replace(self, params=(*self.params, *params.items()))  # type: ignore[attr-defined,call-arg]
        raise PlanError(
            f"{self} takes no rules for single parameters ({', '.join(params)}); give their module "
            "the style 'local_params' or 'moe_tp_experts'"
        )

    def param_rule(self, param: Tensor, tp: int) -> ParamRule:
        """Returns the rule for one parameter that a plan names by its path; PlanError if there is none."""
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
        """Returns the collectives of the module, with their sizes per token, for the report."""
        return ()

    @property
    def ends(self) -> tuple[str, str]:
        """The layouts of its input and of its output, such as ``"sequence"``; ``""``: those it is given."""
        return "", ""

    @property
    def parts(self) -> tuple[bool, bool]:
        """Whether its module's input, and its output, is a part on each rank."""
        return self.ends[0] in ("shard", "sequence"), self.ends[1] in ("shard", "sequence")

    @property
    def random_after(self) -> RandomLayout:
        """The layout of the output, for random numbers (``tp/random.py``); ``""``: that of the input."""
        return RANDOM_LAYOUTS.get(self.ends[1], "")

    @property
    def splits_sequence(self) -> bool:
        """Whether its forward splits the sequence among the ranks."""
        return self.ends[1] == "sequence"

    @property
    def takes_parts(self) -> bool:
        """Whether its input is a part of the sequence, of which it must know the global length."""
        return self.ends[0] == "sequence"


class LayoutStyle(Style):
    """A style with the field ``output``, and perhaps with ``input``."""

    @property
    def ends(self) -> tuple[str, str]:
        return getattr(self, "input", ""), self.output  # type: ignore[attr-defined]


def _shown(value: object) -> str:
    return f"{value.lengths} by rank" if isinstance(value, Packing) else repr(value)
