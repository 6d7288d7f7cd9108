"""Values that are not tensors, as JSON and back. There is no pickle, so reading them runs no code."""

from __future__ import annotations

import base64
import reprlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parallel3d._util.quantised import wrapper_kind
from parallel3d.errors import CheckpointError, CorruptCheckpointError

_MAX_DEPTH = 64  # lists and dicts within each other
_MAX_BITS = 14_000  # of an integer; Python converts longer ones neither to decimal nor back
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}

Keep = Callable[[torch.Tensor, str], str]
"""Stores a tensor, which has a name in errors, and returns the name that it is stored under."""
Read = Callable[[str], torch.Tensor]


def as_dict(name: str, value: Any) -> dict[Any, Any]:
    """Returns a user's argument ``name`` as a dict, empty for None; CheckpointError if it isn't a mapping."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} is {value!r:.80}; it must be a dict")
    return dict(value)


def keeper(tensors: dict[str, torch.Tensor]) -> Keep:
    """Returns a function for ``encode`` that puts tensors into ``tensors``, under unique names."""

    def keep(tensor: torch.Tensor, where: str) -> str:
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            kind = tensor.layout if tensor.layout != torch.strided else "on the meta device"
            raise CheckpointError(f"{where} is {kind}; checkpoints hold dense tensors with values")
        refuse_wrapper(where, tensor)
        while where in tensors:
            where += "'"
        tensors[where] = tensor
        return where

    return keep


def refuse_wrapper(where: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError if ``tensor`` is a subclass that holds its values in other tensors."""
    if kind := wrapper_kind(tensor):
        raise CheckpointError(
            f"{where} is a {kind}, which holds its values in other tensors; checkpoints hold dense tensors "
            "only. Save the model without its optimizer, or both by torch.distributed.checkpoint.save, as "
            "get_state_dict(model, optimizer) returns them"
        )


def encode(value: Any, where: str, tensor: Keep | None = None, depth: int = 0) -> Any:
    """Converts ``value`` to a form that ``json.dumps`` takes; raises CheckpointError if something can't be
    stored.

    Args:
        where: names the value in errors.
        tensor: a function that takes a tensor and its name, stores it separately and returns the stored name.
            Without it only scalars on the CPU can be encoded.
        depth: how many lists and dicts contain the value.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is float:
        return value
    if type(value) is int:
        if value.bit_length() > _MAX_BITS:
            raise CheckpointError(f"{where} is an integer of {value.bit_length()} bits: too large")
        return value
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where[:80]}...: lists and dicts are more than {_MAX_DEPTH} deep")
    if isinstance(value, torch.Tensor):
        real = value.dtype.is_floating_point or value.dtype in _INTEGERS
        own = type(value) is torch.Tensor and value.is_cpu and not value.requires_grad
        if own and real and value.dim() == 0:  # such as an optimizer's step count
            return {"$scalar": [str(value.dtype).removeprefix("torch."), value.item()]}
        if tensor is not None:
            return {"$tensor": tensor(value, where)}
    if type(value) in (list, tuple):
        items = [encode(x, f"{where}[{i}]", tensor, depth + 1) for i, x in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in (dict, OrderedDict, Counter):
        return _encode_dict(value, where, tensor, depth + 1)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return encode(value.item(), where, tensor)  # a numpy scalar
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint can't hold; "
        "it holds tensors, numbers, strings, bytes, None, dtypes, and lists, tuples and dicts of these"
    )


def _encode_dict(
    value: dict[Any, Any], where: str, tensor: Keep | None, depth: int
) -> dict[str, Any]:
    counter = type(value) is Counter
    for key, item in value.items():
        if key != key:
            raise CheckpointError(f"a key of {where} is NaN, which no key equals")
        if counter and type(item) not in (int, float):
            raise CheckpointError(
                f"{where}[{key!r}] is a {type(item).__qualname__}; a Counter's counts are numbers in a "
                "checkpoint"
            )
    pairs = [(key, encode(x, f"{where}[{key!r}]", tensor, depth)) for key, x in value.items()]
    if not counter and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(pairs)
    encoded = [[encode(key, f"a key of {where}", None, depth), x] for key, x in pairs]
    return {"$counter" if counter else "$dict": encoded}


def decode(value: Any, tensor: Read | None = None, depth: int = 0) -> Any:
    """Converts the result of ``encode`` back; ``tensor`` maps a stored name to the tensor kept under it."""
    if isinstance(value, (list, dict)) and depth > _MAX_DEPTH + 2:
        raise CorruptCheckpointError("a value is too deep")
    if isinstance(value, list):
        return [decode(item, tensor, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode(item, tensor, depth + 1) for key, item in value.items()}
    try:
        ((kind, content),) = value.items()
        return _decode_special(kind, content, tensor, depth + 1)
    except CheckpointError:
        raise
    except (TypeError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        raise CorruptCheckpointError(f"{reprlib.repr(value)} is not an encoded value") from error


def _decode_special(kind: str, content: Any, tensor: Read | None, depth: int) -> Any:
    if kind == "$tensor" and tensor is not None and isinstance(content, str):
        return tensor(content)
    if kind == "$bytes" and isinstance(content, str):
        return base64.b64decode(content, validate=True)
    if kind == "$dtype":
        return _DTYPES[content]
    if not isinstance(content, list):
        raise ValueError(kind)
    if kind == "$tuple":
        return tuple(decode(item, tensor, depth) for item in content)
    if kind in ("$dict", "$counter"):
        return _decode_dict(kind == "$counter", content, tensor, depth)
    first, second = content
    if kind == "$scalar":
        return _scalar(_DTYPES[first], second)
    if kind == "$complex" and type(first) is type(second) is float:
        return complex(first, second)
    raise ValueError(kind)


def _decode_dict(
    counter: bool, content: list[Any], tensor: Read | None, depth: int
) -> dict[Any, Any]:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
        raise ValueError("not a list of pairs")
    if counter and any(type(count) not in (int, float) for _, count in content):
        raise ValueError("a count is not a number")
    result = {decode(k, None, depth): decode(item, tensor, depth) for k, item in content}
    if len(result) != len(content):
        raise ValueError("a key is repeated")
    return Counter(result) if counter else result


def _scalar(dtype: torch.dtype, number: Any) -> torch.Tensor:
    kind = bool if dtype == torch.bool else float if dtype.is_floating_point else int
    if type(number) is not kind or dtype.is_complex:
        raise ValueError(number)
    result = torch.tensor(number, dtype=dtype)
    if result.item() != number and number == number:
        raise ValueError(number)  # not a value of this dtype
    return result
