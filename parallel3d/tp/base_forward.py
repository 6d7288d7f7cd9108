"""A tensor-parallel forward under a subclass's own, in place of what ``super().forward(...)`` computes."""

from typing import Any

from torch import nn

from parallel3d._forward import as_if
from parallel3d.tp.forwards import TpState, bind_forward, note_state

__all__ = ["bind_base_forward"]


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
