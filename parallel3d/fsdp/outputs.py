"""Where a backward may begin in what a unit has computed: what it returns, and leaves on its modules."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import call, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from parallel3d._torch.fully_shard import FULLY_SHARD_KEYS

UNIT_ATTRIBUTE = "_parallel3d_unit"  # of a module, which a copy of it must not share

_SCALARS = (int, float, str, type(None))  # most of what is found; told apart quickly
_OPAQUE = (
    *(str, bytes, bytearray, int, float, complex, type, ModuleType, BuiltinFunctionType),
    *(nn.Module, torch.dtype, torch.device, torch.Size, torch.Generator, weakref.ref),
)
_MOST = 2000  # objects to look into: who returns a graph of more has an error at worst


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``value``: in containers, dataclasses, objects of any class, closures, generators.

    It sees what the garbage collector sees: not what is in objects of C++.
    """
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
        elif isinstance(each, FunctionType):  # not its globals
            stack += each.__closure__ or ()
            stack += each.__defaults__ or ()
        elif isinstance(each, Mapping) and not gc.is_tracked(each):
            stack += each.values()
        elif not isinstance(each, _OPAQUE):
            stack += gc.get_referents(each)


_STANDARD = frozenset((*vars(nn.Module()), *FULLY_SHARD_KEYS, UNIT_ATTRIBUTE))
_NOT_THE_USERS = ("torch.", "parallel3d.")
_PLAIN = frozenset(  # types of values that neither are tensors nor have any
    (int, float, bool, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)
    + (FunctionType, BuiltinFunctionType, MethodType)
)


class Attributes:
    """Those of a unit's modules, without what ``nn.Module`` has by itself.

    Read after each forward, so it looks at types in passes that stay within C, and at values only where one
    may be or hold a tensor.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tops = [weakref.ref(module) for module in modules]
        # Weakly too: the top ones have the unit, which has this.
        self._modules: list[weakref.ref[nn.Module]] = []
        self._sizes: list[int] = []
        self._getters: list[Any] = []
        self._plain: list[Any] | None = (
            None  # the values of last time, where none can be or hold a tensor
        )

    def _list(self) -> list[dict[str, Any]]:
        modules = list(_own_modules([m for ref in self._tops if (m := ref()) is not None]))
        self._modules = [weakref.ref(module) for module in modules]
        dicts = list(map(vars, modules))
        self._sizes = _sizes_of(dicts)
        self._getters, self._plain = [], None
        for attributes in dicts:
            names = [name for name in attributes if name not in _STANDARD]
            # Of one name it gives the value itself, of several a tuple.
            self._getters.append(itemgetter(*names, *names[:1]) if names else _nothing)
        return dicts

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that were computed with autograd's record: on attributes, and in what lies there."""
        dicts = [vars(module) for module in map(call, self._modules) if module is not None]
        if not dicts or _sizes_of(dicts) != self._sizes:
            dicts = self._list()
        try:
            values = self._read(dicts)
        except KeyError:  # one was deleted, and another added
            dicts = self._list()
            values = self._read(dicts)
        plain = self._plain
        if plain is None or not all(map(is_, values, plain)):
            others = [
                value
                for value in values
                if type(value) not in _PLAIN and not _is_plain_tuple(value)
            ]
            self._plain = None if others else values
            yield from _with_graph(others)
        for buffers in filter(None, map(_buffers_of, dicts)):
            if any(b is not None and b.requires_grad for b in buffers.values()):
                yield from _with_graph(buffers.values())

    def _read(self, dicts: list[dict[str, Any]]) -> list[Any]:
        return list(chain.from_iterable(map(call, self._getters, dicts)))


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and _PLAIN.issuperset(map(type, value))


_buffers_of = itemgetter("_buffers")
_children_of = itemgetter("_modules")


def _sizes_of(dicts: list[dict[str, Any]]) -> list[int]:
    """What is another where a module or an attribute was added."""
    return [*map(len, dicts), *map(len, map(_children_of, dicts))]


def _nothing(_: Any) -> tuple:
    return ()


def _own_modules(tops: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """``tops`` and the modules inside, but for those of inner units."""
    stack, seen = list(tops), set()
    first = {id(module) for module in stack}
    while stack:
        module = stack.pop()
        if id(module) in seen or (UNIT_ATTRIBUTE in vars(module) and id(module) not in first):
            continue
        seen.add(id(module))
        yield module
        stack += [child for child in module._modules.values() if child is not None]


def _with_graph(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for tensor in _tensors_near(values):
        if tensor.requires_grad and not tensor.is_leaf:
            yield tensor


def _tensors_near(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors in ``values`` and in containers, and on the attributes of other objects there.

    Not further: a module may have a reference to all of the program.
    """
    stack = list(values)
    seen: set[int] = set()
    while stack and len(seen) < _MOST:
        each = stack.pop()
        if isinstance(each, torch.Tensor):
            yield each
        elif type(each) in _PLAIN or id(each) in seen or isinstance(each, _OPAQUE):
            continue
        else:
            seen.add(id(each))
            if isinstance(each, (list, tuple, set, frozenset, deque)):
                stack += each
            elif isinstance(each, dict):
                stack += each.values()
            elif not type(each).__module__.startswith(_NOT_THE_USERS):
                for value in _attributes_of(each):
                    if isinstance(value, torch.Tensor):
                        yield value
                    elif isinstance(value, (list, tuple, dict, deque)):
                        stack.append(value)


def _attributes_of(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            yield getattr(value, name, None)
