"""Every private torch name the library uses, in one place.

Checked on torch 2.13.0 by the tests; on 2.11 by reading.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

__all__ = [
    "DTensorSpec",
    "LocalTensor",
    "LocalTensorMode",
    "StridedShard",
    "TensorMeta",
    "backend_name",
    "concatenate_meshes",
    "default_store",
    "dtensor_shard_box",
    "inner_tensors",
    "ranks_are_simulated",
    "root_mesh",
]

from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, local_tensor_mode
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard


def ranks_are_simulated() -> bool:
    """Whether a ``LocalTensorMode`` is active: one process plays all ranks."""
    return local_tensor_mode() is not None


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The real tensors behind ``tensor``: itself, or one per simulated rank."""
    if isinstance(tensor, LocalTensor):
        yield from tensor._local_tensors.values()
    else:
        yield tensor


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` was sliced from, or ``mesh`` itself."""
    return mesh._get_root_mesh()


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of ``meshes`` in order; they must be slices of one root mesh."""
    return DeviceMesh._concatenate(list(meshes))


def default_store() -> dist.Store:
    """The key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def backend_name(group: ProcessGroup, device_type: str) -> str:
    """The backend that carries ``device_type``'s tensors in ``group``: ``gloo``, ``nccl``, ``fake``."""
    return group._get_backend(torch.device(device_type)).name()


def dtensor_shard_box(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local shape, global offset) DTensor gives to the rank at ``coordinate``."""
    return _compute_local_shape_and_global_offset(
        tuple(shape), tuple(mesh_shape), list(coordinate), list(placements)
    )
