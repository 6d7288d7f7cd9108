"""PackedDTensor: a DTensor whose rows on one mesh axis lie as a ``Packing`` says."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d._compat import make_dtensor
from parallel3d._packing import Packing
from parallel3d._tree import map_tensors, tensors_in

__all__ = ["PackedDTensor", "make_packed", "packing_of"]


class PackedDTensor(DTensor):
    """Its placements say ``Shard(packing.dim)`` on ``axis``, but the rows there are the packing's.

    Attributes:
        packing: the rows on each rank of the mesh axis.
        axis: position in ``device_mesh`` of that axis.
    """

    packing: Packing
    axis: int

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = next(t for t in tensors_in((args, kwargs or {})) if isinstance(t, PackedDTensor))

        def plain(t: Tensor) -> Tensor:
            return make_dtensor(t._local_tensor, t._spec) if isinstance(t, PackedDTensor) else t

        def packed(t: Tensor) -> Tensor:
            if type(t) is not DTensor or t.shape != first.shape:
                return t
            return make_packed(t._local_tensor, t._spec, first.packing, first.axis)

        args, kwargs = map_tensors(plain, (args, kwargs or {}))
        return map_tensors(packed, func(*args, **kwargs))


def make_packed(local: Tensor, spec: Any, packing: Packing, axis: int) -> PackedDTensor:
    """The DTensor of ``local``, without checks."""
    made = PackedDTensor(local, spec, requires_grad=False)
    made.packing = packing
    made.axis = axis
    return made


def packing_of(tensor: Tensor) -> Packing | None:
    """The packing of a PackedDTensor; None for any other tensor."""
    return tensor.packing if isinstance(tensor, PackedDTensor) else None
