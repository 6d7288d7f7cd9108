"""The first rank of a model's meshes: what ``rank0_only`` keeps and ``broadcast_from_rank0`` gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor

from parallel3d._compat_simulated import ranks_are_simulated
from parallel3d.errors import Parallel3dError

if TYPE_CHECKING:
    from parallel3d.fsdp.state import Unit

__all__ = ["broadcast", "is_first", "meshes_of", "refusal", "sent_by_first"]


def meshes_of(units: Iterable[Unit]) -> list[DeviceMesh]:
    """The meshes that the units' parameters lie on at rest, each once, in an order all ranks share."""
    meshes: list[DeviceMesh] = []
    for unit in units:
        for bucket in unit.group.buckets:
            for param in bucket.params:
                if all(param.on.mesh is not mesh and param.on.mesh != mesh for mesh in meshes):
                    meshes.append(param.on.mesh)
    return meshes


def is_first(meshes: Iterable[DeviceMesh]) -> bool:
    """Whether this rank is the first of each of ``meshes``: rank 0, where they have all ranks.

    Simulated ranks are one process, which counts as the first.
    """
    if ranks_are_simulated():
        return True
    return not any(any(mesh.get_coordinate() or ()) for mesh in meshes)


def _groups(mesh: DeviceMesh) -> list[ProcessGroup]:
    return [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]


def broadcast(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Gives ``tensor`` of the mesh's first rank to all, in place, axis by axis.

    After axis i all ranks have it whose coordinates on later axes are 0; what others send is overwritten.
    """
    if not tensor.numel():
        return
    for group in _groups(mesh):
        dist.broadcast(tensor.view(-1).view(torch.uint8), group=group, group_src=0)


def sent_by_first(value: Any, meshes: Iterable[DeviceMesh]) -> Any:
    """``value`` of the first rank of ``meshes``, on all of them; pickled, so for small things.

    Raises:
        Parallel3dError: it is a ``refusal``; on every rank, others would wait for one that raises alone.
    """
    for mesh in meshes:
        value = _broadcast_object(value, mesh)
    if isinstance(value, str):
        raise Parallel3dError(value)
    return value


def refusal(values: Mapping[str, Any]) -> str | None:
    """What is wrong with ``values``, which the first rank is to send; None if nothing is."""
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.is_meta):
            what = "on the meta device" if value.is_meta else "a DTensor"
            return (
                f"broadcast_from_rank0=True: {name} is {what} on the first rank, which has to give whole "
                "tensors with values, as model_state_dict and optim_state_dict return them for "
                "StateDictType.FULL_STATE_DICT"
            )
    return None


def _broadcast_object(value: Any, mesh: DeviceMesh) -> Any:
    if ranks_are_simulated():
        return value
    box = [value]
    for group in _groups(mesh):
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]
