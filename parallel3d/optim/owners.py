"""Owners: the ranks that share parameters, and how whole ones are dealt out to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from parallel3d._compat import all_gather_single, dtensor_shard_box, flatten_axes
from parallel3d._packed_layout import PackedShard, packed_boxes
from parallel3d._trace import issuing
from parallel3d.errors import MeshError

__all__ = ["Owners"]


@dataclass(frozen=True)
class Part:
    """What a rank holds of a whole tensor.

    Attributes:
        shape: of its local tensor.
        boxes: (where in the whole, which rows of the local tensor), of a packed parameter several.
    """

    shape: tuple[int, ...]
    boxes: list[tuple[tuple[slice, ...], tuple[slice, ...]]]

    @classmethod
    def at(
        cls,
        shape: Sequence[int],
        mesh_shape: Sequence[int],
        coordinate: Sequence[int],
        placements: Sequence[Placement],
    ) -> Part:
        """That of the rank at ``coordinate``."""
        if any(isinstance(p, PackedShard) for p in placements):
            local, packed = packed_boxes(shape, mesh_shape, coordinate, placements)
            return cls(local, [(box.slices, box.local_slices) for box in packed])
        local, start = dtensor_shard_box(shape, mesh_shape, coordinate, placements)
        box = tuple(slice(o, o + s) for o, s in zip(start, local, strict=True))
        return cls(tuple(local), [(box, (slice(None),) * len(local))])

    @property
    def numel(self) -> int:
        """Elements of the local tensor."""
        return math.prod(self.shape)

    def write(self, whole: torch.Tensor, row: torch.Tensor) -> None:
        """Puts the local tensor at the front of ``row`` into ``whole``."""
        local = row[: self.numel].view(self.shape)
        for box, rows in self.boxes:
            whole[box].copy_(local[rows])

    def read(self, whole: torch.Tensor, row: torch.Tensor) -> None:
        """The other way."""
        local = row[: self.numel].view(self.shape)
        for box, rows in self.boxes:
            local[rows].copy_(whole[box])


class Owners:
    """The ranks that share parameters of one shape and placement.

    Attributes:
        group: their process group, of ``size`` ranks; ``coordinate`` is this rank's place in it.
        shape: of the whole parameter.
        parts: by place, which part of the whole a rank holds.
        slot: elements of the largest part.
    """

    def __init__(
        self, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, axes: list[int]
    ) -> None:
        names = mesh.mesh_dim_names
        if len(axes) == 1:
            self.group, self.coordinate = mesh.get_group(axes[0]), mesh.get_local_rank(axes[0])
        else:
            if names is None:
                raise MeshError(
                    f"optim.local: a parameter of shape {tuple(shape)} is shared over several axes of "
                    f"{mesh}, which have no names; name them, as parallel3d.build_mesh does"
                )
            flat = flatten_axes(mesh, tuple(names[axis] for axis in axes))
            self.group, self.coordinate = flat.get_group(), flat.get_local_rank()
        self.size = self.group.size()
        self.shape = tuple(shape)
        self.parts: list[Part] = []
        sizes = [mesh.size(axis) for axis in axes]
        for place in range(self.size):
            at = [0] * mesh.ndim
            for axis, size in reversed(list(zip(axes, sizes, strict=True))):
                place, at[axis] = divmod(place, size)
            self.parts.append(Part.at(shape, mesh.shape, at, placements))
        self.slot = max(part.numel for part in self.parts)

    def deal(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """This rank's part of each of at most ``size`` tensors -> of one of them, the whole.

        Where there are fewer than ranks, some get the same one.
        """
        send = parts[0].new_zeros(self.size, self.slot)
        for place in range(self.size):
            part = parts[place % len(parts)]
            send[place].narrow(0, 0, part.numel()).copy_(part.reshape(-1))
        received = self._exchange(send)
        whole = parts[0].new_empty(self.shape)
        for row, held in zip(received, self.parts, strict=True):
            held.write(whole, row)
        return whole

    def collect(self, whole: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
        """The other way: this rank's parts of the tensors that the first ranks have, shaped as ``like``."""
        send = whole.new_zeros(self.size, self.slot)
        for row, part in zip(send, self.parts, strict=True):
            part.read(whole, row)
        received = self._exchange(send)
        return [
            row.narrow(0, 0, part.numel()).view(part.shape)
            for row, part in zip(received.unbind(), like, strict=False)
        ]

    def deal_small(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Of tensors that every rank has, one per parameter: that of the one this rank steps on."""
        rows = [values[place % len(values)] for place in range(self.size)]
        # By an index that is a tensor: what a plain checkpoint brought knows of no simulated ranks.
        mine = torch.full((1,), self.coordinate, dtype=torch.int64, device=values[0].device)
        return torch.stack(rows).index_select(0, mine)[0]

    def collect_small(self, value: torch.Tensor, number: int) -> list[torch.Tensor]:
        """The other way: what the first ``number`` ranks have made of theirs."""
        rows = value.new_empty((self.size * value.numel(),))
        all_gather_single(rows, value.reshape(-1).contiguous(), group=self.group)
        return [row.view(value.shape).clone() for row in rows.view(self.size, -1)[:number]]

    def _exchange(self, send: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(send)
        with issuing.as_unit("optimizer"):
            dist.all_to_all_single(received, send, group=self.group)
        return received
