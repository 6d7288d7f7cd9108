"""Reshard to a smaller world: between forward and backward k neighbouring ranks hold the parameters once.

``reshard_after_forward=k`` spends memory (n/k times a shard) to gather within k ranks only, which are one
machine's if k is the number of its devices. What rank j of k keeps are the rows that ranks j*n/k to
(j+1)*n/k of the shard axis have in the gathered buffer: gathering them over the k ranks fills that
buffer as the gather over all n does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed import DeviceMesh

from parallel3d._torch.dtensor import unflatten_mesh
from parallel3d._torch.kernels import foreach_copy_
from parallel3d._util.storage import allocate, release
from parallel3d.fsdp.placement import DataAxes, kept_with

if TYPE_CHECKING:
    from parallel3d.fsdp.bucket import Bucket

__all__ = ["SmallWorld"]

_WITHIN = "within"


def small_mesh(axes: DataAxes, ranks: int) -> DeviceMesh:
    """The mesh of ``axes`` with its shard axis cut into (groups, ``ranks``), the latter named ``within``."""
    shard = axes.shard
    assert shard is not None
    key = ("small_world", axes.group(shard).group_name, ranks)
    return kept_with(axes.mesh, key, lambda: _make_small_mesh(axes.mesh, shard, ranks))


def _make_small_mesh(mesh: DeviceMesh, shard: int, ranks: int) -> DeviceMesh:
    names = ("between", _WITHIN)
    if mesh.mesh_dim_names is None:
        rows = mesh.mesh.movedim(shard, -1).reshape(-1, ranks)
        return DeviceMesh(mesh.device_type, rows, mesh_dim_names=names)
    axis = mesh[mesh.mesh_dim_names[shard]]
    return unflatten_mesh(axis, (axis.size() // ranks, ranks), names)


class SmallWorld:
    """What a bucket's rank keeps of the unsharded parameters, and with whom it shares them.

    It lies as the next all-gather sends it: of each parameter in place its n/k rows, then rows of the others.

    Attributes:
        in_rows: whether it lies in rows of all parameters instead, as custom all-gathers send it.
        group: the k ranks that hold the parameters once together.
        rank: this rank's place among them.
        buffer: (n/k * S,) in compute dtype; has storage while it is kept.
    """

    def __init__(self, bucket: Bucket, ranks: int, *, in_rows: bool = False) -> None:
        mesh = small_mesh(bucket.axes, ranks)
        self.ranks = ranks
        self.in_rows = in_rows
        self.group = mesh.get_group(_WITHIN)
        self.rank = mesh.get_local_rank(_WITHIN)
        rows = bucket.parts // ranks
        self.buffer = torch.empty(
            rows * bucket.numel, dtype=bucket.compute_dtype, device=bucket.device
        )
        first = self.rank * rows
        if in_rows:
            pairs = bucket.copy_pairs(self.buffer.view(rows, -1), first)
        else:
            pairs = bucket.member_pairs(bucket.members(self.buffer), first)
        self._sources, self._targets = map(list, zip(*pairs, strict=True))
        release(self.buffer)

    def keep(self) -> torch.Tensor:
        """Copies this rank's rows out of the unsharded parameters."""
        allocate(self.buffer)
        foreach_copy_(self._targets, self._sources)
        return self.buffer

    def drop(self) -> None:
        """Frees them."""
        release(self.buffer)
