"""State dicts of a sharded model and its optimizer: full, sharded or local.

Names and configurations of the types are FSDP1's own. Values of a model's sharded state dict, the default,
are always DTensors. A full state dict is made unit by unit: the unit's buckets are gathered one after
another, copied to the CPU if requested, and the results are registered in its modules while these write them
into the dict.

An optimizer's is by parameter name: ``{"state": {name: {"exp_avg": ..., ...}}, "param_groups": [{...,
"params": [name, ...]}]}``. Tensors sharded as their parameter (moments) are gathered and sharded as it is;
other values (step counts) are the same on every rank and stay as they are.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
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
from torch.utils.hooks import RemovableHandle

from parallel3d._torch.dtensor import get_local_tensor, make_dtensor, make_spec
from parallel3d._util.arguments import as_bool
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.members import check_module, get_unit, params_of, units_of
from parallel3d.fsdp.options.gather_extension import as_plain
from parallel3d.fsdp.param import ShardedParam, owner_of
from parallel3d.fsdp.state_dict.full_params import (
    check_at_rest,
    full_tensors,
    gather_full_params,
    is_first,
    meshes_of,
    params_by_bucket,
    places_of,
    state_dict_from_first,
    swapped_params,
    tensor_from_first,
    to_rest,
    to_send,
)
from parallel3d.fsdp.state_dict.transforms import chunk
from parallel3d.fsdp.unit import Unit
from parallel3d.mesh.agreement import check_agreement

_FULL, _LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    _FULL: (FullStateDictConfig, FullOptimStateDictConfig),
    _LOCAL: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


@dataclass(eq=False)
class Form:
    """The state dict type that is set on a unit.

    Attributes:
        settings: the type and its configurations.
        broadcast: when loading: the meshes whose first rank has the values; empty if every rank has them.
        handles: the hooks on the unit's modules that convert values when they are loaded.
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
        config: options of ``type``: ``FullStateDictConfig(offload_to_cpu, rank0_only)``,
            ``ShardedStateDictConfig(offload_to_cpu)`` or ``LocalStateDictConfig(offload_to_cpu)``.
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
                f"unit {unit.label} has {settings}, and other units of this model have {common}; "
                "call set_state_dict_type on the outermost module"
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
    """Context manager that calls ``set_state_dict_type`` and restores each unit's settings on exit.

    Args:
        module, type, config, optim_config: as for ``set_state_dict_type``.
    """
    check_module(module)
    settings = _settings(type, config, optim_config)
    with form_set(units_of(module, True), settings):
        yield


@contextmanager
def form_set(
    units: Iterable[Unit], settings: StateDictSettings | None, broadcast: Sequence[DeviceMesh] = ()
) -> Iterator[None]:
    """Context manager that sets ``settings`` on ``units``; None: the default type, SHARDED."""
    before = [(unit, unit.form) for unit in units]
    try:
        for unit, _ in before:
            _set_form(unit, None if settings is None else Form(settings, broadcast))
        yield
    finally:
        for unit, form in before:
            _set_form(unit, None if form is None else Form(form.settings, form.broadcast))


def with_options(
    model: nn.Module,
    type: StateDictType | None,
    offload_to_cpu: bool | None = None,
    rank0_only: bool | None = None,
    config_name: str = "state_dict_config",
) -> StateDictSettings:
    """Returns the settings set on ``model``, changed by those of ``type``, ``offload_to_cpu`` and
    ``rank0_only`` that are not None.

    Args:
        config_name: the configuration to change: the model's, or "optim_state_dict_config".
    """
    settings = get_state_dict_type(model)
    if type is not None and type is not settings.state_dict_type:
        settings = _settings(type)
    settings = copy.copy(settings)
    config: Any = copy.copy(getattr(settings, config_name))
    setattr(settings, config_name, config)
    if offload_to_cpu is not None:
        config.offload_to_cpu = as_bool("offload_to_cpu", offload_to_cpu)
    if rank0_only is not None:
        wanted = as_bool("rank0_only", rank0_only)
        if hasattr(config, "rank0_only"):
            config.rank0_only = wanted
        elif wanted:
            raise Parallel3dError(
                f"rank0_only=True with {settings.state_dict_type.name}: each rank has shards that no other "
                "has; give type=StateDictType.FULL_STATE_DICT"
            )
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
    given: dict[str, Any] = {"config": config, "optim_config": optim_config}
    for (name, value), wanted in zip(given.items(), _CONFIGS[type], strict=True):
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
    places: set[int] = set().union(*map(places_of, params_of([unit])))
    inside = {m for root in unit.modules for m in root.modules() if id(m._parameters) in places}
    form.handles = [m.register_load_state_dict_pre_hook(_adapt_values) for m in inside]


# Loading: values are adapted in a hook that runs just before a module takes its own entries. Renaming hooks
# of modules outside have run by then, one parameter is handled at a time, and a failed load leaves nothing
# behind.


def _adapt_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Load-state-dict pre-hook: shards values of ``module``'s own parameters, as DTensors like theirs."""
    error_msgs = args[-1]
    for name, param in module._parameters.items():
        owner = None if param is None else owner_of(param)
        unit = None if owner is None else owner.unit()
        value = state_dict.get(prefix + name)
        if unit is None or unit.form is None or not isinstance(value, torch.Tensor):
            continue
        assert owner is not None
        kind = unit.form.settings.state_dict_type
        if unit.form.broadcast and value.shape == owner.global_shape:
            value = tensor_from_first(value, unit.form.broadcast)
        adapted = in_sharded_form(owner, value, kind)
        if adapted is None:
            error_msgs.append(_misfit(prefix + name, owner, value, kind))
        else:
            state_dict[prefix + name] = adapted


def in_sharded_form(
    owner: ShardedParam, value: torch.Tensor, kind: StateDictType
) -> torch.Tensor | None:
    """Returns ``value``, from a state dict of type ``kind``, as a DTensor sharded as the parameter ``owner``
    is. None: a state dict of this type has no such value.

    A full tensor of another shape is returned unchanged, so that ``load_state_dict`` reports it.
    """
    mesh, placements = owner.spec.mesh, owner.spec.placements
    if isinstance(value, DTensor):
        if value.device_mesh == mesh or value.shape != owner.global_shape:
            return value
        return chunk(value.full_tensor(), mesh, placements)
    if kind is StateDictType.SHARDED_STATE_DICT:
        return None
    if kind is StateDictType.LOCAL_STATE_DICT:
        if tuple(value.shape) != tuple(owner.geometry.local_shape):
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


def _misfit(key: str, owner: ShardedParam, value: torch.Tensor, kind: StateDictType) -> str:
    if kind is StateDictType.LOCAL_STATE_DICT:
        return (
            f"{key} is a tensor of shape {tuple(value.shape)} in a LOCAL_STATE_DICT, but this rank's shard "
            f"of {tuple(owner.global_shape)} has shape {tuple(owner.geometry.local_shape)}; load it on the "
            "mesh it was saved on, or as FULL_STATE_DICT if it is a full tensor."
        )
    return (
        f"{key} is a plain tensor of shape {tuple(value.shape)} in a SHARDED_STATE_DICT, whose values are "
        "DTensors; load it as FULL_STATE_DICT if it is a full tensor, as LOCAL_STATE_DICT if it is this "
        "rank's shard."
    )


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
    settings = with_options(model, type, offload_to_cpu, rank0_only)
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
    settings = with_options(model, type)
    meshes = broadcast_meshes(model, state_dict, settings, broadcast_from_rank0)
    if meshes:
        by_key = parameters_by_key(model)
        # Values of units' parameters are sent one by one.
        later = {k for k, p in by_key.items() if isinstance(p, DTensor) and owner_of(p) is not None}
        given = state_dict
        state_dict = state_dict_from_first(
            meshes, given, given, lambda: {k: to_send(v, k in later) for k, v in given.items()}
        )
    if settings.state_dict_type is _FULL:
        state_dict = _with_dtensors(model, state_dict)
    with form_set(units_of(model, True), settings, meshes):
        return model.load_state_dict(state_dict, strict=strict, assign=assign)


def parameters_by_key(model: nn.Module) -> dict[str, Any]:
    """Returns the sharded Parameters and the buffers of ``model`` by their names in its state dict."""
    with form_set(units_of(model, True), None):
        return model.state_dict(keep_vars=True)


def _with_dtensors(model: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``state_dict`` with plain values sharded if they are for DTensors that no unit has."""
    if not any(isinstance(p, DTensor) and owner_of(p) is None for p in model.parameters()):
        return state_dict
    result = dict(state_dict)
    for key, param in parameters_by_key(model).items():
        value: Any = result.get(key)
        plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        of_no_unit = isinstance(param, DTensor) and owner_of(param) is None
        if plain and of_no_unit and value.shape == param.shape:
            result[key] = chunk(value.to(param.device), param.device_mesh, param.placements)
    return result


def broadcast_meshes(
    model: nn.Module, state_dict: object, settings: StateDictSettings, broadcast_from_rank0: bool
) -> list[DeviceMesh]:
    """Checks a load's arguments; returns the meshes to broadcast over from the first rank, or []."""
    broadcast = as_bool("broadcast_from_rank0", broadcast_from_rank0)
    if not isinstance(state_dict, Mapping):
        raise Parallel3dError(
            f"state_dict is {type(state_dict).__name__}; it must be a dict, {{}} on ranks that get it from "
            "the first (broadcast_from_rank0=True)"
        )
    if broadcast and settings.state_dict_type is not _FULL:
        raise Parallel3dError(
            f"broadcast_from_rank0=True with {settings.state_dict_type.name}: the first rank has only its "
            "own shards; give type=StateDictType.FULL_STATE_DICT"
        )
    return meshes_of(units_of(model, True)) if broadcast else []


def state_dict_as_set(
    module: nn.Module, save: Callable[[], dict[str, Any]], destination: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Calls ``save``, which writes the entries of ``module`` into ``destination``, with its parameters in the
    type set on its unit, and returns the result.

    Units inside have written their entries in the same way before.
    """
    unit = get_unit(module)
    assert unit.form is not None
    settings = unit.form.settings
    before, keep = set(destination or ()), True
    kind = settings.state_dict_type
    if kind is StateDictType.SHARDED_STATE_DICT or unit.group.is_in_other_form:
        return _apply_config(save(), before, settings, keep=keep)
    check_at_rest(unit, "state_dict")
    to_rest(unit)
    chosen = params_by_bucket(unit, module)
    if kind is _LOCAL:
        with torch.inference_mode(False):
            own = [param for _, params in chosen for param in params]
            others = {p: nn.Parameter(as_plain(p.local), p.sharded.requires_grad) for p in own}
    else:
        config: Any = settings.state_dict_config
        keep = not config.rank0_only or is_first(meshes_of([unit]))
        others = gather_full_params(chosen, keep=keep, to_cpu=config.offload_to_cpu)
    with swapped_params(unit, chosen, others):
        return _apply_config(save(), before, settings, keep=keep)


def _apply_config(
    state_dict: dict[str, Any], before: set[str], settings: StateDictSettings, *, keep: bool
) -> dict[str, Any]:
    """Applies the configuration to entries that are not in ``before``: moves them to the CPU, or with
    ``rank0_only`` deletes them on ranks that are not to ``keep`` them."""
    config = settings.state_dict_config
    rank0_only = getattr(config, "rank0_only", False)
    for key in [key for key in state_dict if key not in before]:
        if rank0_only and not keep:
            del state_dict[key]
        elif config.offload_to_cpu and isinstance(state_dict[key], torch.Tensor):
            state_dict[key] = state_dict[key].cpu()
    return state_dict


# -- optimizers ----------------------------------------------------------------------------------------

States = dict[Any, dict[str, Any]]
"""An optimizer's state by parameter name or key."""


def optim_state_dict(
    model: nn.Module,
    optim: Any,
    *,
    type: StateDictType | None = None,
    offload_to_cpu: bool | None = None,
    rank0_only: bool | None = None,
) -> dict[str, Any]:
    """Returns ``optim.state_dict()`` by ``model``'s parameter names, as a state dict of ``type``.

    Every rank must call it. Full tensors are gathered one bucket and one key (``exp_avg``) at a time.

    Args:
        model: the model whose parameters the optimizer has.
        optim: an optimizer of all or some of ``model.parameters()``.
        type, rank0_only: as for ``model_state_dict``.
        offload_to_cpu: copy tensors to the CPU. None: as ``set_state_dict_type`` has set it for the
            optimizer; torch's default is True, except for LOCAL.

    Raises:
        Parallel3dError: the optimizer has a parameter that ``model`` doesn't have.
        StateError: a forward, backward or ``full_params`` is running.
        AgreementError: for FULL: ranks have state of different parameters.
    """
    settings = with_options(model, type, offload_to_cpu, rank0_only, "optim_state_dict_config")
    check_optimizer(optim)
    kind, config = settings.state_dict_type, settings.optim_state_dict_config
    units = list(units_of(model, True))
    for unit in units:
        check_at_rest(unit, "optim_state_dict")
    named = named_params(model, optim)
    raw = optim.state_dict()
    name_of = {key: name for key, (name, _) in zip(state_keys(raw), named, strict=True)}
    states: States = {name_of.get(key, key): dict(state) for key, state in raw["state"].items()}
    keep = not getattr(config, "rank0_only", False) or is_first(meshes_of(units))
    if kind is _FULL:
        _check_same_states(states, meshes_of(units))
        buckets = [bucket for unit in units for bucket in unit.group.buckets]
        _gather_states(states, dict(named), buckets, keep=keep, to_cpu=config.offload_to_cpu)
        if not keep:
            return {}
    elif kind is _LOCAL:
        _map_tensors(states, lambda t: get_local_tensor(t) if isinstance(t, DTensor) else t)
    if config.offload_to_cpu:
        _map_tensors(states, lambda t: t.cpu())
    groups = [{**g, "params": [name_of[key] for key in g["params"]]} for g in raw["param_groups"]]
    return {"state": states, "param_groups": groups}


def check_optimizer(optim: object) -> None:
    if not all(hasattr(optim, name) for name in ("param_groups", "state_dict", "load_state_dict")):
        raise Parallel3dError(
            f"optim is {optim!r}; it must be an optimizer, with param_groups, state_dict and load_state_dict"
        )


def named_params(model: nn.Module, optim: Any) -> list[tuple[str, nn.Parameter]]:
    """Returns (name in the model's state dict, parameter) of the optimizer's parameters, in its order."""
    names: dict[int, str] = {}
    for name, param in [*parameters_by_key(model).items(), *model.named_parameters()]:
        names.setdefault(id(param), name)
    result = []
    for group in optim.param_groups:
        for param in group["params"]:
            if id(param) not in names:
                raise Parallel3dError(
                    f"the optimizer has a parameter of shape {tuple(param.shape)} that the "
                    f"{model.__class__.__name__} doesn't have; make it after fully_shard, of this model"
                )
            result.append((names[id(param)], param))
    return result


def state_keys(raw: Mapping[str, Any]) -> list[Any]:
    """Returns the keys of the parameters in ``raw``, the optimizer's own state dict, in its order."""
    return [key for group in raw["param_groups"] for key in group["params"]]


# -- saving --------------------------------------------------------------------------------------------


def _map_tensors(states: States, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for state in states.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = fn(value)


def _gather_states(
    states: States,
    params: dict[str, nn.Parameter],
    buckets: Iterable[Bucket],
    *,
    keep: bool,
    to_cpu: bool,
) -> None:
    """Replaces the DTensors in ``states`` by full tensors, or by None on ranks that don't ``keep`` them."""

    def full(tensor: torch.Tensor) -> torch.Tensor | None:
        return (tensor.cpu() if to_cpu else tensor) if keep else None

    names = {id(param): name for name, param in params.items()}
    for bucket in buckets:
        # By key and dtype, in the same order on all ranks: one all-gather for each.
        gathers: defaultdict[Any, list[tuple[ShardedParam, dict[str, Any]]]] = defaultdict(list)
        for param in bucket.params:
            state = states.get(names.get(id(param.sharded), ""), {})
            for key, value in state.items():
                if _is_sharded_as(param, value):
                    gathers[key, value.dtype].append((param, state))
        for (key, _), members in gathers.items():
            locals_ = [get_local_tensor(state[key]) for _, state in members]
            tensors = full_tensors(bucket, [param for param, _ in members], locals_)
            for (_, state), tensor in zip(members, tensors, strict=True):
                state[key] = full(tensor)
            del locals_, tensors, tensor  # before the next gather
    for state in states.values():  # tensors sharded otherwise than their parameters
        for key, value in state.items():
            if isinstance(value, DTensor):
                state[key] = full(value.full_tensor())


def _is_sharded_as(param: ShardedParam, value: Any) -> bool:
    spec = param.spec
    return (
        isinstance(value, DTensor)
        and value.shape == spec.shape
        and value.placements == spec.placements
        and value.device_mesh == spec.mesh
    )


def _check_same_states(states: States, meshes: list[DeviceMesh]) -> None:
    """Raises AgreementError unless all ranks have the same tensors to gather; without it they would hang."""
    described = {
        str(name): ", ".join(
            f"{key} {value.dtype}" for key, value in state.items() if isinstance(value, DTensor)
        )
        for name, state in states.items()
    }
    for index, mesh in enumerate(meshes):  # each with a topic of its own, as meshes may overlap
        ranks = sorted(mesh.mesh.flatten().tolist())
        check_agreement(f"optimizer state {index}", described, ranks=ranks)


# -- loading -------------------------------------------------------------------------------------------


def load_optim_state_dict(
    model: nn.Module,
    optim: Any,
    state_dict: Mapping[str, Any],
    *,
    type: StateDictType | None = None,
    broadcast_from_rank0: bool = False,
) -> None:
    """Loads what ``optim_state_dict`` has returned, on this mesh or (FULL) on another, into ``optim``.

    Parameters are matched by name, so their order and groups may differ. A group of ``optim`` takes its
    options from the saved group of its first parameter. A parameter without saved state has none afterwards.

    Args:
        type: the type of ``state_dict``. None: as ``set_state_dict_type`` has set it on ``model``.
        broadcast_from_rank0: for FULL: the first rank has the state dict, others give ``{}``.

    Raises:
        Parallel3dError: ``model`` or ``state_dict`` lacks names, or tensors have another shape. ``optim`` is
            unchanged.
    """
    settings = with_options(model, type)
    check_optimizer(optim)
    meshes = broadcast_meshes(model, state_dict, settings, broadcast_from_rank0)
    if meshes:
        state_dict = _from_first(state_dict, meshes)
    if not {"state", "param_groups"} <= set(state_dict):
        raise Parallel3dError(
            f"the optimizer state dict has the keys {sorted(map(str, state_dict))}; it must have 'state' and "
            "'param_groups', unless only the first rank has it (broadcast_from_rank0=True)"
        )
    named = named_params(model, optim)
    _check_names(state_dict, named)
    raw, kind = optim.state_dict(), settings.state_dict_type
    states: States = {}
    for index, (name, param) in zip(state_keys(raw), named, strict=True):
        saved, present = state_dict["state"].get(name), raw["state"].get(index, {})
        if saved is None:
            continue
        states[index] = {}
        for key, value in saved.items():
            if meshes and isinstance(value, torch.Tensor) and value.ndim:
                value = tensor_from_first(value, meshes)
            states[index][key] = _as_present(key, name, value, param, present.get(key), kind)
    # Other entries are the user's.
    states |= {key: v for key, v in state_dict["state"].items() if not isinstance(key, str)}
    groups = _groups(raw["param_groups"], state_dict, named)
    optim.load_state_dict({"state": states, "param_groups": groups})


def _check_names(state_dict: Mapping[str, Any], named: list[tuple[str, nn.Parameter]]) -> None:
    known = {name for name, _ in named}
    saved = {name for group in state_dict["param_groups"] for name in group["params"]}
    unknown = [name for name in state_dict["state"] if isinstance(name, str) and name not in known]
    missing = [name for name, _ in named if name not in saved]
    for names, what in (
        (unknown, "has state of {}, which are not parameters of the optimizer"),
        (missing, "has no group with {}, which are parameters of the optimizer"),
    ):
        if names:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise Parallel3dError(
                f"the optimizer state dict {what.format(shown)}; its names must be those of "
                "model.state_dict()"
            )


def _groups(
    raw: list[dict[str, Any]], state_dict: Mapping[str, Any], named: list[tuple[str, nn.Parameter]]
) -> list[dict[str, Any]]:
    """Returns the optimizer's param groups ``raw`` with the options saved in ``state_dict``."""
    saved = {name: group for group in state_dict["param_groups"] for name in group["params"]}
    names = iter(named)
    result = []
    for group in raw:
        own_names = [next(names)[0] for _ in group["params"]]
        options = saved[own_names[0]] if own_names else group
        own = {key: group[key] for key in ("params", "param_names") if key in group}
        result.append({**options, **own})
    return result


def _from_first(state_dict: Mapping[str, Any], meshes: list[DeviceMesh]) -> Mapping[str, Any]:
    """Returns the first rank's state dict; others get placeholders for tensors that are no scalars."""
    states = state_dict.get("state", {})
    values = {f"{key} of {name}": v for name, state in states.items() for key, v in state.items()}

    def strip() -> dict[str, Any]:
        sent = {
            name: {k: to_send(v, getattr(v, "ndim", 0) > 0) for k, v in state.items()}
            for name, state in states.items()
        }
        return {**state_dict, "state": sent}

    return state_dict_from_first(meshes, state_dict, values, strip)


def _as_present(
    key: str, name: str, value: Any, param: nn.Parameter, present: Any, kind: StateDictType
) -> Any:
    """Returns a copy of ``value``, saved as state ``key`` of parameter ``name`` in a state dict of type
    ``kind``, sharded as ``present``, what the optimizer has for that key now.

    If ``present`` is None it is sharded as ``param`` is, if it has the same shape.
    """
    if not isinstance(value, torch.Tensor):
        return value
    is_local = present is not None and not isinstance(present, DTensor)
    if is_local or not isinstance(param, DTensor) or isinstance(value, DTensor):
        return value.clone()
    owner = owner_of(param)
    shape = param.shape if kind is _FULL or owner is None else owner.geometry.local_shape
    if present is None:
        as_param = key != "step" and tuple(value.shape) == tuple(shape)
        if not as_param and not value.ndim:
            return value.clone()  # one number for the whole parameter
    else:
        as_param = owner is not None and present.placements == owner.spec.placements
        as_param = as_param and present.shape == param.shape
    result: torch.Tensor | None = None
    if as_param and owner is not None:
        result = in_sharded_form(owner, value, kind)
    elif kind is _FULL and (as_param or present is not None):
        like = param if present is None else present
        if value.shape == like.shape:
            result = chunk(value.to(like.device), like.device_mesh, like.placements)
    if not isinstance(result, DTensor):
        raise Parallel3dError(
            f"optimizer state {key} of {name} has shape {tuple(value.shape)} in a {kind.name}, and the "
            f"parameter {tuple(shape)}, so it is not sharded alike: load it in the type it was saved in; "
            "if its shape differs by nature, take one optimizer step first"
        )
    return result.clone()
