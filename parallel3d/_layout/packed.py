"""PackedDTensor: a DTensor whose rows on one mesh axis lie as a ``Packing`` says.

What it computes is in ``_packed_ops``; here is what it is otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from parallel3d._layout.packing import Packing
from parallel3d._layout.param_layout import strided_chunk
from parallel3d._torch.dtensor import (
    DTensorSpec,
    StridedShard,
    call_torch_dispatch_of,
    dtensor_shard_box,
    get_local_tensor,
    make_dtensor,
    make_spec,
    spec_of,
)
from parallel3d._torch.groups import all_gather_single
from parallel3d.errors import Parallel3dError

# PackedShard: the placement of a dim whose rows on one mesh axis are a ``Packing``'s, and what follows.
#
# Such a parameter is cut by its packing first; what a rank of that axis holds, the other axes cut as their
# placements say. The rows of one rank may lie in several boxes of the plain model's tensor.


class PackedSpec(DTensorSpec):
    """The description of a PackedDTensor: one of its placements is a ``PackedShard``."""

    tensor_class: ClassVar[type[DTensor]]

    def __post_init__(self) -> None:
        # Without an order of the cuts, which torch would check against placements of its own.
        self.use_strided_shard_as_shard_order = True
        super().__post_init__()

    @cached_property
    def packed(self) -> tuple[int, PackedShard]:
        """(position of the packed axis in the mesh, the placement there)."""
        found = packed_among(self.placements)
        assert found is not None
        return found

    @cached_property
    def leaves_ranks_empty(self) -> bool:
        """Whether some rank holds nothing."""
        sizes = self.mesh.shape
        places = product(*(range(n) for n in sizes))
        return any(
            not prod(packed_boxes(self.shape, sizes, at, self.placements)[0]) for at in places
        )

    @cached_property
    def ordinary(self) -> DTensorSpec:
        """The same for DTensor's own operations, which then take the ranks' rows for ``torch.chunk``'s."""
        return DTensorSpec(self.mesh, ordinary(self.placements), tensor_meta=self.tensor_meta)


class PackedShard(Shard):
    """As ``Shard(packing.dim)``, but the rows of each rank are the packing's.

    torch's own functions on placements can't tell such rows: those that would cut or join with it raise.
    """

    spec_class = PackedSpec

    def __init__(self, packing: Packing) -> None:
        super().__init__(packing.dim)
        self.packing = packing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedShard) and self.packing == other.packing

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.packing)

    def __repr__(self) -> str:
        rows = [[(first, first + number) for first, number in held] for held in self.packing.rows]
        return f"PackedShard(dim={self.dim}, rows={rows})"

    def __str__(self) -> str:
        return f"PS({self.dim})"

    def __reduce__(self) -> Any:
        return PackedShard, (self.packing,)

    def __copy__(self) -> PackedShard:
        return self

    def __deepcopy__(self, memo: Any) -> PackedShard:
        return self


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(self: PackedShard, *args: Any, **kwargs: Any) -> Any:
        raise Parallel3dError(
            f"torch's {name} with {self!r}: no function of torch knows which rows a packed parameter "
            "(gate and up in one, q, k and v in one, uneven heads) has on a rank. Load whole tensors with "
            "parallel3d.fsdp.load_model_state_dict and load_optim_state_dict "
            "(type=StateDictType.FULL_STATE_DICT), and read them with full_tensor()"
        )

    return refuse


for _name in (
    "_local_shard_size_and_offset",
    "_make_shard_tensor",
    "_reduce_shard_tensor",
    "_replicate_to_shard",
    "_select_split_tensor",
    "_shard_tensor",
    "_split_tensor",
    "_to_new_shard_dim",
    "_to_replicate_tensor",
):
    setattr(PackedShard, _name, _refusal(_name.lstrip("_")))


def packed_among(placements: Sequence[Placement]) -> tuple[int, PackedShard] | None:
    """(position, the PackedShard), if there is one."""
    for axis, placement in enumerate(placements):
        if type(placement) is PackedShard:  # isinstance takes 3 us with torch's placements
            return axis, placement
    return None


def ordinary(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """``placements`` with ``Shard`` for ``PackedShard``."""
    return tuple(Shard(p.dim) if isinstance(p, PackedShard) else p for p in placements)


# -- which rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """Some rows of a rank's local tensor that are neighbours in the whole.

    Attributes:
        dim: the packed one.
        start: the first of them in the local tensor; there are ``sizes[dim]``.
        offsets, sizes: where they are in the whole tensor, by dim.
    """

    dim: int
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Of the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """Of the local tensor."""
        rows = slice(self.start, self.start + self.sizes[self.dim])
        return tuple(rows if d == self.dim else slice(None) for d in range(len(self.sizes)))

    def of(self, local: Tensor) -> Tensor:
        """Its part of the local tensor: a view."""
        return local.narrow(self.dim, self.start, self.sizes[self.dim])


def packed_boxes(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[tuple[int, ...], list[Box]]:
    """(local shape, boxes in the order of the local rows) of the rank at ``coordinate``."""
    axis, packing, others = _split(placements, mesh_shape)
    dim, rank = packing.dim, coordinate[axis]
    held = list(shape)
    held[dim] = packing.length_on(rank)
    local, start = dtensor_shard_box(
        held,
        [mesh_shape[i] for i, _ in others],
        [coordinate[i] for i, _ in others],
        [placement for _, placement in others],
    )
    boxes = []
    for before, (first, number) in packing.rows_of(rank, start[dim], local[dim]):
        offsets, sizes = list(start), list(local)
        offsets[dim], sizes[dim] = first, number
        if prod(sizes):
            boxes.append(Box(dim, before, tuple(offsets), tuple(sizes)))
    return tuple(local), boxes


def _split(
    placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> tuple[int, Packing, list[tuple[int, Placement]]]:
    """(the packed axis, its packing, the other axes with what they do to a rank's rows)."""
    found = packed_among(placements)
    assert found is not None
    axis, packed = found
    others: list[tuple[int, Placement]] = []
    for i, placement in enumerate(placements):
        if i == axis:
            continue
        if isinstance(placement, StridedShard) and placement.dim == packed.dim and i < axis:
            # The packed axis is one of those that have cut before it.
            factor, rest = divmod(int(placement.split_factor), mesh_shape[axis])
            assert not rest, f"{placements} on a mesh {tuple(mesh_shape)}"
            dim = placement.dim
            placement = StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
        others.append((i, placement))
    return axis, packed.packing, others


# -- whole and part ------------------------------------------------------------------------------------


def cut_packed(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of ``whole``, with memory of its own."""
    axis, packing, others = _split(placements, mesh.shape)
    local = packing.take(whole, mesh.get_local_rank(axis))
    for i, placement in others:
        if mesh.size(i) > 1 and isinstance(placement, (Shard, StridedShard)):
            factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
            local = strided_chunk(
                local, placement.dim, factor, mesh.size(i), mesh.get_local_rank(i)
            )
    return local


def gather_packed(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Tensor:
    """The whole tensor on every rank; one all-gather for each axis that cuts. Collective."""
    cutting = [
        i
        for i, p in enumerate(placements)
        if isinstance(p, (Shard, StridedShard)) and mesh.size(i) > 1
    ]
    places = []
    for ranks in product(*(range(mesh.size(i)) for i in cutting)):
        at = [0] * mesh.ndim
        for i, rank in zip(cutting, ranks, strict=True):
            at[i] = rank
        places.append(packed_boxes(shape, mesh.shape, at, placements))
    largest = max(prod(sizes) for sizes, _ in places)
    gathered = torch.zeros(largest, dtype=local.dtype, device=local.device)
    gathered.narrow(0, 0, local.numel()).copy_(local.reshape(-1))
    for i in reversed(cutting if largest else []):
        size = mesh.size(i) * gathered.numel()
        output = torch.empty(size, dtype=local.dtype, device=local.device)
        all_gather_single(output, gathered, group=mesh.get_group(i))
        gathered = output
    whole = torch.empty(tuple(shape), dtype=local.dtype, device=local.device)
    for (sizes, boxes), row in zip(places, gathered.view(len(places), largest), strict=True):
        part = row.narrow(0, 0, prod(sizes)).view(sizes)
        for box in boxes:
            whole[box.slices] = box.of(part)
    return whole


# Operations on packed DTensors.
#
# To DTensor's own operations their rows are those of ``torch.chunk``. So only what treats rows alike,
# wherever they are, goes through to them; anything else would be silently wrong, and raises.


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """``func(*args, **kwargs)``, with packed DTensors among the operands.

    Raises:
        Parallel3dError: it would mix their rows, or they don't lie alike.
    """
    return _Call(func, args, kwargs).run()


# Beside those that torch marks as elementwise.
_SAME_ROWS = {
    "_amp_foreach_non_finite_check_and_unscale_",
    "_fused_adagrad_",
    "_fused_adam_",
    "_fused_adamw_",
    "_fused_sgd_",
    "_pin_memory",
    "_to_copy",
    "alias",
    "bernoulli_",
    "clone",
    "copy_",
    "detach",
    "detach_",
    "empty_like",
    "equal",
    "fill_",
    "full_like",
    "is_pinned",
    "is_same_size",
    "normal_",
    "ones_like",
    "rand_like",
    "randn_like",
    "record_stream",
    "uniform_",
    "zero_",
    "zeros_like",
}
# All rows to one number.
_TO_NUMBER = {
    "all",
    "amax",
    "amin",
    "any",
    "linalg_vector_norm",
    "max",
    "min",
    "norm",
    "sum",
}


# New tensors of any shape; of the same one they lie as the packed one does.
_NEW = {"new_empty", "new_full", "new_ones", "new_zeros"}
# Of the same shape, as autograd's nodes are found by, they leave all rows.
_VIEWS = {"expand", "view"}


_LARGEST = {"amax", "max", "_foreach_max"}
_LEAST = {"amin", "min"}
_NORMS = {"linalg_vector_norm", "norm", "_foreach_norm"}


@lru_cache(maxsize=1024)
def _fixed_neutral(func: Any) -> float:
    """Of that reduction; 0: it is none; not a number: a norm, whose order says it."""
    name = func._schema.name.removeprefix("aten::")
    if name in _NORMS:
        return math.nan
    return -math.inf if name in _LARGEST else math.inf if name in _LEAST else 0.0


def _neutral(func: Any, args: Any, kwargs: Any) -> float | None:
    """A value that doesn't change a reduction to one number, if that of no values at all is an error."""
    fixed = _fixed_neutral(func)
    if not math.isnan(fixed):
        return None if fixed == 0 else fixed
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    if not isinstance(order, (int, float)) or 0 <= order < math.inf:
        return None
    return 0.0 if order > 0 else math.inf


def _with_one_more(local: Tensor, value: float) -> Tensor:
    """All values of ``local`` and one more, in as many dims."""
    if local.dtype.is_floating_point:
        more = local.new_full((1,), value)
    elif local.dtype is torch.bool:
        more = local.new_full((1,), value > 0)
    else:
        info = torch.iinfo(local.dtype)
        more = local.new_full((1,), info.max if value > 0 else info.min)
    flat = torch.cat([local.flatten(), more])
    return flat.view(*(1,) * (local.dim() - 1), -1)


@lru_cache(maxsize=1024)
def _kind(func: Any) -> str:
    """``"rows"``: each result has the rows of its operands. ``"number"``: it is a number of all.
    ``"new"``: it has none of their values. ``"view"``: rows if it keeps the shape. ``""``: anything else."""
    name = func._schema.name.removeprefix("aten::")
    if name.startswith("_foreach_") or name in _SAME_ROWS or torch.Tag.pointwise in func.tags:
        return "rows"
    if name in _NEW:
        return "new"
    if name in _VIEWS:
        return "view"
    return "number" if name in _TO_NUMBER else ""


class _Call:
    """One operation with packed DTensors among its operands.

    An operation on lists is one on each position; ``like[i]`` tells how what is packed at position i lies.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.kind, self.neutral = _kind(func), _neutral(func, args, kwargs)
        self.like: dict[int, PackedSpec] = {}
        self.plain: dict[int, DTensor] = {}  # by id of an operand: what DTensor sees of it
        self.originals: dict[int, DTensor] = {}  # the other way
        self.on_lists = bool(args) and isinstance(args[0], (list, tuple))

    def run(self) -> Any:
        if self.kind == "view" and tuple(self.args[1]) == tuple(self.args[0].shape):
            local = get_local_tensor(self.args[0])
            return make_dtensor(self.func(local, list(local.shape)), spec_of(self.args[0]))
        if self.kind in ("", "view"):
            self._refuse("mixes, picks or moves rows,")
        if self.func is torch.ops.aten.copy_.default and _lie_apart(*self.args[:2]):
            return _copied(*self.args[:2])
        if self.kind == "new":
            return _new(self.func, *self.args, **self.kwargs)
        if self.func in _LOGICAL:
            return _all_or_any(self.func, self.args[0])
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, (list, tuple)):
                for position, item in enumerate(value):
                    self._take(position, item)
            else:
                self._take(0, value)
        args = [self._plain(value) for value in self.args]
        kwargs = {key: self._plain(value) for key, value in self.kwargs.items()}
        result = self.func(*args, **kwargs)
        if isinstance(result, (list, tuple)):
            marked = [self._marked(i * self.on_lists, value) for i, value in enumerate(result)]
            return type(result)(marked)
        return self._marked(0, result)

    def _take(self, position: int, value: Any) -> None:
        """Notes how ``value`` lies, if it is packed."""
        spec = _packed_spec(value)
        if spec is None:
            return
        known = self.like.setdefault(position, spec)
        if known is not spec and not _alike(known, spec):
            self._refuse(f"has operands with other rows, {known.placements} and {spec.placements},")
        if (
            id(value) in self.plain
        ):  # given twice; what DTensor saw of it must live on for its id's sake
            return
        local = get_local_tensor(value)
        if self.neutral is not None and spec.leaves_ranks_empty:
            # Those would raise while the others wait for them.
            local = _with_one_more(local, self.neutral)
        plain = make_dtensor(local, spec.ordinary)
        self.plain[id(value)] = plain
        self.originals[id(plain)] = value

    def _plain(self, value: Any) -> Any:
        """``value`` as DTensor gets it."""
        if isinstance(value, (list, tuple)):
            return [self._plain_at(i, item) for i, item in enumerate(value)]
        return self._plain_at(0, value)

    def _plain_at(self, position: int, value: Any) -> Any:
        known = self.plain.get(id(value))
        if known is not None:
            return known
        like = self.like.get(position)
        if like is None or not isinstance(value, Tensor) or not value.dim() or value.numel() == 1:
            return value
        at = like.packed[1].dim + value.dim() - like.ndim
        if at < 0 or value.shape[at] == 1:
            return value
        if value.stride(at) == 0:  # one row, expanded, as backward expands numbers
            return value.narrow(at, 0, 1)
        what = f"{tuple(value.placements)}" if isinstance(value, DTensor) else "no DTensor"
        return self._refuse(f"has an operand of {tuple(value.shape)} with other rows, {what},")

    def _marked(self, position: int, result: Any) -> Any:
        """The result at ``position`` of the result, packed as the operands there are."""
        original = self.originals.get(id(result))
        if original is not None:
            return original
        like = self.like.get(position)
        if like is None or not isinstance(result, DTensor):
            return result
        if self.kind == "number" or not result.dim():
            if result.dim():
                self._refuse("leaves some of the rows,")
            return result
        if result.shape != like.shape:
            self._refuse(f"makes a tensor of {tuple(result.shape)},")
        spec, same = spec_of(result), like.ordinary
        if spec.tensor_meta == same.tensor_meta and spec.placements == same.placements:
            return make_dtensor(get_local_tensor(result), like)
        axis, shard = like.packed
        placements = list(spec.placements)
        assert placements[axis] == ordinary([shard])[0], f"{self.func} gave {placements}"
        placements[axis] = shard
        made = PackedSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)
        return make_dtensor(get_local_tensor(result), made)

    def _refuse(self, why: str) -> Any:
        raise Parallel3dError(
            f"{self.func} on a packed parameter (gate and up in one, q, k and v in one, uneven heads) {why} "
            "and which rows a rank has DTensor doesn't know; use full_tensor(), which every rank must call, "
            "or to_local(). (State of an optimizer that torch's set_optimizer_state_dict has loaded whole "
            "lies otherwise than its parameter: load it with parallel3d.fsdp.load_optim_state_dict)"
        )


def _new(func: Any, like: DTensor, size: Any, *args: Any, **kwargs: Any) -> DTensor:
    """``like.new_empty(size)`` and its kind."""
    spec, local = _packed_spec(like), get_local_tensor(like)
    assert spec is not None
    if tuple(size) != tuple(like.shape):
        return func(make_dtensor(local, spec.ordinary), size, *args, **kwargs)
    made = func(local, list(local.shape), *args, **kwargs)
    return make_dtensor(made, make_spec(spec.mesh, spec.placements, like.shape, made.dtype))


_LOGICAL = {torch.ops.aten.all.default, torch.ops.aten.any.default}


def _all_or_any(func: Any, value: DTensor) -> Tensor:
    """``value.all()`` or ``value.any()``, by a count on each rank.

    DTensor of torch 2.15 would gather the rows first, as many of each rank as ``torch.chunk`` gives it.
    """
    spec, local = _packed_spec(value), get_local_tensor(value)
    assert spec is not None
    is_all = func is torch.ops.aten.all.default
    count = (local.logical_not() if is_all else local).count_nonzero()
    parts = [Partial() if p.is_shard() else p for p in ordinary(spec.placements)]
    summed = DTensor.from_local(count, spec.mesh, parts, run_check=False)
    summed = summed.redistribute(placements=[Replicate()] * len(parts))
    return summed == 0 if is_all else summed != 0


def _lie_apart(target: Any, source: Any) -> bool:
    """Whether these are DTensors of one shape, one of them packed in a way that the other isn't."""
    if not (isinstance(target, DTensor) and isinstance(source, DTensor)):
        return False
    to, of = _packed_spec(target), _packed_spec(source)
    alike = to is not None and of is not None and _alike(to, of)
    return target.shape == source.shape and not alike


def _copied(target: DTensor, source: DTensor) -> DTensor:
    """``target.copy_(source)`` by way of the whole tensor: what torch loads is placed without a packing."""
    whole = source.full_tensor()
    mesh, placements = target.device_mesh, target.placements
    if _packed_spec(target) is not None:
        whole = cut_packed(whole, mesh, placements)
        get_local_tensor(target).copy_(whole)
        return target
    target.copy_(DTensor.from_local(whole, mesh, run_check=False))
    return target


def _packed_spec(value: Any) -> PackedSpec | None:
    """How ``value`` lies, if packed; also a plain DTensor that was made with a packed one's placements."""
    if not isinstance(value, DTensor):
        return None
    spec = spec_of(value)
    if type(spec) is PackedSpec:
        return spec
    if packed_among(spec.placements) is None:
        return None
    return PackedSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta)


def _alike(one: PackedSpec, other: PackedSpec) -> bool:
    """Whether the rows of the same shape lie on the ranks alike."""
    (axis, shard), (its_axis, its_shard) = one.packed, other.packed
    same = shard is its_shard or shard == its_shard
    same_mesh = one.mesh is other.mesh or one.mesh == other.mesh
    return same and axis == its_axis and same_mesh and one.shape == other.shape


class PackedDTensor(DTensor):
    """One of its placements is a ``PackedShard``. Elementwise operations, copies, norms and optimizers work
    as on any DTensor; ``full_tensor()`` and checkpoints have the plain model's rows."""

    _spec: PackedSpec

    @property
    def packing(self) -> Packing:
        """The rows on each rank of the packed axis."""
        return self._spec.packed[1].packing

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"PackedDTensor(local_tensor={self._local_tensor}, device_mesh={self.device_mesh}, "
            f"placements={self.placements})"
        )

    # -- other layouts -----------------------------------------------------------------------------------

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The plain model's tensor, on every rank; differentiable. Every rank must call it."""
        if grad_placements is not None and not all(
            isinstance(p, Replicate) for p in grad_placements
        ):
            raise Parallel3dError(
                f"full_tensor(grad_placements={grad_placements}) of a packed parameter: its gradient must be "
                "whole on every rank, Replicate()"
            )
        return _Whole.apply(self)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """As DTensor's, to ``Replicate()`` on all axes, or with partial axes reduced.

        Raises:
            Parallel3dError: to any other layout.
        """
        mesh = device_mesh or self.device_mesh
        wanted = self.placements if placements is None else tuple(placements)
        if mesh == self.device_mesh and wanted == self.placements:
            return self
        if mesh == self.device_mesh and all(isinstance(p, Replicate) for p in wanted):
            return DTensor.from_local(self.full_tensor(), mesh, wanted, run_check=False)
        spec = self._spec
        reduced = mesh == spec.mesh and all(
            now == then or now.is_partial()
            for now, then in zip(spec.placements, wanted, strict=True)
        )
        if reduced:
            plain = make_dtensor(self._local_tensor, spec.ordinary)
            local = get_local_tensor(plain.redistribute(mesh, ordinary(wanted), **options))
            return make_dtensor(local, PackedSpec(mesh, wanted, tensor_meta=spec.tensor_meta))
        raise Parallel3dError(
            f"redistribute from {self.placements} to {wanted}: of a packed parameter, whose rows are not "
            "torch.chunk's, only the whole is made: full_tensor()"
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's rows; differentiable. Its gradient must be that of these rows."""
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise Parallel3dError(
                f"to_local(grad_placements={grad_placements}) of a packed parameter: its gradient must be "
                f"placed as it is, {self.placements}"
            )
        return _Local.apply(self) if torch.is_grad_enabled() else self._local_tensor

    # -- torch.distributed.checkpoint ----------------------------------------------------------------------

    def boxes(self) -> list[Box]:
        """Where this rank's rows are in the whole tensor."""
        spec = self._spec
        coordinate = spec.mesh.get_coordinate()
        if coordinate is None:
            return []
        return packed_boxes(self.shape, spec.mesh.shape, coordinate, spec.placements)[1]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        self._raise_if_contains_partial_placements()
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.boxes()
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        self._raise_if_contains_partial_placements()
        for box in self.boxes():
            if index.offset is not None and tuple(index.offset) == box.offsets:
                return box.of(self._local_tensor.detach())
        raise Parallel3dError(f"{index.fqn} has no rows at {index.offset} on this rank")


PackedSpec.tensor_class = PackedDTensor
call_torch_dispatch_of(PackedDTensor)
# What a file with such a tensor in it names, for torch.load's safe mode.
torch.serialization.add_safe_globals([PackedDTensor, PackedSpec, PackedShard, Packing])


def packing_of(tensor: Tensor) -> Packing | None:
    """The packing of a PackedDTensor; None for any other tensor."""
    return tensor.packing if isinstance(tensor, PackedDTensor) else None


class _Whole(torch.autograd.Function):
    """A PackedDTensor -> the whole tensor, and the gradient of the whole -> a PackedDTensor."""

    @staticmethod
    def forward(ctx: Any, packed: PackedDTensor) -> Tensor:
        spec = ctx.spec = packed._spec
        local = packed._local_tensor
        placements = spec.placements
        if any(p.is_partial() for p in placements):
            placements = tuple(Replicate() if p.is_partial() else p for p in placements)
            plain = make_dtensor(local, spec.ordinary)
            local = get_local_tensor(plain.redistribute(spec.mesh, ordinary(placements)))
        return gather_packed(local, spec.mesh, placements, packed.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        spec = ctx.spec
        placements = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
        local = cut_packed(grad, spec.mesh, placements)
        return make_dtensor(local, PackedSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta))


class _Local(torch.autograd.Function):
    """A PackedDTensor -> its local tensor, and the gradient of that -> a PackedDTensor."""

    @staticmethod
    def forward(ctx: Any, packed: PackedDTensor) -> Tensor:
        ctx.spec = packed._spec
        return packed._local_tensor.view_as(packed._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        spec = ctx.spec
        placements = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
        return make_dtensor(grad, PackedSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta))
