"""Kinds of operations: which of ATen's are products, attention, norms; their sizes, and what they write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

from torch import Tensor

from parallel3d._util.trees import tensors_in

_KINDS = {
    "product": "mm addmm bmm baddbmm linear _scaled_mm _grouped_mm _scaled_grouped_mm",
    "convolution": "convolution convolution_backward",
    "norm": "native_layer_norm _fused_rms_norm native_group_norm native_batch_norm",
    "lookup": "embedding index index_select gather",
    "copy": "copy_ _to_copy",
    # They read and write nothing.
    "free": "empty empty_like new_empty empty_strided new_empty_strided set_ resize_ detach alias lift_fresh "
    "is_same_size _local_scalar_dense",
}
_BY_NAME = {name: kind for kind, names in _KINDS.items() for name in names.split()}


@cache
def kind_of(name: str) -> str:
    """Returns the kind of an ATen operation: ``product``, ``convolution``, ``attention``, ``norm``,
    ``lookup``, ``copy``, ``free``, or ``other``.

    Args:
        name: name of an operation, or of its backward, without namespace and overload.
    """
    known = _BY_NAME.get(name) or _BY_NAME.get(name.removesuffix("_backward"))
    attends = "attention" in name or "attn" in name  # other packages' too
    return known or ("attention" if attends else "other")


def product_of(name: str, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Returns the two factors of a matrix product, and its sizes (rows, n, k): 2 * rows * n * k FLOPs.

    Args:
        name: name of the operation, whose kind is ``product``.
        tensors: its tensor arguments, in order.
    """
    a, b = tensors[1:3] if name in ("addmm", "baddbmm") else tensors[:2]
    n, k = b.shape[-2 if name == "linear" else -1], a.shape[-1]
    # The rows of a matrix are shared out among several, those of several matrices are each one's.
    rows = a.shape[-2] if a.ndim > b.ndim and "grouped" in name else prod(a.shape[:-1])
    return a, b, (rows, n, k)


def bytes_of(tensor: Tensor) -> int:
    """Returns the bytes of the distinct elements of ``tensor``: an expanded dim counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, step in sizes if step != 0) * tensor.element_size()


def arguments_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of ``op`` by name; those left at their defaults are omitted."""
    names = (argument.name for argument in op._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def written_by(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], *, but: str = ""
) -> list[Tensor]:
    """Returns the tensor arguments that ``op`` writes to by its schema, ``but`` the one of this name."""
    if not op._schema.is_mutable:
        return []
    given = arguments_of(op, args, kwargs)
    arguments = (a for a in op._schema.arguments if a.alias_info is not None)
    written = [a.name for a in arguments if a.alias_info.is_write and a.name != but]
    return [tensor for name in written for tensor in tensors_in(given.get(name))]
