"""Giving one module another forward, by a subclass that has it.

The module's class changes, as ``fully_shard`` changes it, and nothing refers back to the module: a bound
method in ``module.__dict__`` would be a cycle, so that a model waits for the garbage collector to be
freed, and a copy of the module would call the original's. Names and ``state_dict`` keys stay.
"""

import inspect
from collections.abc import Callable, Hashable
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from parallel3d.errors import StateError

Forward = Callable[..., Any]  # of (module, *args, **kwargs)

_OWN = "_parallel3d_own_forward"
_classes: dict[tuple[type, Hashable, Forward], type] = {}


def wrap_forward(
    module: nn.Module, wrapper: Callable[[Forward], Forward], key: Hashable
) -> Forward:
    """Makes ``wrapper(forward)`` the module's forward, where ``forward`` is the one it has.

    Args:
        wrapper: called once for all modules of one class; both forwards are functions of
            ``(module, *args, **kwargs)``.
        key: what tells this wrapper from others.

    Returns:
        The forward it had.
    """
    cls = type(module)
    inner = _take_own(module) if "forward" in module.__dict__ else cls.forward
    made = _classes.get((cls, key, inner))
    if made is None:
        namespace = {
            "forward": wrapper(inner),
            "__doc__": cls.__doc__,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        made = _classes[cls, key, inner] = type(cls.__name__, (cls,), namespace)
    module.__class__ = made
    return inner


def as_if(forward: Any, inner: Forward) -> Forward:
    """A copy of ``forward`` with the signature of ``inner``.

    With code of its own too: what torch.compile makes of it is then shared by modules of one class only,
    of which it accepts a limited number.
    """
    copy = FunctionType(
        forward.__code__.replace(),
        forward.__globals__,
        inner.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    copy.__doc__ = inner.__doc__
    copy.__signature__ = inspect.signature(inner)  # type: ignore[attr-defined]
    return copy


def _take_own(module: nn.Module) -> Forward:
    """Moves a forward that the instance has of its own out of the way."""
    own = module.__dict__.pop("forward")
    name = f"{_OWN}_{len(type(module).__mro__)}"  # a second one, given later, must not replace it
    module.__dict__[name] = own
    signature = inspect.signature(own)
    forward = _calls(name, str(signature))
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[first, *signature.parameters.values()]
    )
    return forward


@cache
def _calls(name: str, signature: str) -> Forward:
    """A function that calls the module's attribute ``name``, the same one for the same signature."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    return forward


_CACHES = ("past_key_values", "past_key_value", "layer_past")  # transformers' names


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a block that is recomputed in backward, where it would add its keys and values to a
    cache a second time: none instead of an empty one.

    Raises:
        StateError: a cache that isn't empty.
    """
    for name in _CACHES:
        cache = kwargs.get(name)
        if cache is None:
            continue
        count = getattr(cache, "get_seq_length", None)
        held = int(count()) if count is not None else len(cache)
        if held:
            raise StateError(
                f"{name} holds {held} tokens, and activation_checkpointing=True recomputes blocks in "
                "backward, which would add to it again: call under torch.no_grad(), or without the cache"
            )
        kwargs = {**kwargs, name: None}
    return kwargs
