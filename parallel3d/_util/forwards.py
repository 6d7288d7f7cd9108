"""Replacing the forward of one module, by giving the module a subclass of its class; and undoing all of it.

``fully_shard`` changes the class in the same way. A bound method in ``module.__dict__`` would be a reference
cycle, so that only the garbage collector frees the model, and a copy of the module would call the original's.
Names and ``state_dict`` keys stay.
"""

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
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
    """Replaces the module's forward by ``wrapper(forward)``.

    Args:
        wrapper: called once for all modules of one class; both forwards are functions of
            ``(module, *args, **kwargs)``.
        key: identifies the wrapper.

    Returns:
        The forward that the module had.
    """
    cls = type(module)
    inner = _take_own(module) if "forward" in module.__dict__ else cls.forward
    wrapped = _classes.get((cls, key, inner))
    if wrapped is None:
        namespace = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
        namespace["forward"] = wrapper(inner)
        wrapped = _classes[cls, key, inner] = type(cls.__name__, (cls,), namespace)
    set_class(module, wrapped)
    return inner


def set_class(module: nn.Module, cls: type) -> None:
    """Sets ``module.__class__``, also if the module's ``__setattr__`` would set it on a wrapped module, as
    that of ``torch.compile(module)`` does."""
    object.__setattr__(module, "__class__", cls)


def as_if(forward: Any, inner: Forward) -> Forward:
    """Returns a copy of ``forward`` with the signature of ``inner``.

    Its code object is a copy too: torch.compile limits the number of graphs per code object, and so counts
    those of one class only.
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
    """Moves a forward in ``module.__dict__`` to another attribute; returns a function that calls it there."""
    own = module.__dict__.pop("forward")
    name = f"{_OWN}_{len(type(module).__mro__)}"  # a second one, set later, must not replace it
    module.__dict__[name] = own
    signature = inspect.signature(own)
    forward = _caller_of(name, str(signature))
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[first, *signature.parameters.values()]
    )
    return forward


@cache
def _caller_of(name: str, signature: str) -> Forward:
    """Returns a function that calls attribute ``name`` of its first argument; one for each ``signature``."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    return forward


def packages_of(function: Any) -> Iterator[str]:
    """Yields the packages that define ``function`` and the functions that it wraps (``__wrapped__``)."""
    while function is not None:
        function = getattr(function, "__func__", function)
        scope = getattr(function, "__globals__", None)
        yield str((scope or {}).get("__name__") or type(function).__module__).partition(".")[0]
        function = getattr(function, "__wrapped__", getattr(function, "func", None))


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns a block's keyword arguments with None for an empty key-value cache.

    A block that is recomputed in backward would add its keys and values to the cache twice. So a cache that
    is not empty is an error.
    """
    # transformers' names, the newest (5.24) first, which other models may use for something else.
    for name in ("cache", "past_key_values", "past_key_value", "layer_past"):
        cache = kwargs.get(name)
        if cache is None or (name == "cache" and not hasattr(cache, "get_seq_length")):
            continue
        tokens = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else len(cache)
        if tokens:
            raise StateError(
                f"{name} holds {tokens} tokens, and activation_checkpointing recomputes blocks in "
                "backward, which would add to it again: call under torch.no_grad(), or without the cache"
            )
        kwargs = {**kwargs, name: None}
    return kwargs


# Attributes in which torch keeps parameters, buffers, modules and hooks.
_CONTAINERS = tuple(k for k, v in vars(nn.Module()).items() if isinstance(v, (dict, set)))


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Context manager that restores every module's class and attributes if the body raises.

    Parameters are not copied: wrapping replaces them and never writes to them. Containers are refilled, not
    replaced, since the handle of a user's hook refers to its container.
    """
    modules = [(module, type(module), dict(vars(module))) for module in model.modules()]
    containers = [
        (container, container.copy() if container else ())  # most of a module's are empty
        for _, _, state in modules
        for container in (state[name] for name in _CONTAINERS if name in state)
    ]
    attributes = [(param, dict(vars(param))) for param in model.parameters()]
    try:
        yield
    except BaseException:
        for module, cls, state in modules:
            set_class(module, cls)
            vars(module).clear()
            vars(module).update(state)
        for container, content in containers:
            container.clear()
            container.update(content)
        for param, values in attributes:
            vars(param).clear()
            vars(param).update(values)
        raise
