"""Optimizer state dicts under parameter names, in the forms that a sharded model's state dict has.

``{"state": {name: {"exp_avg": ..., ...}}, "param_groups": [{..., "params": [name, ...]}]}``, as FSDP1 gives
them. What has a parameter's layout (moments) is gathered and cut as the parameter is; the rest
(step counts) is the same on every rank and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from parallel3d._torch.dtensor import get_local_tensor
from parallel3d._util.arguments import as_bool
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.members import units_of
from parallel3d.fsdp.param import owner_of
from parallel3d.fsdp.state_dict.full_params import (
    check_at_rest,
    is_first,
    meshes_of,
    refusal,
    sent_by_first,
    whole_tensors,
)
from parallel3d.fsdp.state_dict.model_state_dict import Placeholder, check_broadcast, check_mapping
from parallel3d.fsdp.state_dict.state_dict_type import (
    form_set,
    from_first_rank,
    get_state_dict_type,
    in_sharded_form,
    with_options,
)
from parallel3d.fsdp.state_dict.transforms import chunk
from parallel3d.mesh.agreement import check_agreement

_FULL, _LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT

# One rank may come late, from an evaluation say; a collective would wait for it too.
_PATIENCE = timedelta(minutes=10)

States = dict[Any, dict[str, Any]]
"""What an optimizer keeps, by parameter."""


def optim_state_dict(
    model: nn.Module,
    optim: Any,
    *,
    type: StateDictType | None = None,
    offload_to_cpu: bool | None = None,
    rank0_only: bool | None = None,
) -> dict[str, Any]:
    """``optim.state_dict()`` under ``model``'s parameter names, in the form ``type``.

    Every rank must call it. Whole tensors are gathered one bucket and one kind (``exp_avg``) at a time.

    Args:
        model: what the optimizer's parameters are of.
        optim: an optimizer over all or some of ``model.parameters()``.
        type, rank0_only: as for ``model_state_dict``.
        offload_to_cpu: copy tensors to the CPU. None: as ``set_state_dict_type`` has set it for the
            optimizer; torch's default is True, save for LOCAL.

    Raises:
        Parallel3dError: a parameter of the optimizer is none of ``model``'s.
        StateError: in a forward, backward or ``full_params``.
        AgreementError: for FULL, ranks have state of different parameters.
    """
    settings = with_options(
        get_state_dict_type(model), type, offload_to_cpu, rank0_only, optimizer=True
    )
    check_optimizer(optim)
    kind, config = settings.state_dict_type, settings.optim_state_dict_config
    units = list(units_of(model, True))
    for unit in units:
        check_at_rest(unit, "optim_state_dict")
    named = named_params(model, optim)
    raw = optim.state_dict()
    keys = dict(zip(state_keys(raw), named, strict=True))
    states: States = {}
    for key, state in raw["state"].items():
        states[keys[key][0] if key in keys else key] = dict(state)
    keep = not getattr(config, "rank0_only", False) or is_first(meshes_of(units))
    if kind is _FULL:
        _check_same_states(states, meshes_of(units))
        _make_whole(states, dict(named), units, keep=keep, to_cpu=config.offload_to_cpu)
        if not keep:
            return {}
    elif kind is _LOCAL:
        _map_tensors(states, lambda t: get_local_tensor(t) if isinstance(t, DTensor) else t)
    if config.offload_to_cpu:
        _map_tensors(states, lambda t: t.cpu())
    names = [name for name, _ in named]
    groups = [dict(group) for group in raw["param_groups"]]
    for group in groups:
        count = len(group["params"])
        group["params"], names = names[:count], names[count:]
    return {"state": states, "param_groups": groups}


def check_optimizer(optim: object) -> None:
    """Raises unless ``optim`` has what is asked of an optimizer."""
    if not all(hasattr(optim, name) for name in ("param_groups", "state_dict", "load_state_dict")):
        raise Parallel3dError(
            f"optim is {optim!r}; it must be an optimizer, with param_groups, state_dict and load_state_dict"
        )


# -- names ---------------------------------------------------------------------------------------------


def named_params(model: nn.Module, optim: Any) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) in the order of the optimizer's groups; names as in ``model.state_dict()``."""
    with form_set(list(units_of(model, True)), None):
        values = model.state_dict(keep_vars=True)
    names: dict[int, str] = {}
    for name, param in [*values.items(), *model.named_parameters()]:
        names.setdefault(id(param), name)
    found = []
    for group in optim.param_groups:
        for param in group["params"]:
            if id(param) not in names:
                raise Parallel3dError(
                    f"the optimizer has a parameter of shape {tuple(param.shape)} that the "
                    f"{model.__class__.__name__} doesn't have; give the model whose parameters() it was made "
                    "with, after fully_shard"
                )
            found.append((names[id(param)], param))
    return found


def state_keys(raw: Mapping[str, Any]) -> list[Any]:
    """The optimizer's own keys of its parameters, in the order of its groups."""
    return [key for group in raw["param_groups"] for key in group["params"]]


# -- saving --------------------------------------------------------------------------------------------


def _map_tensors(states: States, fn: Any) -> None:
    for state in states.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = fn(value)


def _make_whole(
    states: States, params: dict[str, nn.Parameter], units: list, *, keep: bool, to_cpu: bool
) -> None:
    """Replaces DTensors by whole tensors; by None where the rank is to ``keep`` nothing."""

    def put(state: dict[str, Any], key: str, whole: torch.Tensor) -> None:
        state[key] = (whole.cpu() if to_cpu else whole) if keep else None

    names = {id(param): name for name, param in params.items()}
    buckets = [bucket for unit in units for bucket in unit.group.buckets]
    for bucket in buckets:
        by_index = {
            i: states.get(names.get(id(p.sharded), ""), {}) for i, p in enumerate(bucket.params)
        }
        for key, dtype in _kinds(bucket, by_index):
            _gather_kind(bucket, by_index, key, dtype, put)
    for state in states.values():  # of other layouts than their parameters
        for key, value in state.items():
            if isinstance(value, DTensor):
                put(state, key, value.full_tensor())


def _gather_kind(
    bucket: Bucket,
    by_index: dict[int, dict[str, Any]],
    key: str,
    dtype: torch.dtype,
    put: Callable[[dict[str, Any], str, torch.Tensor], None],
) -> None:
    """Replaces what the bucket's parameters have under ``key``; on return nothing else is alive."""
    indices = [i for i, s in by_index.items() if _fits(bucket, i, s.get(key), dtype)]
    locals_ = [get_local_tensor(by_index[i][key]) for i in indices]
    for i, whole in zip(indices, whole_tensors(bucket, indices, locals_), strict=True):
        put(by_index[i], key, whole)


def _kinds(
    bucket: Bucket, by_index: dict[int, dict[str, Any]]
) -> Iterator[tuple[str, torch.dtype]]:
    seen = set()
    for index, state in by_index.items():
        for key, value in list(state.items()):
            if not isinstance(value, DTensor) or (key, value.dtype) in seen:
                continue
            if _fits(bucket, index, value, value.dtype):
                seen.add((key, value.dtype))
                yield key, value.dtype


def _fits(bucket: Bucket, index: int, value: Any, dtype: torch.dtype) -> bool:
    """Whether ``value`` lies as parameter ``index`` does."""
    spec = bucket.params[index].spec
    return (
        isinstance(value, DTensor)
        and value.dtype == dtype
        and value.shape == spec.shape
        and value.placements == spec.placements
        and value.device_mesh == spec.mesh
    )


def _check_same_states(states: States, meshes: list[DeviceMesh]) -> None:
    """What is gathered must be there on every rank: ranks that wait for others would hang."""
    described = {
        str(name): ", ".join(
            f"{key} {value.dtype}" for key, value in state.items() if isinstance(value, DTensor)
        )
        for name, state in states.items()
    }
    for index, mesh in enumerate(meshes):  # each a topic of its own: their ranks may overlap
        ranks = sorted(mesh.mesh.flatten().tolist())
        check_agreement(f"optimizer state {index}", described, ranks=ranks, timeout=_PATIENCE)


# load_optim_state_dict: an optimizer's state by parameter names, cut as this mesh has the
# parameters.

_FULL_TYPE = StateDictType.FULL_STATE_DICT


def load_optim_state_dict(
    model: nn.Module,
    optim: Any,
    state_dict: Mapping[str, Any],
    *,
    type: StateDictType | None = None,
    broadcast_from_rank0: bool = False,
) -> None:
    """Loads what ``optim_state_dict`` has returned, on this mesh or (FULL) another, into ``optim``.

    Parameters are matched by name: their order and groups may differ from what was saved. A group of
    ``optim`` takes its options from the saved group of its first parameter. A parameter without saved
    state has none afterwards.

    Args:
        type: the form of ``state_dict``. None: what ``set_state_dict_type`` has set on ``model``.
        broadcast_from_rank0: of FULL: the first rank has the state dict, others give ``{}``.

    Raises:
        Parallel3dError: names that ``model`` or ``state_dict`` doesn't have, tensors of another shape.
            ``optim`` is unchanged.
    """
    settings = with_options(get_state_dict_type(model), type, None, None, optimizer=True)
    as_bool("broadcast_from_rank0", broadcast_from_rank0)
    check_optimizer(optim)
    check_mapping(state_dict)
    meshes = meshes_of(units_of(model, True))
    if broadcast_from_rank0:
        check_broadcast(settings)
        state_dict = _from_first(state_dict, meshes)
    if not {"state", "param_groups"} <= set(state_dict):
        raise Parallel3dError(
            f"an optimizer state dict with the keys {sorted(map(str, state_dict))}; it must have 'state' and "
            "'param_groups', as optim_state_dict returns it (or broadcast_from_rank0=True where "
            "others than the first rank have none)"
        )
    sources = meshes if broadcast_from_rank0 else ()
    named = named_params(model, optim)
    _check_names(state_dict, named)
    raw = optim.state_dict()
    states: States = {}
    for index, (name, param) in zip(state_keys(raw), named, strict=True):
        given = state_dict["state"].get(name)
        if given is None:
            continue
        before = raw["state"].get(index, {})
        states[index] = {
            key: _loaded(
                key, name, value, param, before.get(key), settings.state_dict_type, sources
            )
            for key, value in given.items()
        }
    for name, given in state_dict["state"].items():
        if not isinstance(name, str):
            states[name] = given  # the user's own
    optim.load_state_dict(
        {"state": states, "param_groups": _groups(raw["param_groups"], state_dict, named)}
    )


def _check_names(state_dict: Mapping[str, Any], named: list[tuple[str, nn.Parameter]]) -> None:
    known = {name for name, _ in named}
    saved = {name for group in state_dict["param_groups"] for name in group["params"]}
    unknown = [name for name in state_dict["state"] if isinstance(name, str) and name not in known]
    missing = [name for name, _ in named if name not in saved]
    for names, what in (
        (unknown, "has state of {}, which are no parameters of the optimizer"),
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
    """The optimizer's groups with their saved options."""
    saved = {name: group for group in state_dict["param_groups"] for name in group["params"]}
    names = iter(name for name, _ in named)
    result = []
    for group in raw:
        mine = [next(names) for _ in group["params"]]
        options = {k: v for k, v in (saved[mine[0]] if mine else group).items() if k != "params"}
        own = {k: group[k] for k in ("param_names",) if k in group}
        result.append({**options, **own, "params": group["params"]})
    return result


def _from_first(state_dict: Mapping[str, Any], meshes: list[DeviceMesh]) -> Mapping[str, Any]:
    """The first rank's state dict; on others tensors of any size are stand-ins of the same shape."""
    if not meshes:
        return state_dict
    sent: Any = {}
    if is_first(meshes):
        given = state_dict.get("state", {})
        values = {
            f"{key} of {name}": v for name, state in given.items() for key, v in state.items()
        }
        sent = refusal(values)
        if sent is None:
            states = {n: {k: _sent(v) for k, v in state.items()} for n, state in given.items()}
            sent = {**state_dict, "state": states}
    sent = sent_by_first(sent, meshes)
    if is_first(meshes):
        return state_dict
    for state in sent["state"].values():
        for key, value in state.items():
            if isinstance(value, Placeholder):
                state[key] = value.tensor()
    return sent


def _sent(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return Placeholder(value) if value.ndim else value.cpu()


def _loaded(
    key: str,
    name: str,
    value: Any,
    param: nn.Parameter,
    before: Any,
    kind: StateDictType,
    sources: Sequence[DeviceMesh],
) -> Any:
    """A copy of ``value`` as the optimizer keeps it: cut as ``before`` is, or as ``param`` if of its shape.

    Args:
        before: what the optimizer has now; None where it has nothing.
        sources: the meshes whose first rank has the value; none: every rank has.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if sources and value.ndim:
        value = from_first_rank(value, sources)
    if not isinstance(param, DTensor) or isinstance(value, DTensor):
        return value.clone()
    if before is not None and not isinstance(before, DTensor):
        return value.clone()
    owner = owner_of(param)
    shape = param.shape if kind is _FULL_TYPE or owner is None else owner.local_shape
    if before is None:
        as_param = key != "step" and tuple(value.shape) == tuple(shape)
        if not as_param and not value.ndim:
            return value.clone()  # a number for the whole parameter
    else:
        as_param = owner is not None and before.placements == owner.spec.placements
        as_param = as_param and before.shape == param.shape
    result: torch.Tensor | None = None
    if as_param and owner is not None:
        result = in_sharded_form(owner, value, kind)
    elif kind is _FULL_TYPE and (as_param or before is not None):
        like = param if before is None else before
        if value.shape == like.shape:
            result = chunk(value.to(like.device), like.device_mesh, like.placements)
    if not isinstance(result, DTensor):
        raise Parallel3dError(
            f"optimizer state {key} of {name} has shape {tuple(value.shape)} in a {kind.name}, and the "
            f"parameter {tuple(shape)}; its layout is not the parameter's: load it in the form it was saved "
            "in, and if it is of another shape by nature take one step first, so that the optimizer tells it"
        )
    return result.clone()
