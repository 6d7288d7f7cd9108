"""Which form ``state_dict`` and ``load_state_dict`` of a sharded model have: full, sharded or local.

The names and configurations are FSDP1's own. Values of the sharded form are DTensors always; it is what a
model has that nothing was set on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from parallel3d._torch.dtensor import make_dtensor, make_spec
from parallel3d._util.arguments import as_bool
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.members import check_module, units_of
from parallel3d.fsdp.param import owner_of
from parallel3d.fsdp.state_dict.full_params import broadcast, is_first, places_of
from parallel3d.fsdp.state_dict.transforms import chunk

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from parallel3d.fsdp.param import ShardedParam
    from parallel3d.fsdp.unit import Unit


# adapt_values: what is loaded into a sharded model, brought to the form its Parameters have.
#
# It is a hook of each module that holds parameters of a unit, run as ``load_state_dict`` comes to
# the module: names are then as renaming hooks outside have left them, one parameter is handled at
# a time, and if loading fails half-way nothing of ours is left behind.


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


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


@dataclass(eq=False)
class Form:
    """What is set on a unit.

    Attributes:
        broadcast: the meshes whose first rank has what is loaded; none: every rank has.
        handles: the hooks on the unit's modules that adapt what is loaded.
    """

    settings: StateDictSettings
    broadcast: Sequence[DeviceMesh] = ()
    handles: list[RemovableHandle] = field(default_factory=list)


def set_state_dict_type(
    module: nn.Module,
    type: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Lets ``state_dict`` and ``load_state_dict`` of ``module`` give and take ``type`` from now on.

    FULL: whole plain tensors, of the plain model's shapes. LOCAL: plain tensors of this rank's parts.
    SHARDED: DTensors, for ``torch.distributed.checkpoint``.

    Args:
        module: a unit, or a module with units inside, all of which are set.
        config: of the class that goes with ``type``: ``FullStateDictConfig(offload_to_cpu, rank0_only)``,
            ``ShardedStateDictConfig(offload_to_cpu)``, ``LocalStateDictConfig(offload_to_cpu)``.
        optim_config: the same for ``fsdp.optim_state_dict``.

    Returns:
        What was set before.

    Raises:
        Parallel3dError: no StateDictType, a configuration of another type, or units that differ so far.
    """
    check_module(module)
    settings = _settings(type, config, optim_config)
    before = get_state_dict_type(module)
    for unit in units_of(module, True):
        _put(unit, Form(settings))
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """What is set on the units of ``module``: the type, and the configurations for model and optimizer.

    Raises:
        Parallel3dError: its units differ.
    """
    check_module(module)
    found: StateDictSettings | None = None
    for unit in units_of(module, True):
        settings = settings_of(unit)
        if found is not None and settings != found:
            raise Parallel3dError(
                f"unit {unit.label} has {settings}, and others of this model {found}; call "
                "set_state_dict_type on the outermost module"
            )
        found = settings
    return found if found is not None else default_settings(StateDictType.SHARDED_STATE_DICT)


@contextmanager
def state_dict_type(
    module: nn.Module,
    type: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """``set_state_dict_type`` for the body; each unit then has again what it had."""
    check_module(module)
    settings = _settings(type, config, optim_config)
    with form_set(units_of(module, True), settings):
        yield


@contextmanager
def form_set(
    units: Iterable[Unit],
    settings: StateDictSettings | None,
    *,
    broadcast: Sequence[DeviceMesh] = (),
) -> Iterator[None]:
    """``settings`` on ``units`` for the body; None: as if nothing were set."""
    before = [(unit, unit.form) for unit in units]
    try:
        for unit, _ in before:
            _put(unit, None if settings is None else Form(settings, broadcast))
        yield
    finally:
        for unit, form in before:
            _put(unit, None if form is None else Form(form.settings, form.broadcast))


def settings_of(unit: Unit) -> StateDictSettings:
    """What is set on ``unit``."""
    if unit.form is None:
        return default_settings(StateDictType.SHARDED_STATE_DICT)
    return unit.form.settings


def default_settings(type: StateDictType) -> StateDictSettings:
    """``type`` with its default configurations."""
    return _settings(type, None, None)


def with_options(
    settings: StateDictSettings,
    type: StateDictType | None,
    offload_to_cpu: bool | None,
    rank0_only: bool | None,
    *,
    optimizer: bool,
) -> StateDictSettings:
    """``settings`` with what is given as arguments instead; None is not given.

    Args:
        optimizer: whether the options are of the optimizer's configuration.
    """
    if type is not None and type is not settings.state_dict_type:
        settings = default_settings(type)
    model, optim = settings.state_dict_config, settings.optim_state_dict_config
    changed: Any = copy.copy(optim if optimizer else model)
    if offload_to_cpu is not None:
        changed.offload_to_cpu = as_bool("offload_to_cpu", offload_to_cpu)
    if rank0_only is not None:
        if as_bool("rank0_only", rank0_only) and not hasattr(changed, "rank0_only"):
            raise Parallel3dError(
                f"rank0_only=True with {settings.state_dict_type.name}: each rank has parts that no other "
                "has; give type=StateDictType.FULL_STATE_DICT"
            )
        if hasattr(changed, "rank0_only"):
            changed.rank0_only = rank0_only
    if optimizer:
        return StateDictSettings(settings.state_dict_type, model, changed)
    return StateDictSettings(settings.state_dict_type, changed, optim)


def _settings(
    type: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    if not isinstance(type, StateDictType):
        names = ", ".join(f"StateDictType.{each.name}" for each in StateDictType)
        raise Parallel3dError(f"type is {type!r}; it must be one of {names}")
    model_class, optim_class = _CONFIGS[type]
    given: Any
    for name, given, wanted in (
        ("config", config, model_class),
        ("optim_config", optim_config, optim_class),
    ):
        if given is not None and given.__class__ is not wanted:
            raise Parallel3dError(
                f"{name} is {given!r}; for {type.name} it must be a {wanted.__name__}, or None"
            )
    return StateDictSettings(type, config or model_class(), optim_config or optim_class())


def _put(unit: Unit, form: Form | None) -> None:
    if unit.form is not None:
        for handle in unit.form.handles:
            handle.remove()
    unit.form = form
    if form is None:
        return
    places = {
        place for bucket in unit.group.buckets for p in bucket.params for place in places_of(p)
    }
    seen: set[int] = set()
    for root in unit.modules:
        for module in root.modules():
            if id(module._parameters) in places and id(module) not in seen:
                seen.add(id(module))
                form.handles.append(module.register_load_state_dict_pre_hook(adapt_values))
