"""Modules that keep their own precision within a unit of a lower one: ``full_precision_modules``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallel3d._forward import as_if, wrap_forward
from parallel3d._tree import map_tensors
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.managed import units_modules

if TYPE_CHECKING:
    from parallel3d.fsdp.state import Unit

__all__ = ["cast_around", "cast_inputs", "kept_in_full", "outside_full"]

_KEY = "full_precision"  # of the wrapped forward


def kept_in_full(modules: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> set[int]:
    """Ids of the modules of one unit that ``policy`` keeps in full precision, and of all inside them.

    Args:
        modules: those given to ``fully_shard``.
    """
    classes = policy.full_precision_modules
    return {
        id(inner)
        for module in units_modules(modules)
        if isinstance(module, classes)
        for inner in units_modules([module])
    }


def outside_full(modules: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> Iterator[nn.Module]:
    """The other modules of the unit."""
    kept = kept_in_full(modules, policy)
    return (module for module in units_modules(modules) if id(module) not in kept)


def cast_around(modules: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> None:
    """Lets the unit's full-precision modules cast what comes in, and back what goes out."""
    if policy.param_dtype is None:
        return
    for module in units_modules(modules):
        if isinstance(module, policy.full_precision_modules):
            wrap_forward(module, _in_own_precision, _KEY)


def _in_own_precision(inner: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = _dtype_of(self)
        before: torch.dtype | None = None

        def cast_in(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal before
            wanted = own or torch.promote_types(tensor.dtype, torch.float32)
            if not tensor.is_floating_point() or tensor.dtype == wanted:
                return tensor
            before = before or tensor.dtype
            return tensor.to(wanted)

        # One by one: torch.compile can't trace what compares the tuple of all.
        args = tuple(map_tensors(cast_in, each) for each in args)
        kwargs = {key: map_tensors(cast_in, each) for key, each in kwargs.items()}
        output = inner(self, *args, **kwargs)
        if before is None:
            return output
        dtype = before
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, output)

    return as_if(forward, inner)


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    """What the module computes in: the dtype of its first parameter or buffer with numbers in it."""
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            return tensor.dtype
    return None


def cast_inputs(unit: Unit, module: nn.Module, inputs: tuple[tuple, dict]) -> tuple[tuple, dict]:
    """(args, kwargs) as the forward of ``module``, one of a unit that casts its inputs, is to see them."""
    lower = unit.input_dtype
    assert lower is not None
    if isinstance(module, unit.policy.full_precision_modules):
        return inputs  # it casts them itself, to its own dtype
    if not unit.group.full:
        args, kwargs = inputs
        if (
            len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor
        ):  # most blocks' only input
            if args[0].dtype == lower or not args[0].is_floating_point():
                return inputs
            return (args[0].to(lower),), kwargs
        return map_tensors(lambda t: t.to(lower) if t.is_floating_point() else t, inputs)
    own = unit.group.dtype
    if own is None or own == lower:
        return inputs
    return map_tensors(lambda t: t.to(own) if t.dtype == lower else t, inputs)
