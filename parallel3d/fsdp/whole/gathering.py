"""Whole tensors: from what the ranks hold of a bucket's parameters to tensors of the plain model's shapes.

One all-gather over the shard axis for all that is asked for of a bucket, and one over each own axis (tp)
for what it cuts. Values keep their dtype, unlike those that an unshard makes for computing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from parallel3d.errors import StateError
from parallel3d.fsdp.buckets.extension import as_plain
from parallel3d.fsdp.collectives import all_gather
from parallel3d.fsdp.placing.placement import ParamAxes

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket
    from parallel3d.fsdp.param import ShardedParam

__all__ = ["check_has_values", "gather_rows", "make_replicas_agree", "whole_tensors"]


def check_has_values(bucket: Bucket) -> None:
    """Raises StateError for parameters on the meta device, which have nothing to gather."""
    if bucket.flat.is_meta:
        raise StateError(
            f"parameters of unit {bucket.unit} ({bucket.params[0].name} is the first) are on the meta "
            "device and have no values yet; call parallel3d.materialize or to_empty first"
        )


def gather_rows(bucket: Bucket, flat: torch.Tensor) -> torch.Tensor:
    """What every shard rank has in ``flat``.

    Args:
        flat: (k,), of the same k on every rank: slots of some or all of the bucket's parameters.

    Returns:
        (parts, k) on the device that the bucket computes on. Without a shard axis a view of ``flat``.
    """
    flat = flat.to(bucket.device)
    numel = flat.numel()
    # Of a HybridBucket the parts are those of replicate x shard, neighbours along replicate.
    for group in (bucket.second_group, bucket.shard_group):
        if group is not None and numel:
            size = group.size() * flat.numel()
            gathered = torch.empty(size, dtype=flat.dtype, device=flat.device)
            _gather(gathered, flat, group, bucket.unit)
            flat = gathered
    return flat.view(bucket.parts, numel) if numel else flat.view(1, 0).expand(bucket.parts, 0)


def whole_tensors(
    bucket: Bucket, indices: Sequence[int], locals_: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Gathers tensors that lie on the ranks as the bucket's parameters do: values, gradients, moments.

    Args:
        indices: which parameters' they are.
        locals_: this rank's parts, plain tensors of one dtype; None counts as zeros.

    Returns:
        Tensors of the parameters' global shapes, each with memory of its own.
    """
    params = [bucket.params[i] for i in indices]
    if not params:
        return []
    with torch.inference_mode(False), torch.no_grad():
        rows = gather_rows(bucket, _packed(bucket, params, locals_))
        columns = rows.split([p.slot_numel for p in params], dim=1)
        parts = [_compute_part(p, c) for p, c in zip(params, columns, strict=True)]
        del rows, columns
        return _joined_over_own_axes(bucket.unit, params, parts)


def _packed(
    bucket: Bucket, params: Sequence[ShardedParam], locals_: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """``locals_`` in the parameters' slots, one after another; padding is zero."""
    views = bucket.local_views
    one_buffer = bucket.joinable  # not where each parameter has memory of its own
    if one_buffer and len(locals_) == len(views) and all(map(operator.is_, locals_, views)):
        return bucket.flat
    dtype = next((x.dtype for x in locals_ if x is not None), bucket.dtype)
    sizes = [p.slot_numel for p in params]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=bucket.home)
    for param, slot, local in zip(params, flat.split(sizes), locals_, strict=True):
        if local is not None:
            param.local_view(slot).copy_(local)
    return flat


def _compute_part(param: ShardedParam, column: torch.Tensor) -> torch.Tensor:
    """(parts, slot_numel) of one parameter -> what the own axes leave of it on this rank."""
    region = torch.empty(param.parts * param.slot_numel, dtype=column.dtype, device=column.device)
    for part, held in param.copy_pairs(region, column):
        part.copy_(held)
    view = param.contiguous_view(region)
    return view if param.even else view.clone(memory_format=torch.contiguous_format)


# -- own axes ----------------------------------------------------------------------------------------


def _joined_over_own_axes(
    unit: str, params: Sequence[ShardedParam], parts: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Undoes the own axes' cuts, the last first."""
    for level in reversed(range(max(len(p.on.cuts) for p in params))):
        members: dict[str, list[int]] = {}
        groups: dict[str, ProcessGroup] = {}
        for index, param in enumerate(params):
            if level < len(param.on.cuts) and _ways(param.on, level) > 1:
                group = _group(param.on, level)
                groups[group.group_name] = group
                members.setdefault(group.group_name, []).append(index)
        for name, indices in members.items():
            _join(unit, groups[name], level, params, parts, indices)
    return parts


def _join(
    unit: str,
    group: ProcessGroup,
    level: int,
    params: Sequence[ShardedParam],
    parts: list[torch.Tensor],
    indices: list[int],
) -> None:
    """Replaces ``parts[i]``, cut by ``group`` as their ``level``-th cut, by what they were before it."""
    cells = [_Cut(params[i], level) for i in indices]
    sizes = [prod(cell.largest) for cell in cells]
    packed = torch.cat([cell.padded(parts[i]) for cell, i in zip(cells, indices, strict=True)])
    if not packed.numel():
        rows = packed.new_empty(group.size(), 0)
    else:
        gathered = torch.empty(
            group.size() * packed.numel(), dtype=packed.dtype, device=packed.device
        )
        _gather(gathered, packed, group, unit)
        rows = gathered.view(group.size(), packed.numel())
    columns = rows.split(sizes, dim=1)
    for cell, index, column in zip(cells, indices, columns, strict=True):
        parts[index] = cell.joined(column)


class _Cut:
    """One cut of one parameter by an own axis.

    Attributes:
        dim: what is cut.
        largest: the largest shape after the cut.
        before: this rank's shape before it; SymInts under simulated ranks.
    """

    def __init__(self, param: ShardedParam, level: int) -> None:
        on, shape = param.on, param.global_shape
        self.on = on
        self.axis, self.dim = on.cuts[level]
        self.largest, self.before = list(shape), list(shape)
        for each, (axis, dim) in enumerate(on.cuts[: level + 1]):
            self.largest[dim] = on.largest_length(axis, self.largest[dim])
            if each < level:
                assert on.compute_mesh is not None
                rank = on.compute_mesh.get_local_rank(axis)
                self.before[dim] = on.length(axis, self.before[dim], rank)
        self.even = on.are_even(shape)

    def padded(self, part: torch.Tensor) -> torch.Tensor:
        """``part`` with zeros up to the largest shape, flat."""
        if self.even:
            return part.reshape(-1)
        padded = torch.zeros(self.largest, dtype=part.dtype, device=part.device)
        target = padded
        for dim, size in enumerate(part.shape):
            target = target.narrow(dim, 0, size)
        target.copy_(part)
        return padded.view(-1)

    def joined(self, column: torch.Tensor) -> torch.Tensor:
        """(ways, elements) of the ranks along the axis -> the tensor before the cut."""
        pieces = []
        for rank, row in enumerate(column):
            piece = row.view(self.largest)
            if not self.even:
                for dim, size in enumerate(self.before):
                    length = self.on.length(self.axis, size, rank) if dim == self.dim else size
                    piece = piece.narrow(dim, 0, length)
            pieces.append(piece)
        return self.on.joined(self.axis, self.dim, pieces)


def _ways(on: ParamAxes, level: int) -> int:
    assert on.compute_mesh is not None
    return on.compute_mesh.size(on.cuts[level][0])


def _group(on: ParamAxes, level: int) -> ProcessGroup:
    assert on.compute_mesh is not None
    return on.compute_mesh.get_group(on.cuts[level][0])


def _gather(output: torch.Tensor, part: torch.Tensor, group: ProcessGroup, unit: str) -> None:
    work = all_gather(output, part.contiguous(), group, unit=unit)
    if work is not None:
        work.wait()


# -- replicas ----------------------------------------------------------------------------------------


def make_replicas_agree(
    bucket: Bucket, indices: Sequence[int], locals_: Sequence[torch.Tensor]
) -> None:
    """Ranks that hold the same part of a parameter take what the first of them has, in place.

    One broadcast per axis that replicates: what users write to whole tensors may differ by rank, as
    random numbers do, and replicas that differ stay so without a sign.
    """
    params = [bucket.params[i] for i in indices]
    with torch.inference_mode(False), torch.no_grad():
        for group in bucket.replicate_groups:
            _take_first(group, bucket.device, locals_)
        members: dict[str, list[torch.Tensor]] = {}
        groups: dict[str, ProcessGroup] = {}
        for param, local in zip(params, locals_, strict=True):
            for group in param.on.replicating_groups():
                groups[group.group_name] = group
                members.setdefault(group.group_name, []).append(local)
        for name, group in groups.items():
            _take_first(group, bucket.device, members[name])


def _take_first(group: ProcessGroup, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
    """Broadcasts ``tensors``, of one dtype and the same shapes on every rank of ``group``, in one call."""
    if not tensors:
        return
    plain = [as_plain(tensor.detach()) for tensor in tensors]
    packed = torch.cat([tensor.reshape(-1) for tensor in plain]).to(device)
    dist.broadcast(packed.view(torch.uint8), group=group, group_src=0)  # bytes: of any dtype
    values = packed.split([tensor.numel() for tensor in plain])
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value.view(tensor.shape))
