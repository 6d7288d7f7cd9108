"""Giving a module instance a tensor-parallel forward, and what such forwards share.

A forward is a plain function, the method of a subclass that the module's class becomes; all it needs
lies in the module's ``_parallel3d_tp``. So a copy of a model has its own, ``torch.compile`` traces it,
nothing refers back to the module, and names and ``state_dict`` keys stay those of the plain model.

Inside a forward ``self.weight`` is this rank's local tensor: the engine puts it there.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from parallel3d._layout.packing import Packing
from parallel3d._util.forwards import as_if, wrap_forward
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

_STATE = "_parallel3d_tp"


@dataclass
class TpState:
    """What a module's tensor-parallel forward needs.

    Attributes:
        style: the style that put it there.
        axis: the tp axis.
        sequence: shared by all modules of one ``apply``.
        inner: the forward the module had, a function of the module and its arguments.
        first: name of the first argument of the module's forward; ``""`` when it takes none.
        packing: how the features its style cuts are cut, where not as ``torch.chunk`` does.
        once: parameters every rank holds that only the first adds.
    """

    style: Any
    axis: TpAxis
    sequence: SequenceLength
    inner: Callable[..., Any] = nn.Module.forward
    first: str = ""
    packing: Packing | None = None
    once: tuple[str, ...] = ()


def bind_forward(module: nn.Module, forward: Any, state: TpState) -> None:
    """Makes ``forward(module, ...)`` the module's forward."""
    note_state(module, module.forward, state)
    state.inner = wrap_forward(module, functools.partial(as_if, forward), forward)


def note_state(module: nn.Module, forward: Any, state: TpState) -> None:
    """Puts ``state`` where the forward that takes the place of ``forward`` finds it."""
    names = [
        p.name
        for p in inspect.signature(forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "self"
    ]
    state.first = names[0] if names else ""
    module.__dict__[_STATE] = state


def take_input(x: Tensor, layout: str, dim: int, tp: TpState, *, read_only: bool = False) -> Tensor:
    """The input of a module whose ranks each compute a part of the output: one copy or gather for all
    modules that take the same tensor object. ``read_only``: the caller won't change it in place."""
    if layout == "replicate":
        return share_copy(x, tp.axis, read_only=read_only)
    if layout == "sequence":
        return share_sequence(x, dim, tp.sequence.of(x, dim, tp.axis), tp.axis)
    return x  # "gathered": the enclosing PrepareInput did it, and sums the gradient


def finish_sum(y: Tensor, layout: str, dim: int, tp: TpState) -> Tensor:
    """The ranks' parts ``y`` summed: whole, or this rank's part of the sequence along ``dim``."""
    if layout == "replicate":
        return reduce_from_tp(y, tp.axis, in_place=True)  # y was made for this
    tp.sequence.length = y.shape[dim]
    return reduce_scatter_sequence(y, dim, tp.axis)


def gather_features(y: Tensor, size: int, tp: TpState) -> Tensor:
    """The ranks' parts of the last dim joined in the plain module's order, (..., part) -> (..., size)."""
    if tp.packing is not None:
        return gather_packed(y, replace(tp.packing, dim=y.dim() - 1), tp.axis)
    return gather_from_tp(y, -1, size, tp.axis)


def split_features(x: Tensor, tp: TpState) -> Tensor:
    """This rank's part of a whole last dim."""
    if tp.packing is not None:
        return split_packed(x, replace(tp.packing, dim=x.dim() - 1), tp.axis)
    return split_to_tp(x, -1, tp.axis)


def map_first(
    tp: TpState,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fn: Callable[[Tensor], Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces the first positional tensor, or the first argument when given by name, by ``fn`` of
    it. All other arguments pass through."""
    for i, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:i], fn(value), *args[i + 1 :]), kwargs
    if isinstance(kwargs.get(tp.first), Tensor):
        return args, {**kwargs, tp.first: fn(kwargs[tp.first])}
    if any(isinstance(kwargs.get(name), Tensor) for name in getattr(tp.style, "keywords", ())):
        return args, dict(kwargs)
    # Left alone, the input would be used as it is and its gradient never summed.
    raise StateError(
        f"{tp.style} found no tensor among the positional arguments, nor as {tp.first!r}; "
        f"keyword arguments given: {', '.join(kwargs) or 'none'}. Name the input in PrepareInput's "
        "keywords."
    )


# A tensor-parallel forward under a subclass's own, in place of what ``super().forward(...)``
# computes.


def bind_base_forward(
    module: nn.Module, base: type[nn.Module], forward: Any, state: TpState
) -> None:
    """Makes ``forward(module, ...)`` what ``module`` computes where it would compute ``base``'s forward.

    For a subclass with a forward of its own, such as one that scales what it looks up, ``forward`` takes the
    place that ``base.forward`` has in it.
    """
    cls = type(module)
    if cls.forward is base.forward or "forward" in module.__dict__:
        bind_forward(module, forward, state)
        return
    note_state(module, base.forward, state)
    state.inner = base.forward
    made = _classes.get((cls, base, forward))
    if made is None:
        made = _classes[cls, base, forward] = _with_base(cls, base, forward)
    module.__class__ = made


_classes: dict[tuple[type, type, Any], type] = {}


def _with_base(cls: type[nn.Module], base: type[nn.Module], forward: Any) -> type:
    """``cls`` with a class between it and ``base`` that has the forward: ``super()`` finds it first."""
    between = type(f"Tp{base.__name__}", (base,), {"forward": as_if(forward, base.forward)})
    names = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls, between), names)
