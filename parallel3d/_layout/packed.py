"""PackedDTensor: a DTensor whose rows on one mesh axis are distributed as a ``Packing`` says."""

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
    dtensor_shard_box,
    get_local_tensor,
    make_dtensor,
    make_spec,
    spec_of,
)
from parallel3d._torch.groups import all_gather_single
from parallel3d._torch.v2_11 import call_torch_dispatch_of
from parallel3d.errors import Parallel3dError


class PackedSpec(DTensorSpec):
    """The DTensor spec of a PackedDTensor: one of its placements is a ``PackedShard``."""

    tensor_class: ClassVar[type[DTensor]]

    def __post_init__(self) -> None:
        # Without a shard order, which torch would check against its own placements.
        self.use_strided_shard_as_shard_order = True
        super().__post_init__()

    @cached_property
    def packed(self) -> tuple[int, PackedShard]:
        """(index of the packed axis in the mesh, the placement there)."""
        found = packed_among(self.placements)
        assert found is not None
        return found

    @cached_property
    def has_empty_ranks(self) -> bool:
        """Whether the local tensor of any rank has no elements."""
        sizes = self.mesh.shape
        return any(
            not prod(packed_boxes(self.shape, sizes, at, self.placements)[0])
            for at in product(*map(range, sizes))
        )

    @cached_property
    def ordinary(self) -> DTensorSpec:
        """This spec with ``Shard`` for ``PackedShard``, for DTensor's own operations: they take each rank's
        rows for those of ``torch.chunk``."""
        return DTensorSpec(self.mesh, ordinary(self.placements), tensor_meta=self.tensor_meta)


class PackedShard(Shard):
    """Like ``Shard(packing.dim)``, but each rank has the rows that ``packing`` says.

    The rows that the packing gives to a rank are then sharded over the other mesh axes by their placements.
    In the plain model's tensor they may be several boxes, which are not neighbours. torch's own functions
    that would split or join a tensor by such a placement raise.
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
            f"torch's {name} with {self!r}: torch does not know which rows a rank has of a packed parameter "
            "(gate and up in one, q, k and v in one, uneven heads). Load whole tensors with "
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
    """Returns (index, placement) of the ``PackedShard`` in ``placements``; None if there is none."""
    for axis, placement in enumerate(placements):
        if type(placement) is PackedShard:  # isinstance takes 3 us with torch's placements
            return axis, placement
    return None


def ordinary(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Returns ``placements`` with ``Shard`` for ``PackedShard``."""
    return tuple(Shard(p.dim) if isinstance(p, PackedShard) else p for p in placements)


@dataclass(frozen=True)
class Box:
    """A part of a rank's local tensor whose rows are also neighbours in the whole tensor.

    Attributes:
        dim: the packed dim; 0 if there is none.
        start: index of its first row in the local tensor; it has ``sizes[dim]`` rows.
        offsets, sizes: for each dim, where the box begins in the whole tensor, and its size.
    """

    dim: int
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def of(self, local: Tensor) -> Tensor:
        return local.narrow(self.dim, self.start, self.sizes[self.dim])


def packed_boxes(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[tuple[int, ...], list[Box]]:
    """Returns (local shape, boxes in the order of the local rows) of the rank at ``coordinate``.

    Without a ``PackedShard`` in ``placements`` it returns DTensor's local part as one box, or none if empty.
    """
    if packed_among(placements) is None:
        local, start = dtensor_shard_box(shape, mesh_shape, coordinate, placements)
        return tuple(local), [Box(0, 0, tuple(start), tuple(local))] if prod(local) else []
    axis, packing, others = _split(placements, mesh_shape)
    dim, rank = packing.dim, coordinate[axis]
    packed_shape = list(shape)
    packed_shape[dim] = packing.length_on(rank)
    local, start = dtensor_shard_box(
        packed_shape,
        [mesh_shape[i] for i in others],
        [coordinate[i] for i in others],
        list(others.values()),
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
) -> tuple[int, Packing, dict[int, Placement]]:
    """Returns (the packed axis, its packing, {other axis: how it shards the rows that the packing gives})."""
    found = packed_among(placements)
    assert found is not None
    axis, packed = found
    others = {i: placement for i, placement in enumerate(placements) if i != axis}
    for i, placement in others.items():
        if isinstance(placement, StridedShard) and placement.dim == packed.dim and i < axis:
            # The packed axis is one of those that its split_factor counts.
            factor, rest = divmod(int(placement.split_factor), mesh_shape[axis])
            assert not rest, f"{placements} on a mesh {tuple(mesh_shape)}"
            dim = placement.dim
            others[i] = StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
    return axis, packed.packing, others


def cut_packed(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Returns this rank's part of ``whole`` by ``placements``, in its own memory, without communication."""
    axis, packing, others = _split(placements, mesh.shape)
    local = packing.take(whole, mesh.get_local_rank(axis))
    for i, placement in others.items():
        if mesh.size(i) > 1 and isinstance(placement, (Shard, StridedShard)):
            factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
            rank = mesh.get_local_rank(i)
            local = strided_chunk(local, placement.dim, factor, mesh.size(i), rank)
    return local


def gather_packed(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Tensor:
    """Returns the whole tensor, of ``shape``, on every rank, from the ranks' ``local`` parts: one all-gather
    for each axis that shards."""
    sharding = [isinstance(p, (Shard, StridedShard)) for p in placements]
    ranks = [
        range(size if shards else 1) for size, shards in zip(mesh.shape, sharding, strict=True)
    ]
    parts = [packed_boxes(shape, mesh.shape, at, placements) for at in product(*ranks)]
    largest = max(prod(sizes) for sizes, _ in parts)
    gathered = torch.zeros(largest, dtype=local.dtype, device=local.device)
    gathered.narrow(0, 0, local.numel()).copy_(local.reshape(-1))
    for i in reversed(range(mesh.ndim)):
        if len(ranks[i]) > 1 and largest:
            size = mesh.size(i) * gathered.numel()
            output = torch.empty(size, dtype=local.dtype, device=local.device)
            all_gather_single(output, gathered, group=mesh.get_group(i))
            gathered = output
    whole = torch.empty(tuple(shape), dtype=local.dtype, device=local.device)
    for (sizes, boxes), row in zip(parts, gathered.view(len(parts), largest), strict=True):
        part = row.narrow(0, 0, prod(sizes)).view(sizes)
        for box in boxes:
            whole[box.slices] = box.of(part)
    return whole


def packed_as_param(param: Tensor, value: Any) -> Any:
    """Returns ``value``. If ``param`` is packed and ``value`` a DTensor of its shape that is not, it is
    resharded to the rows of ``param`` first: all ranks must call this.

    torch's ``set_optimizer_state_dict`` makes such values, by ``distribute_tensor``.
    """
    spec = _packed_spec(param)
    other = isinstance(value, DTensor) and value.ndim and _packed_spec(value) is None
    if spec is None or not other or value.shape != param.shape:
        return value
    local = cut_packed(value.full_tensor(), spec.mesh, spec.placements)
    return make_dtensor(local, make_spec(spec.mesh, spec.placements, value.shape, value.dtype))


# Operations on packed DTensors.
#
# DTensor's own operations handle their rows as those of ``torch.chunk``. An operation that does the same to
# all rows, wherever they are, is passed on to them. Any other would silently compute wrong values: it raises.

# "rows": results have the rows of the operands. "number": all rows are reduced to one number. "new": a new
# tensor, of the same rows if of the same shape. "view": keeps all rows if it keeps the shape, as in autograd.
_KINDS = {
    "_amp_foreach_non_finite_check_and_unscale_": "rows",
    **dict.fromkeys(("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"), "rows"),
    **dict.fromkeys(("_pin_memory", "_to_copy", "is_pinned", "record_stream"), "rows"),
    **dict.fromkeys(("alias", "clone", "copy_", "detach", "detach_"), "rows"),
    **dict.fromkeys(("bernoulli_", "fill_", "normal_", "uniform_", "zero_"), "rows"),
    **dict.fromkeys(("equal", "is_same_size"), "rows"),
    **dict.fromkeys(("all", "any", "amax", "amin", "max", "min", "sum"), "number"),
    **dict.fromkeys(("linalg_vector_norm", "norm"), "number"),
    **dict.fromkeys(("new_empty", "new_full", "new_ones", "new_zeros"), "new"),
    **dict.fromkeys(("expand", "view"), "view"),
}
# Values that don't change a reduction; nan: it depends on the order of the norm.
_NEUTRAL = {
    **dict.fromkeys(("amax", "max", "_foreach_max"), -math.inf),
    **dict.fromkeys(("amin", "min"), math.inf),
    **dict.fromkeys(("linalg_vector_norm", "norm", "_foreach_norm"), math.nan),
}


@lru_cache(maxsize=1024)
def _kind(func: Any) -> tuple[str, float | None]:
    """Returns (kind of the operation, see ``_KINDS``, "" if it is refused; its neutral value, or None)."""
    name = func._schema.name.removeprefix("aten::")
    elementwise = name.startswith("_foreach_") or torch.Tag.pointwise in func.tags
    kind = "rows" if elementwise or name.endswith("_like") else _KINDS.get(name, "")
    return kind, _NEUTRAL.get(name)


def _neutral_of_norm(args: Any, kwargs: Any) -> float | None:
    """Returns a value that, appended to a tensor, leaves a norm of this order as it is; None if the norm of
    an empty tensor is no error."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    if not isinstance(order, (int, float)) or 0 <= order < math.inf:
        return None
    return 0.0 if order > 0 else math.inf


def _with_one_more(local: Tensor, value: float) -> Tensor:
    """Returns the values of ``local`` and ``value``, so that it is not empty, in as many dims."""
    if local.dtype is torch.bool:
        value = value > 0
    elif not local.dtype.is_floating_point:
        info = torch.iinfo(local.dtype)
        value = info.max if value > 0 else info.min
    flat = torch.cat([local.flatten(), local.new_full((1,), value)])
    return flat.view(*(1,) * (local.dim() - 1), -1)


class _PackedCall:
    """One operation with packed DTensors among its operands: runs it as DTensor's operation on plain DTensors
    with the same local tensors, and packs the results.

    In an operation on lists (foreach) the elements at one index are operands of each other.

    Attributes:
        like: index in lists (0 without) -> spec of the packed operands there, and of the results.
        plain: id of a packed operand -> the plain DTensor.
        originals: id of such a plain DTensor -> the packed operand.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.kind, self.neutral = _kind(func)
        if self.neutral is not None and math.isnan(self.neutral):
            self.neutral = _neutral_of_norm(args, kwargs)
        self.like: dict[int, PackedSpec] = {}
        self.plain: dict[int, DTensor] = {}
        self.originals: dict[int, DTensor] = {}
        self.on_lists = bool(args) and isinstance(args[0], (list, tuple))

    def run(self) -> Any:
        """Runs the operation. Raises if it would mix rows of an operand, or operands have other rows."""
        if self.kind == "view" and tuple(self.args[1]) == tuple(self.args[0].shape):
            local = get_local_tensor(self.args[0])
            return make_dtensor(self.func(local, list(local.shape)), spec_of(self.args[0]))
        if self.kind in ("", "view"):
            self._refuse("mixes, picks or moves rows,")
        if self.func is torch.ops.aten.copy_.default and _placed_differently(*self.args[:2]):
            return _copied(*self.args[:2])
        if self.kind == "new":
            return _new(self.func, *self.args, **self.kwargs)
        if self.func in (torch.ops.aten.all.default, torch.ops.aten.any.default):
            return _all_or_any(self.func, self.args[0])
        for value in (*self.args, *self.kwargs.values()):
            for position, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                self._take(position, item)
        args = [self._as_plain(value) for value in self.args]
        kwargs = {key: self._as_plain(value) for key, value in self.kwargs.items()}
        result = self.func(*args, **kwargs)
        if isinstance(result, (list, tuple)):
            packed = [self._as_packed(i * self.on_lists, value) for i, value in enumerate(result)]
            return type(result)(packed)
        return self._as_packed(0, result)

    def _take(self, position: int, value: Any) -> None:
        """If ``value``, an operand at index ``position``, is packed, makes the plain DTensor for it."""
        spec = _packed_spec(value)
        if spec is None:
            return
        known = self.like.setdefault(position, spec)
        if known is not spec and not _same_rows(known, spec):
            self._refuse(f"has operands with other rows, {known.placements} and {spec.placements},")
        if id(value) in self.plain:  # given twice; the first plain one must live on, for its id
            return
        local = get_local_tensor(value)
        if self.neutral is not None and spec.has_empty_ranks:
            # Empty ranks would raise while the others wait for them.
            local = _with_one_more(local, self.neutral)
        plain = make_dtensor(local, spec.ordinary)
        self.plain[id(value)] = plain
        self.originals[id(plain)] = value

    def _as_plain(self, value: Any, position: int = 0) -> Any:
        """Returns operand ``value`` for DTensor's operation: the plain DTensor of a packed one."""
        if isinstance(value, (list, tuple)):
            return [self._as_plain(item, i) for i, item in enumerate(value)]
        if id(value) in self.plain:
            return self.plain[id(value)]
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

    def _as_packed(self, position: int, result: Any) -> Any:
        """Returns ``result``, at index ``position``, as a DTensor packed like the operands there."""
        if id(result) in self.originals:
            return self.originals[id(result)]
        like = self.like.get(position)
        if like is None or not isinstance(result, DTensor) or not result.dim():
            return result
        if self.kind == "number":
            self._refuse("leaves some of the rows,")
        if result.shape != like.shape:
            self._refuse(f"makes a tensor of {tuple(result.shape)},")
        spec, same = spec_of(result), like.ordinary
        if spec.tensor_meta == same.tensor_meta and spec.placements == same.placements:
            return make_dtensor(get_local_tensor(result), like)
        axis, shard = like.packed
        placements = list(spec.placements)
        assert placements[axis] == ordinary([shard])[0], f"{self.func} gave {placements}"
        placements[axis] = shard
        packed = PackedSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)
        return make_dtensor(get_local_tensor(result), packed)

    def _refuse(self, why: str) -> Any:
        raise Parallel3dError(
            f"{self.func} on a packed parameter (gate and up in one, q, k and v in one, uneven heads) {why} "
            "and DTensor does not know which rows a rank has; use full_tensor(), which every rank must call, "
            "or to_local()"
        )


def _new(func: Any, like: DTensor, size: Any, *args: Any, **kwargs: Any) -> DTensor:
    """Runs ``new_empty``, ``new_zeros`` and the like; of the shape of ``like`` the result is packed too."""
    spec, local = _packed_spec(like), get_local_tensor(like)
    assert spec is not None
    if tuple(size) != tuple(like.shape):
        return func(make_dtensor(local, spec.ordinary), size, *args, **kwargs)
    new = func(local, list(local.shape), *args, **kwargs)
    return make_dtensor(new, make_spec(spec.mesh, spec.placements, like.shape, new.dtype))


def _all_or_any(func: Any, value: DTensor) -> Tensor:
    """Computes ``value.all()`` or ``value.any()`` from the number of true elements on each rank.

    DTensor of torch 2.15 would gather the rows first, and would assume ``torch.chunk``'s sizes.
    """
    spec, local = _packed_spec(value), get_local_tensor(value)
    assert spec is not None
    is_all = func is torch.ops.aten.all.default
    count = (local.logical_not() if is_all else local).count_nonzero()
    partial = [Partial() if p.is_shard() else p for p in ordinary(spec.placements)]
    summed = DTensor.from_local(count, spec.mesh, partial, run_check=False)
    summed = summed.redistribute(placements=[Replicate()] * len(partial))
    return summed == 0 if is_all else summed != 0


def _placed_differently(target: Any, source: Any) -> bool:
    """Whether both are DTensors of one shape, at least one of them packed, with different rows per rank."""
    if not (isinstance(target, DTensor) and isinstance(source, DTensor)):
        return False
    to, of = _packed_spec(target), _packed_spec(source)
    same = to is not None and of is not None and _same_rows(to, of)
    return target.shape == source.shape and not same


def _copied(target: DTensor, source: DTensor) -> DTensor:
    """Runs ``target.copy_(source)`` for DTensors with different rows per rank, by gathering ``source``: torch
    places loaded state without a packing."""
    whole = source.full_tensor()
    mesh, placements = target.device_mesh, target.placements
    if _packed_spec(target) is not None:
        get_local_tensor(target).copy_(cut_packed(whole, mesh, placements))
    else:
        target.copy_(DTensor.from_local(whole, mesh, run_check=False))
    return target


def _packed_spec(value: Any) -> PackedSpec | None:
    """Returns the PackedSpec of ``value``, also of a plain DTensor with a ``PackedShard``; else None."""
    if not isinstance(value, DTensor):
        return None
    spec = spec_of(value)
    if type(spec) is PackedSpec:
        return spec
    if packed_among(spec.placements) is None:
        return None
    return PackedSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta)


def _same_rows(one: PackedSpec, other: PackedSpec) -> bool:
    """Whether each rank holds the same rows of tensors with these specs."""
    return (one.packed, one.mesh, one.shape) == (other.packed, other.mesh, other.shape)


class PackedDTensor(DTensor):
    """A DTensor one of whose placements is a ``PackedShard``.

    Elementwise operations, copies, norms and optimizers work as on any DTensor. ``full_tensor()`` and
    checkpoints have the plain model's rows.
    """

    _spec: PackedSpec

    @property
    def packing(self) -> Packing:
        return self._spec.packed[1].packing

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _PackedCall(func, args, kwargs or {}).run()

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"PackedDTensor(local_tensor={self._local_tensor}, device_mesh={self.device_mesh}, "
            f"placements={self.placements})"
        )

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Returns the plain model's tensor, on every rank; differentiable. Every rank must call it."""
        if any(not isinstance(p, Replicate) for p in grad_placements or ()):
            raise Parallel3dError(
                f"full_tensor(grad_placements={grad_placements}) of a packed parameter: its gradient must be "
                "whole on every rank, Replicate()"
            )
        return _FullTensor.apply(self)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Redistributes to ``Replicate()`` on all axes, or reduces partial axes; refuses all else."""
        mesh, spec = device_mesh or self.device_mesh, self._spec
        wanted = self.placements if placements is None else tuple(placements)
        if mesh == spec.mesh:
            if wanted == self.placements:
                return self
            if all(isinstance(p, Replicate) for p in wanted):
                return DTensor.from_local(self.full_tensor(), mesh, wanted, run_check=False)
            if all(a == b or a.is_partial() for a, b in zip(spec.placements, wanted, strict=True)):
                plain = make_dtensor(self._local_tensor, spec.ordinary)
                local = get_local_tensor(plain.redistribute(mesh, ordinary(wanted), **options))
                return make_dtensor(local, PackedSpec(mesh, wanted, tensor_meta=spec.tensor_meta))
        raise Parallel3dError(
            f"redistribute from {self.placements} to {wanted}: of a packed parameter, whose rows are not "
            "torch.chunk's, only the whole can be made: full_tensor()"
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Returns this rank's rows; differentiable. The gradient that comes back is that of these rows."""
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise Parallel3dError(
                f"to_local(grad_placements={grad_placements}) of a packed parameter: its gradient must be "
                f"placed as it is, {self.placements}"
            )
        return _Local.apply(self) if torch.is_grad_enabled() else self._local_tensor

    def boxes(self) -> list[Box]:
        """Returns this rank's local tensor as boxes in the whole tensor."""
        spec = self._spec
        coordinate = spec.mesh.get_coordinate()
        if coordinate is None:
            return []
        return packed_boxes(self.shape, spec.mesh.shape, coordinate, spec.placements)[1]

    # The protocol of torch.distributed.checkpoint.

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
# torch.load's safe mode refuses a file with such a tensor otherwise.
torch.serialization.add_safe_globals([PackedDTensor, PackedSpec, PackedShard, Packing])


def packing_of(tensor: Tensor) -> Packing | None:
    """Returns the packing of a PackedDTensor; None for any other tensor."""
    return tensor.packing if isinstance(tensor, PackedDTensor) else None


def _reduced_placements(spec: PackedSpec) -> tuple[Placement, ...]:
    """Returns the spec's placements with ``Replicate()`` in place of partial ones."""
    return tuple(Replicate() if p.is_partial() else p for p in spec.placements)


class _FullTensor(torch.autograd.Function):
    """From a PackedDTensor to the whole tensor; backward cuts the gradient to a PackedDTensor."""

    @staticmethod
    def forward(ctx: Any, packed: PackedDTensor) -> Tensor:
        spec = ctx.spec = packed._spec
        reduced = packed.redistribute(placements=_reduced_placements(spec))
        return gather_packed(get_local_tensor(reduced), spec.mesh, reduced.placements, packed.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        local = cut_packed(grad, ctx.spec.mesh, _reduced_placements(ctx.spec))
        return _Local.backward(ctx, local)


class _Local(torch.autograd.Function):
    """From a PackedDTensor to its local tensor; backward makes the gradient a PackedDTensor."""

    @staticmethod
    def forward(ctx: Any, packed: PackedDTensor) -> Tensor:
        ctx.spec = packed._spec
        return packed._local_tensor.view_as(packed._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        mesh, placements = ctx.spec.mesh, _reduced_placements(ctx.spec)
        return make_dtensor(grad, PackedSpec(mesh, placements, tensor_meta=ctx.spec.tensor_meta))
