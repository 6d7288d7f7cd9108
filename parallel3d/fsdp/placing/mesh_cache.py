"""Process groups and meshes that the engine makes for a mesh or cuts out of it, once, and keeps with it."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

from torch.distributed import DeviceMesh

from parallel3d._compat import concatenate_meshes, root_mesh

__all__ = ["axis_of", "joined", "kept_with"]

_ATTRIBUTE = "_parallel3d_cache"
T = TypeVar("T")


class _Cache(dict):
    """Process groups can't be copied or pickled: a copy of a mesh begins without a cache.

    A pickled mesh has an empty dict of the standard library's in its place: ``torch.save`` writes the mesh of
    each DTensor, and ``torch.load(weights_only=True)`` knows no class of ours.
    """

    def __reduce__(self) -> tuple:
        return OrderedDict, ()


def kept_with(mesh: DeviceMesh, key: Hashable, make: Callable[[], T]) -> T:
    """What ``make`` returned when it was first called for ``key`` and ``mesh``, or another slice of its root.

    Making a process group is collective: all its ranks must come here in the same order.
    """
    attributes = vars(root_mesh(mesh))
    cache = attributes.get(_ATTRIBUTE)
    if type(cache) is not _Cache:  # none yet, or what a copy has in its place
        cache = attributes[_ATTRIBUTE] = _Cache()
    if key not in cache:
        cache[key] = make()
    return cache[key]


def axis_of(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """``mesh[name]``: cutting an axis out takes half a millisecond, and every parameter asks for it."""
    return kept_with(mesh, ("axis", mesh, name), lambda: mesh[name])


def joined(data: DeviceMesh, own: DeviceMesh) -> DeviceMesh:
    """One mesh with the axes of both, which must be slices of one root mesh."""
    if root_mesh(own) is not root_mesh(data):
        return concatenate_meshes([data, own])  # raises
    return kept_with(data, ("joined", data, own), lambda: concatenate_meshes([data, own]))
