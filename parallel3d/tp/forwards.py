"""Tensor-parallel forwards of module instances.

A forward is a plain function, the method of a subclass that the module's class becomes; its data is in the
module's ``_parallel3d_tp``. So a copy of a model has its own, ``torch.compile`` traces it, nothing refers
back to the module, and names and ``state_dict`` keys stay those of the plain model.

Inside a forward ``self.weight`` is this rank's local tensor, which the engine registers there.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d._layout.packing import Packing
from parallel3d._util.forwards import as_if, set_class, wrap_forward
from parallel3d._util.recompute import only_summed
from parallel3d.errors import StateError
from parallel3d.tp.collectives import (
    SequenceLength,
    TpAxis,
    gather_from_tp,
    gather_packed,
    reduce_from_tp,
    reduce_scatter_sequence,
    split_packed,
    split_to_tp,
)
from parallel3d.tp.overlap import share_copy, share_sequence
from parallel3d.tp.parts import refuse_hooks


@dataclass
class TpState:
    """The data of a module's tensor-parallel forward.

    Attributes:
        sequence: the global length of the sequence, shared by all modules of one ``ResolvedPlan.apply``.
        inner: the forward that the module had, a function of the module and its arguments.
        names: names of the arguments of that forward, in order.
        first: the first of them that may be positional, or ``""``.
        packing: which features each rank has, if not the chunks of ``torch.chunk``.
        once: names of parameters that every rank holds and only the first rank adds, such as a bias.
        casts: whether the plain forward casts the parameters to the input's dtype.
        index: an index tensor that a forward caches; created on the device of the first call.
    """

    style: Any
    axis: TpAxis
    sequence: SequenceLength
    inner: Callable[..., Any] = nn.Module.forward
    names: tuple[str, ...] = ()
    first: str = ""
    packing: Packing | None = None
    once: tuple[str, ...] = ()
    casts: bool = False
    index: Tensor | None = field(default=None, repr=False)


def bind_forward(module: nn.Module, state: TpState) -> None:
    """Makes the method ``forward`` of ``state.style`` the forward of ``module``; it gets ``state``."""
    _set_state(module, module.forward, state)
    state.inner = wrap_forward(module, functools.partial(as_if, _forward), _forward)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    tp: TpState = self._parallel3d_tp
    if not torch.compiler.is_compiling() and (
        self._forward_hooks
        or self._forward_pre_hooks
        or self._backward_hooks
        or self._backward_pre_hooks
    ):
        refuse_hooks(self, tp.style)
    return tp.style.forward(tp, self, *args, **kwargs)


def _set_state(module: nn.Module, forward: Any, state: TpState) -> None:
    """Stores ``state`` on the module, with the argument names of ``forward``, the one to be replaced."""
    parameters = inspect.signature(forward).parameters
    state.names = tuple(name for name in parameters if name != "self")
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = (name for name in state.names if parameters[name].kind in kinds)
    state.first = next(positional, "")
    module.__dict__["_parallel3d_tp"] = state


def take_input(x: Tensor, layout: str, dim: int, tp: TpState, *, read_only: bool = False) -> Tensor:
    """Returns a column-parallel module's input with the whole sequence; its gradient is summed over tp.
    Modules that are called with the same tensor object share the result.

    Args:
        layout: ``"replicate"``: ``x`` is whole. ``"sequence"``: a part of the sequence along ``dim``.
            ``"gathered"``: a module around this one has prepared it.
        read_only: the caller doesn't change the result in place.
    """
    if layout == "replicate":
        return share_copy(x, tp.axis, read_only=read_only)
    if layout == "sequence":
        return share_sequence(x, dim, tp.sequence.of(x, dim, tp.axis), tp.axis)
    return x  # "gathered": the enclosing PrepareInput did it, and sums the gradient


def finish_sum(y: Tensor, layout: str, dim: int, tp: TpState) -> Tensor:
    """Sums the ranks' ``y`` over tp. Returns the whole sum (``layout="replicate"``, an all-reduce), or this
    rank's part of it along the sequence ``dim`` (``"sequence"``, a reduce-scatter)."""
    if tp.axis.size > 1:
        only_summed(y)
    if layout == "replicate":
        return reduce_from_tp(y, tp.axis, in_place=True)  # nobody else has y
    tp.sequence.length = y.shape[dim]
    return reduce_scatter_sequence(y, dim, tp.axis)


def split_sequence(x: Tensor, dim: int, tp: TpState) -> Tensor:
    """Returns this rank's chunk of ``x`` along ``dim``; records the sequence's length for gathers."""
    tp.sequence.length = x.shape[dim]
    return split_to_tp(x, dim, tp.axis)


def gather_parts(x: Tensor, dim: int, tp: TpState) -> Tensor:
    """All-gathers the ranks' parts of the sequence along ``dim``; in the backward each rank takes its part of
    the result's gradient, as all ranks compute the same from the result."""
    return gather_from_tp(x, dim, tp.sequence.of(x, dim, tp.axis), tp.axis)


def gather_features(y: Tensor, size: int, tp: TpState) -> Tensor:
    """All-gathers the last dim, (..., features of this rank) -> (..., size), in the plain module's order."""
    if tp.packing is not None:
        return gather_packed(y, replace(tp.packing, dim=y.dim() - 1), tp.axis)
    return gather_from_tp(y, -1, size, tp.axis)


def split_features(x: Tensor, tp: TpState) -> Tensor:
    """Returns this rank's features of the last dim of ``x``."""
    if tp.packing is not None:
        return split_packed(x, replace(tp.packing, dim=x.dim() - 1), tp.axis)
    return split_to_tp(x, -1, tp.axis)


def map_first(
    tp: TpState, args: tuple[Any, ...], kwargs: dict[str, Any], fn: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) with ``fn`` applied to the first positional tensor or, if there is none, to the
    keyword argument ``tp.first``; StateError if there is neither."""
    for i, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:i], fn(value), *args[i + 1 :]), kwargs
    if isinstance(kwargs.get(tp.first), Tensor):
        return args, {**kwargs, tp.first: fn(kwargs[tp.first])}
    if any(isinstance(kwargs.get(name), Tensor) for name in getattr(tp.style, "keywords", ())):
        return args, dict(kwargs)
    # Otherwise the input would be used as it is, and its gradient never summed.
    raise StateError(
        f"{tp.style} found no tensor among the positional arguments, nor as {tp.first!r}; "
        f"keyword arguments given: {', '.join(kwargs) or 'none'}. Name the input in PrepareInput's "
        "keywords."
    )


def bind_base_forward(module: nn.Module, base: type[nn.Module], state: TpState) -> None:
    """Replaces the forward of ``base``, a class of ``module``, by the style's. If a subclass overrides
    forward (an embedding that scales its output), its forward stays, and its ``super().forward(...)`` calls
    the style's."""
    cls = type(module)
    if cls.forward is base.forward or "forward" in module.__dict__:
        bind_forward(module, state)
        return
    _set_state(module, base.forward, state)
    state.inner = base.forward
    set_class(module, _with_base(cls, base))  # type: ignore[arg-type]  # a class has a hash


@functools.cache
def _with_base(cls: type[nn.Module], base: type[nn.Module]) -> type:
    """Returns a subclass of ``cls`` whose ``super().forward`` is the style's, not ``base.forward``."""
    between = type(f"Tp{base.__name__}", (base,), {"forward": as_if(_forward, base.forward)})
    names = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls, between), names)
