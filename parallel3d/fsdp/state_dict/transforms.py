"""chunk and gather: between layouts of one tensor on a mesh, as a checkpoint of another layout needs them.

FSDP1's DTensor extension did this inside state dicts, for one mesh of two axes. Here the mesh may have any
axes, and several may cut one dim: "tp first, then shard" is ``_StridedShard(dim, split_factor=tp)`` on
shard, as torch lays parameters out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from parallel3d._layout.packed import PackedShard, PackedSpec, cut_packed, packing_of
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
from parallel3d.fsdp.placement import ceil_div, chunk_length, is_exact


@dataclass(frozen=True)
class _Cut:
    """How one axis cuts: into ``factor`` parts first, each of these into one chunk for each rank."""

    axis: int
    dim: int
    factor: int


def chunk(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """``tensor`` laid out on ``mesh`` by ``placements``; each rank keeps its part, without autograd.

    Nothing is communicated for a plain tensor, nor where a DTensor's own axes keep their placements and
    others cut what they have left: a tp-parallel parameter becomes one on (replicate, shard, tp). Anything
    else gathers the tensor first.

    Args:
        tensor: the whole tensor, the same on every rank, or a DTensor on ``mesh`` or on some of its axes.
        placements: one for each axis: ``Replicate()``, ``Shard(dim)``, or torch's ``_StridedShard``.

    Returns:
        A DTensor of ``tensor``'s shape and dtype on its device, with memory of its own.

    Raises:
        Parallel3dError: a placement of another kind, a dim that ``tensor`` doesn't have, partial values.
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
        whole = tensor.detach()
        spec = make_spec(mesh, placements, whole.shape, whole.dtype)
        if packing_of(whole) is not None or isinstance(spec, PackedSpec):
            return make_dtensor(_chunk_packed(whole, spec), spec)
        if isinstance(whole, DTensor):
            local = _from_dtensor(whole, mesh, placements)
            if local is not None:
                return make_dtensor(local, spec)
            whole = _read(whole)
        local = whole
        for cut in _cuts(placements):
            local = _cut(local, mesh, cut)
        if local is whole:  # a factory call, for simulated ranks too
            local = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device).copy_(whole)
        return make_dtensor(local, spec)


def gather(dtensor: DTensor, over: str = "shard") -> DTensor:
    """``dtensor`` with ``Replicate()`` on the axis ``over``, by one all-gather; without autograd.

    Other axes keep their parts. If one of them has cut the same dim after ``over``, its part is then in
    pieces: its placement becomes a ``_StridedShard`` that says so. Where three axes cut one dim, or cuts
    are so uneven that DTensor doesn't tell the order they were made in, the tensor is gathered and cut anew.

    Args:
        over: the name of an axis of the DTensor's mesh.

    Raises:
        Parallel3dError: not a DTensor, or partial values.
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
            f"over={over!r} is no axis of {mesh}; it has {', '.join(names) or 'no names'}"
        )
    axis = names.index(over)
    placements = _checked(dtensor, mesh, dtensor.placements)
    mine = next((cut for cut in _cuts(placements) if cut.axis == axis), None)
    if isinstance(placements[axis], PackedShard):
        return chunk(dtensor, mesh, _cut_anew(placements, mesh, axis))
    target = _after_gather(placements, mesh, axis)
    spec = make_spec(mesh, target, dtensor.shape, dtensor.dtype)
    with torch.no_grad():
        local = get_local_tensor(dtensor.detach())
        if mine is None or mesh.size(axis) == 1:
            return make_dtensor(local.clone(), spec)
        pieces = _pieces(dtensor, mesh, mine, [c for c in _cuts(placements) if c != mine])
        if pieces is None:
            return chunk(dtensor, mesh, _cut_anew(placements, mesh, axis))
        return make_dtensor(_gathered(local, mesh, mine, *pieces), spec)


# -- placements ----------------------------------------------------------------------------------------


def _checked(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[Placement, ...]:
    placements = tuple(placements)
    if len(placements) != mesh.ndim:
        raise Parallel3dError(
            f"{len(placements)} placements for {mesh}, which has {mesh.ndim} axes; give one for each"
        )
    result: list[Placement] = []
    for placement in placements:
        if isinstance(placement, (Replicate, PackedShard)):
            result.append(placement)
            continue
        if not isinstance(placement, (Shard, StridedShard)):
            raise Parallel3dError(
                f"placement {placement!r}: chunk and gather know Replicate(), Shard(dim) and "
                "_StridedShard; reduce partial values first (redistribute)"
            )
        dim = placement.dim + tensor.ndim if placement.dim < 0 else placement.dim
        if not 0 <= dim < tensor.ndim:
            raise Parallel3dError(
                f"placement {placement!r} for a tensor of shape {tuple(tensor.shape)}: it has no such dim"
            )
        factor = _factor(placement)
        result.append(StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim))
    return tuple(result)


def _factor(placement: Placement) -> int:
    return int(placement.split_factor) if isinstance(placement, StridedShard) else 1


def _cuts(placements: Sequence[Placement]) -> list[_Cut]:
    """In the order that DTensor applies them."""
    return [
        _Cut(axis, placement.dim, _factor(placement))
        for axis, placement in enumerate(placements)
        if isinstance(placement, (Shard, StridedShard))
    ]


def _after_gather(
    placements: Sequence[Placement], mesh: DeviceMesh, axis: int
) -> tuple[Placement, ...]:
    """``placements`` with ``axis`` whole. One further in that has cut its pieces has a piece of each."""
    result = list(placements)
    gone = placements[axis]
    result[axis] = Replicate()
    # A strided cut is made after those further in, which therefore are none of its pieces.
    if isinstance(gone, (Shard, StridedShard)) and _factor(gone) == 1 and mesh.size(axis) > 1:
        for inner in range(axis + 1, len(placements)):
            other = placements[inner]
            if isinstance(other, (Shard, StridedShard)) and other.dim == gone.dim:
                factor = _factor(other) * mesh.size(axis)
                result[inner] = StridedShard(other.dim, split_factor=factor)
    return tuple(result)


def _cut_anew(
    placements: Sequence[Placement], mesh: DeviceMesh, axis: int
) -> tuple[Placement, ...]:
    """``placements`` with ``axis`` whole, other axes cutting in the same order as before."""
    result = list(placements)
    result[axis] = Replicate()
    ways = mesh.size(axis)
    mine = next(cut for cut in _cuts(placements) if cut.axis == axis)
    for other in _cuts(placements[:axis]):
        if other.dim == mine.dim and other.factor > 1 and other.factor % ways == 0:
            left = other.factor // ways
            result[other.axis] = (
                StridedShard(other.dim, split_factor=left) if left > 1 else Shard(other.dim)
            )
    return tuple(result)


# -- chunk ---------------------------------------------------------------------------------------------


def _cut(local: torch.Tensor, mesh: DeviceMesh, cut: _Cut) -> torch.Tensor:
    """One axis's cut of what the axes before it have left."""
    if mesh.size(cut.axis) == 1:
        return local
    return _part(local, cut, mesh.size(cut.axis), mesh.get_local_rank(cut.axis))


def _part(local: torch.Tensor, cut: _Cut, ways: int, rank: int) -> torch.Tensor:
    """That of ``rank`` of ``ways``."""
    return strided_chunk(local, cut.dim, cut.factor, ways, rank)


def _chunk_packed(tensor: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's part of a tensor that is packed, or is to be."""
    if isinstance(tensor, DTensor):
        if tensor.device_mesh == spec.mesh and tensor.placements == spec.placements:
            return get_local_tensor(tensor).clone(memory_format=torch.contiguous_format)
        tensor = tensor.full_tensor() if packing_of(tensor) is not None else _read(tensor)
    if isinstance(spec, PackedSpec):
        return cut_packed(tensor, spec.mesh, spec.placements)
    return get_local_tensor(chunk(tensor, spec.mesh, spec.placements))


def _from_dtensor(
    tensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> torch.Tensor | None:
    """This rank's part, cut from what it has; None if that is not enough."""
    own = dict(zip(_positions(tensor.device_mesh, mesh), tensor.placements, strict=True))
    before = [own.get(axis, Replicate()) for axis in range(mesh.ndim)]
    kept = [cut for cut in _cuts(before) if mesh.size(cut.axis) > 1]
    if any(own[cut.axis] != placements[cut.axis] for cut in kept):
        return None
    new = [
        cut
        for cut in _cuts(placements)
        if mesh.size(cut.axis) > 1 and all(cut.axis != k.axis for k in kept)
    ]
    local = get_local_tensor(tensor)
    result = local
    for cut in new:
        same = [k for k in kept if k.dim == cut.dim]
        if same and sum(each.dim == cut.dim for each in new) > 1:
            return None
        outside = tuple(mesh.size(k.axis) for k in same if k.axis < cut.axis)
        inside = tuple(mesh.size(k.axis) for k in same if k.axis > cut.axis)
        strided = any(k.factor > 1 for k in same)
        if same and (strided or cut.factor != prod(inside)):
            return None
        ways = mesh.size(cut.axis)
        if same and not is_exact(tensor.shape[cut.dim], outside, inside, ways):
            return None
        result = _cut(result, mesh, _Cut(cut.axis, cut.dim, 1 if same else cut.factor))
    return result.clone(memory_format=torch.contiguous_format) if result is local else result


def _read(tensor: DTensor) -> torch.Tensor:
    """The whole tensor. Uneven strided cuts are undone here: ``full_tensor`` fails there, on some ranks only,
    for which the others then wait, or takes rows for others."""
    mesh, shape = tensor.device_mesh, tensor.shape
    cuts = [cut for cut in _cuts(tensor.placements) if mesh.size(cut.axis) > 1]
    if all(cut.factor == 1 for cut in cuts):
        if any(isinstance(placement, StridedShard) for placement in tensor.placements):
            # torch 2.11 reads the strides of axes of size 1 too, which mean nothing, and may not know such.
            placements = [
                Replicate() if mesh.size(axis) == 1 else placement
                for axis, placement in enumerate(tensor.placements)
            ]
            spec = make_spec(mesh, placements, shape, tensor.dtype)
            tensor = make_dtensor(get_local_tensor(tensor), spec)
        return tensor.full_tensor()
    ways = [mesh.size(cut.axis) for cut in cuts]
    places = []  # by rank along the axes that cut: which rows of each dim it has
    for ranks in product(*map(range, ways)):
        rows = [torch.arange(size, device=tensor.device) for size in shape]
        for cut, size, rank in zip(cuts, ways, ranks, strict=True):
            rows[cut.dim] = _part(rows[cut.dim], replace(cut, dim=0), size, rank)
        places.append(rows)
    largest = max(prod(map(len, rows)) for rows in places)
    local = get_local_tensor(tensor)
    gathered = torch.zeros(largest, dtype=tensor.dtype, device=tensor.device)
    gathered.narrow(0, 0, local.numel()).copy_(local.reshape(-1))
    for cut in reversed(cuts if largest else ()):
        size = mesh.size(cut.axis) * gathered.numel()
        output = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
        work = all_gather(output, gathered, mesh.get_group(cut.axis), unit="")
        if work is not None:
            work.wait()
        gathered = output
    whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    for rows, part in zip(places, gathered.view(len(places), largest), strict=True):
        sizes = [len(each) for each in rows]
        if prod(sizes):
            whole[torch.meshgrid(*rows, indexing="ij")] = part.narrow(0, 0, prod(sizes)).view(sizes)
    return whole


def _positions(own: DeviceMesh, mesh: DeviceMesh) -> list[int]:
    """Where the axes of ``own`` are in ``mesh``."""
    if own == mesh:
        return list(range(mesh.ndim))
    names, known = own.mesh_dim_names or (), mesh.mesh_dim_names or ()
    fits = all(
        name in known and mesh.size(known.index(name)) == own.size(i)
        for i, name in enumerate(names)
    )
    positions = [known.index(name) for name in names] if fits else []
    if not names or not fits or root_mesh(own) != root_mesh(mesh) or positions != sorted(positions):
        raise MeshError(
            f"the tensor is a DTensor on {own}, whose axes are not some of those of {mesh}; give a mesh "
            "that has them, or the whole tensor (full_tensor())"
        )
    return positions


# -- gather --------------------------------------------------------------------------------------------


def _pieces(
    tensor: DTensor, mesh: DeviceMesh, mine: _Cut, cuts: Sequence[_Cut]
) -> tuple[list[list[int]], int] | None:
    """What each rank along ``mine``'s axis brings.

    Returns:
        For each rank the sizes of its pieces along the dim; and the largest sum of them on any rank. The
        result is all ranks' first pieces, then all second ones. None where an axis besides ``mine`` and
        one other cuts the dim, or DTensor doesn't tell the two cuts' rows.
    """
    size, ways = tensor.shape[mine.dim], mesh.size(mine.axis)
    others = [cut for cut in cuts if cut.dim == mine.dim and mesh.size(cut.axis) > 1]
    if not others:
        cells = [chunk_length(size, mine.factor, i) for i in range(mine.factor)]
        by_rank = [[chunk_length(cell, ways, rank) for cell in cells] for rank in range(ways)]
        return by_rank, sum(ceil_div(cell, ways) for cell in cells)
    if len(others) > 1:
        return None
    outer, inner = sorted((mine, others[0]), key=lambda cut: cut.axis)
    first, second = outer, inner
    if outer.factor > 1:  # "inner first", told by a strided cut
        first, second = inner, outer
        told = outer.factor == mesh.size(inner.axis)
        if not told or not is_exact(size, (), (outer.factor,), mesh.size(outer.axis)):
            return None
    if inner.factor > 1:
        return None
    here = mesh.get_local_rank(others[0].axis)
    by_rank = []
    for rank in range(ways):
        left = chunk_length(size, mesh.size(first.axis), rank if first is mine else here)
        by_rank.append(
            [chunk_length(left, mesh.size(second.axis), rank if second is mine else here)]
        )
    return by_rank, ceil_div(ceil_div(size, mesh.size(first.axis)), mesh.size(second.axis))


def _gathered(
    local: torch.Tensor, mesh: DeviceMesh, mine: _Cut, sizes: list[list[int]], largest: int
) -> torch.Tensor:
    ways, dim = mesh.size(mine.axis), mine.dim
    shape = list(local.shape)
    shape[dim] = largest  # on the wire every rank's part has one size
    padded = torch.zeros(shape, dtype=local.dtype, device=local.device)
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    rows = torch.empty((ways, *shape), dtype=local.dtype, device=local.device)
    if largest:
        work = all_gather(rows.view(-1), padded.view(-1), mesh.get_group(mine.axis), unit="")
        if work is not None:
            work.wait()
    pieces: list[list[torch.Tensor]] = [[] for _ in sizes[0]]
    for row, lengths in zip(rows, sizes, strict=True):
        start = 0
        for index, length in enumerate(lengths):
            pieces[index].append(row.narrow(dim, start, length))
            start = start + length
    return torch.cat([piece for each in pieces for piece in each], dim=dim)
