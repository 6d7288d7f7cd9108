"""Process groups and meshes that the engine makes for a mesh, made once and kept with it."""

from collections.abc import Callable, Hashable
from typing import TypeVar

from torch.distributed import DeviceMesh

from parallel3d._compat import root_mesh

__all__ = ["kept_with"]

_ATTRIBUTE = "_parallel3d_cache"
T = TypeVar("T")


class _Cache(dict):
    """Process groups can't be copied or pickled: a copy of a mesh begins with an empty cache."""

    def __reduce__(self) -> tuple:
        return _Cache, ()


def kept_with(mesh: DeviceMesh, key: Hashable, make: Callable[[], T]) -> T:
    """What ``make`` returned when it was first called for ``key`` and ``mesh``, or another slice of its root.

    Making a process group is collective: all its ranks must come here in the same order.
    """
    cache = vars(root_mesh(mesh)).setdefault(_ATTRIBUTE, _Cache())
    if key not in cache:
        cache[key] = make()
    return cache[key]
