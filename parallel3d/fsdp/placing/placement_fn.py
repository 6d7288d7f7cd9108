"""What the user's ``shard_placement_fn`` wants for each parameter."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Shard

from parallel3d._compat import ShardPlacementResult, StridedShard
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.fsdp.placing.axes import DataAxes, data_axes
from parallel3d.fsdp.placing.spmd import spmd_axes

__all__ = ["ShardPlacementFn", "Wish", "wishes"]

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


class Wish(NamedTuple):
    """Where to shard one parameter.

    Attributes:
        axes: the axes to shard and replicate over.
        dim: the dim, from 0; None for the default.
    """

    axes: DataAxes
    dim: int | None


def wishes(
    fn: ShardPlacementFn | None, params: Iterable[tuple[str, nn.Parameter]], default: DataAxes
) -> list[Wish]:
    """Asks ``fn`` about each of the named ``params``, once.

    Raises:
        Parallel3dError: ``fn`` can't be called; an answer of another type, or a dim that the parameter
            doesn't have.
        MeshError: a mesh without usable axes, or of another device type.
    """
    if fn is None:
        return [Wish(default, None) for _ in params]
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
) -> Wish:
    answer = fn(param)
    axes, placement = default, answer
    if isinstance(answer, ShardPlacementResult):
        info, placement = answer.mesh_info, answer.placement
        # With the object itself, or another one could come to have its id.
        _, axes = known.get(id(info)) or (info, _axes_of(name, info, default))
        known[id(info)] = info, axes
    if placement is None:
        return Wish(axes, None)
    # Not a subclass: torch 2.11's _StridedShard is one.
    if not isinstance(placement, Shard) or isinstance(placement, StridedShard):
        raise Parallel3dError(
            f"shard_placement_fn returned {answer!r} for parameter {name}; it must return Shard(dim), "
            "ShardPlacementResult(placement, mesh_info), or None for the default"
        )
    return Wish(axes, _dim(name, param, placement.dim))


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
