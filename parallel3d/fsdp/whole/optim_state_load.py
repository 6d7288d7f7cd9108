"""load_optim_state_dict: an optimizer's state by parameter names, cut as this mesh has the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from parallel3d._arguments import as_bool
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.param import owner_of
from parallel3d.fsdp.running.members import units_of
from parallel3d.fsdp.state_dict import Placeholder, check_broadcast, check_mapping
from parallel3d.fsdp.whole.first_rank import is_first, meshes_of, refusal, sent_by_first
from parallel3d.fsdp.whole.optim_state_dict import (
    States,
    check_optimizer,
    named_params,
    state_keys,
)
from parallel3d.fsdp.whole.state_dict_load import from_first_rank, in_sharded_form
from parallel3d.fsdp.whole.state_dict_type import get_state_dict_type, with_options
from parallel3d.fsdp.whole.transforms import chunk

__all__ = ["load_optim_state_dict"]

_FULL = StateDictType.FULL_STATE_DICT


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
    shape = param.shape if kind is _FULL or owner is None else owner.local_shape
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
    elif kind is _FULL and (as_param or before is not None):
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
