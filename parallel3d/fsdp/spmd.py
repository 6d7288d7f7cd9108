"""Axes that users choose for parameters: ``dp_mesh_dims`` and ``shard_placement_fn`` of ``fully_shard``."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Shard

from parallel3d._torch.dtensor import StridedShard, concatenate_meshes, flatten_axes
from parallel3d._torch.fully_shard import DataParallelMeshDims, ShardPlacementResult
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.fsdp.placement import DataAxes, Spmd, data_axes

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


def spmd_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataAxes:
    """Returns the data axes that ``dims`` names; parameters are DTensors on all of ``mesh``.

    As in torch, several shard axes are one axis at rest, with the replicate axes, if any, as one axis before
    it; other axes stay. Otherwise the mesh at rest is ``mesh``.

    Raises:
        Parallel3dError: ``dims`` is no DataParallelMeshDims, or has names that are no strings.
        MeshError: ``mesh`` lacks a name, or names are given twice or out of order.
    """
    shard, replicate = _names(dims)
    _check_names(mesh, shard, replicate)
    if len(shard) > 1:
        return _with_joined_shards(mesh, shard, replicate)
    positions = {name: axis for axis, name in enumerate(mesh.mesh_dim_names or ())}
    replicas = tuple(positions[name] for name in replicate)
    spmd = Spmd(
        mesh,
        {axis: axis for name, axis in positions.items() if name not in shard + replicate},
        replicas,
        _one_axis(mesh, replicate) if len(replicate) > 1 else None,
    )
    return DataAxes(
        mesh,
        replicas[0] if replicas else None,
        positions[shard[0]] if shard else None,
        None,
        spmd,
    )


def _with_joined_shards(
    mesh: DeviceMesh, shard: tuple[str, ...], replicate: tuple[str, ...]
) -> DataAxes:
    meshes: list[DeviceMesh] = []
    own: dict[int, int] = {}
    shard_position = 0
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name == shard[0]:
            if replicate:
                meshes.append(_one_axis(mesh, replicate))
            shard_position = len(meshes)
            meshes.append(_one_axis(mesh, shard))
        elif name not in shard + replicate:
            own[axis] = len(meshes)
            meshes.append(mesh[name])
    at_rest = concatenate_meshes(meshes) if len(meshes) > 1 else meshes[0]
    replicas = (shard_position - 1,) if replicate else ()
    spmd = Spmd(mesh, own, replicas, None)
    return DataAxes(at_rest, replicas[0] if replicas else None, shard_position, None, spmd)


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    if len(names) == 1:
        return mesh[names[0]]
    try:
        return flatten_axes(mesh, names)
    except (ValueError, RuntimeError, KeyError) as error:
        raise MeshError(
            f"dp_mesh_dims: the axes {names} of {mesh} can't be joined to one, {'_'.join(names)!r}: {error}"
        ) from error


def _names(dims: DataParallelMeshDims) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not isinstance(dims, DataParallelMeshDims):
        raise Parallel3dError(
            f"dp_mesh_dims is {dims!r}; it must be a DataParallelMeshDims(shard=..., replicate=...) "
            "with names of axes of mesh"
        )
    for role in ("shard", "replicate"):
        value = getattr(dims, role)
        several = value if isinstance(value, tuple) else (value,)
        if value is not None and not (several and all(isinstance(n, str) for n in several)):
            raise Parallel3dError(
                f"dp_mesh_dims.{role} is {value!r}; it must be the name of an axis of mesh, a tuple of "
                "names, or None"
            )
    if not dims.shard_names + dims.replicate_names:
        raise Parallel3dError(
            "dp_mesh_dims names no axis; give it shard, replicate or both, as names of axes of mesh"
        )
    return dims.shard_names, dims.replicate_names


def _check_names(mesh: DeviceMesh, shard: tuple[str, ...], replicate: tuple[str, ...]) -> None:
    names = mesh.mesh_dim_names
    if names is None:
        raise MeshError(
            f"dp_mesh_dims names axes, but those of {mesh} have no names: make the mesh with mesh_dim_names"
        )
    for name, count in Counter(shard + replicate).items():
        if name not in names:
            raise MeshError(
                f"dp_mesh_dims: the mesh has no axis {name!r}; it has {', '.join(names)}"
            )
        if count > 1:
            raise MeshError(
                f"dp_mesh_dims names the axis {name!r} twice; an axis either shards or replicates"
            )
    for several in (shard, replicate):
        in_order = tuple(sorted(several, key=names.index))
        if several != in_order:
            raise MeshError(
                f"dp_mesh_dims names the axes {several}, whose order in the mesh is {in_order}; "
                "give them in the mesh's order"
            )


class RequestedPlacement(NamedTuple):
    """How to shard one parameter.

    Attributes:
        axes: the axes to shard and replicate over.
        dim: the dim to shard, from 0; None for the default.
    """

    axes: DataAxes
    dim: int | None


def requested_placements(
    fn: ShardPlacementFn | None, params: Iterable[tuple[str, nn.Parameter]], default: DataAxes
) -> list[RequestedPlacement]:
    """Calls ``fn`` once for each of the named ``params``.

    Raises:
        Parallel3dError: ``fn`` is not callable, or it returned another type, or a dim that the parameter
            doesn't have.
        MeshError: it returned a mesh without usable axes, or of another device type.
    """
    if fn is None:
        return [RequestedPlacement(default, None) for _ in params]
    if not callable(fn):
        raise Parallel3dError(
            f"shard_placement_fn is {fn!r}; it must be a function of a Parameter that returns Shard(dim), "
            "ShardPlacementResult(placement, mesh_info), or None for the default"
        )
    # By id of the mesh info, which is kept alive: parameters with the same object share a bucket.
    known: dict[int, tuple[Any, DataAxes]] = {}
    result = []
    for name, param in params:
        returned = fn(param)
        axes, placement = default, returned
        if isinstance(returned, ShardPlacementResult):
            info, placement = returned.mesh_info, returned.placement
            if id(info) not in known:
                known[id(info)] = info, _axes_of(name, info, default)
            axes = known[id(info)][1]
        dim = None if placement is None else _dim(name, param, placement, returned)
        result.append(RequestedPlacement(axes, dim))
    return result


def _dim(name: str, param: nn.Parameter, placement: Any, returned: object) -> int:
    # Not a subclass: torch 2.11's _StridedShard is one.
    if not isinstance(placement, Shard) or isinstance(placement, StridedShard):
        raise Parallel3dError(
            f"shard_placement_fn returned {returned!r} for parameter {name}; it must return Shard(dim), "
            "ShardPlacementResult(placement, mesh_info), or None for the default"
        )
    dim, n = placement.dim, param.ndim
    if n == 0:
        raise Parallel3dError(
            f"shard_placement_fn returned Shard({dim}) for parameter {name}, a scalar; return None for it: "
            "it is not sharded"
        )
    if not isinstance(dim, int) or not -n <= dim < n:
        raise Parallel3dError(
            f"shard_placement_fn returned Shard({dim}) for parameter {name} of shape {tuple(param.shape)}; "
            f"dim must be from {-n} to {n - 1}"
        )
    return dim % n


def _axes_of(name: str, mesh_info: Any, default: DataAxes) -> DataAxes:
    """Returns the axes of a mesh, or of one of torch's mesh infos, which say which axis is which."""
    if isinstance(mesh_info, DeviceMesh):
        axes = default if mesh_info == default.mesh else data_axes(mesh_info)
    else:
        axes = _axes_of_info(name, mesh_info)
    if axes.mesh.device_type != default.mesh.device_type:
        raise MeshError(
            f"shard_placement_fn returned a mesh on {axes.mesh.device_type} for parameter {name}; it must be "
            f"on {default.mesh.device_type}, as fully_shard's mesh"
        )
    return axes


def _axes_of_info(name: str, info: Any) -> DataAxes:
    mesh = getattr(info, "mesh", None)
    if not isinstance(mesh, DeviceMesh) or not hasattr(info, "shard_mesh_dim"):
        raise MeshError(
            f"shard_placement_fn returned mesh_info={info!r} for parameter {name}; it must be a DeviceMesh, "
            "or torch's FSDPMeshInfo or HSDPMeshInfo"
        )
    dims, whole = getattr(info, "dp_mesh_dims", None), getattr(info, "spmd_mesh", None)
    if dims is not None and whole is not None:
        return spmd_axes(whole, dims)
    return DataAxes(mesh, info.replicate_mesh_dim, info.shard_mesh_dim, None)
