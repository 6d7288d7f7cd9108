"""State dicts of a sharded model in any form, as arguments; and how a unit makes its part of one.

A full state dict is made unit by unit: the unit's buckets are gathered one after another, copied to the
CPU if so wanted, and its modules show the result while they write it into the dict under names of their own.
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
    Chosen,
    check_at_rest,
    chosen_of,
    is_first,
    meshes_of,
    refusal,
    sent_by_first,
    shown_instead,
    to_rest,
    whole_params,
)
from parallel3d.fsdp.state_dict.state_dict_type import form_set, get_state_dict_type, with_options
from parallel3d.fsdp.state_dict.transforms import chunk

if TYPE_CHECKING:
    from torch.distributed.fsdp import StateDictSettings

    from parallel3d.fsdp.param import ShardedParam
    from parallel3d.fsdp.unit import Unit


_FULL, _LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT


def model_state_dict(
    model: nn.Module,
    *,
    type: StateDictType | None = None,
    offload_to_cpu: bool | None = None,
    rank0_only: bool | None = None,
) -> dict[str, Any]:
    """``model.state_dict()`` in the form ``type``, buffers included; every rank must call it.

    Args:
        type: FULL: whole tensors, gathered one unit at a time. LOCAL: this rank's parts as plain tensors.
            SHARDED: DTensors. None: what ``set_state_dict_type`` has set, SHARDED if it has not.
        offload_to_cpu: copy each unit's tensors to the CPU as soon as they are there. None: as set.
        rank0_only: of FULL: others than the first rank of the mesh get ``{}``. None: as set.

    Returns:
        Names as the plain model's. Whole tensors have memory of their own; parts share the model's.

    Raises:
        Parallel3dError: no StateDictType, or ``rank0_only`` with another than FULL.
        StateError: in a forward, backward or ``full_params``, or on meta, for FULL and LOCAL.
    """
    settings = with_options(
        get_state_dict_type(model), type, offload_to_cpu, rank0_only, optimizer=False
    )
    units = list(units_of(model, True))
    with form_set(units, settings):
        found = model.state_dict()
    if settings.state_dict_type is _FULL:
        for key, value in found.items():
            if isinstance(value, DTensor):  # of no unit: ignored, or under tensor parallelism only
                found[key] = value.full_tensor()
    return _kept(found, set(), settings, keep=is_first(meshes_of(units)))


def load_model_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    type: StateDictType | None = None,
    strict: bool = True,
    assign: bool = False,
    broadcast_from_rank0: bool = False,
) -> Any:
    """``model.load_state_dict(state_dict)`` with values of the form ``type``; every rank must call it.

    Nothing is communicated where every rank has what it needs, and no parameter is ever whole on the device.

    Args:
        state_dict: under the plain model's names.
        type: as for ``model_state_dict``.
        strict, assign: as for ``load_state_dict``.
        broadcast_from_rank0: of FULL: the first rank of the mesh has the state dict, others give
            ``{}``; parameters are sent one at a time.

    Returns:
        What ``load_state_dict`` returns: missing and unexpected keys.

    Raises:
        Parallel3dError: no StateDictType, or ``broadcast_from_rank0`` with another than FULL.
        RuntimeError: keys or shapes don't fit, as ``load_state_dict`` raises it.
    """
    settings = with_options(get_state_dict_type(model), type, None, None, optimizer=False)
    as_bool("broadcast_from_rank0", broadcast_from_rank0)
    check_mapping(state_dict)
    units = list(units_of(model, True))
    if broadcast_from_rank0:
        check_broadcast(settings)
        state_dict = _from_first(model, state_dict)
    if settings.state_dict_type is _FULL:
        state_dict = _with_dtensors(model, state_dict, units)
    meshes = meshes_of(units) if broadcast_from_rank0 else ()
    with form_set(units, settings, broadcast=meshes):
        return model.load_state_dict(state_dict, strict=strict, assign=assign)


def _with_dtensors(
    model: nn.Module, state_dict: Mapping[str, Any], units: list[Unit]
) -> Mapping[str, Any]:
    """``state_dict`` with what is loaded into DTensors of no unit laid out as they are."""
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
    """Raises unless ``state_dict`` is a mapping."""
    if not isinstance(state_dict, Mapping):
        raise Parallel3dError(
            f"state_dict is {type(state_dict).__name__}; it must be a dict, {{}} on ranks that get it from "
            "the first (broadcast_from_rank0=True)"
        )


def check_broadcast(settings: StateDictSettings) -> None:
    """Raises Parallel3dError if the first rank's values can't be the others': it is no full state dict."""
    if settings.state_dict_type is not _FULL:
        raise Parallel3dError(
            f"broadcast_from_rank0=True with {settings.state_dict_type.name}: the first rank's values are no "
            "other's then; give type=StateDictType.FULL_STATE_DICT"
        )


def _from_first(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The first rank's state dict: on others, units' parameters are stand-ins of the same shape and dtype.

    What is of no unit, buffers above all, is sent at once.
    """
    meshes = meshes_of(units_of(model, True))
    if not meshes:
        return dict(state_dict)
    with form_set(list(units_of(model, True)), None):
        values = model.state_dict(keep_vars=True)
    sharded = {key for key, value in values.items() if _is_managed(value)}
    first = is_first(meshes)
    sent: Any = refusal(state_dict) if first else None
    if sent is None:
        sent = {
            key: Placeholder(value)
            if key in sharded and isinstance(value, torch.Tensor)
            else _on_cpu(value)
            for key, value in (state_dict.items() if first else ())
        }
    sent = sent_by_first(sent, meshes)
    if first:
        return dict(state_dict)
    return {k: v.tensor() if isinstance(v, Placeholder) else v for k, v in sent.items()}


def _is_managed(value: Any) -> bool:
    return isinstance(value, DTensor) and owner_of(value) is not None


class Placeholder:
    """Shape and dtype of a tensor that is sent later."""

    def __init__(self, value: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(value.shape), value.dtype

    def tensor(self) -> torch.Tensor:
        """One of that shape in the memory of one element."""
        return torch.zeros((), dtype=self.dtype).expand(self.shape)


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


# -- one unit's part -----------------------------------------------------------------------------------


def saved_in_form(
    module: nn.Module, save: Callable[[], dict[str, Any]], destination: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What ``save()`` writes into ``destination`` for ``module``, in the form set on its unit.

    Units inside have written theirs already in the same way.
    """
    unit = get_unit(module)
    assert unit.form is not None
    settings = unit.form.settings
    before = set(destination or ())
    kind = settings.state_dict_type
    if kind is StateDictType.SHARDED_STATE_DICT or unit.group.is_in_other_form:
        return _kept(save(), before, settings, keep=True)
    check_at_rest(unit, "state_dict")
    to_rest(unit)
    chosen = chosen_of(unit, module)
    keep = True
    shown: dict[ShardedParam, nn.Parameter]
    if kind is _LOCAL:
        shown = _local_params(chosen)
    else:
        config: Any = settings.state_dict_config
        keep = not config.rank0_only or is_first(meshes_of([unit]))
        shown = whole_params(chosen, keep=keep, to_cpu=config.offload_to_cpu)
    with shown_instead(unit, chosen, shown.get):
        return _kept(save(), before, settings, keep=keep)


def _local_params(chosen: Chosen) -> dict[ShardedParam, nn.Parameter]:
    params = [bucket.params[i] for bucket, indices in chosen for i in indices]
    with torch.inference_mode(False):
        return {p: nn.Parameter(as_plain(p.local), p.sharded.requires_grad) for p in params}


def _kept(
    found: dict[str, Any], before: set[str], settings: StateDictSettings, *, keep: bool
) -> dict[str, Any]:
    """``found``, of whose new entries this rank keeps all or, with ``rank0_only``, none."""
    config = settings.state_dict_config
    rank0_only = getattr(config, "rank0_only", False)
    for key in [key for key in found if key not in before]:
        if rank0_only and not keep:
            del found[key]
        elif config.offload_to_cpu and isinstance(found[key], torch.Tensor):
            found[key] = found[key].cpu()
    return found
