"""The state dict type of a sharded model: full, sharded or local.

Names and configurations are FSDP1's own. Values of a sharded state dict are always DTensors; it is the
default.
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


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


@dataclass(eq=False)
class Form:
    """The state dict type that is set on a unit.

    Attributes:
        settings: the type and its configurations.
        broadcast: the meshes whose first rank has the values to load; empty if every rank has them.
        handles: the hooks on the unit's modules that adapt values to load.
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
    """Sets the type of state dict that ``module.state_dict`` returns and ``load_state_dict`` takes.

    FULL: full plain tensors of the plain model's shapes. LOCAL: this rank's shards as plain tensors.
    SHARDED: DTensors, for ``torch.distributed.checkpoint``.

    Args:
        module: a unit, or a module with units inside; it is set on all of them.
        config: of the class that goes with ``type``: ``FullStateDictConfig(offload_to_cpu, rank0_only)``,
            ``ShardedStateDictConfig(offload_to_cpu)``, ``LocalStateDictConfig(offload_to_cpu)``.
        optim_config: the same for ``fsdp.optim_state_dict``.

    Returns:
        The previous settings.

    Raises:
        Parallel3dError: ``type`` is no StateDictType, a configuration belongs to another type, or the units
            had different settings.
    """
    check_module(module)
    settings = _settings(type, config, optim_config)
    before = get_state_dict_type(module)
    for unit in units_of(module, True):
        _set_form(unit, Form(settings))
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Returns the settings of the units of ``module``: the type, and configurations for model and optimizer.

    Raises:
        Parallel3dError: the units have different settings.
    """
    check_module(module)
    common: StateDictSettings | None = None
    for unit in units_of(module, True):
        settings = unit.form.settings if unit.form is not None else _settings()
        if common is not None and settings != common:
            raise Parallel3dError(
                f"unit {unit.label} has {settings}, and others of this model {common}; call "
                "set_state_dict_type on the outermost module"
            )
        common = settings
    return common or _settings()


@contextmanager
def state_dict_type(
    module: nn.Module,
    type: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Context manager that calls ``set_state_dict_type`` and restores each unit's settings on exit."""
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
    """Sets ``settings`` on ``units`` in the body; None: the default."""
    before = [(unit, unit.form) for unit in units]
    try:
        for unit, _ in before:
            _set_form(unit, None if settings is None else Form(settings, broadcast))
        yield
    finally:
        for unit, form in before:
            _set_form(unit, None if form is None else Form(form.settings, form.broadcast))


def with_options(
    settings: StateDictSettings,
    type: StateDictType | None,
    offload_to_cpu: bool | None,
    rank0_only: bool | None,
    *,
    optimizer: bool,
) -> StateDictSettings:
    """Returns ``settings`` with those arguments that are not None instead.

    Args:
        optimizer: whether the options change the optimizer's configuration, and not the model's.
    """
    if type is not None and type is not settings.state_dict_type:
        settings = _settings(type)
    settings = copy.copy(settings)
    name = "optim_state_dict_config" if optimizer else "state_dict_config"
    config: Any = copy.copy(getattr(settings, name))
    setattr(settings, name, config)
    if offload_to_cpu is not None:
        config.offload_to_cpu = as_bool("offload_to_cpu", offload_to_cpu)
    if rank0_only is not None:
        if as_bool("rank0_only", rank0_only) and not hasattr(config, "rank0_only"):
            raise Parallel3dError(
                f"rank0_only=True with {settings.state_dict_type.name}: each rank has shards that no other "
                "has; give type=StateDictType.FULL_STATE_DICT"
            )
        if hasattr(config, "rank0_only"):
            config.rank0_only = rank0_only
    return settings


def _settings(
    type: StateDictType = StateDictType.SHARDED_STATE_DICT,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    if not isinstance(type, StateDictType):
        names = ", ".join(f"StateDictType.{known.name}" for known in StateDictType)
        raise Parallel3dError(f"type is {type!r}; it must be one of {names}")
    model_class, optim_class = _CONFIGS[type]
    value: Any
    for name, value, wanted in (
        ("config", config, model_class),
        ("optim_config", optim_config, optim_class),
    ):
        if value is not None and value.__class__ is not wanted:
            raise Parallel3dError(
                f"{name} is {value!r}; for {type.name} it must be a {wanted.__name__}, or None"
            )
    return StateDictSettings(type, config or model_class(), optim_config or optim_class())


def _set_form(unit: Unit, form: Form | None) -> None:
    if unit.form is not None:
        for handle in unit.form.handles:
            handle.remove()
    unit.form = form
    if form is None:
        return
    places: set[int] = set().union(
        *(places_of(p) for bucket in unit.group.buckets for p in bucket.params)
    )
    modules = {module for root in unit.modules for module in root.modules()}
    form.handles = [
        module.register_load_state_dict_pre_hook(_adapt_values)
        for module in modules
        if id(module._parameters) in places
    ]


# Loading: values are adapted in a hook that runs just before a module takes its own entries. Renaming hooks
# of modules outside have run by then, one parameter is handled at a time, and a failed load leaves nothing
# behind.


def _adapt_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Load-state-dict pre-hook: replaces ``module``'s own entries of ``state_dict`` by DTensors."""
    error_msgs = args[-1]
    for name, param in module._parameters.items():
        owner = None if param is None else owner_of(param)
        unit = None if owner is None or owner.unit is None else owner.unit()
        value = state_dict.get(prefix + name)
        if unit is None or unit.form is None or not isinstance(value, torch.Tensor):
            continue
        assert owner is not None
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
    """Returns ``value`` of a state dict of type ``kind`` as a DTensor sharded as the parameter is.

    Returns:
        None if ``value`` doesn't fit the type. A full tensor of another shape is returned unchanged, so that
        ``load_state_dict`` reports it.
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
            value = value[0]  # old checkpoints have scalars so
        if value.shape != owner.global_shape:
            return value
        local = owner.local_part(value.detach())
    if not owner.local.is_meta:  # a meta parameter gets the value's device by assign=True
        local = local.to(owner.local.device)
    return make_dtensor(local, make_spec(mesh, placements, owner.global_shape, value.dtype))


def from_first_rank(value: torch.Tensor, meshes: Sequence[DeviceMesh]) -> torch.Tensor:
    """Returns the first rank's ``value`` on all ranks of ``meshes``, in the device type's memory.

    Other ranks give any tensor of the same shape and dtype. It is broadcast over one mesh after another, as
    the first rank of a later mesh may have it by an earlier one only.
    """
    if isinstance(value, DTensor):
        return value
    device = torch.device(meshes[0].device_type)
    full = torch.empty(value.shape, dtype=value.dtype, device=device)
    if is_first(meshes):
        full.copy_(value)
    for mesh in meshes:
        broadcast(full, mesh)
    return full


def _misfit(key: str, owner: ShardedParam, value: torch.Tensor, kind: StateDictType) -> str:
    if kind is StateDictType.LOCAL_STATE_DICT:
        return (
            f"{key}: a tensor of shape {tuple(value.shape)} in a LOCAL_STATE_DICT, where this rank's shard "
            f"of {tuple(owner.global_shape)} has shape {tuple(owner.local_shape)}; load it on the mesh it "
            "was saved on, or as FULL_STATE_DICT if it is a full tensor."
        )
    return (
        f"{key}: a plain tensor of shape {tuple(value.shape)} in a SHARDED_STATE_DICT, whose values are "
        "DTensors; load it as FULL_STATE_DICT if it is a full tensor, as LOCAL_STATE_DICT if it is this "
        "rank's shard."
    )
