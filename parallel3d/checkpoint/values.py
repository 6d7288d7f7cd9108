"""Values that are no tensors, as JSON and back: no pickle, so that reading them runs no code.

JSON's own types stay as they are; others are an object with one key that begins with ``$``.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from parallel3d.errors import CheckpointError, CorruptCheckpointError

__all__ = ["decode", "encode", "is_scalar"]


def is_scalar(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a plain number on the CPU, such as an optimizer's count of steps."""
    known = tensor.dtype.is_floating_point or tensor.dtype in _INTEGERS
    return type(tensor) is torch.Tensor and tensor.dim() == 0 and tensor.is_cpu and known


_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def encode(value: Any, where: str, tensor: Callable[[torch.Tensor, str], str] | None = None) -> Any:
    """``value`` as what ``json.dumps`` takes.

    Args:
        where: what it is, for the error.
        tensor: given a tensor and what it is, stores it apart and returns its name; without it only scalars
            on the CPU can be kept.

    Raises:
        CheckpointError: something in it has a type that can't be kept.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, torch.Tensor):
        if is_scalar(value) and not value.requires_grad:
            return {"$scalar": [_name(value.dtype), value.item()]}
        if tensor is not None:
            return {"$tensor": tensor(value, where)}
    if type(value) in (list, tuple):
        items = [encode(item, f"{where}[{i}]", tensor) for i, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in (dict, OrderedDict):
        pairs = [(key, encode(item, f"{where}[{key!r}]", tensor)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$dict": [[encode(key, f"a key of {where}"), item] for key, item in pairs]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": _name(value)}
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return encode(value.item(), where, tensor)  # a number of numpy's
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint can't hold; "
        "it holds tensors, numbers, strings, bytes, None, dtypes, and lists, tuples and dicts of these"
    )


def decode(value: Any, tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
    """What ``encode`` was given.

    Raises:
        CorruptCheckpointError: it can't have made this.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: decode(item, tensor) for key, item in value.items()}
    try:
        return _special(kind, value[kind], tensor)
    except (TypeError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptCheckpointError(f"no value: {kind} {str(value[kind])[:80]}") from error


def _special(kind: str, content: Any, tensor: Callable[[str], torch.Tensor] | None) -> Any:
    if kind == "$scalar":
        dtype, number = content
        return torch.tensor(number, dtype=_dtype(dtype))
    if kind == "$tensor" and tensor is not None:
        return tensor(content)
    if kind == "$tuple":
        return tuple(decode(item, tensor) for item in content)
    if kind == "$dict":
        return {decode(key, tensor): decode(item, tensor) for key, item in content}
    if kind == "$bytes":
        return base64.b64decode(content, validate=True)
    if kind == "$dtype":
        return _dtype(content)
    if kind == "$complex":
        return complex(*content)
    raise ValueError(kind)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(name)
    return found
