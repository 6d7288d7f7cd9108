"""Values that are no tensors, as JSON and back: no pickle, so that reading them runs no code."""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parallel3d.checkpoint.format.index import shown
from parallel3d.errors import CheckpointError, CorruptCheckpointError

_DEEPEST = 64  # lists and dicts within each other


_LONGEST = 14_000  # bits of an integer; Python writes and reads no longer ones as decimal


def as_dict(name: str, given: Any) -> dict[Any, Any]:
    """What a user has given as a dict, or as None.

    Raises:
        CheckpointError: anything else.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{name} is {given!r:.80}; it must be a dict")
    return dict(given)


def is_scalar(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a plain number on the CPU, such as an optimizer's count of steps."""
    known = tensor.dtype.is_floating_point or tensor.dtype in _INTEGERS
    return type(tensor) is torch.Tensor and tensor.dim() == 0 and tensor.is_cpu and known


_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def keeper(tensors: dict[str, torch.Tensor]) -> Callable[[torch.Tensor, str], str]:
    """For ``encode``: puts tensors into ``tensors``, each under a name of its own, from ``where``."""

    def keep(tensor: torch.Tensor, where: str) -> str:
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            kind = tensor.layout if tensor.layout != torch.strided else "on the meta device"
            raise CheckpointError(f"{where} is {kind}; checkpoints hold dense tensors with values")
        while where in tensors:
            where += "'"
        tensors[where] = tensor
        return where

    return keep


def encode(
    value: Any,
    where: str,
    tensor: Callable[[torch.Tensor, str], str] | None = None,
    depth: int = 0,
) -> Any:
    """``value`` as what ``json.dumps`` takes.

    Args:
        where: what it is, for the error.
        tensor: given a tensor and what it is, stores it apart and returns its name; without it only scalars
            on the CPU can be kept.
        depth: how many lists and dicts it is within.

    Raises:
        CheckpointError: something in it has a type that can't be kept, or is too large or too deep.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is float:
        return value
    if type(value) is int:
        if value.bit_length() > _LONGEST:
            raise CheckpointError(f"{where} is an integer of {value.bit_length()} bits: too large")
        return value
    if depth > _DEEPEST:
        raise CheckpointError(f"{where[:80]}...: lists and dicts are more than {_DEEPEST} deep")
    if isinstance(value, torch.Tensor):
        if is_scalar(value) and not value.requires_grad:
            return {"$scalar": [_name(value.dtype), value.item()]}
        if tensor is not None:
            return {"$tensor": tensor(value, where)}
    if type(value) in (list, tuple):
        items = [encode(x, f"{where}[{i}]", tensor, depth + 1) for i, x in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in (dict, OrderedDict):
        pairs = [(k, encode(x, f"{where}[{k!r}]", tensor, depth + 1)) for k, x in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        if any(key != key for key in value):
            raise CheckpointError(f"a key of {where} is NaN, which no key equals")
        return {"$dict": [[encode(k, f"a key of {where}", None, depth + 1), x] for k, x in pairs]}
    if type(value) is Counter:
        return {"$counter": _encoded_counts(value, where, depth + 1)}
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


def _encoded_counts(value: Counter[Any], where: str, depth: int) -> list[list[Any]]:
    if any(key != key for key in value):
        raise CheckpointError(f"a key of {where} is NaN, which no key equals")
    pairs = []
    for key, count in value.items():
        if type(count) not in (int, float):
            kind = type(count).__qualname__
            raise CheckpointError(
                f"{where}[{key!r}] is a {kind}; a Counter's counts are numbers in a checkpoint"
            )
        found = encode(key, f"a key of {where}", None, depth)
        pairs.append([found, encode(count, f"{where}[{key!r}]", None, depth)])
    return pairs


def decode(value: Any, tensor: Callable[[str], torch.Tensor] | None = None, depth: int = 0) -> Any:
    """What ``encode`` was given.

    Args:
        tensor: gives the tensor that was stored apart, by its name.
        depth: as for ``encode``.

    Raises:
        CorruptCheckpointError: it can't have made this.
    """
    if isinstance(value, (list, dict)) and depth > _DEEPEST + 2:
        raise CorruptCheckpointError("no value: it is too deep")
    if isinstance(value, list):
        return [decode(item, tensor, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not any(key.startswith("$") for key in value):
        return {key: decode(item, tensor, depth + 1) for key, item in value.items()}
    try:
        if len(value) != 1:
            raise ValueError(kind)
        return _special(kind, value[kind], tensor, depth + 1)
    except (TypeError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptCheckpointError(f"no value: {shown(value)}") from error


def _special(
    kind: str, content: Any, tensor: Callable[[str], torch.Tensor] | None, depth: int
) -> Any:
    if kind == "$scalar":
        dtype, number = _several(content, 2)
        return _scalar(_dtype(dtype), number)
    if kind == "$tensor" and tensor is not None and isinstance(content, str):
        return tensor(content)
    if kind == "$tuple":
        return tuple(decode(item, tensor, depth) for item in _several(content))
    if kind in ("$dict", "$counter"):
        pairs = [_several(pair, 2) for pair in _several(content)]
        if kind == "$counter" and any(type(count) not in (int, float) for _, count in pairs):
            raise ValueError("a count is no number")
        found = {decode(k, None, depth): decode(item, tensor, depth) for k, item in pairs}
        if len(found) != len(pairs):
            raise ValueError("a key comes twice")
        return found if kind == "$dict" else Counter(found)
    if kind == "$bytes" and isinstance(content, str):
        return base64.b64decode(content, validate=True)
    if kind == "$dtype":
        return _dtype(content)
    if kind == "$complex":
        real, imag = _several(content, 2)
        return complex(_real(real), _real(imag))
    raise ValueError(kind)


def _several(content: Any, count: int | None = None) -> list[Any]:
    if not isinstance(content, list) or count not in (None, len(content)):
        raise ValueError(content)
    return content


def _real(number: Any) -> float:
    if type(number) is not float:
        raise ValueError(number)
    return number


def _scalar(dtype: torch.dtype, number: Any) -> torch.Tensor:
    kind = bool if dtype == torch.bool else float if dtype.is_floating_point else int
    if type(number) is not kind or dtype.is_complex:
        raise ValueError(number)
    found = torch.tensor(number, dtype=dtype)
    if found.item() != number and number == number:
        raise ValueError(number)  # not of this dtype
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES = {_name(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str):
        raise ValueError(name)
    return _DTYPES[name]
