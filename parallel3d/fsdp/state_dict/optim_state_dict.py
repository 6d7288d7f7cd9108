"""optim_state_dict and load_optim_state_dict: optimizer state dicts by parameter name, in any type.

``{"state": {name: {"exp_avg": ..., ...}}, "param_groups": [{..., "params": [name, ...]}]}``, as in FSDP1.
Tensors sharded as their parameter (moments) are gathered and sharded as it is; other values (step counts) are
the same on every rank and stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.members import units_of
from parallel3d.fsdp.param import owner_of
from parallel3d.fsdp.state_dict.full_params import (
    check_at_rest,
    full_tensors,
    is_first,
    meshes_of,
    state_dict_from_first,
    tensor_from_first,
    to_send,
)
from parallel3d.fsdp.state_dict.model_state_dict import (
    broadcast_meshes,
    in_sharded_form,
    parameters_by_key,
    with_options,
)
from parallel3d.fsdp.state_dict.transforms import chunk
from parallel3d.mesh.agreement import check_agreement

if TYPE_CHECKING:
    from parallel3d.fsdp.param import ShardedParam

_FULL, _LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT

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
    """Raises Parallel3dError unless ``optim`` has the methods of an optimizer."""
    if not all(hasattr(optim, name) for name in ("param_groups", "state_dict", "load_state_dict")):
        raise Parallel3dError(
            f"optim is {optim!r}; it must be an optimizer, with param_groups, state_dict and load_state_dict"
        )


def named_params(model: nn.Module, optim: Any) -> list[tuple[str, nn.Parameter]]:
    """Returns (name in ``model.state_dict()``, parameter) in the order of the optimizer's groups."""
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
    """Returns the keys of parameters in the optimizer's own state dict, in the order of its groups."""
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
    """Replaces DTensors in ``states`` by full tensors, or by None on ranks that are not to ``keep`` them."""

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
    """Raises AgreementError unless all ranks have the same tensors to gather; otherwise they would hang."""
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
    """Returns the optimizer's groups with their saved options."""
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
    """Returns the first rank's state dict, on other ranks with placeholders of all but scalar tensors."""
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
    """Returns a copy of ``value``, of a state dict of type ``kind``, sharded as the optimizer has it now.

    Without a ``present`` value that is as ``param``, if it has the same shape.
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
            f"parameter has {tuple(shape)}, so it is not sharded as the parameter is: load it in "
            "the type it was saved in, and if its shape differs by nature take one optimizer step "
            "first"
        )
    return result.clone()
