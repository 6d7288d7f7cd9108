"""Boxes: rectangular parts of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a part of a tensor, by dim."""

_MAX_CUT_DIMS = 8  # dims that a tensor is divided along; a mesh has three axes


def slices_of(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Returns the index of a box."""
    return tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))


def whole_box(shape: Sequence[int]) -> Box:
    """Returns the box that covers a tensor of ``shape``."""
    return (0,) * len(shape), tuple(shape)


def intersection(a: Box, b: Box) -> Box | None:
    """Returns the common part of two boxes; None if it is empty."""
    offsets = tuple(map(max, a[0], b[0]))
    ends = [min(o + n, p + m) for o, n, p, m in zip(*a, *b, strict=True)]
    sizes = tuple(end - o for end, o in zip(ends, offsets, strict=True))
    return (offsets, sizes) if all(n > 0 for n in sizes) else None


def tile(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Returns whether each element of a tensor of ``shape`` is in exactly one of ``boxes``, in one pass.

    The differences of a box's indicator function along all dims are +1 and -1 at its corners, by the parity
    of its upper ends, and 0 elsewhere; and they determine the indicator. So boxes tile the tensor exactly if
    their corners add up to those of the whole box. Dims that no box divides add nothing.
    """
    cut = [d for d, n in enumerate(shape) if any(sizes[d] != n for _, sizes in boxes)]
    if len(cut) > _MAX_CUT_DIMS:
        return False
    strides, count = [], 1  # they number the corners
    for d in cut:
        strides.append((d, count))
        count *= shape[d] + 1
    corners: dict[int, int] = {}
    whole = [(-1, whole_box(shape))] if prod(shape) else []
    for sign, (offsets, sizes) in [*((1, box) for box in boxes), *whole]:
        ends = [(sum(offsets[d] * stride for d, stride in strides), sign)]
        for d, stride in strides:
            ends += [(at + sizes[d] * stride, -parity) for at, parity in ends]
        for at, parity in ends:
            corners[at] = corners.get(at, 0) + parity
    return not any(corners.values())
