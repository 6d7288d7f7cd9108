"""Optimizer state dicts under parameter names, in the forms that a sharded model's state dict has.

``{"state": {name: {"exp_avg": ..., ...}}, "param_groups": [{..., "params": [name, ...]}]}``, as FSDP1 gives
them. What has a parameter's layout (moments) is gathered and cut as the parameter is; the rest
(step counts) is the same on every rank and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from parallel3d._compat import get_local_tensor
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.running.members import units_of
from parallel3d.fsdp.whole.first_rank import is_first, meshes_of
from parallel3d.fsdp.whole.gathering import whole_tensors
from parallel3d.fsdp.whole.other_form import check_at_rest
from parallel3d.fsdp.whole.state_dict_type import form_set, get_state_dict_type, with_options
from parallel3d.mesh.agreement import check_agreement

__all__ = ["States", "check_optimizer", "named_params", "optim_state_dict", "state_keys"]

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
