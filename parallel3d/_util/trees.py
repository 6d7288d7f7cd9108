"""The tensors of a module's inputs and outputs, and those that can be reached from any value."""

import copy
import dataclasses
import weakref
from collections import deque
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from contextlib import suppress
from functools import partial
from itertools import chain
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn

_SCALARS = (int, float, str, type(None))  # most of what is found, tested first


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Returns ``value`` with ``fn`` applied to each tensor in tuples, lists, mappings and dataclasses.

    Containers keep their type; one without a changed tensor is returned as it is. Others are copied, so that
    a module that writes to a list or dict does not change its caller's.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(fn, item) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    inside = members(value)
    changed = {key: map_tensors(fn, item) for key, item in inside.items()}
    if all(changed[key] is item for key, item in inside.items()):
        return value
    result: Any = copy.copy(value)
    for key, item in changed.items():
        if isinstance(value, Mapping):
            result[key] = item
        else:
            object.__setattr__(result, key, item)  # a dataclass may be frozen
    return result


def members(value: Any) -> dict[Any, Any]:
    """Returns the items of a mapping or dataclass, and none of anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {}
        for field in dataclasses.fields(value):
            with suppress(AttributeError, RuntimeError):  # transformers' configs refuse some
                found[field.name] = getattr(value, field.name)
        return found
    return {}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in ``value`` that ``map_tensors`` visits."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return iter(found)


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif not isinstance(value, _SCALARS):
        for item in members(value).values():
            _collect(item, found)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def to_device(value: Any, device_type: str) -> Any:
    """Returns ``value`` with its tensors, except meta tensors, on the current device of ``device_type``."""
    stay = (device_type, "meta")
    return map_tensors(
        lambda t: t if t.device.type in stay else t.to(device_type, non_blocking=True), value
    )


# What can be reached from a value: an output, or an attribute of a module

_OPAQUE = (
    *(str, bytes, bytearray, int, float, complex, type, ModuleType, BuiltinFunctionType),
    *(nn.Module, torch.dtype, torch.device, torch.Size, torch.Generator, weakref.ref),
)
_MOST = 2000  # objects to look into: who returns a graph of more has an error at worst


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that ``value`` refers to: in containers, attributes of any objects, closures,
    generators and iterators, but not inside other objects of C or C++."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    stack = [value]
    seen: set[int] = set()
    while stack and len(seen) < _MOST:
        each = stack.pop()
        if isinstance(each, _SCALARS) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (tuple, list)):
            stack += reversed(each)
        elif type(each) is dict:
            stack += reversed(each.values())
        elif not isinstance(each, _OPAQUE):
            stack += _inside(each)


def _inside(value: Any) -> Iterable[Any]:
    """Returns the objects that ``value`` refers to."""
    kind = type(value)
    if kind is FunctionType:  # not its globals
        return (*(value.__closure__ or ()), *(value.__defaults__ or ()))
    if kind is CellType:
        with suppress(ValueError):  # it is empty
            return (value.cell_contents,)
        return ()
    if kind is GeneratorType:
        return () if value.gi_frame is None else value.gi_frame.f_locals.values()
    if kind in (partial, MethodType) or (
        kind.__module__ == "builtins" and isinstance(value, Iterator)
    ):
        return value.__reduce__()[1:]  # what it calls, or iterates over
    if isinstance(value, (dict, MappingProxyType)):
        return chain(value.values(), _attributes_of(value))
    if isinstance(value, (set, frozenset, deque, KeysView, ValuesView, ItemsView)):
        return value
    return _attributes_of(value)


_NOT_THE_USERS = ("torch.", "parallel3d.")
PLAIN_TYPES = frozenset(  # types of values that neither are tensors nor have any
    (int, float, bool, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)
    + (FunctionType, BuiltinFunctionType, MethodType)
)


def tensors_with_graph(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors with an autograd graph in ``values``, in nested containers and in the attributes of
    objects; what modules and other large objects hold is left out, as that may be all of the program."""
    stack = list(values)
    seen: set[int] = set()
    while stack and len(seen) < _MOST:
        each = stack.pop()
        if isinstance(each, torch.Tensor):
            if each.requires_grad and not each.is_leaf:
                yield each
        elif type(each) in PLAIN_TYPES or id(each) in seen or isinstance(each, _OPAQUE):
            continue
        else:
            seen.add(id(each))
            if isinstance(each, (list, tuple, set, frozenset, deque)):
                stack += each
            elif isinstance(each, dict):
                stack += each.values()
            elif not type(each).__module__.startswith(_NOT_THE_USERS):
                near = (torch.Tensor, list, tuple, dict, deque)
                stack += [value for value in _attributes_of(each) if isinstance(value, near)]


def _attributes_of(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{cls.__name__.lstrip('_')}{name}"
            yield getattr(value, name, None)
