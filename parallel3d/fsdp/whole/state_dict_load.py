"""adapt_values: what is loaded into a sharded model, brought to the form its Parameters have.

It is a hook of each module that holds parameters of a unit, run as ``load_state_dict`` comes to the
module: names are then as renaming hooks outside have left them, one parameter is handled at a time,
and if loading fails half-way nothing of ours is left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from parallel3d._compat import make_dtensor, make_spec
from parallel3d.fsdp.param import owner_of
from parallel3d.fsdp.whole.first_rank import broadcast, is_first
from parallel3d.fsdp.whole.transforms import chunk

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

    from parallel3d.fsdp.param import ShardedParam

__all__ = ["adapt_values", "from_first_rank", "in_sharded_form"]


def adapt_values(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Hook before ``module`` takes its own entries of ``state_dict``; changes them in place."""
    for name, param in module._parameters.items():
        owner = None if param is None else owner_of(param)
        value = state_dict.get(prefix + name)
        unit = None if owner is None or owner.unit is None else owner.unit()
        if (
            owner is None
            or unit is None
            or unit.form is None
            or not isinstance(value, torch.Tensor)
        ):
            continue
        kind = unit.form.settings.state_dict_type
        if unit.form.broadcast and value.shape == owner.global_shape:
            value = from_first_rank(value, unit.form.broadcast)
        adapted = in_sharded_form(owner, value, kind)
        if adapted is None:
            error_msgs.append(_misfit(prefix + name, owner, value, kind))
        else:
            state_dict[prefix + name] = adapted


def in_sharded_form(
    owner: ShardedParam, value: torch.Tensor, kind: StateDictType
) -> torch.Tensor | None:
    """``value``, of the form ``kind``, as a DTensor laid out as the parameter is; None if it isn't one.

    A whole tensor of another shape is returned as it is: ``load_state_dict`` says best what is wrong.
    """
    mesh, placements = owner.spec.mesh, owner.spec.placements
    if isinstance(value, DTensor):
        if value.device_mesh == mesh or value.shape != owner.global_shape:
            return value
        return chunk(value.full_tensor(), mesh, placements)
    if kind is StateDictType.SHARDED_STATE_DICT:
        return None
    if kind is StateDictType.LOCAL_STATE_DICT:
        if tuple(value.shape) != tuple(owner.local_shape):
            return None
        local = value.detach()
    else:
        if value.shape == (1,) and owner.global_shape == ():
            value = value[0]  # as old checkpoints have scalars
        if value.shape != owner.global_shape:
            return value
        local = owner.local_part(value.detach())
    if not owner.local.is_meta:  # assign=True gives it values
        local = local.to(owner.local.device)
    return make_dtensor(local, make_spec(mesh, placements, owner.global_shape, value.dtype))


def from_first_rank(value: torch.Tensor, meshes: Sequence[DeviceMesh]) -> torch.Tensor:
    """What the first rank of all ``meshes`` has as ``value``; others give anything of its shape and dtype.

    Over each mesh in turn: of a second one, the first rank may have it by the first one only.
    """
    if isinstance(value, DTensor):
        return value
    device = torch.device(meshes[0].device_type)
    whole = torch.empty(value.shape, dtype=value.dtype, device=device)
    if is_first(meshes):
        whole.copy_(value)
    for mesh in meshes:
        broadcast(whole, mesh)
    return whole


def _misfit(key: str, owner: ShardedParam, value: torch.Tensor, kind: StateDictType) -> str:
    if kind is StateDictType.LOCAL_STATE_DICT:
        return (
            f"{key}: a tensor of shape {tuple(value.shape)} in a LOCAL_STATE_DICT, where this rank's part "
            f"of {tuple(owner.global_shape)} has shape {tuple(owner.local_shape)}; load it on the mesh it "
            "was saved on, or as FULL_STATE_DICT if it is whole."
        )
    return (
        f"{key}: a plain tensor of shape {tuple(value.shape)} in a SHARDED_STATE_DICT, whose values are "
        "DTensors; load it as FULL_STATE_DICT if it is whole, as LOCAL_STATE_DICT if it is this rank's part."
    )
