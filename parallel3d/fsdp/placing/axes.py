"""DataAxes: which axes of a DeviceMesh the engine replicates and shards over, found by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.errors import MeshError

__all__ = ["DataAxes", "Spmd", "checked_mesh", "data_axes"]

_REPLICATE = ("replicate", "dp_replicate")
_SHARD = ("shard", "dp_shard")
_TP = ("tp",)
_NEVER = ("pp", "ep")  # their ranks hold different parameters


@dataclass(frozen=True, eq=False)
class Spmd:
    """What ``dp_mesh_dims`` adds: parameters that are DTensors on the data axes too.

    Attributes:
        mesh: the whole mesh, on which forward sees the parameters.
        own: position in it -> position at rest, of the axes that are no data axes.
        replicas: positions at rest of the replicate axes.
        replicate: them as one axis, if they are several at rest.
    """

    mesh: DeviceMesh
    own: Mapping[int, int]
    replicas: tuple[int, ...]
    replicate: DeviceMesh | None


@dataclass(frozen=True)
class DataAxes:
    """The axes of ``mesh`` as the engine uses them.

    Attributes:
        mesh: the mesh that parameters lie on at rest (save for axes that they bring themselves).
        replicate, shard, tp: positions of the axes in ``mesh``, or None where it has none. Where several
            axes replicate (``dp_mesh_dims``), the first of them stands for all.
        spmd: see ``Spmd``; None without ``dp_mesh_dims``.
        over_replicate: whether the shards at rest are cut over replicate too; see ``hybrid_bucket``.
    """

    mesh: DeviceMesh
    replicate: int | None
    shard: int | None
    tp: int | None
    spmd: Spmd | None = None
    over_replicate: bool = False

    def size(self, axis: int | None) -> int:
        """Ranks along ``axis``; 1 where the mesh has none."""
        if axis is None:
            return 1
        several = self._several(axis)
        return self.mesh.size(axis) if several is None else several.size()

    def group(self, axis: int) -> ProcessGroup:
        """This rank's process group along ``axis``."""
        several = self._several(axis)
        return self.mesh.get_group(axis) if several is None else several.get_group()

    def _several(self, axis: int) -> DeviceMesh | None:
        return self.spmd.replicate if self.spmd is not None and axis == self.replicate else None

    @property
    def replicas(self) -> tuple[int, ...]:
        """Positions of all axes that replicate."""
        if self.spmd is not None:
            return self.spmd.replicas
        return () if self.replicate is None else (self.replicate,)

    def coordinate(self, axis: int | None) -> int:
        """This rank's place along ``axis``; a ``SymInt`` under simulated ranks."""
        return 0 if axis is None else self.mesh.get_local_rank(axis)

    @property
    def parts(self) -> int:
        """Into how many parts a parameter is cut at rest."""
        return self.data_size if self.over_replicate else self.size(self.shard)

    @property
    def part_index(self) -> int:
        """Which of the parts is this rank's; a ``SymInt`` under simulated ranks."""
        index = self.coordinate(self.shard)
        if self.over_replicate:
            # Neighbours along replicate hold neighbouring parts: those of one shard rank are in one piece.
            index = index * self.size(self.replicate) + self.coordinate(self.replicate)
        return index

    @cached_property
    def data_size(self) -> int:
        """Ranks that gradients are averaged over."""
        return self.size(self.replicate) * self.size(self.shard)


def data_axes(mesh: DeviceMesh) -> DataAxes:
    """Finds the axes of ``mesh`` by name.

    ``replicate`` / ``shard`` (also ``dp_replicate`` / ``dp_shard``) and ``tp`` decide where they
    appear. A one-axis mesh without such a name shards; two axes of other names are (replicate, shard) by
    position, as in ``torch.distributed.fsdp``.

    Raises:
        MeshError: shard before replicate, tp alone or not innermost, several axes without names or with names
            that cannot be told apart.
    """
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    found = {
        role: next((i for i, name in enumerate(names) if name in known), None)
        for role, known in (("replicate", _REPLICATE), ("shard", _SHARD), ("tp", _TP))
    }
    unknown = [i for i in range(mesh.ndim) if i not in found.values()]
    for name in _NEVER:
        if name in names and mesh.ndim > 1:  # alone it says what it is used for
            _fail(
                mesh, f"axis {name!r} is none to shard or replicate over: give a submesh without it"
            )
    if mesh.ndim > 1 and mesh.mesh_dim_names is None:
        _fail(mesh, "its axes have no names, so that nobody can tell which of them replicates")
    if unknown and found["tp"] is None and mesh.ndim <= 2:
        _place_by_position(mesh, found, unknown)
    elif unknown:
        first = names[unknown[0]]
        _fail(mesh, f"axis {first!r} is not known")
    _check_order(mesh, found)
    return DataAxes(mesh, found["replicate"], found["shard"], found["tp"])


def checked_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """``mesh``; for None, one axis over all ranks, on the accelerator if there is one.

    As torch does, None initialises the default process group if there is none.

    Raises:
        MeshError: not a mesh, one that this rank is not in, or no process group and no way to make one.
    """
    if mesh is None:
        return _default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"mesh is {mesh!r}; it must be a DeviceMesh, as parallel3d.build_mesh makes, or None"
        )
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"this rank is not in {mesh}; call fully_shard on the ranks of its mesh only, or give each rank "
            "a mesh that it is in"
        )
    return mesh


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except (ValueError, RuntimeError) as error:
            raise MeshError(
                "mesh is None and there is no default process group, nor can one be initialised: "
                f"{error}. Start the program with torchrun, or call torch.distributed.init_process_group "
                "first, or give a mesh"
            ) from error
    # Available: a CUDA build names CUDA also on a machine without a GPU.
    device = torch.accelerator.current_accelerator(check_available=True)
    # Unnamed, as torch makes it: DTensors of both compute together.
    return init_device_mesh(device.type if device is not None else "cpu", (dist.get_world_size(),))


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
