"""Traced: a tensor without values that remembers where they would come from.

Conversions that Hugging Face writes for real tensors run on these, and their results tell what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from parallel3d._compat import torch_function_off
from parallel3d.checkpoint.hf.layout import (
    Layout,
    Untraceable,
    concatenated,
    narrowed,
    permuted,
    reshaped,
)

__all__ = ["Traced"]


class Traced(Tensor):
    """A meta tensor with a Layout. What moves values may be done with it; all else raises Untraceable."""

    origin: Layout

    @staticmethod
    def of(layout: Layout, dtype: torch.dtype) -> Traced:
        empty = torch.empty(layout.shape, dtype=dtype, device="meta")
        traced = torch.Tensor._make_subclass(Traced, empty)
        traced.origin = layout
        return traced

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        follow = _FOLLOWED.get(name)
        if follow is not None:
            return follow(*args, **(kwargs or {}))
        if name in _QUESTIONS:
            with torch_function_off():
                return func(*args, **(kwargs or {}))
        raise Untraceable(f"it calls {name}, which may compute values")


_QUESTIONS = {"__get__", "size", "dim", "ndimension", "numel", "is_floating_point", "is_contiguous"}


def _like(tensor: Traced, layout: Layout) -> Traced:
    return Traced.of(layout, tensor.dtype)


def _dim(tensor: Traced, dim: int, beyond: int = 0) -> int:
    """``dim`` counted from the front; ``beyond`` 1 where a new one is put in."""
    dims = tensor.dim() + beyond
    if not -dims <= dim < dims:
        raise IndexError(f"dim {dim} of a tensor with {dims} dims")
    return dim % dims


def _same(tensor: Traced, *_: Any, **__: Any) -> Traced:
    return tensor


def _permute(tensor: Traced, *dims: Any) -> Traced:
    order = [_dim(tensor, d) for d in _listed(dims)]
    return _like(tensor, permuted(tensor.origin, order))


def _transpose(tensor: Traced, dim0: int, dim1: int) -> Traced:
    order = list(range(tensor.dim()))
    a, b = _dim(tensor, dim0), _dim(tensor, dim1)
    order[a], order[b] = order[b], order[a]
    return _permute(tensor, order)


def _reshape(tensor: Traced, *shape: Any, **named: Any) -> Traced:
    sizes = _listed(shape or tuple(named.values()))
    if not all(isinstance(size, int) for size in sizes):
        raise Untraceable("it views a tensor in another dtype")
    if -1 in sizes:
        known = prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = tensor.numel() // known if known else 0
    return _like(tensor, reshaped(tensor.origin, sizes))


def _flatten(tensor: Traced, start_dim: int = 0, end_dim: int = -1) -> Traced:
    shape = list(tensor.origin.shape)
    start, end = _dim(tensor, start_dim), _dim(tensor, end_dim)
    return _reshape(tensor, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


def _squeeze(tensor: Traced, dim: int | None = None) -> Traced:
    shape = list(tensor.origin.shape)
    dims = range(len(shape)) if dim is None else [_dim(tensor, dim)]
    return _reshape(tensor, [size for d, size in enumerate(shape) if size != 1 or d not in dims])


def _unsqueeze(tensor: Traced, dim: int) -> Traced:
    shape, at = list(tensor.origin.shape), _dim(tensor, dim, beyond=1)
    return _reshape(tensor, [*shape[:at], 1, *shape[at:]])


def _cat(tensors: Sequence[Traced], dim: int = 0, **named: Any) -> Traced:
    tensors = _alike(tensors)
    at = _dim(tensors[0], named.get("axis", dim))
    return _like(tensors[0], concatenated([tensor.origin for tensor in tensors], at))


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    return _cat([_unsqueeze(tensor, dim) for tensor in _alike(tensors)], dim)


def _narrow(tensor: Traced, dim: int, start: int, length: int) -> Traced:
    return _like(tensor, narrowed(tensor.origin, _dim(tensor, dim), start, length))


def _split(tensor: Traced, sizes: int | Sequence[int], dim: int = 0, **named: Any) -> tuple:
    whole = tensor.origin.shape[_dim(tensor, dim)]
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    if sum(sizes) != whole:
        raise ValueError(f"dim {dim} of size {whole} can't be split into {list(sizes)}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(_narrow(tensor, dim, at, size) for at, size in zip(starts, sizes, strict=True))


def _chunk(tensor: Traced, chunks: int, dim: int = 0) -> tuple:
    whole = tensor.origin.shape[_dim(tensor, dim)]
    return _split(tensor, max(1, -(-whole // chunks)), dim)


def _unbind(tensor: Traced, dim: int = 0) -> tuple:
    return tuple(_squeeze(part, dim) for part in _split(tensor, 1, dim))


def _listed(values: tuple) -> list:
    one = values[0] if len(values) == 1 else values
    return list(one) if isinstance(one, (tuple, list)) else [one]


def _alike(tensors: Sequence[Any]) -> list[Traced]:
    found = list(tensors)
    if not all(isinstance(tensor, Traced) for tensor in found):
        raise Untraceable("it joins weights with a tensor of its own")
    if len({tensor.dtype for tensor in found}) > 1:
        kinds = sorted({str(tensor.dtype) for tensor in found})
        raise ValueError(f"tensors to be joined are of different dtypes: {', '.join(kinds)}")
    return found


_FOLLOWED: dict[str, Callable] = {
    "cat": _cat,
    "chunk": _chunk,
    "clone": _same,
    "concat": _cat,
    "concatenate": _cat,
    "contiguous": _same,
    "detach": _same,
    "flatten": _flatten,
    "narrow": _narrow,
    "permute": _permute,
    "reshape": _reshape,
    "split": _split,
    "split_with_sizes": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "swapaxes": _transpose,
    "transpose": _transpose,
    "unbind": _unbind,
    "unsqueeze": _unsqueeze,
    "view": _reshape,
}
