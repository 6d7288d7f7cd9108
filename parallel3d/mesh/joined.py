"""joined_mesh: the mesh on which parameters lie, shard and cp as one axis; what is made for a mesh once."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import distributed as dist
from torch.distributed import DeviceMesh

from parallel3d._torch.dtensor import concatenate_meshes, flatten_axes, root_axes, root_mesh
from parallel3d.errors import MeshError
from parallel3d.mesh.axes import Role, axis_named, listed, names_of

_CP, _SHARD = names_of(Role.CONTEXT), names_of(Role.SHARDED)
_ATTRIBUTE = "_parallel3d_cache"  # of root meshes
T = TypeVar("T")


class _Cache(dict):
    """The process groups and meshes that the engine has made for a mesh.

    They can't be copied or pickled: a copy of a mesh begins without a cache. A pickled mesh has an empty dict
    of the standard library's instead, as ``torch.save`` writes the mesh of each DTensor, and
    ``torch.load(weights_only=True)`` allows no class of ours.
    """

    def __reduce__(self) -> tuple:
        return OrderedDict, ()


def kept_with(mesh: DeviceMesh, key: Hashable, make: Callable[[], T]) -> T:
    """Returns what ``make`` returned when first called for ``key`` and ``mesh``, or a slice of the same root.

    Making a process group is collective: all its ranks must call this in the same order.
    """
    attributes = vars(root_mesh(mesh))
    cache = attributes.get(_ATTRIBUTE)
    if type(cache) is not _Cache:  # none yet, or the dict of an unpickled mesh
        cache = attributes[_ATTRIBUTE] = _Cache()
    if key not in cache:
        cache[key] = make()
    return cache[key]


def joined_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh that parameters lie on: with the axes shard and cp of ``mesh`` as one, ``shard_cp``.

    Without cp it is ``mesh``, as it is where cp is the only axis, or one of two whose other's name is not
    known, which count by position. A cp of one rank is left out. The first call for a mesh makes process
    groups, which is collective, unless ``build_mesh`` made the mesh. Every call returns the same object.

    Raises:
        MeshError: cp does not come right after shard.
    """
    names = mesh.mesh_dim_names or ()
    cp = next((i for i, name in enumerate(names) if name in _CP), None)
    known = sum(axis_named(name) is not None for name in names)
    if cp is None or (known == 1 and mesh.ndim <= 2):
        return mesh
    return kept_with(mesh, ("joined", mesh), lambda: _join(mesh, names, cp))


def has_cp(mesh: DeviceMesh) -> bool:
    """Whether the ranks of ``mesh``, or of one that ``joined_mesh`` returned, share sequences."""
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)
    # Joined axes have several cp ranks.
    return any(size > 1 and name.split("_")[-1] in _CP for name, size in sizes)


def axis_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Returns axis -> size of a mesh with names; of an axis of ``joined_mesh``, those that it joins."""
    names, root, positions = mesh.mesh_dim_names or (), root_mesh(mesh), root_axes(mesh)
    if positions is None:
        return dict(zip(names, mesh.shape, strict=True))
    known: Any = root.mesh_dim_names
    return {known[i]: root.size(i) for axis in positions for i in axis}


def _join(mesh: DeviceMesh, names: tuple[str, ...], cp: int) -> DeviceMesh:
    if not cp or names[cp - 1] not in _SHARD:
        shown = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
        raise MeshError(
            f"mesh ({shown}): cp does not come right after shard. The axes are {listed()} in this order "
            "(dp_replicate and dp_shard are known too), as build_mesh(MeshLayout(shard=..., cp=...)) makes "
            "them"
        )
    shard, joined = names[cp - 1], names[cp - 1 : cp + 1]
    if mesh.size(cp) == 1:
        meshes = [mesh[name] for name in names if name not in _CP]
    else:
        # torch gives axes as long as the world one group: parameters would wait for attention's collectives.
        shares = mesh.size(cp) == dist.get_world_size()
        one = flatten_axes(mesh, joined, own_group=shares)
        meshes = [one if name == shard else mesh[name] for name in names if name not in _CP]
    return concatenate_meshes(meshes) if len(meshes) > 1 else meshes[0]
