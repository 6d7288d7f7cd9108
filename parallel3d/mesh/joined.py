"""joined_mesh: the mesh on which parameters lie, shard and cp as one axis; ExpertView: that of experts."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import prod
from typing import Any, Self, TypeVar

from torch import distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from parallel3d._torch.dtensor import (
    concatenate_meshes,
    flatten_axes,
    root_axes,
    root_mesh,
    unflatten_mesh,
)
from parallel3d.errors import MeshError
from parallel3d.mesh.axes import EXPERT, Role, axis_named, listed, names_of

_CP, _SHARD = names_of(Role.CONTEXT), names_of(Role.SHARDED)
_TP, _REPLICATE = names_of(Role.TENSOR_PARALLEL), names_of(Role.REPLICATED)
_ATTRIBUTE = "_parallel3d_cache"  # of root meshes
T = TypeVar("T")


class MeshAxis:
    """One axis of a mesh, as seen from this rank.

    Attributes:
        mesh: the axis as a DeviceMesh.
        size: the number of ranks.
        rank: this rank's coordinate; under simulated ranks a ``SymInt`` that differs by rank.
        group: its process group.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.group: ProcessGroup = mesh.get_group()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied model runs on the same ranks; process groups can't be copied


class _Cache(dict):
    """The process groups and meshes derived from a root mesh, which ``kept_with`` has stored with it.

    They can't be copied or pickled: a copied mesh begins with an empty cache. A pickled one has an
    OrderedDict in its place: ``torch.save`` writes the mesh of each DTensor, and
    ``torch.load(weights_only=True)`` allows no class of ours.
    """

    def __reduce__(self) -> tuple:
        return OrderedDict, ()


def kept_with(mesh: DeviceMesh, key: Hashable, make: Callable[[], T]) -> T:
    """Returns ``make()``, which is called once for each ``key`` and root mesh of ``mesh``.

    If ``make`` makes a process group, all its ranks must call this in the same order.
    """
    attributes = vars(root_mesh(mesh))
    cache = attributes.get(_ATTRIBUTE)
    if type(cache) is not _Cache:  # none yet, or the dict of an unpickled mesh
        cache = attributes[_ATTRIBUTE] = _Cache()
    if key not in cache:
        cache[key] = make()
    return cache[key]


def joined_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh that parameters are sharded on: the axes shard and cp of ``mesh`` become ``shard_cp``.

    It is ``mesh`` itself if there is no cp, if cp is the only axis, or if there are two axes and the other's
    name is unknown, so that axes count by position. A cp of one rank is left out. The first call for a mesh
    creates process groups, which is collective, unless ``build_mesh`` made the mesh. Every call returns the
    same object.

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
    """Returns {axis: size} of a mesh with names; for a joined axis, such as ``shard_cp``, its two axes."""
    names, root, positions = mesh.mesh_dim_names or (), root_mesh(mesh), root_axes(mesh)
    if positions is None:
        return dict(zip(names, mesh.shape, strict=True))
    known: Any = root.mesh_dim_names
    return {known[i]: root.size(i) for axis in positions for i in axis}


@dataclass(frozen=True, eq=False)
class ExpertView:
    """A second view of a mesh's ranks, as axes (replicate, efsdp, ep): experts lie on these.

    A rank's gradient of an expert is the sum over all tokens routed to it in its ep group. Summed over
    ``data`` it is divided by ``mean_over``, the number of ranks with different tokens.
    """

    data: DeviceMesh  # the axes (replicate, efsdp), without replicate if the mesh has none
    ep: DeviceMesh  # innermost: its ranks hold different experts
    mean_over: int


_VIEW = "experts"


def make_expert_view(mesh: DeviceMesh, ep: int) -> ExpertView:
    """Makes the view of ``mesh`` in which ``ep`` neighbours share the experts, and stores it with the mesh.

    ``build_mesh(MeshLayout(..., ep=...))`` calls this itself; call it for other meshes. It creates process
    groups: all ranks must call it.

    Args:
        mesh: a mesh with names that ``parallelize`` takes.
        ep: divides shard x cp x tp.

    Raises:
        MeshError: ``ep`` doesn't divide shard x cp x tp, or the mesh has another view already.
    """
    names = mesh.mesh_dim_names or ()
    inner = tuple(name for name in names if name in (*_SHARD, *_CP, *_TP))
    ranks = prod(mesh.size(names.index(name)) for name in inner)
    if type(ep) is not int or ep < 1 or ranks % ep:
        raise MeshError(
            f"ep={ep!r} doesn't divide {' x '.join(inner) or 'the axes shard, cp and tp'} = {ranks} of the "
            f"mesh {names}; it may be {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}"
        )

    def make() -> ExpertView:
        one = flatten_axes(mesh, inner) if len(inner) > 1 else mesh[inner[0]]
        both = unflatten_mesh(one, (ranks // ep, ep), ("efsdp", EXPERT.name))
        data = [mesh[name] for name in names if name in _REPLICATE] + [both["efsdp"]]
        tokens = prod(mesh.size(names.index(n)) for n in names if n not in _TP)
        return ExpertView(
            concatenate_meshes(data) if len(data) > 1 else data[0], both[EXPERT.name], tokens
        )

    view = kept_with(mesh, _VIEW, make)
    if view.ep.size() != ep:
        raise MeshError(f"ep={ep}, but the mesh {names} has a view with ep={view.ep.size()}")
    return view


def expert_view(mesh: DeviceMesh) -> ExpertView | None:
    """Returns the ``ExpertView`` made of ``mesh``, or of another slice of its root mesh; None without one."""
    cache = vars(root_mesh(mesh)).get(_ATTRIBUTE)
    return cache.get(_VIEW) if type(cache) is _Cache else None


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
