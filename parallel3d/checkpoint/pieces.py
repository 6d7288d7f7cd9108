"""Boxes, (offsets, sizes), of a global tensor, and which of them a rank holds: of plain, sharded and packed
tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d._layout.packed import packed_among, packed_boxes
from parallel3d._torch.dtensor import dtensor_shard_box, get_local_tensor
from parallel3d.errors import CheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a part of a tensor, by dim."""

_MAX_CUT_DIMS = 8  # dims that a tensor is divided along; a mesh has three axes


def slices_of(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))


def whole_box(shape: Sequence[int]) -> Box:
    return (0,) * len(shape), tuple(shape)


def intersection(a: Box, b: Box) -> Box | None:
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


def check_tiles(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raises ValueError unless ``boxes`` cover each element of the tensor ``name`` exactly once."""
    for offsets, sizes in boxes:
        inside = len(offsets) == len(sizes) == len(shape) and all(
            o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            raise ValueError(
                f"{name!r:.100}, {shape}, has a chunk at {offsets} of {sizes}, outside of it"
            )
    if not tile(shape, [box for box in boxes if prod(box[1])]):
        raise ValueError(f"the chunks of {name!r:.100}, {shape}, overlap or leave elements out")


@dataclass(frozen=True)
class Boxed:
    """A part of a tensor: a box that begins at ``offsets``, one for each dim, and has the shape ``sizes``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return slices_of(self.offsets, self.sizes)

    @property
    def box(self) -> Box:
        return self.offsets, self.sizes


@dataclass(frozen=True)
class Piece(Boxed):
    """A box of a global tensor that this rank holds, and its values ``local``, a view of the local tensor."""

    local: Tensor


def pieces_of(tensor: Tensor) -> list[Piece]:
    """Returns the boxes that this rank holds of ``tensor``, with values, in the order of local rows."""
    if not isinstance(tensor, DTensor):
        return [Piece(*whole_box(tensor.shape), tensor.detach())]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    _check_no_partial(tensor)
    local = get_local_tensor(tensor).detach()
    if packed_among(tensor.placements) is not None:
        return [Piece(box.offsets, box.sizes, box.of(local)) for box in _packed(tensor, coordinate)]
    offsets, sizes = _shard_box(tensor, coordinate)
    if tuple(local.shape) != sizes:
        raise CheckpointError(
            f"a DTensor of shape {tuple(tensor.shape)}, {tensor.placements} on a mesh "
            f"{tuple(tensor.device_mesh.shape)}, holds {tuple(local.shape)} on this rank, but its placements "
            f"say {sizes}"
        )
    return [Piece(offsets, sizes, local)] if prod(sizes) else []


def boxes_of(tensor: Tensor) -> list[Box]:
    return [piece.box for piece in pieces_of(tensor)]


def held_boxes(tensor: DTensor) -> dict[Box, list[int]]:
    """Returns box -> the ranks (of the default group) that hold it, for all ranks of the tensor's mesh. It is
    computed from placements, without communication."""
    _check_no_partial(tensor)
    mesh = tensor.device_mesh
    ranks: dict[Box, list[int]] = {}
    for coordinate in product(*map(range, mesh.shape)):
        if packed_among(tensor.placements) is not None:
            boxes = [(box.offsets, box.sizes) for box in _packed(tensor, coordinate)]
        else:
            boxes = [_shard_box(tensor, coordinate)]
        for box in boxes:
            if prod(box[1]):
                ranks.setdefault(box, []).append(int(mesh.mesh[coordinate]))
    return ranks


def _packed(tensor: DTensor, coordinate: Sequence[int]) -> list[Any]:
    return packed_boxes(tensor.shape, tensor.device_mesh.shape, coordinate, tensor.placements)[1]


def _shard_box(tensor: DTensor, coordinate: Sequence[int]) -> Box:
    sizes, offsets = dtensor_shard_box(
        tensor.shape, tensor.device_mesh.shape, coordinate, tensor.placements
    )
    return tuple(offsets), tuple(sizes)


def _check_no_partial(tensor: DTensor) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"a DTensor placed {tensor.placements} has a pending reduction and so no values to store; "
            "redistribute it first"
        )


def shares_memory_within(tensor: Tensor) -> bool:
    """Returns whether elements of the tensor share memory, as after ``expand``: it can't be read into."""
    local = get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    sizes = zip(local.shape, local.stride(), strict=True)
    return local.numel() > 1 and any(n > 1 and stride == 0 for n, stride in sizes)


def check_own_memory(name: str, tensor: Tensor) -> None:
    """Raises CheckpointError if several elements of ``tensor`` share memory."""
    if shares_memory_within(tensor):
        raise CheckpointError(
            f"{name} can't be read into: its elements share memory, as after expand(); make it contiguous"
        )
