"""The one process group of all ranks that must agree."""

from __future__ import annotations

from torch import distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from parallel3d._compat import flatten_axes
from parallel3d.errors import MeshError

__all__ = ["group_of"]


def group_of(mesh: DeviceMesh | None, what: str) -> ProcessGroup | None:
    """The group over all axes of ``mesh``, made once; the default group for None; None without one.

    Raises:
        MeshError: not a mesh, one that this rank is not in, or one whose axes have no names.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise MeshError(f"{what}: mesh is {mesh!r}; it must be a DeviceMesh, or None for all ranks")
    if not dist.is_initialized():
        return None
    if mesh is None or mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    if mesh.get_coordinate() is None:
        raise MeshError(f"{what}: this rank is not in {mesh}; give one that it is in, or None")
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.mesh_dim_names is None:
        raise MeshError(
            f"{what}: {mesh} has several axes without names and not all ranks; name them, as "
            "parallel3d.build_mesh does"
        )
    return flatten_axes(mesh, mesh.mesh_dim_names).get_group()
