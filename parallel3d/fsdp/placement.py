"""DataAxes and ParamAxes: the mesh axes of the engine and of one parameter, and the dims they shard.

The engine's axes are replicate and shard. A parameter may have *own* axes, of tensor or expert parallelism:
those shard it first, and the shard axis shards what they leave. At rest it is one DTensor on all these axes;
the engine shards only dims for which a DTensor's placements tell which rows each rank has.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from parallel3d._layout.packed import PackedShard
from parallel3d._layout.packing import Packing
from parallel3d._layout.param_layout import local_chunk
from parallel3d._torch.dtensor import (
    StridedShard,
    concatenate_meshes,
    flatten_axes,
    root_mesh,
    unflatten_mesh,
)
from parallel3d._torch.fully_shard import DataParallelMeshDims, ShardPlacementResult
from parallel3d.errors import MeshError, Parallel3dError, RefusedError, UnnamedAxesError
from parallel3d.fsdp.layout import block_dim, ceil_div, default_dim, is_exact
from parallel3d.mesh.axes import Role, names_of
from parallel3d.mesh.joined import expert_view, joined_mesh, kept_with

_REPLICATE, _SHARD = names_of(Role.REPLICATED), names_of(Role.SHARDED)
_TP = names_of(Role.TENSOR_PARALLEL)
_EFSDP = "efsdp"  # of the experts' view
_NEVER = ("pp", "ep")  # their ranks hold different parameters


@dataclass(frozen=True, eq=False)
class Spmd:
    """With ``dp_mesh_dims``: the mesh on which parameters are DTensors in forward, data axes included."""

    mesh: DeviceMesh  # the whole, on which forward sees the parameters
    own: Mapping[int, int]  # of axes that are no data axes: position in ``mesh`` -> at rest
    replicas: tuple[int, ...]  # positions at rest of the replicate axes
    replicate: DeviceMesh | None  # these as one axis, if there are several at rest


@dataclass(frozen=True)
class DataAxes:
    """The mesh that the engine uses, and the positions in it of its axes by role; None: no such axis.

    If several axes replicate, ``replicate`` is the first. ``mean_over``: the number of ranks that gradients
    are averaged over, if not ``data_size``: experts' gradients are summed over ep by the token exchange.
    """

    mesh: DeviceMesh  # that parameters lie on at rest, besides axes of their own
    replicate: int | None
    shard: int | None
    tp: int | None
    spmd: Spmd | None = None  # by ``dp_mesh_dims``
    over_replicate: bool = False  # whether parameters are sharded over it too; see ``HybridBucket``
    mean_over: int | None = None

    def size(self, axis: int | None) -> int:
        if axis is None:
            return 1
        joined = self._joined_replicate(axis)
        return self.mesh.size(axis) if joined is None else joined.size()

    def group(self, axis: int) -> ProcessGroup:
        joined = self._joined_replicate(axis)
        return self.mesh.get_group(axis) if joined is None else joined.get_group()

    def _joined_replicate(self, axis: int) -> DeviceMesh | None:
        return self.spmd.replicate if self.spmd is not None and axis == self.replicate else None

    @property
    def replicas(self) -> tuple[int, ...]:
        """Positions of all replicate axes."""
        if self.spmd is not None:
            return self.spmd.replicas
        return () if self.replicate is None else (self.replicate,)

    def coordinate(self, axis: int | None) -> int:
        """Returns this rank's coordinate on ``axis``, 0 for None; a ``SymInt`` under simulated ranks."""
        return 0 if axis is None else self.mesh.get_local_rank(axis)

    def data_ranks(self) -> list[int]:
        """Returns the global ranks of this rank's data-parallel group (shard and replicate)."""
        data = {self.shard, *self.replicas}
        here = self.mesh.get_coordinate()
        assert here is not None
        place = tuple(slice(None) if axis in data else at for axis, at in enumerate(here))
        return sorted(self.mesh.mesh[place].flatten().tolist())

    @property
    def num_shards(self) -> int:
        """Number of ranks that a parameter is sharded over at rest."""
        return self.data_size if self.over_replicate else self.size(self.shard)

    @property
    def part_index(self) -> int:
        """Index of this rank's shard; a ``SymInt`` under simulated ranks."""
        index = self.coordinate(self.shard)
        if self.over_replicate:
            # Ranks of one shard coordinate have consecutive shards.
            index = index * self.size(self.replicate) + self.coordinate(self.replicate)
        return index

    @cached_property
    def data_size(self) -> int:
        """Number of data ranks: the product of replicate and shard."""
        return self.size(self.replicate) * self.size(self.shard)


def data_axes(mesh: DeviceMesh) -> DataAxes:
    """Finds the axes of ``mesh`` by name.

    The names ``replicate`` / ``shard`` (also ``dp_replicate`` / ``dp_shard``), ``cp`` and ``tp`` are
    recognised. With cp the axes are those of ``joined_mesh(mesh)``. A one-axis mesh without such a name
    shards; two axes of other names are (replicate, shard) by position, as in ``torch.distributed.fsdp``.

    Raises:
        MeshError: shard comes before replicate, cp is not right after the data axes, tp is alone or not
            innermost, or the mesh has several axes without names or with names that are not recognised.
    """
    mesh = joined_mesh(mesh)
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    found: dict[str, int | None] = {
        role: next((i for i, name in enumerate(names) if name in known), None)
        for role, known in (("replicate", _REPLICATE), ("shard", _SHARD), ("tp", _TP))
    }
    unknown = [i for i in range(mesh.ndim) if i not in found.values()]
    for name in _NEVER:
        if name in names and mesh.ndim > 1:  # as the only axis it is meant to be used
            why = f"axis {name!r} is not one to shard or replicate over: give a submesh without it"
            _fail(mesh, why)
    if mesh.ndim > 1 and mesh.mesh_dim_names is None:
        why = "its axes have no names, so it is unknown which of them replicates"
        _fail(mesh, why, UnnamedAxesError)
    if unknown:
        if found["tp"] is not None or mesh.ndim > 2:
            _fail(mesh, f"axis {names[unknown[0]]!r} is not known")
        free = [role for role in ("replicate", "shard") if found[role] is None]
        found.update(zip(free[-len(unknown) :], unknown, strict=True))  # a single axis shards
    replicate, shard, tp = found["replicate"], found["shard"], found["tp"]
    if replicate is None and shard is None:
        _fail(mesh, "it has no axis to shard or replicate over")
    if replicate is not None and shard is not None and shard < replicate:
        _fail(mesh, "shard comes before replicate")
    if tp is not None and tp != mesh.ndim - 1:
        _fail(mesh, "tp is not the innermost axis")
    view = expert_view(mesh) if _EFSDP in names else None
    return DataAxes(mesh, replicate, shard, tp, mean_over=None if view is None else view.mean_over)


def checked_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Returns ``mesh`` after checks. For None returns a mesh of one axis over all ranks, on the accelerator
    if there is one, and initialises the default process group if there is none, as torch does.

    Raises:
        MeshError: ``mesh`` is no mesh or lacks this rank, or no process group can be initialised.
    """
    if mesh is None:
        return _default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"mesh is {mesh!r}; it must be a DeviceMesh, as parallel3d.build_mesh makes, or None"
        )
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"this rank is not in {mesh}; call fully_shard only on the ranks of its mesh"
        )
    return mesh


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except (ValueError, RuntimeError) as error:
            raise MeshError(
                f"mesh is None, and no default process group exists or can be initialised: {error}. Start "
                "the program with torchrun, call torch.distributed.init_process_group first, or give a mesh"
            ) from error
    # check_available: a CUDA build returns CUDA also on a machine without a GPU.
    device = torch.accelerator.current_accelerator(check_available=True)
    # Unnamed, as torch makes it, so that DTensors of both can be used together.
    return init_device_mesh(device.type if device is not None else "cpu", (dist.get_world_size(),))


@cache
def warn_of_replicas() -> None:
    """Warns once about a one-axis mesh named ``dp_replicate``: the engine replicates, torch would shard."""
    warnings.warn(
        "parameters are replicated over the mesh's only axis, as it is named 'dp_replicate'; torch's "
        "fully_shard shards over a mesh of one axis whatever its name. Name it 'dp_shard' to shard, or "
        "'replicate' to replicate without this warning",
        stacklevel=2,
    )


def _fail(mesh: DeviceMesh, why: str, kind: type[MeshError] = MeshError) -> NoReturn:
    axes = zip(mesh.mesh_dim_names or "?" * mesh.ndim, mesh.shape, strict=True)
    shown = ", ".join(f"{name}={size}" for name, size in axes)
    raise kind(
        f"mesh ({shown}): {why}. The engine takes the axes replicate, shard, cp, tp in this order "
        "(tp, cp and replicate may be missing; dp_replicate and dp_shard are known too), as "
        "parallel3d.build_mesh(MeshLayout(replicate=..., shard=..., cp=..., tp=...)) makes them"
    )


class ParamAxes:
    """The mesh axes that one parameter lies on: the engine's data axes, and its own axes (tp, ep).

    *Part* means what the own axes leave of the parameter on a rank, before the engine shards it.

    Attributes:
        data: the engine's axes.
        mesh: the mesh of the sharded Parameter, with all axes.
        compute_mesh: the mesh of the DTensor that the parameter was; for a plain one the tp axis, or None.
        compute_placements: its placements there, ``Replicate()`` on data axes.
        cuts: (position in ``compute_mesh``, dim) of the own axes that shard, outermost first.
        summed: (position in ``compute_mesh``, position in ``mesh``) of the own axis over which gradients may
            be partial. None if no own axis, or more than one, has several ranks.
    """

    def __init__(self, name: str, param: nn.Parameter, data: DataAxes) -> None:
        self.data = data
        self.compute_mesh: DeviceMesh | None
        self.compute_placements: tuple[Placement, ...]
        if data.spmd is not None:
            self._from_spmd(name, param)
        elif isinstance(param, DTensor):
            self._from_dtensor(name, param)
        elif data.mean_over is not None:
            raise MeshError(
                f"parameter {name} is whole on each rank of ep, whose tokens the mesh {data.mesh} of experts "
                "doesn't sum over; give parallelize the model and a mesh with ep, which divides the experts, "
                "or fully_shard the mesh itself, not its view"
            )
        else:
            self._from_plain()
        self.cuts = [
            (axis, placement.dim)
            for axis, placement in enumerate(self.compute_placements)
            if isinstance(placement, Shard)
        ]
        self._check_packed(name)
        self.summed: tuple[int, int] | None = None
        several = [(axis, rest) for rest, axis in self._at_rest.items() if self._size(axis) > 1]
        alone = data.spmd is not None or self.compute_mesh is None or self.compute_mesh.ndim == 1
        if alone and len(several) == 1:
            self.summed = several[0]

    # These set ``_at_rest``, for the own axes: position in ``mesh`` -> position in ``compute_mesh``.

    def _from_plain(self) -> None:
        self.mesh, self._at_rest = self.data.mesh, {}
        self.compute_mesh, self.compute_placements = None, ()
        if self.data.tp is not None:
            mesh, name = self.mesh, (self.mesh.mesh_dim_names or ())[self.data.tp]
            # Kept, as slicing takes half a millisecond, and is done for every parameter.
            self.compute_mesh = kept_with(mesh, ("axis", mesh, name), lambda: mesh[name])
            self.compute_placements = (Replicate(),)
            self._at_rest = {self.data.tp: 0}

    def _from_dtensor(self, name: str, param: DTensor) -> None:
        data, own = self.data, param.device_mesh
        self.compute_mesh, self.compute_placements = own, param.placements
        for placement in self.compute_placements:
            _check_own(name, placement)
        if own.device_type != data.mesh.device_type:
            raise MeshError(
                f"parameter {name} is a DTensor on {own.device_type} and fully_shard's mesh is on "
                f"{data.mesh.device_type}; make both meshes for one device type"
            )
        if data.tp is None:
            self.mesh = _joined(name, data.mesh, own)
            self._at_rest = {data.mesh.ndim + axis: axis for axis in range(own.ndim)}
            return
        if own.ndim != 1 or own.size() != data.mesh.size(data.tp):
            raise MeshError(
                f"parameter {name} is a DTensor on {own}, which is not the tp axis of {data.mesh}"
            )
        self.mesh, self._at_rest = data.mesh, {data.tp: 0}

    def _from_spmd(self, name: str, param: nn.Parameter) -> None:
        spmd = self.data.spmd
        assert spmd is not None
        names = spmd.mesh.mesh_dim_names or ()
        if not isinstance(param, DTensor) or param.device_mesh != spmd.mesh:
            what = f"a DTensor on {param.device_mesh}" if isinstance(param, DTensor) else "plain"
            raise MeshError(
                f"parameter {name} is {what}; with dp_mesh_dims all parameters must be DTensors on the "
                f"mesh given, {spmd.mesh}, as torch.distributed.tensor.distribute_module makes them"
            )
        for axis, placement in enumerate(param.placements):
            if axis in spmd.own:
                _check_own(name, placement)
            elif not isinstance(placement, Replicate):
                raise MeshError(
                    f"parameter {name} has placement {placement!r} on axis {names[axis]!r}, which "
                    "dp_mesh_dims names as a data axis; it must be Replicate() there"
                )
        self.mesh = self.data.mesh
        self.compute_mesh, self.compute_placements = param.device_mesh, param.placements
        self._at_rest = {rest: axis for axis, rest in spmd.own.items()}

    # -- own axes ------------------------------------------------------------------------------------

    def _size(self, axis: int) -> int:
        assert self.compute_mesh is not None
        return self.compute_mesh.size(axis)

    def _coordinate(self, axis: int) -> int:
        assert self.compute_mesh is not None
        return self.compute_mesh.get_local_rank(axis)

    @property
    def summed_group(self) -> ProcessGroup:
        assert self.summed is not None and self.compute_mesh is not None
        return self.compute_mesh.get_group(self.summed[0])

    def lacks_sum(self, source: tuple[Placement, ...], target: tuple[Placement, ...]) -> bool:
        """Returns whether placements ``source`` become ``target`` by one sum over the axis ``summed``."""
        assert self.summed is not None
        axis = self.summed[0]
        partial = source[axis]
        if type(partial) is not Partial or partial.reduce_op != "sum":
            return False
        return (*source[:axis], *source[axis + 1 :]) == (*target[:axis], *target[axis + 1 :])

    def _check_packed(self, name: str) -> None:
        for axis, dim in self.cuts:
            others = sum(d == dim and self._size(a) > 1 for a, d in self.cuts if a != axis)
            if self.packing(axis) is not None and others:
                raise Parallel3dError(
                    f"parameter {name} is {self.compute_placements} on {self.compute_mesh}: only one of "
                    "its axes may shard a dim with packed rows"
                )

    def packing(self, axis: int) -> Packing | None:
        """Returns the ``Packing`` of own axis ``axis``: which rows ranks have; None: ``torch.chunk``'s."""
        placement = self.compute_placements[axis]
        return placement.packing if isinstance(placement, PackedShard) else None

    def largest_length(self, axis: int, size: int) -> int:
        """Returns the most rows that a rank gets when the own axis ``axis`` shards ``size`` rows."""
        packing = self.packing(axis)
        return ceil_div(size, self._size(axis)) if packing is None else max(packing.lengths)

    def length(self, axis: int, size: int, rank: int) -> int:
        """Returns the number of rows that ``rank`` gets when the own axis ``axis`` shards ``size`` rows."""
        packing = self.packing(axis)
        if packing is None:
            return chunk_length(size, self._size(axis), rank)
        return packing.length_on(rank)

    def joined(self, axis: int, dim: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the tensor that ``axis`` has sharded on ``dim``, from the ``parts`` of all its ranks."""
        packing = self.packing(axis)
        return torch.cat(list(parts), dim=dim) if packing is None else packing.join(parts)

    def largest(self, shape: Sequence[int]) -> list[int]:
        """Returns the shape of the largest part that any rank has of ``shape``."""
        sizes = list(shape)
        for axis, dim in self.cuts:
            sizes[dim] = self.largest_length(axis, sizes[dim])
        return sizes

    def mine(self, shape: Sequence[int]) -> list[int]:
        """Returns the shape of this rank's part of ``shape``; SymInts under simulated ranks."""
        sizes = list(shape)
        for axis, dim in self.cuts:
            sizes[dim] = self.length(axis, sizes[dim], self._coordinate(axis))
        return sizes

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        for axis, dim in self.cuts:
            packing = self.packing(axis)
            if packing is None:
                whole = local_chunk(whole, dim, self._size(axis), self._coordinate(axis))
            else:
                whole = packing.take(whole, self._coordinate(axis))
        return whole

    def ways(self, dim: int) -> int:
        """Returns the number of parts that the own axes shard ``dim`` into."""
        return prod(self._size(axis) for axis, cut in self.cuts if cut == dim)

    def are_even(self, shape: Sequence[int]) -> bool:
        """Returns whether the parts of a parameter of ``shape`` have the same shape on all ranks."""
        return all(
            shape[dim] % self.ways(dim) == 0 and self._cuts_evenly(axis) for axis, dim in self.cuts
        )

    def _cuts_evenly(self, axis: int) -> bool:
        packing = self.packing(axis)
        return packing is None or packing.is_even

    def replicating_groups(self) -> list[ProcessGroup]:
        """Returns the process groups of the own axes that replicate the parameter."""
        cutting = {axis for axis, _ in self.cuts}
        own = sorted(axis for axis in self._at_rest.values() if axis not in cutting)
        mesh = self.compute_mesh
        return [mesh.get_group(axis) for axis in own if mesh is not None and mesh.size(axis) > 1]

    # -- the shard axis ------------------------------------------------------------------------------

    def placements(
        self, dim: int | None, shape: Sequence[int] = (), rows: int = 1
    ) -> list[Placement]:
        """Returns the placements on ``mesh`` of the parameter when the engine shards ``dim`` (None: nothing).

        Args:
            shape: the parameter's shape. rows: how many rows stay together in a shard, see ``block_dim``.
        """
        result: list[Placement] = [Replicate() for _ in range(self.mesh.ndim)]
        for rest, axis in self._at_rest.items():
            result[rest] = self.compute_placements[axis]
        if dim is None:
            return result
        if rows > 1 and self.data.shard is not None:
            result[self.data.shard] = self._in_blocks(dim, shape[dim], rows)
            return result
        data, factor = self.data, prod(self._cuts_around(dim)[1])
        if data.shard is not None:
            result[data.shard] = shard_placement(dim, factor)
        if data.over_replicate and data.replicate is not None:
            result[data.replicate] = shard_placement(dim, factor * data.size(data.shard))
        return result

    def _in_blocks(self, dim: int, size: int, rows: int) -> PackedShard:
        """Returns the placement on shard for ``dim`` of ``size`` rows, of which each ``rows`` stay together.
        If own axes shard ``dim`` too, their parts are sharded so."""
        ways, parts = self.ways(dim), self.data.num_shards
        each = size // ways
        chunk = ceil_div(each, parts * rows) * rows
        starts = [(part * each, part * each + each) for part in range(ways)]
        of_rank = [
            tuple(
                (first + rank * chunk, min(chunk, end - first - rank * chunk))
                for first, end in starts
                if rank * chunk < each
            )
            for rank in range(parts)
        ]
        return PackedShard(Packing(dim, tuple(of_rank)))

    def in_blocks(self, shape: Sequence[int], block: int) -> tuple[int | None, int]:
        """Returns (dim to shard, how many of its rows stay together) for whole blocks; see ``block_dim``."""
        works, cut = self.dims(shape), {dim for _, dim in self.cuts}
        parts = self.data.num_shards
        dim, rows = block_dim(shape, self.largest(shape), works, cut, parts, block)
        own = any(self.packing(axis) is not None for axis, _ in self.cuts)
        plain = self.data.spmd is None and not self.data.over_replicate and not own
        if rows == 1 or (plain and self.are_even(shape)):
            return dim, rows
        return default_dim(self.largest(shape), works, cut, parts), 1

    def gradient_placements(self, source: tuple[Placement, ...]) -> tuple[Placement, ...]:
        """Returns the placements that a gradient with placements ``source`` is redistributed to: the
        parameter's, but ``Partial`` stays on data axes (``dp_mesh_dims``), over which the engine's reduction
        sums."""
        spmd = self.data.spmd
        if spmd is None:
            return self.compute_placements
        return tuple(
            present if axis not in spmd.own and isinstance(present, Partial) else own
            for axis, (present, own) in enumerate(zip(source, self.compute_placements, strict=True))
        )

    def dims(self, shape: Sequence[int]) -> list[int]:
        """Returns the dims of a parameter of ``shape`` that the engine can shard. A packed dim is among them
        only if all ranks have equally many rows of it."""
        parts = self.data.num_shards
        uneven = {dim for axis, dim in self.cuts if not self._cuts_evenly(axis)}
        dims = [(dim, size) for dim, size in enumerate(shape) if dim not in uneven]
        if self.data.over_replicate:  # placements express only even shards over two axes
            return [dim for dim, size in dims if size % (parts * self.ways(dim)) == 0]
        return [dim for dim, size in dims if is_exact(size, *self._cuts_around(dim), parts)]

    def _cuts_around(self, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the sizes of own axes that shard ``dim``: (before the shard axis in the mesh, after it)."""
        outside: list[int] = []
        inside: list[int] = []
        for rest, axis in sorted(self._at_rest.items()):
            if (axis, dim) in self.cuts and self._size(axis) > 1:
                after = self.data.shard is not None and rest > self.data.shard
                (inside if after else outside).append(self._size(axis))
        return tuple(outside), tuple(inside)


def shard_placement(dim: int, split_factor: int) -> Placement:
    """Returns ``Shard(dim)``; strided if axes after it in the mesh shard into ``split_factor`` parts
    first."""
    return StridedShard(dim, split_factor=split_factor) if split_factor > 1 else Shard(dim)


def _check_own(name: str, placement: Placement) -> None:
    if isinstance(placement, (Partial, StridedShard)) or not isinstance(
        placement, (Shard, Replicate)
    ):
        raise Parallel3dError(
            f"parameter {name} is a DTensor with placement {placement!r}; "
            "the engine takes Shard(dim) and Replicate()"
        )


def _joined(name: str, data: DeviceMesh, own: DeviceMesh) -> DeviceMesh:
    try:
        if root_mesh(own) is not root_mesh(data):
            return concatenate_meshes([data, own])  # raises
        return kept_with(data, ("joined", data, own), lambda: concatenate_meshes([data, own]))
    except (RuntimeError, AssertionError, TypeError) as error:
        raise MeshError(
            f"parameter {name} is already a DTensor on the mesh {own}, which does not fit {data}: both "
            "must be slices of one named mesh, with different axes. If it is a DTensor on the data axes as "
            "well, give the whole mesh, and dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)"
        ) from error


def chunk_length(size: int, parts: int, index: int, multiple: int = 1) -> int:
    """Returns the number of rows of ``local_chunk``'s result for ``size`` rows; ``index`` may be a SymInt."""
    chunk = ceil_div(size, parts * multiple) * multiple
    return torch.sym_min(size - torch.sym_min(index * chunk, size), chunk)


def post_forward_mesh(axes: DataAxes, ranks: int) -> DeviceMesh:
    """Returns the mesh of ``axes``, its shard axis split in two: the inner, ``within``, has ``ranks``."""
    shard = axes.shard
    assert shard is not None
    key = ("post_forward_group", axes.group(shard).group_name, ranks)

    def make() -> DeviceMesh:
        names, mesh = ("between", "within"), axes.mesh
        if mesh.mesh_dim_names is None:
            rows = mesh.mesh.movedim(shard, -1).reshape(-1, ranks)
            return DeviceMesh(mesh.device_type, rows, mesh_dim_names=names)
        axis = mesh[mesh.mesh_dim_names[shard]]
        return unflatten_mesh(axis, (axis.size() // ranks, ranks), names)

    return kept_with(axes.mesh, key, make)


# Axes that users choose for parameters: ``dp_mesh_dims`` and ``shard_placement_fn`` of ``fully_shard``.

ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


def spmd_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataAxes:
    """Returns the data axes for ``dp_mesh_dims=dims``, with parameters that are DTensors on ``mesh``.

    As in torch, several shard axes are joined to one axis of the sharded Parameters' mesh, and several
    replicate axes to one before it; other axes stay. With one shard axis that mesh is ``mesh``.
    """
    _check_dims(mesh, dims)
    shard, replicate = dims.shard_names, dims.replicate_names
    if len(shard) > 1:
        return _with_joined_shards(mesh, shard, replicate)
    positions = {name: axis for axis, name in enumerate(mesh.mesh_dim_names or ())}
    replicas = tuple(positions[name] for name in replicate)
    spmd = Spmd(
        mesh,
        {axis: axis for name, axis in positions.items() if name not in shard + replicate},
        replicas,
        _one_axis(mesh, replicate) if len(replicate) > 1 else None,
    )
    sharding = positions[shard[0]] if shard else None
    return DataAxes(mesh, replicas[0] if replicas else None, sharding, None, spmd)


def _with_joined_shards(
    mesh: DeviceMesh, shard: tuple[str, ...], replicate: tuple[str, ...]
) -> DataAxes:
    """Returns the data axes of ``spmd_axes`` if several axes shard: these are joined, in a new mesh."""
    meshes: list[DeviceMesh] = []
    own: dict[int, int] = {}
    shard_position = 0
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name == shard[0]:
            if replicate:
                meshes.append(_one_axis(mesh, replicate))
            shard_position = len(meshes)
            meshes.append(_one_axis(mesh, shard))
        elif name not in shard + replicate:
            own[axis] = len(meshes)
            meshes.append(mesh[name])
    at_rest = concatenate_meshes(meshes) if len(meshes) > 1 else meshes[0]
    replicas = (shard_position - 1,) if replicate else ()
    spmd = Spmd(mesh, own, replicas, None)
    return DataAxes(at_rest, replicas[0] if replicas else None, shard_position, None, spmd)


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    if len(names) == 1:
        return mesh[names[0]]
    try:
        return flatten_axes(mesh, names)
    except (ValueError, RuntimeError, KeyError) as error:
        raise MeshError(
            f"dp_mesh_dims: the axes {names} of {mesh} can't be joined to one, {'_'.join(names)!r}: {error}"
        ) from error


def _check_dims(mesh: DeviceMesh, dims: DataParallelMeshDims) -> None:
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
    names = mesh.mesh_dim_names
    if names is None:
        raise MeshError(
            f"dp_mesh_dims names axes, but those of {mesh} have no names: make the mesh with mesh_dim_names"
        )
    for name, count in Counter(dims.shard_names + dims.replicate_names).items():
        if name not in names:
            raise MeshError(
                f"dp_mesh_dims: the mesh has no axis {name!r}; it has {', '.join(names)}"
            )
        if count > 1:
            raise MeshError(
                f"dp_mesh_dims names the axis {name!r} twice; an axis either shards or replicates"
            )
    for several in (dims.shard_names, dims.replicate_names):
        in_order = tuple(sorted(several, key=names.index))
        if several != in_order:
            raise MeshError(
                f"dp_mesh_dims names the axes {several}, whose order in the mesh is {in_order}; "
                "give them in the mesh's order"
            )


class RequestedPlacement(NamedTuple):
    """The mesh axes to shard one parameter over, and the dim (not negative); None: the default dim."""

    axes: DataAxes
    dim: int | None


def requested_placements(
    fn: ShardPlacementFn | None, params: Iterable[tuple[str, nn.Parameter]], default: DataAxes
) -> list[RequestedPlacement]:
    """Calls the user's ``shard_placement_fn`` for each (name, parameter); returns its checked results."""
    if fn is None:
        return [RequestedPlacement(default, None) for _ in params]
    if not callable(fn):
        raise Parallel3dError(
            f"shard_placement_fn is {fn!r}; it must be a function of a Parameter that returns Shard(dim), "
            "ShardPlacementResult(placement, mesh_info), or None for the default"
        )
    # By id of the mesh info, which is kept alive: parameters with the same object share a bucket.
    known: dict[int, tuple[Any, DataAxes]] = {}
    result = []
    for name, param in params:
        returned = fn(param)
        axes, placement = default, returned
        if isinstance(returned, ShardPlacementResult):
            info, placement = returned.mesh_info, returned.placement
            if id(info) not in known:
                known[id(info)] = info, _axes_of(name, info, default)
            axes = known[id(info)][1]
        dim = None if placement is None else _dim(name, param, placement, returned)
        result.append(RequestedPlacement(axes, dim))
    return result


def _dim(name: str, param: nn.Parameter, placement: Any, returned: object) -> int:
    # Not a subclass: torch 2.11's _StridedShard is one.
    if not isinstance(placement, Shard) or isinstance(placement, StridedShard):
        raise Parallel3dError(
            f"shard_placement_fn returned {returned!r} for parameter {name}; it must return Shard(dim), "
            "ShardPlacementResult(placement, mesh_info), or None for the default"
        )
    dim, n = placement.dim, param.ndim
    if n == 0:
        raise Parallel3dError(
            f"shard_placement_fn returned Shard({dim}) for parameter {name}, a scalar; return None for it: "
            "it is not sharded"
        )
    if not isinstance(dim, int) or not -n <= dim < n:
        raise RefusedError(
            f"shard_placement_fn returned Shard({dim}) for parameter {name} of shape {tuple(param.shape)}; "
            f"dim must be from {-n} to {n - 1}"
        )
    return dim % n


def _axes_of(name: str, mesh_info: Any, default: DataAxes) -> DataAxes:
    """Returns the data axes for ``mesh_info``, a DeviceMesh or one of torch's mesh infos, which
    ``shard_placement_fn`` has returned for parameter ``name``."""
    if isinstance(mesh_info, DeviceMesh):
        axes = default if mesh_info == default.mesh else data_axes(mesh_info)
    else:
        mesh = getattr(mesh_info, "mesh", None)
        if not isinstance(mesh, DeviceMesh) or not hasattr(mesh_info, "shard_mesh_dim"):
            raise MeshError(
                f"shard_placement_fn returned mesh_info={mesh_info!r} for parameter {name}; it must be a "
                "DeviceMesh, or torch's FSDPMeshInfo or HSDPMeshInfo"
            )
        axes = DataAxes(mesh, mesh_info.replicate_mesh_dim, mesh_info.shard_mesh_dim, None)
        dims, whole = (getattr(mesh_info, key, None) for key in ("dp_mesh_dims", "spmd_mesh"))
        if dims is not None and whole is not None:
            axes = spmd_axes(whole, dims)
    if axes.mesh.device_type != default.mesh.device_type:
        raise MeshError(
            f"shard_placement_fn returned a mesh on {axes.mesh.device_type} for parameter {name}; it must be "
            f"on {default.mesh.device_type}, as fully_shard's mesh"
        )
    return axes
