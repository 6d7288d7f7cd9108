"""chunk and gather: change how one tensor is sharded on a mesh, as loading a checkpoint may need it.

FSDP1's DTensor extension did this inside state dicts, for a mesh of two axes. Here the mesh may have any
axes, and several may shard one dim: "tp first, then shard" is ``_StridedShard(dim, split_factor=tp)`` on the
shard axis, as torch lays parameters out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from parallel3d._layout.packed import PackedShard, PackedSpec, cut_packed, packed_among, packing_of
from parallel3d._layout.param_layout import strided_chunk
from parallel3d._torch.dtensor import (
    DTensorSpec,
    StridedShard,
    get_local_tensor,
    make_dtensor,
    make_spec,
    root_mesh,
)
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.fsdp.collectives import all_gather
from parallel3d.fsdp.placement import is_exact, shard_placement


@dataclass(frozen=True)
class _Cut:
    """How one mesh axis shards a dim: into ``factor`` parts, of each of which a rank has one chunk."""

    axis: int
    dim: int
    factor: int


def chunk(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Shards ``tensor`` on ``mesh`` by ``placements``, without autograd.

    A plain tensor is sharded without communication, and so is a DTensor whose axes keep their placements
    while other axes shard its local tensors further: a tp-parallel parameter becomes one on (replicate,
    shard, tp). Any other DTensor is gathered first.

    Args:
        tensor: the full tensor, the same on every rank, or a DTensor on ``mesh`` or on some of its axes.
        placements: one for each axis: ``Replicate()``, ``Shard(dim)``, or torch's ``_StridedShard``.

    Returns:
        A DTensor of ``tensor``'s shape and dtype on its device, in its own memory.

    Raises:
        Parallel3dError: a placement of another kind, a dim that ``tensor`` doesn't have, or partial values.
        MeshError: a DTensor on axes that ``mesh`` doesn't have.
    """
    if not isinstance(tensor, torch.Tensor) or not isinstance(mesh, DeviceMesh):
        raise Parallel3dError(
            f"chunk was given a {type(tensor).__name__} and a {type(mesh).__name__}; it takes a tensor and a "
            "DeviceMesh"
        )
    placements = _checked(tensor, mesh, placements)
    if isinstance(tensor, DTensor):
        _checked(tensor, tensor.device_mesh, tensor.placements)
    with torch.no_grad():
        full = tensor.detach()
        spec = make_spec(mesh, placements, full.shape, full.dtype)
        if packing_of(full) is not None or isinstance(spec, PackedSpec):
            return make_dtensor(_chunk_packed(full, spec), spec)
        if isinstance(full, DTensor):
            local = _chunk_further(full, mesh, placements)
            if local is not None:
                return make_dtensor(local, spec)
            full = _full_tensor(full)
        local = full
        for cut in _cuts(placements):
            local = _own_chunk(local, mesh, cut)
        if local is full:  # by a factory call, which also works for simulated ranks
            local = torch.empty(full.shape, dtype=full.dtype, device=full.device).copy_(full)
        return make_dtensor(local, spec)


def gather(dtensor: DTensor, over: str = "shard") -> DTensor:
    """Replicates ``dtensor`` over the axis ``over`` by one all-gather, without autograd.

    Other axes keep sharding it. If one of them has sharded the same dim after ``over``, its rows are no
    longer contiguous, and its placement becomes a ``_StridedShard``. If three axes shard one dim, or so
    unevenly that the placements don't tell in which order, the tensor is gathered over all axes and sharded
    again.

    Args:
        over: the name of an axis of the DTensor's mesh.

    Raises:
        Parallel3dError: ``dtensor`` is no DTensor, or has partial values.
        MeshError: the mesh has no such axis.
    """
    if not isinstance(dtensor, DTensor):
        raise Parallel3dError(
            f"gather was given a {type(dtensor).__name__}; it takes a DTensor, as model.parameters() has"
        )
    mesh = dtensor.device_mesh
    names = mesh.mesh_dim_names or ()
    if over not in names:
        raise MeshError(
            f"over={over!r} is not an axis of {mesh}; it has {', '.join(names) or 'no names'}"
        )
    axis = names.index(over)
    placements = _checked(dtensor, mesh, dtensor.placements)
    packed = packed_among(placements)
    if packed is not None and (packed[0] == axis or _shards_first(*packed, placements[axis], axis)):
        return chunk(dtensor, mesh, _without_axis(placements, mesh, axis))
    cuts, result = _cuts(placements), list(placements)
    result[axis] = Replicate()
    cut = next((cut for cut in cuts if cut.axis == axis and mesh.size(axis) > 1), None)
    # A strided axis is applied after those further in, which therefore do not shard its chunks.
    for inner in cuts:
        if cut is not None and cut.factor == 1 and inner.axis > axis and inner.dim == cut.dim:
            result[inner.axis] = shard_placement(inner.dim, inner.factor * mesh.size(axis))
    spec = make_spec(mesh, result, dtensor.shape, dtensor.dtype)
    with torch.no_grad():
        if cut is None:
            return make_dtensor(get_local_tensor(dtensor.detach()).clone(), spec)
        others = [c for c in cuts if c != cut and c.dim == cut.dim and mesh.size(c.axis) > 1]
        if not _tell_rows(dtensor, cut, others):
            return chunk(dtensor, mesh, _without_axis(placements, mesh, axis))
        return make_dtensor(_gathered(dtensor, cut, cuts), spec)


def all_gathered(part: torch.Tensor, group: ProcessGroup, unit: str = "") -> torch.Tensor:
    """All-gathers ``part``, (k,), over ``group``; returns (n * k,), in rank order."""
    size = group.size() * part.numel()
    output = torch.empty(size, dtype=part.dtype, device=part.device)
    work = all_gather([output], [part.contiguous()], group, unit=unit) if part.numel() else None
    if work is not None:
        work.wait()
    return output


def _shards_first(at: int, packed: PackedShard, placement: Placement, axis: int) -> bool:
    """Whether the axis ``at``, of placement ``packed``, comes before ``axis`` and shards the same dim."""
    return (
        at < axis and isinstance(placement, (Shard, StridedShard)) and placement.dim == packed.dim
    )


# -- placements ----------------------------------------------------------------------------------------


def _checked(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[Placement, ...]:
    """Returns ``placements`` after checks, with dims not negative and strided ones of factor 1 plain."""
    placements = tuple(placements)
    if len(placements) != mesh.ndim:
        raise Parallel3dError(
            f"placements has length {len(placements)}; {mesh} needs {mesh.ndim}, one for each axis"
        )
    result: list[Placement] = []
    for placement in placements:
        if isinstance(placement, (Replicate, PackedShard)):
            result.append(placement)
            continue
        if not isinstance(placement, (Shard, StridedShard)):
            raise Parallel3dError(
                f"placement is {placement!r}; chunk and gather take Replicate(), Shard(dim) and "
                "_StridedShard: reduce partial values first (redistribute)"
            )
        dim = placement.dim + tensor.ndim if placement.dim < 0 else placement.dim
        if not 0 <= dim < tensor.ndim:
            raise Parallel3dError(
                f"placement is {placement!r}, but the tensor of shape {tuple(tensor.shape)} has no such dim"
            )
        result.append(shard_placement(dim, _factor(placement)))
    return tuple(result)


def _factor(placement: Placement) -> int:
    return int(placement.split_factor) if isinstance(placement, StridedShard) else 1


def _cuts(placements: Sequence[Placement]) -> list[_Cut]:
    """Returns how axes shard, in the order in which DTensor applies them."""
    return [
        _Cut(axis, placement.dim, _factor(placement))
        for axis, placement in enumerate(placements)
        if isinstance(placement, (Shard, StridedShard))
    ]


def _without_axis(
    placements: Sequence[Placement], mesh: DeviceMesh, axis: int
) -> tuple[Placement, ...]:
    """Returns ``placements`` with ``axis`` replicated; other axes shard in the same order as before."""
    result = list(placements)
    result[axis] = Replicate()
    ranks = mesh.size(axis)
    removed = next(cut for cut in _cuts(placements) if cut.axis == axis)
    for cut in _cuts(placements[:axis]):
        if cut.dim == removed.dim and cut.factor > 1 and cut.factor % ranks == 0:
            result[cut.axis] = shard_placement(cut.dim, cut.factor // ranks)
    return tuple(result)


# -- chunk ---------------------------------------------------------------------------------------------


def _own_chunk(local: torch.Tensor, mesh: DeviceMesh, cut: _Cut) -> torch.Tensor:
    """Returns the chunk of ``local`` that ``cut`` leaves on this rank."""
    size = mesh.size(cut.axis)
    if size == 1:
        return local
    return strided_chunk(local, cut.dim, cut.factor, size, mesh.get_local_rank(cut.axis))


def _chunk_packed(tensor: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Returns this rank's part of ``tensor`` by ``spec``, where ``tensor`` or ``spec`` has packed rows."""
    if isinstance(tensor, DTensor):
        if tensor.device_mesh == spec.mesh and tensor.placements == spec.placements:
            return get_local_tensor(tensor).clone(memory_format=torch.contiguous_format)
        packed = packing_of(tensor) is not None
        tensor = tensor.full_tensor() if packed else _full_tensor(tensor)
    if isinstance(spec, PackedSpec):
        return cut_packed(tensor, spec.mesh, spec.placements)
    return get_local_tensor(chunk(tensor, spec.mesh, spec.placements))


def _chunk_further(
    tensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> torch.Tensor | None:
    """Returns this rank's part by ``placements``, cut from its local tensor without communication; None if
    the local tensor doesn't contain it."""
    own = dict(zip(_positions(tensor.device_mesh, mesh), tensor.placements, strict=True))
    before = [own.get(axis, Replicate()) for axis in range(mesh.ndim)]
    kept = {cut.axis: cut for cut in _cuts(before) if mesh.size(cut.axis) > 1}
    if any(own[axis] != placements[axis] for axis in kept):
        return None
    new = [c for c in _cuts(placements) if mesh.size(c.axis) > 1 and c.axis not in kept]
    result = local = get_local_tensor(tensor)
    for cut in new:
        same_dim = [k for k in kept.values() if k.dim == cut.dim]
        if not same_dim:
            result = _own_chunk(result, mesh, cut)
            continue
        outside = tuple(mesh.size(k.axis) for k in same_dim if k.axis < cut.axis)
        inside = tuple(mesh.size(k.axis) for k in same_dim if k.axis > cut.axis)
        if (
            sum(other.dim == cut.dim for other in new) > 1
            or any(k.factor > 1 for k in same_dim)
            or cut.factor != prod(inside)
            or not is_exact(tensor.shape[cut.dim], outside, inside, mesh.size(cut.axis))
        ):
            return None
        result = _own_chunk(result, mesh, replace(cut, factor=1))
    return result.clone(memory_format=torch.contiguous_format) if result is local else result


def _full_tensor(tensor: DTensor) -> torch.Tensor:
    """Like ``DTensor.full_tensor``, also for uneven strided shards.

    For these torch's raises on some ranks only, so that others hang, or returns rows in the wrong order.
    """
    mesh, shape = tensor.device_mesh, tensor.shape
    # torch 2.11 reads the factors of axes of size 1 too, which mean nothing, and may raise.
    placements = [
        Replicate() if size == 1 else placement
        for size, placement in zip(mesh.shape, tensor.placements, strict=True)
    ]
    cuts = _cuts(placements)
    if all(cut.factor == 1 for cut in cuts):
        spec = make_spec(mesh, placements, shape, tensor.dtype)
        return make_dtensor(get_local_tensor(tensor), spec).full_tensor()
    axes = [cut.axis for cut in cuts]
    rows_by_rank = [  # by rank along the axes that shard: the row numbers it has of each dim
        [_rows(tensor, dim, cuts, dict(zip(axes, ranks, strict=True))) for dim in range(len(shape))]
        for ranks in product(*(range(mesh.size(axis)) for axis in axes))
    ]
    largest = max(prod(map(len, rows)) for rows in rows_by_rank)
    local = get_local_tensor(tensor)
    gathered = torch.zeros(largest, dtype=tensor.dtype, device=tensor.device)
    gathered.narrow(0, 0, local.numel()).copy_(local.reshape(-1))
    for cut in reversed(cuts):
        gathered = all_gathered(gathered, mesh.get_group(cut.axis))
    full = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    for rows, part in zip(rows_by_rank, gathered.view(len(rows_by_rank), largest), strict=True):
        lengths = [len(numbers) for numbers in rows]
        if prod(lengths):
            local = part.narrow(0, 0, prod(lengths)).view(lengths)
            full[torch.meshgrid(*rows, indexing="ij")] = local
    return full


def _positions(own: DeviceMesh, mesh: DeviceMesh) -> list[int]:
    if own == mesh:
        return list(range(mesh.ndim))
    names, known = own.mesh_dim_names or (), mesh.mesh_dim_names or ()
    sizes = dict(zip(known, mesh.shape, strict=False))
    fits = all(sizes.get(name) == own.size(i) for i, name in enumerate(names))
    positions = [known.index(name) for name in names] if fits else []
    if not names or not fits or root_mesh(own) != root_mesh(mesh) or positions != sorted(positions):
        raise MeshError(
            f"the tensor is a DTensor on {own}, whose axes are not some of those of {mesh}; give a mesh "
            "that has them, or the whole tensor (full_tensor())"
        )
    return positions


# -- gather --------------------------------------------------------------------------------------------


def _rows(
    tensor: DTensor, dim: int, cuts: Sequence[_Cut], ranks: Mapping[int, int]
) -> torch.Tensor:
    """Returns which rows of ``dim`` a rank has; ``ranks``: {axis: the rank's coordinate}."""
    rows = torch.arange(tensor.shape[dim], device=tensor.device)
    for cut in cuts:
        if cut.dim == dim:
            size = tensor.device_mesh.size(cut.axis)
            rows = strided_chunk(rows, 0, cut.factor, size, ranks[cut.axis])
    return rows


def _tell_rows(tensor: DTensor, cut: _Cut, others: Sequence[_Cut]) -> bool:
    """Whether, with the axis of ``cut`` replicated, placements of ``others``, the other axes that shard the
    dim, can express the rows that each rank then has."""
    if not others:
        return True
    outer, inner = sorted((cut, others[0]), key=lambda each: each.axis)
    if len(others) > 1 or inner.factor > 1:
        return False
    mesh, factor = tensor.device_mesh, outer.factor
    return factor == 1 or (  # a strided outer axis is applied after the inner one
        factor == mesh.size(inner.axis)
        and is_exact(tensor.shape[cut.dim], (), (factor,), mesh.size(outer.axis))
    )


def _gathered(tensor: DTensor, gathered: _Cut, cuts: Sequence[_Cut]) -> torch.Tensor:
    """Returns the local tensor all-gathered over the axis of ``gathered``, its rows in global order."""
    mesh, dim, axis = tensor.device_mesh, gathered.dim, gathered.axis
    own = {cut.axis: mesh.get_local_rank(cut.axis) for cut in cuts}
    rows = [_rows(tensor, dim, cuts, own | {axis: rank}) for rank in range(mesh.size(axis))]
    local = get_local_tensor(tensor).detach()
    shape = list(local.shape)
    # The all-gather needs the same size from every rank; the first has the most rows.
    shape[dim] = len(_rows(tensor, dim, cuts, dict.fromkeys(own, 0)))
    padded = torch.zeros(shape, dtype=local.dtype, device=local.device)
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    parts = all_gathered(padded.view(-1), mesh.get_group(axis)).view(len(rows), *shape)
    pieces = [part.narrow(dim, 0, each.shape[0]) for part, each in zip(parts, rows, strict=True)]
    whole = torch.cat(pieces, dim)
    if gathered.factor == 1 and sum(cut.dim == dim for cut in cuts) == 1:
        return whole  # in order already
    return whole.index_select(dim, torch.cat(rows).argsort())
