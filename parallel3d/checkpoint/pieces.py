"""Pieces: which parts of a whole tensor a rank holds, for plain tensors, DTensors and packed ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d._layout.packed import packed_among, packed_boxes
from parallel3d._torch.dtensor import dtensor_shard_box, get_local_tensor
from parallel3d.errors import CheckpointError


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor that this rank holds.

    Attributes:
        offsets, sizes: where it is in the whole, by dim.
        local: its values: a view of the local tensor, of ``sizes``.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: Tensor

    @property
    def slices(self) -> tuple[slice, ...]:
        """Of the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class HeldBox:
    """A box of a whole tensor, and who holds it.

    Attributes:
        offsets, sizes: where it is in the whole, by dim.
        ranks: numbers in the default group; every one of them has all its values.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]


def pieces_of(tensor: Tensor) -> list[Piece]:
    """What this rank holds of ``tensor``, in the order of its local rows; no empty ones.

    Raises:
        CheckpointError: a DTensor with a partial placement, or whose local tensor isn't of the shape that
            its placements say.
    """
    if not isinstance(tensor, DTensor):
        return [Piece((0,) * tensor.dim(), tuple(tensor.shape), tensor.detach())]
    local = get_local_tensor(tensor).detach()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    _check_whole(tensor)
    shape, mesh_shape, placements = tensor.shape, tensor.device_mesh.shape, tensor.placements
    if packed_among(placements) is not None:
        boxes = packed_boxes(shape, mesh_shape, coordinate, placements)[1]
        return [Piece(box.offsets, box.sizes, box.of(local)) for box in boxes]
    sizes, offsets = dtensor_shard_box(shape, mesh_shape, coordinate, placements)
    if tuple(local.shape) != tuple(sizes):
        raise CheckpointError(
            f"a DTensor of shape {tuple(shape)}, {placements} on a mesh {tuple(mesh_shape)}, holds "
            f"{tuple(local.shape)} on this rank, but its placements say {tuple(sizes)}"
        )
    return [Piece(tuple(offsets), tuple(sizes), local)] if prod(sizes) or not sizes else []


def shares_memory_within(tensor: Tensor) -> bool:
    """Whether several elements are one place in memory, as in an expanded tensor: it can't be read into."""
    local = get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    sizes = zip(local.shape, local.stride(), strict=True)
    return local.numel() > 1 and any(n > 1 and stride == 0 for n, stride in sizes)


def held_boxes(tensor: DTensor) -> list[HeldBox]:
    """All boxes that the ranks of its mesh hold of ``tensor``, which together are the whole, and who does.

    Computed, not communicated: every rank gets the same.
    """
    _check_whole(tensor)
    mesh = tensor.device_mesh
    ranks: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for coordinate in product(*(range(size) for size in mesh.shape)):
        rank = int(mesh.mesh[coordinate])
        for box in _boxes_at(tensor, coordinate):
            ranks.setdefault(box, []).append(rank)
    return [HeldBox(*box, tuple(found)) for box, found in ranks.items()]


def _boxes_at(
    tensor: DTensor, coordinate: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    shape, mesh_shape, placements = tensor.shape, tensor.device_mesh.shape, tensor.placements
    if packed_among(placements) is not None:
        boxes = packed_boxes(shape, mesh_shape, coordinate, placements)[1]
        return [(box.offsets, box.sizes) for box in boxes]
    sizes, offsets = dtensor_shard_box(shape, mesh_shape, coordinate, placements)
    return [(tuple(offsets), tuple(sizes))] if prod(sizes) else []


def _check_whole(tensor: DTensor) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"a DTensor placed {tensor.placements} is a sum that is not done yet: it has no values to store; "
            "redistribute it first"
        )
