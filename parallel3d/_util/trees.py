"""Applying a function to the tensors of a module's inputs or outputs."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

_SCALARS = (int, float, str, type(None))  # the most common arguments of operations, tested first


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
    """Returns the tensors in ``value`` that ``map_tensors`` visits."""
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
    """Returns ``value`` with its floating-point tensors in ``dtype``."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def to_device(value: Any, device_type: str) -> Any:
    """Returns ``value`` with its tensors, except meta tensors, on the current device of ``device_type``."""
    stay = (device_type, "meta")
    return map_tensors(
        lambda t: t if t.device.type in stay else t.to(device_type, non_blocking=True), value
    )
