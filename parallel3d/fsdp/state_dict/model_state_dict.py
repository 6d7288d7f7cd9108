"""model_state_dict and load_model_state_dict: state dicts of a sharded model in any type.

A full state dict is made unit by unit: the unit's buckets are gathered one after another, copied to the CPU
if requested, and the results are registered in its modules while these write them into the dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from parallel3d._util.arguments import as_bool
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.members import get_unit, units_of
from parallel3d.fsdp.options.gather_extension import as_plain
from parallel3d.fsdp.param import owner_of
from parallel3d.fsdp.state_dict.full_params import (
    check_at_rest,
    gather_full_params,
    is_first,
    made_by_first,
    meshes_of,
    params_by_bucket,
    placeholder,
    swapped_params,
    to_rest,
)
from parallel3d.fsdp.state_dict.state_dict_type import form_set, get_state_dict_type, with_options
from parallel3d.fsdp.state_dict.transforms import chunk

if TYPE_CHECKING:
    from torch.distributed.fsdp import StateDictSettings

    from parallel3d.fsdp.unit import Unit


_FULL, _LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT


def model_state_dict(
    model: nn.Module,
    *,
    type: StateDictType | None = None,
    offload_to_cpu: bool | None = None,
    rank0_only: bool | None = None,
) -> dict[str, Any]:
    """Returns ``model.state_dict()``, buffers included, as a state dict of ``type``; all ranks must call it.

    Args:
        type: FULL: full tensors, gathered one unit at a time. LOCAL: this rank's shards as plain tensors.
            SHARDED: DTensors. None: the type set by ``set_state_dict_type``, by default SHARDED.
        offload_to_cpu: copy each unit's tensors to the CPU as soon as they are gathered. None: as set.
        rank0_only: for FULL: return ``{}`` on all ranks but the first of the mesh. None: as set.

    Returns:
        Values under the plain model's names. Full tensors have their own memory; shards share the model's.

    Raises:
        Parallel3dError: ``type`` is no StateDictType, or ``rank0_only`` was given with another than FULL.
        StateError: for FULL and LOCAL: a forward, backward or ``full_params`` is running, or parameters are
            on the meta device.
    """
    settings = with_options(
        get_state_dict_type(model), type, offload_to_cpu, rank0_only, optimizer=False
    )
    units = list(units_of(model, True))
    with form_set(units, settings):
        result = model.state_dict()
    if settings.state_dict_type is _FULL:
        for key, value in result.items():
            if isinstance(value, DTensor):  # of no unit: ignored, or tensor-parallel only
                result[key] = value.full_tensor()
    return _apply_config(result, set(), settings, keep=is_first(meshes_of(units)))


def load_model_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    type: StateDictType | None = None,
    strict: bool = True,
    assign: bool = False,
    broadcast_from_rank0: bool = False,
) -> Any:
    """Loads a state dict of ``type`` into ``model``, as ``load_state_dict``; all ranks must call it.

    It does not communicate if every rank has the values it needs. On the device there is never a full
    parameter.

    Args:
        state_dict: values under the plain model's names.
        type: as for ``model_state_dict``.
        strict, assign: as for ``load_state_dict``.
        broadcast_from_rank0: for FULL: the first rank of the mesh has the state dict, others give
            ``{}``; parameters are broadcast one at a time.

    Returns:
        The missing and unexpected keys, as ``load_state_dict`` returns them.

    Raises:
        Parallel3dError: ``type`` is no StateDictType, or ``broadcast_from_rank0`` was given with another than
            FULL.
        RuntimeError: keys or shapes don't fit, as from ``load_state_dict``.
    """
    settings = with_options(get_state_dict_type(model), type, None, None, optimizer=False)
    as_bool("broadcast_from_rank0", broadcast_from_rank0)
    check_mapping(state_dict)
    units = list(units_of(model, True))
    meshes = meshes_of(units) if broadcast_from_rank0 else []
    if broadcast_from_rank0:
        check_broadcast(settings)
    if meshes:
        with form_set(units, None):
            values = model.state_dict(keep_vars=True)
        sent_later = {
            key
            for key, value in values.items()
            if isinstance(value, DTensor) and owner_of(value) is not None
        }

        def stripped() -> dict[str, Any]:
            """Everything but the values of units' parameters, which are sent one by one."""
            return {
                key: (placeholder(value) if key in sent_later else value.detach().cpu())
                if isinstance(value, torch.Tensor)
                else value
                for key, value in state_dict.items()
            }

        sent = made_by_first(meshes, state_dict, stripped)
        if not is_first(meshes):
            state_dict = sent
    if settings.state_dict_type is _FULL:
        state_dict = _with_dtensors(model, state_dict, units)
    with form_set(units, settings, broadcast=meshes):
        return model.load_state_dict(state_dict, strict=strict, assign=assign)


def _with_dtensors(
    model: nn.Module, state_dict: Mapping[str, Any], units: list[Unit]
) -> Mapping[str, Any]:
    """Returns ``state_dict`` with full values sharded where they are loaded into DTensors of no unit."""
    if not any(isinstance(p, DTensor) and owner_of(p) is None for p in model.parameters()):
        return state_dict
    with form_set(units, None):
        params = model.state_dict(keep_vars=True)
    result = dict(state_dict)
    for key, param in params.items():
        value = result.get(key)
        if not isinstance(param, DTensor) or owner_of(param) is not None:
            continue
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == param.shape:
            result[key] = chunk(value.to(param.device), param.device_mesh, param.placements)
    return result


def check_mapping(state_dict: object) -> None:
    """Raises Parallel3dError unless ``state_dict`` is a mapping."""
    if not isinstance(state_dict, Mapping):
        raise Parallel3dError(
            f"state_dict is {type(state_dict).__name__}; it must be a dict, {{}} on ranks that get it from "
            "the first (broadcast_from_rank0=True)"
        )


def check_broadcast(settings: StateDictSettings) -> None:
    """Raises Parallel3dError unless state dicts are full, so that the first rank's values are for all."""
    if settings.state_dict_type is not _FULL:
        raise Parallel3dError(
            f"broadcast_from_rank0=True with {settings.state_dict_type.name}: the first rank has only its "
            "own shards; give type=StateDictType.FULL_STATE_DICT"
        )


def state_dict_as_set(
    module: nn.Module, save: Callable[[], dict[str, Any]], destination: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns what ``save()`` writes into ``destination`` for ``module``, in the type set on its unit.

    Units inside have already written theirs in the same way.
    """
    unit = get_unit(module)
    assert unit.form is not None
    settings = unit.form.settings
    before = set(destination or ())
    kind = settings.state_dict_type
    if kind is StateDictType.SHARDED_STATE_DICT or unit.group.is_in_other_form:
        return _apply_config(save(), before, settings, keep=True)
    check_at_rest(unit, "state_dict")
    to_rest(unit)
    chosen = params_by_bucket(unit, module)
    keep = True
    if kind is _LOCAL:
        with torch.inference_mode(False):
            others = {
                param: nn.Parameter(as_plain(param.local), param.sharded.requires_grad)
                for _, params in chosen
                for param in params
            }
    else:
        config: Any = settings.state_dict_config
        keep = not config.rank0_only or is_first(meshes_of([unit]))
        others = gather_full_params(chosen, keep=keep, to_cpu=config.offload_to_cpu)
    with swapped_params(unit, chosen, others):
        return _apply_config(save(), before, settings, keep=keep)


def _apply_config(
    state_dict: dict[str, Any], before: set[str], settings: StateDictSettings, *, keep: bool
) -> dict[str, Any]:
    """Deletes new entries with ``rank0_only`` unless ``keep`` is set, or offloads them if configured."""
    config = settings.state_dict_config
    rank0_only = getattr(config, "rank0_only", False)
    for key in [key for key in state_dict if key not in before]:
        if rank0_only and not keep:
            del state_dict[key]
        elif config.offload_to_cpu and isinstance(state_dict[key], torch.Tensor):
            state_dict[key] = state_dict[key].cpu()
    return state_dict
