"""Applying a function to the tensors of a module's inputs or outputs."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_SCALARS = (int, float, str, type(None))  # most of what operations are given; told apart quickly


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``fn`` applied to each tensor in tuples, lists, mappings and dataclasses.

    Containers keep their type; one without a changed tensor is returned as it is. Others are copied:
    what a module then writes to a list or dict does not reach its caller.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(fn, item) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        changed = {k: map_tensors(fn, v) for k, v in value.items()}
        if all(changed[k] is v for k, v in value.items()):
            return value
        result: Any = copy.copy(value)
        for key, item in changed.items():
            result[key] = item
        return result
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        changed = {k: map_tensors(fn, v) for k, v in fields.items()}
        if all(changed[k] is v for k, v in fields.items()):
            return value
        result = copy.copy(value)
        for key, item in changed.items():
            object.__setattr__(result, key, item)
        return result
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``value``, found as ``map_tensors`` finds them."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return iter(found)


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, _SCALARS):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name), found)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors in ``dtype``."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def to_device(value: Any, device_type: str) -> Any:
    """``value`` with its tensors on the current device of ``device_type``, but for those on meta."""
    there = (device_type, "meta")
    return map_tensors(
        lambda t: t if t.device.type in there else t.to(device_type, non_blocking=True), value
    )
