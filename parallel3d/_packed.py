"""PackedDTensor: a DTensor whose rows on one mesh axis lie as a ``Packing`` says.

To DTensor's own operations its rows are those of ``torch.chunk``. So only what treats rows alike, wherever
they are, goes through to them; anything else would be silently wrong, and raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from parallel3d._compat import get_local_tensor, make_dtensor, spec_of
from parallel3d._packed_layout import (
    Box,
    PackedShard,
    PackedSpec,
    cut_packed,
    gather_packed,
    ordinary,
    packed_boxes,
)
from parallel3d._packing import Packing
from parallel3d.errors import Parallel3dError

__all__ = ["PackedDTensor", "PackedShard", "packing_of"]


class PackedDTensor(DTensor):
    """One of its placements is a ``PackedShard``. Elementwise operations, copies, norms and optimizers work
    as on any DTensor; ``full_tensor()`` and checkpoints have the plain model's rows."""

    _spec: PackedSpec

    @property
    def packing(self) -> Packing:
        """The rows on each rank of the packed axis."""
        return self._spec.packing

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _Call(func, args, kwargs or {}).run()

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


# -- operations ------------------------------------------------------------------------------------------

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


@lru_cache(maxsize=1024)
def _kind(func: Any) -> str:
    """``"rows"``: each result has the rows of its operands. ``"number"``: it is a number of all. ``""``."""
    name = func._schema.name.removeprefix("aten::")
    if name.startswith("_foreach_") or name in _SAME_ROWS or torch.Tag.pointwise in func.tags:
        return "rows"
    return "number" if name in _TO_NUMBER else ""


class _Call:
    """One operation with PackedDTensors among its operands.

    An operation on lists is one on each position; ``like[i]`` is what is packed at position i.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.kind = _kind(func)
        self.like: dict[int, PackedDTensor] = {}
        self.originals: dict[int, PackedDTensor] = {}  # by id of what DTensor sees of it
        self.seen: list[DTensor] = []  # keeps these ids theirs
        self.on_lists = any(isinstance(value, (list, tuple)) for value in args[:1])

    def run(self) -> Any:
        if not self.kind:
            self._refuse("mixes, picks or moves rows")
        values = [*self.args, *self.kwargs.values()]
        for value in values:
            for position, tensor in _positions(value):
                if isinstance(tensor, DTensor) and _is_packed(tensor):
                    self._take(position, tensor)
        args = [self._plain(value) for value in self.args]
        kwargs = {key: self._plain(value) for key, value in self.kwargs.items()}
        result = self.func(*args, **kwargs)
        if isinstance(result, (list, tuple)):
            marked = (self._marked(i * self.on_lists, value) for i, value in enumerate(result))
            return type(result)(marked)
        return self._marked(0, result)

    def _take(self, position: int, tensor: Any) -> None:
        known = self.like.setdefault(position, tensor)
        same = _packed_of(known) == _packed_of(tensor)
        if not same or known.device_mesh != tensor.device_mesh or known.shape != tensor.shape:
            self._refuse(
                f"has operands with other rows, {known.placements} and {tensor.placements},"
            )

    def _plain(self, value: Any) -> Any:
        """``value`` as DTensor gets it."""
        if isinstance(value, (list, tuple)):
            return [self._plain_at(i, item) for i, item in enumerate(value)]
        return self._plain_at(0, value)

    def _plain_at(self, position: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, DTensor) and _is_packed(value):
            spec = spec_of(value)
            plain = make_dtensor(get_local_tensor(value), _ordinary(spec))
            self.originals[id(plain)] = value  # type: ignore[assignment]
            self.seen.append(plain)
            return plain
        like = self.like.get(position)
        if like is None or not value.dim() or value.numel() == 1:
            return value
        at = like.packing.dim + value.dim() - like.dim()
        if at < 0 or value.shape[at] == 1:
            return value
        if value.stride(at) == 0:  # one row, expanded, as backward expands numbers
            return value.narrow(at, 0, 1)
        what = f"{tuple(value.placements)}" if isinstance(value, DTensor) else "no DTensor"
        return self._refuse(f"has an operand of {tuple(value.shape)} with other rows, {what},")

    def _marked(self, position: int, result: Any) -> Any:
        """The result at ``position`` of the result, packed as the operands there are."""
        if not isinstance(result, Tensor):
            return result
        original = self.originals.get(id(result))
        if original is not None:
            return original
        like = self.like.get(position)
        if like is None or not isinstance(result, DTensor):
            return result
        if self.kind == "number" or not result.dim():
            if result.dim():
                self._refuse("leaves some of the rows")
            return result
        if result.shape != like.shape:
            self._refuse(f"makes a tensor of {tuple(result.shape)}")
        spec, packed = spec_of(result), spec_of(like)
        axis, shard = _packed_of(like)
        if (
            spec.placements == _ordinary(packed).placements
            and spec.tensor_meta == packed.tensor_meta
        ):
            return make_dtensor(get_local_tensor(result), packed)
        placements = list(spec.placements)
        assert placements[axis] == ordinary([shard])[0], f"{self.func} gave {placements}"
        placements[axis] = shard
        made = PackedSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)
        return make_dtensor(get_local_tensor(result), made)

    def _refuse(self, why: str) -> Any:
        raise Parallel3dError(
            f"{self.func} on a packed parameter (gate and up in one, q, k and v in one, uneven heads) {why} "
            "and its rows on a rank are not those that DTensor computes with; use full_tensor(), which "
            "every rank must call, or to_local()"
        )


def _is_packed(tensor: DTensor) -> bool:
    """Also of a plain DTensor that torch has made with the placements of a packed one."""
    return isinstance(tensor, PackedDTensor) or any(
        isinstance(p, PackedShard) for p in spec_of(tensor).placements
    )


def _packed_of(tensor: DTensor) -> tuple[int, PackedShard]:
    return next(
        (i, p) for i, p in enumerate(spec_of(tensor).placements) if isinstance(p, PackedShard)
    )


def _ordinary(spec: Any) -> Any:
    if isinstance(spec, PackedSpec):
        return spec.ordinary
    return PackedSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta).ordinary


def _positions(value: Any) -> list[tuple[int, Any]]:
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else [(0, value)]
