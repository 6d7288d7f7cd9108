"""Style: how one module is tensor-parallel.

A style is a frozen value that names no module and no mesh. :meth:`Style.plan` is pure: it says
which parameter of a module gets which placement on the ``tp`` axis, or why that can't be.
:meth:`Style.install` mutates: it gives the module instance a forward on local tensors. Parameters
are replaced by :meth:`~parallel3d.tp.ResolvedPlan.apply`, which knows about sharing.
"""

import difflib
import dis
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from parallel3d._layout.packing import Packing
from parallel3d.errors import PlanError
from parallel3d.tp.checks import ParamRule, is_plain
from parallel3d.tp.collectives import SequenceLength, TpAxis

# What a module is to the styles: a linear layer or an embedding, torch's, Hugging Face's or a
# subclass.


@dataclass(frozen=True)
class LinearKind:
    """A module that computes ``x @ weight + bias``, in one of two ways of holding the weight.

    Attributes:
        out_features, in_features: its sizes.
        out_name, in_name: what the module calls them.
        out_dim, in_dim: their dims of the weight.
        base: the class whose forward is that product.
    """

    out_features: int
    in_features: int
    out_name: str
    in_name: str
    out_dim: int
    in_dim: int
    base: type[nn.Module]


def linear_kind(style: object, module: Any) -> LinearKind:
    """What ``module`` is to a style for linear layers.

    Raises:
        PlanError: it is no linear layer, or one that computes something else.
    """
    if is_plain(module, nn.Linear) or calls_forward_of(module, nn.Linear):
        return LinearKind(
            module.out_features, module.in_features, "out_features", "in_features", 0, 1, nn.Linear
        )
    conv1d = next((c for c in type(module).__mro__ if _is_conv1d(c)), None)
    if conv1d is not None and (is_plain(module, conv1d) or calls_forward_of(module, conv1d)):
        return LinearKind(module.nf, module.nx, "nf", "nx", 1, 0, conv1d)
    raise PlanError(
        f"{type(style).__name__} is for nn.Linear, nn.Embedding and transformers' Conv1D with their own "
        f"forward, not {type(module).__name__}"
    )


def is_embedding(module: nn.Module) -> bool:
    """Whether ``module`` is an ``nn.Embedding``, or one with something done to what it looks up."""
    return is_plain(module, nn.Embedding) or calls_forward_of(module, nn.Embedding)


def _is_conv1d(cls: type) -> bool:
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")


def calls_forward_of(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether ``module`` is a subclass of ``base`` whose forward calls ``super().forward`` once and reads
    nothing else that a style changes: what it does before and after is done to whole activations as before.
    """
    cls = type(module)
    if not isinstance(module, base) or cls.forward is base.forward or "forward" in module.__dict__:
        return False
    between = cls.__mro__[: cls.__mro__.index(base)]
    return all(_is_transparent(c.__dict__["forward"]) for c in between if "forward" in c.__dict__)


def works_by_element(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether ``module`` is a plain ``base``, or does to what its ``super().forward`` takes and gives only
    arithmetic with numbers, the same to each element: that is right on any part too."""
    if type(module).forward is base.forward:
        return True
    cls = type(module)
    between = cls.__mro__[: cls.__mro__.index(base)]
    return calls_forward_of(module, base) and all(
        _is_arithmetic(c.__dict__["forward"], module) for c in between if "forward" in c.__dict__
    )


# Attributes a style changes: a forward that reads them computes with a part where it expects the whole.
_CHANGED = {"weight", "bias", "_parameters", "parameters", "named_parameters", "state_dict"}


@cache
def _steps(forward: Callable[..., Any]) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(forward))


@cache
def _is_transparent(forward: Callable[..., Any]) -> bool:
    code = getattr(forward, "__code__", None)
    if code is None or "super" not in code.co_names:
        return False
    # Straight code: in a loop or a branch the call might come twice or never.
    if any("JUMP" in step.opname or step.opname == "FOR_ITER" for step in _steps(forward)):
        return False
    names = [s.argval for s in _steps(forward) if "ATTR" in s.opname or "METHOD" in s.opname]
    for name, after in zip(names, [*names[1:], ""], strict=True):
        if name in _CHANGED and after not in ("dtype", "device"):
            return False
    calls = [name for name in names if name == "forward"]
    # Nor a function inside, which might read anything.
    nested = any(hasattr(constant, "co_code") for constant in code.co_consts)
    return len(calls) == 1 and not nested


_OF_ELEMENTS = {"super", "forward", "to", "dtype", "device", "weight", "type_as"}
_ARITHMETIC = {"+", "-", "*", "/", "+=", "-=", "*=", "/="}


def _is_arithmetic(forward: Callable[..., Any], module: nn.Module) -> bool:
    for name in set(forward.__code__.co_names) - _OF_ELEMENTS:
        value = getattr(module, name, None)
        if isinstance(value, torch.Tensor):
            if value.dim() or isinstance(value, nn.Parameter):
                return False
        elif not isinstance(value, (int, float)):
            return False
    for step in _steps(forward):
        if "SUBSCR" in step.opname or "SLICE" in step.opname or "BUILD" in step.opname:
            return False
        if step.opname == "BINARY_OP" and step.argrepr not in _ARITHMETIC:
            return False
    return True


# Traffic: what a module communicates over ``tp`` for each token, for the report.


@dataclass(frozen=True)
class Traffic:
    """One collective of a module's forward or backward.

    Attributes:
        op: ``"all-reduce"``, ``"all-gather"`` or ``"reduce-scatter"``; or ``"torch's own"``, whatever its
            DTensors do.
        phase: when it runs.
        elements: of the whole tensor for each token: what is reduced, or what is gathered. ``None``: only
            the input shows it.
    """

    op: Literal["all-reduce", "all-gather", "reduce-scatter", "torch's own"]
    phase: Literal["forward", "backward"]
    elements: int | None


def entered(layout: str, elements: int | None) -> tuple[Traffic, ...]:
    """Taking an input that column-parallel modules read, which is whole, or a part of the sequence."""
    if layout == "replicate":
        return (Traffic("all-reduce", "backward", elements),)
    if layout == "sequence":
        return (
            Traffic("all-gather", "forward", elements),
            Traffic("reduce-scatter", "backward", elements),
        )
    return ()


def summed(layout: str, elements: int | None) -> tuple[Traffic, ...]:
    """Summing the ranks' parts into the whole, or into parts of the sequence."""
    if layout == "replicate":
        return (Traffic("all-reduce", "forward", elements),)
    return (
        Traffic("reduce-scatter", "forward", elements),
        Traffic("all-gather", "backward", elements),
    )


@dataclass(frozen=True)
class Style(ABC):
    """Base of the styles. ``str()`` shows the fields that differ from their defaults."""

    choices: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for name, allowed in self.choices.items():
            value = getattr(self, name)
            if value not in allowed:
                near = difflib.get_close_matches(str(value), allowed, 1, 0.0)[0]
                raise PlanError(
                    f"{type(self).__name__}({name}={value!r}): {name} is one of "
                    f"{', '.join(map(repr, allowed))}. Did you mean {near!r}?"
                )

    def __str__(self) -> str:
        shown = [
            f"{f.name}={_shown(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def for_module(self, module: nn.Module) -> "Style":
        """The style this one means on ``module``: itself, but for names used for two things."""
        return self

    def in_model(self, model: nn.Module, name: str) -> "Style":
        """The style with what it reads from the model around its module, whose path is ``name``."""
        return self

    def inside(self, module: nn.Module) -> dict[str, "Style"]:
        """Styles that modules inside get with this one, by their path from ``module``."""
        return {}

    def attributes(self, module: nn.Module, tp: int) -> dict[str, tuple[int, ...]]:
        """Attributes of the module that say how much this rank holds: name -> value on each rank."""
        return {}

    def with_params(self, params: dict[str, "Style"]) -> "Style":
        """This style for a module some of whose own parameters have rules of their own, by name.

        Raises:
            PlanError: it takes none.
        """
        raise PlanError(
            f"{self} takes no rules for single parameters ({', '.join(params)}); give their module "
            "the style 'local_params' or 'moe_tp_experts'"
        )

    def param_rule(self, param: Tensor, tp: int) -> ParamRule:
        """What this style means for one parameter, given by its path; for styles that split features.

        Raises:
            PlanError: it is no style for a parameter, or its size can't be split.
        """
        raise PlanError(f"{self} is a style for modules, not for a parameter")

    @abstractmethod
    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        """The rule of each of the module's own parameters, by name.

        Raises:
            PlanError: a module type or a size this style can't do on ``tp`` ranks.
        """

    def install(  # noqa: B027 (optional)
        self, module: nn.Module, axis: TpAxis, sequence: SequenceLength
    ) -> None:
        """Gives ``module`` its tensor-parallel forward. Base: the forward it has is right."""

    def traffic(self, module: nn.Module, tp: int) -> tuple[Traffic, ...]:
        """What the module communicates for each token, for the report."""
        return ()

    @property
    def random_after(self) -> Literal["", "features", "sequence", "whole"]:
        """What its output is a part of, for random numbers (``tp/random.py``); ``""``: as before it."""
        return ""

    @property
    def random_before(self) -> bool:
        """Whether the module itself computes on parts, though its input is whole."""
        return False

    @property
    def splits_sequence(self) -> bool:
        """Whether its forward splits the sequence among the ranks."""
        return False

    @property
    def takes_parts(self) -> bool:
        """Whether it must know the global length of the sequence it gets a part of."""
        return False


def _shown(value: object) -> str:
    if isinstance(value, Packing):
        return f"{value.lengths} by rank"
    return repr(value)
