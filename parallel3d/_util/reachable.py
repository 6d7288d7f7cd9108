"""The tensors that can be reached from a value: those that an output holds, or an attribute of a module."""

import weakref
from collections import deque
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
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

_SCALARS = (int, float, str, type(None))  # most of what is found; told apart quickly
_OPAQUE = (
    *(str, bytes, bytearray, int, float, complex, type, ModuleType, BuiltinFunctionType),
    *(nn.Module, torch.dtype, torch.device, torch.Size, torch.Generator, weakref.ref),
)
_MOST = 2000  # objects to look into: who returns a graph of more has an error at worst


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``value``: in containers, attributes of objects of any class, closures, generators and
    iterators; not what is in other objects of C or C++."""
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
    """The objects that ``value`` refers to."""
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
    """The tensors computed with autograd's record in ``values``, in containers and on attributes of objects.

    Not further: a module may have a reference to all of the program.
    """
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
