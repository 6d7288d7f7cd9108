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

from parallel3d._arguments import as_bool
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.checks import check_module
from parallel3d.fsdp.running.members import units_of
from parallel3d.fsdp.whole.other_form import places_of
from parallel3d.fsdp.whole.state_dict_load import adapt_values

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from parallel3d.fsdp.state import Unit

__all__ = [
    "Form",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "default_settings",
    "form_set",
    "get_state_dict_type",
    "set_state_dict_type",
    "settings_of",
    "state_dict_type",
    "with_options",
]

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
