"""Names of mesh axes: a mesh from elsewhere, whose axes are called otherwise, under ours."""

from collections.abc import Mapping
from typing import Any

from torch.distributed import DeviceMesh

from parallel3d.errors import MeshError
from parallel3d.mesh.layout import AXES

__all__ = ["name_axes"]

# Names by which torch's own examples call the axes; the engine knows them too.
_ALIASES = {"dp_replicate": "replicate", "dp_shard": "shard"}


def name_axes(mesh: DeviceMesh, axes: Mapping[str, str] | None = None) -> DeviceMesh:
    """``mesh``, its axes named as ``axes`` says, over the same process groups.

    Args:
        axes: name in ``mesh`` -> ``"replicate"``, ``"shard"`` or ``"tp"``.

    Raises:
        MeshError: names that aren't known and that ``axes`` doesn't map, or a mapping that doesn't fit.
    """
    names = mesh.mesh_dim_names
    if axes is not None:
        _check(mesh, axes)
    if names is None:
        if mesh.ndim == 1 and axes is None:
            return mesh  # there is nothing to confuse: it shards, as in torch
        raise MeshError(
            f"mesh of shape {tuple(mesh.shape)} without names: which of its axes are {_listed(AXES)}? Make "
            "it with build_mesh, or give init_device_mesh mesh_dim_names="
        )
    named = tuple((axes or {}).get(name, name) for name in names)
    foreign = [name for name in named if _ALIASES.get(name, name) not in AXES]
    if foreign:
        shown = ", ".join(f"{n}={s}" for n, s in zip(names, mesh.shape, strict=True))
        example = ", ".join(f'"{name}": "{_guess(name)}"' for name in foreign)
        raise MeshError(
            f"mesh ({shown}): the axes {_listed(foreign)} are not known; an axis is {_listed(AXES)}. Say "
            f"what they are, such as parallelize(..., axes={{{example}}}), or give a submesh without them"
        )
    roles = [_ALIASES.get(name, name) for name in named]
    if len(set(roles)) < len(roles):
        raise MeshError(f"axes={dict(axes or {})!r} gives two axes of {names} one name: {named}")
    if named == names:
        return mesh
    groups = [mesh.get_group(i) for i in range(mesh.ndim)]
    group: Any = groups if mesh.ndim > 1 else groups[0]
    return DeviceMesh.from_group(
        group, mesh.device_type, mesh=mesh.mesh if mesh.ndim > 1 else None, mesh_dim_names=named
    )


def _check(mesh: DeviceMesh, axes: Any) -> None:
    if not isinstance(axes, Mapping) or not all(isinstance(name, str) for name in axes):
        raise MeshError(
            f"axes is {axes!r}; it must be a dict from the mesh's names to ours, such as "
            '{"data_parallel": "shard", "tensor_parallel": "tp"}'
        )
    for name, role in axes.items():
        if name not in (mesh.mesh_dim_names or ()):
            raise MeshError(
                f"axes: {name!r} is no axis of the mesh, which has {mesh.mesh_dim_names or 'no names'}"
            )
        if role not in AXES:
            raise MeshError(f"axes: {name!r} is given as {role!r}; an axis is {_listed(AXES)}")


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))


def _guess(name: str) -> str:
    low = name.lower()
    if any(word in low for word in ("tp", "tensor", "model")):
        return "tp"
    return "replicate" if any(word in low for word in ("repl", "ddp")) else "shard"
