"""What kind of work an operation is: matmul, attention or elementwise, its FLOPs and its bytes."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

__all__ = ["Work", "work_of"]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
_FREE = (
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_", "resize_"),
    *("detach", "alias", "lift_fresh", "is_same_size", "_local_scalar_dense"),
)
_LOOKUPS = ("embedding", "index", "index_select", "gather")


class Work:
    """kind, flops, bytes; (m, n, k) of a matmul, (heads of all sequences, rows, head dim) of an attention."""

    __slots__ = ("flops", "kind", "moved", "sizes")

    def __init__(
        self, kind: str, flops: float, moved: int, sizes: tuple[int, int, int] | None = None
    ) -> None:
        self.kind, self.flops, self.moved, self.sizes = kind, flops, moved, sizes


def work_of(
    func: Any, args: Any, read: list[torch.Tensor], written: list[torch.Tensor]
) -> Work | None:
    """Of one operation with the arguments ``args``, on these tensors.

    None if it does nothing on a device: a view, an allocation.
    """
    name = func.overloadpacket.__name__
    if not written or name in _FREE:
        return None
    mutable = func._schema.is_mutable
    if not mutable:
        known = {id(t.untyped_storage()) for t in read}
        if all(id(t.untyped_storage()) in known for t in written):
            return None
    moved = sum(map(_bytes, written)) + sum(map(_bytes, read))
    if name in _PRODUCTS and len(read) >= 2:
        a, b = [t for t in read if t.ndim >= 2][-2:] if name.endswith("addmm") else read[:2]
        m, n, k = prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
        return Work("matmul", 2.0 * m * n * k, moved, (m, n, k))
    if name in ("convolution", "convolution_backward"):
        return Work("matmul", _convolution(name, read, written), moved)
    if "dot_product" in name and "attention" in name:
        return _attention(name, _is_causal(func, args), read, moved)
    if name in _LOOKUPS:
        moved = 2 * sum(map(_bytes, written)) + sum(map(_bytes, read[1:]))
    return Work("elementwise", 0.0, moved)


def _attention(name: str, causal: bool, read: list[torch.Tensor], moved: int) -> Work:
    """Both products of scores x values, half of it where it is causal; 2.5 times that backward (flash)."""
    backward = "backward" in name
    query, key = (read[1], read[2]) if backward else (read[0], read[1])
    *heads, rows, width = query.shape
    flops = 4.0 * prod(heads) * rows * key.shape[-2] * width / (2 if causal else 1)
    sizes = (prod(heads), rows, width)
    return Work("attention", flops * 2.5 if backward else flops, moved, sizes)


def _is_causal(func: Any, args: Any) -> bool:
    """What the call says; a mask is taken to hide the future."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "is_causal" and value:
            return True
        if argument.name in ("attn_mask", "attn_bias") and value is not None:
            return True
    return False


def _convolution(name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> float:
    if name == "convolution":
        return 2.0 * written[0].numel() * prod(read[1].shape[1:])
    grad, weight = read[0], read[2]
    return 4.0 * grad.numel() * prod(weight.shape[1:])


def _bytes(tensor: torch.Tensor) -> int:
    """Of the elements that are different: an expanded dim is read once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, step in sizes if step != 0) * tensor.element_size()
