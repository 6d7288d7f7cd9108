"""DataAxes: which axes of a DeviceMesh the engine replicates and shards over, found by name."""

from dataclasses import dataclass

from torch.distributed import DeviceMesh, ProcessGroup

from parallel3d.errors import MeshError

__all__ = ["DataAxes", "data_axes"]

_REPLICATE = ("replicate", "dp_replicate")
_SHARD = ("shard", "dp_shard")
_TP = ("tp",)
_NEVER = ("pp", "ep")  # their ranks hold different parameters


@dataclass(frozen=True)
class DataAxes:
    """The axes of ``mesh`` as the engine uses them.

    Attributes:
        mesh: the mesh the user gave, with one to three axes.
        replicate, shard, tp: positions of the axes in ``mesh``, or None where it has none.
    """

    mesh: DeviceMesh
    replicate: int | None
    shard: int | None
    tp: int | None

    def size(self, axis: int | None) -> int:
        """Ranks along ``axis``; 1 where the mesh has none."""
        return 1 if axis is None else self.mesh.size(axis)

    def group(self, axis: int) -> ProcessGroup:
        """This rank's process group along ``axis``."""
        return self.mesh.get_group(axis)

    def coordinate(self, axis: int | None) -> int:
        """This rank's place along ``axis``; a ``SymInt`` under simulated ranks."""
        return 0 if axis is None else self.mesh.get_local_rank(axis)

    @property
    def data_size(self) -> int:
        """Ranks that gradients are averaged over."""
        return self.size(self.replicate) * self.size(self.shard)


def data_axes(mesh: DeviceMesh) -> DataAxes:
    """Finds the axes of ``mesh`` by name.

    ``replicate`` / ``shard`` (also ``dp_replicate`` / ``dp_shard``) and ``tp`` decide where they
    appear. A one-axis mesh without such a name shards; two axes without such names are
    (replicate, shard) by position, as in ``torch.distributed.fsdp``.

    Raises:
        MeshError: shard before replicate, tp alone or not innermost, names that cannot be told apart.
    """
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    found = {
        role: next((i for i, name in enumerate(names) if name in known), None)
        for role, known in (("replicate", _REPLICATE), ("shard", _SHARD), ("tp", _TP))
    }
    unknown = [i for i in range(mesh.ndim) if i not in found.values()]
    for name in _NEVER:
        if name in names:
            _fail(
                mesh, f"axis {name!r} is none to shard or replicate over: give a submesh without it"
            )
    if unknown and found["tp"] is None and mesh.ndim <= 2:
        _place_by_position(mesh, found, unknown)
    elif unknown:
        _fail(mesh, f"axis {names[unknown[0]]!r} is not known")
    _check_order(mesh, found)
    return DataAxes(mesh, found["replicate"], found["shard"], found["tp"])


def _place_by_position(mesh: DeviceMesh, found: dict[str, int | None], unknown: list[int]) -> None:
    if mesh.ndim == 1:
        found["shard"] = 0
    elif len(unknown) == 2:
        found["replicate"], found["shard"] = 0, 1
    else:
        role = "shard" if found["shard"] is None else "replicate"
        found[role] = unknown[0]


def _check_order(mesh: DeviceMesh, found: dict[str, int | None]) -> None:
    replicate, shard, tp = found["replicate"], found["shard"], found["tp"]
    if replicate is None and shard is None:
        _fail(mesh, "it has no axis to shard or replicate over")
    if replicate is not None and shard is not None and shard < replicate:
        _fail(mesh, "shard comes before replicate")
    if tp is not None and tp != mesh.ndim - 1:
        _fail(mesh, "tp is not the innermost axis")


def _fail(mesh: DeviceMesh, why: str) -> None:
    shown = ", ".join(
        f"{name}={size}"
        for name, size in zip(mesh.mesh_dim_names or "?" * mesh.ndim, mesh.shape, strict=True)
    )
    raise MeshError(
        f"mesh ({shown}): {why}. The engine takes the axes replicate, shard, tp in this order "
        "(tp and replicate may be missing; dp_replicate and dp_shard are known too), as "
        "parallel3d.build_mesh(MeshLayout(replicate=..., shard=..., tp=...)) makes them"
    )
