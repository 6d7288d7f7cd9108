"""dp_mesh_dims: the engine's axes among those of a whole mesh that parameters are DTensors on."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Shard

from parallel3d._torch.dtensor import StridedShard, concatenate_meshes, flatten_axes
from parallel3d._torch.fully_shard import DataParallelMeshDims, ShardPlacementResult
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.fsdp.placement import DataAxes, Spmd, data_axes


def spmd_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataAxes:
    """The data axes that ``dims`` names. Several names of one kind count as one axis.

    Several shard axes are one axis at rest too, with the replicate axis, if any, before it; other axes
    stay. Without them the mesh at rest is ``mesh`` itself. As torch lays it out.

    Raises:
        Parallel3dError: not a DataParallelMeshDims, or names that are no strings.
        MeshError: names that ``mesh`` doesn't have, given twice or out of order.
    """
    shard, replicate = _names(dims)
    _check_names(mesh, shard, replicate)
    if len(shard) > 1:
        return _with_joined_shards(mesh, shard, replicate)
    names = mesh.mesh_dim_names or ()
    positions = {name: axis for axis, name in enumerate(names)}
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
    pieces: list[DeviceMesh] = []
    own: dict[int, int] = {}
    at_shard = 0
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name == shard[0]:
            if replicate:
                pieces.append(_one_axis(mesh, replicate))
            at_shard = len(pieces)
            pieces.append(_one_axis(mesh, shard))
        elif name not in shard + replicate:
            own[axis] = len(pieces)
            pieces.append(mesh[name])
    rest = concatenate_meshes(pieces) if len(pieces) > 1 else pieces[0]
    at_replicate = at_shard - 1 if replicate else None
    replicas = () if at_replicate is None else (at_replicate,)
    return DataAxes(rest, at_replicate, at_shard, None, Spmd(mesh, own, replicas, None))


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
    unknown = [name for name in shard + replicate if name not in names]
    if unknown:
        raise MeshError(
            f"dp_mesh_dims: the mesh has no axis {unknown[0]!r}; it has {', '.join(names)}"
        )
    twice = list(_repeated(shard + replicate))
    if twice:
        raise MeshError(
            f"dp_mesh_dims names the axis {twice[0]!r} twice; an axis either shards or replicates"
        )
    for several in (shard, replicate):
        in_order = tuple(sorted(several, key=names.index))
        if several != in_order:
            raise MeshError(
                f"dp_mesh_dims names the axes {several}, which stand in the mesh as {in_order}; "
                "give them in the mesh's order"
            )


def _repeated(names: tuple[str, ...]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield name
        seen.add(name)


# What the user's ``shard_placement_fn`` wants for each parameter.

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


class RequestedPlacement(NamedTuple):
    """Where to shard one parameter.

    Attributes:
        axes: the axes to shard and replicate over.
        dim: the dim, from 0; None for the default.
    """

    axes: DataAxes
    dim: int | None


def requested_placements(
    fn: ShardPlacementFn | None, params: Iterable[tuple[str, nn.Parameter]], default: DataAxes
) -> list[RequestedPlacement]:
    """Asks ``fn`` about each of the named ``params``, once.

    Raises:
        Parallel3dError: ``fn`` can't be called; an answer of another type, or a dim that the parameter
            doesn't have.
        MeshError: a mesh without usable axes, or of another device type.
    """
    if fn is None:
        return [RequestedPlacement(default, None) for _ in params]
    if not callable(fn):
        raise Parallel3dError(
            f"shard_placement_fn is {fn!r}; it must be a function of a Parameter that returns Shard(dim), "
            "ShardPlacementResult(placement, mesh_info), or None for the default"
        )
    known: dict[
        int, tuple[Any, DataAxes]
    ] = {}  # one object per mesh: its parameters share a bucket
    return [_wish(fn, name, param, default, known) for name, param in params]


def _wish(
    fn: ShardPlacementFn,
    name: str,
    param: nn.Parameter,
    default: DataAxes,
    known: dict[int, tuple[Any, DataAxes]],
) -> RequestedPlacement:
    answer = fn(param)
    axes, placement = default, answer
    if isinstance(answer, ShardPlacementResult):
        info, placement = answer.mesh_info, answer.placement
        # With the object itself, or another one could come to have its id.
        _, axes = known.get(id(info)) or (info, _axes_of(name, info, default))
        known[id(info)] = info, axes
    if placement is None:
        return RequestedPlacement(axes, None)
    # Not a subclass: torch 2.11's _StridedShard is one.
    if not isinstance(placement, Shard) or isinstance(placement, StridedShard):
        raise Parallel3dError(
            f"shard_placement_fn returned {answer!r} for parameter {name}; it must return Shard(dim), "
            "ShardPlacementResult(placement, mesh_info), or None for the default"
        )
    return RequestedPlacement(axes, _dim(name, param, placement.dim))


def _dim(name: str, param: nn.Parameter, dim: Any) -> int:
    n = param.ndim
    if n == 0:
        raise Parallel3dError(
            f"shard_placement_fn returned Shard({dim}) for parameter {name}, a scalar; return None for it: "
            "it stays whole on every rank"
        )
    if not isinstance(dim, int) or not -n <= dim < n:
        raise Parallel3dError(
            f"shard_placement_fn returned Shard({dim}) for parameter {name} of shape {tuple(param.shape)}; "
            f"dim must be from {-n} to {n - 1}"
        )
    return dim % n


def _axes_of(name: str, mesh_info: Any, default: DataAxes) -> DataAxes:
    """The axes of a mesh, or of one of torch's mesh infos, which say which axis is which."""
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
