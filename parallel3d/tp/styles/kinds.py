"""What a module is to the styles: a linear layer or an embedding, torch's, Hugging Face's or a subclass."""

import dis
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from parallel3d.errors import PlanError
from parallel3d.tp.checks import is_plain

__all__ = ["LinearKind", "is_embedding", "linear_kind", "works_by_element"]


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
