"""PackedShard: the placement of a dim whose rows on one mesh axis are a ``Packing``'s, and what follows.

Such a parameter is cut by its packing first; what a rank of that axis holds, the other axes cut as their
placements say. The rows of one rank may lie in several boxes of the plain model's tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from parallel3d._compat import DTensorSpec, StridedShard, all_gather_single, dtensor_shard_box
from parallel3d._layout import strided_chunk
from parallel3d._packing import Packing
from parallel3d.errors import Parallel3dError

__all__ = [
    "Box",
    "PackedShard",
    "PackedSpec",
    "cut_packed",
    "gather_packed",
    "packed_among",
    "packed_boxes",
]


class PackedSpec(DTensorSpec):
    """The description of a PackedDTensor: one of its placements is a ``PackedShard``."""

    tensor_class: ClassVar[type[DTensor]]

    def __post_init__(self) -> None:
        # Without an order of the cuts, which torch would check against placements of its own.
        self.use_strided_shard_as_shard_order = True
        super().__post_init__()

    @cached_property
    def packed(self) -> tuple[int, PackedShard]:
        """(position of the packed axis in the mesh, the placement there)."""
        found = packed_among(self.placements)
        assert found is not None
        return found

    @cached_property
    def leaves_ranks_empty(self) -> bool:
        """Whether some rank holds nothing."""
        sizes = self.mesh.shape
        places = product(*(range(n) for n in sizes))
        return any(
            not prod(packed_boxes(self.shape, sizes, at, self.placements)[0]) for at in places
        )

    @cached_property
    def ordinary(self) -> DTensorSpec:
        """The same for DTensor's own operations, which then take the ranks' rows for ``torch.chunk``'s."""
        return DTensorSpec(self.mesh, ordinary(self.placements), tensor_meta=self.tensor_meta)


class PackedShard(Shard):
    """As ``Shard(packing.dim)``, but the rows of each rank are the packing's.

    torch's own functions on placements can't tell such rows: those that would cut or join with it raise.
    """

    spec_class = PackedSpec

    def __init__(self, packing: Packing) -> None:
        super().__init__(packing.dim)
        self.packing = packing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedShard) and self.packing == other.packing

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.packing)

    def __repr__(self) -> str:
        rows = [[(first, first + number) for first, number in held] for held in self.packing.rows]
        return f"PackedShard(dim={self.dim}, rows={rows})"

    def __str__(self) -> str:
        return f"PS({self.dim})"

    def __reduce__(self) -> Any:
        return PackedShard, (self.packing,)

    def __copy__(self) -> PackedShard:
        return self

    def __deepcopy__(self, memo: Any) -> PackedShard:
        return self


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(self: PackedShard, *args: Any, **kwargs: Any) -> Any:
        raise Parallel3dError(
            f"torch's {name} with {self!r}: no function of torch knows which rows a packed parameter "
            "(gate and up in one, q, k and v in one, uneven heads) has on a rank. Load whole tensors with "
            "parallel3d.fsdp.load_model_state_dict and load_optim_state_dict "
            "(type=StateDictType.FULL_STATE_DICT), and read them with full_tensor()"
        )

    return refuse


for _name in (
    "_local_shard_size_and_offset",
    "_make_shard_tensor",
    "_reduce_shard_tensor",
    "_replicate_to_shard",
    "_select_split_tensor",
    "_shard_tensor",
    "_split_tensor",
    "_to_new_shard_dim",
    "_to_replicate_tensor",
):
    setattr(PackedShard, _name, _refusal(_name.lstrip("_")))


def packed_among(placements: Sequence[Placement]) -> tuple[int, PackedShard] | None:
    """(position, the PackedShard), if there is one."""
    for axis, placement in enumerate(placements):
        if type(placement) is PackedShard:  # isinstance takes 3 us with torch's placements
            return axis, placement
    return None


def ordinary(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """``placements`` with ``Shard`` for ``PackedShard``."""
    return tuple(Shard(p.dim) if isinstance(p, PackedShard) else p for p in placements)


# -- which rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """Some rows of a rank's local tensor that are neighbours in the whole.

    Attributes:
        dim: the packed one.
        start: the first of them in the local tensor; there are ``sizes[dim]``.
        offsets, sizes: where they are in the whole tensor, by dim.
    """

    dim: int
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Of the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """Of the local tensor."""
        rows = slice(self.start, self.start + self.sizes[self.dim])
        return tuple(rows if d == self.dim else slice(None) for d in range(len(self.sizes)))

    def of(self, local: Tensor) -> Tensor:
        """Its part of the local tensor: a view."""
        return local.narrow(self.dim, self.start, self.sizes[self.dim])


def packed_boxes(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[tuple[int, ...], list[Box]]:
    """(local shape, boxes in the order of the local rows) of the rank at ``coordinate``."""
    axis, packing, others = _split(placements, mesh_shape)
    dim, rank = packing.dim, coordinate[axis]
    held = list(shape)
    held[dim] = packing.length_on(rank)
    local, start = dtensor_shard_box(
        held,
        [mesh_shape[i] for i, _ in others],
        [coordinate[i] for i, _ in others],
        [placement for _, placement in others],
    )
    boxes = []
    for before, (first, number) in packing.rows_of(rank, start[dim], local[dim]):
        offsets, sizes = list(start), list(local)
        offsets[dim], sizes[dim] = first, number
        if prod(sizes):
            boxes.append(Box(dim, before, tuple(offsets), tuple(sizes)))
    return tuple(local), boxes


def _split(
    placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> tuple[int, Packing, list[tuple[int, Placement]]]:
    """(the packed axis, its packing, the other axes with what they do to a rank's rows)."""
    found = packed_among(placements)
    assert found is not None
    axis, packed = found
    others: list[tuple[int, Placement]] = []
    for i, placement in enumerate(placements):
        if i == axis:
            continue
        if isinstance(placement, StridedShard) and placement.dim == packed.dim and i < axis:
            # The packed axis is one of those that have cut before it.
            factor, rest = divmod(int(placement.split_factor), mesh_shape[axis])
            assert not rest, f"{placements} on a mesh {tuple(mesh_shape)}"
            dim = placement.dim
            placement = StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
        others.append((i, placement))
    return axis, packed.packing, others


# -- whole and part ------------------------------------------------------------------------------------


def cut_packed(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of ``whole``, with memory of its own."""
    axis, packing, others = _split(placements, mesh.shape)
    local = packing.take(whole, mesh.get_local_rank(axis))
    for i, placement in others:
        if mesh.size(i) > 1 and isinstance(placement, (Shard, StridedShard)):
            factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
            local = strided_chunk(
                local, placement.dim, factor, mesh.size(i), mesh.get_local_rank(i)
            )
    return local


def gather_packed(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Tensor:
    """The whole tensor on every rank; one all-gather for each axis that cuts. Collective."""
    cutting = [
        i
        for i, p in enumerate(placements)
        if isinstance(p, (Shard, StridedShard)) and mesh.size(i) > 1
    ]
    places = []
    for ranks in product(*(range(mesh.size(i)) for i in cutting)):
        at = [0] * mesh.ndim
        for i, rank in zip(cutting, ranks, strict=True):
            at[i] = rank
        places.append(packed_boxes(shape, mesh.shape, at, placements))
    largest = max(prod(sizes) for sizes, _ in places)
    gathered = torch.zeros(largest, dtype=local.dtype, device=local.device)
    gathered.narrow(0, 0, local.numel()).copy_(local.reshape(-1))
    for i in reversed(cutting if largest else []):
        size = mesh.size(i) * gathered.numel()
        output = torch.empty(size, dtype=local.dtype, device=local.device)
        all_gather_single(output, gathered, group=mesh.get_group(i))
        gathered = output
    whole = torch.empty(tuple(shape), dtype=local.dtype, device=local.device)
    for (sizes, boxes), row in zip(places, gathered.view(len(places), largest), strict=True):
        part = row.narrow(0, 0, prod(sizes)).view(sizes)
        for box in boxes:
            whole[box.slices] = box.of(part)
    return whole
