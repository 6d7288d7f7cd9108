"""PackedDTensor: a DTensor whose rows on one mesh axis lie as a ``Packing`` says.

What it computes is in ``_packed_ops``; here is what it is otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from parallel3d._compat import call_torch_dispatch_of, get_local_tensor, make_dtensor
from parallel3d._packed_layout import (
    Box,
    PackedShard,
    PackedSpec,
    cut_packed,
    gather_packed,
    ordinary,
    packed_boxes,
)
from parallel3d._packed_ops import run
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
