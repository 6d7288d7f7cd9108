"""copy.deepcopy of a sharded model (EMA, ``AveragedModel``), with units on the same process groups.

Modules and Parameters are copied as usual, and the copies get a unit, buckets and hooks of their own. A unit
is copied with the last of its modules, so the modules of a list are copied together.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import nn

from parallel3d.errors import StateError
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.group import REGISTERED_ATTRIBUTE, ParamGroup
from parallel3d.fsdp.members import UNIT_ATTRIBUTE, get_unit, params_of
from parallel3d.fsdp.options.finalization import is_finalized
from parallel3d.fsdp.options.precision import set_up_precision
from parallel3d.fsdp.param import OwnSetattr, ShardedParam
from parallel3d.fsdp.reduction import ON_DEMAND
from parallel3d.fsdp.unit import Unit

_NOT_COPIED = (UNIT_ATTRIBUTE, REGISTERED_ATTRIBUTE)
_SETTINGS = (  # of a unit, without those that refer to units and streams
    "keep_between_forwards",
    "reshard_after_backward",
    "unshard_in_backward",
    "sync",
    "all_reduce",
    "reduce_unused",
    "manual_finalization",
    "prefetch",
)
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_load_state_dict_post_hooks",
)


def copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Returns a deep copy of a module that is a unit, for its ``__deepcopy__``; ``memo``: deepcopy's.

    Raises:
        StateError: a forward or backward is running, or not finalized yet.
    """
    unit = get_unit(module)
    unit.come_to_rest()
    if unit.depth or unit.backward_begun or unit.group.is_in_other_form:
        raise StateError(f"unit {unit.label} is being used; deep-copy it between steps")
    if not is_finalized(unit):
        raise StateError(
            f"unit {unit.label} has gradients to come; deep-copy it after finalize_backward()"
        )
    registered = unit.group.is_registered
    unit.group.register_sharded()
    state = {key: value for key, value in vars(module).items() if key not in _NOT_COPIED}
    for name in _HOOKS:
        hooks = copy.copy(state[name])
        for handle in unit.members.hook_ids(module):
            hooks.pop(handle, None)
        state[name] = hooks
    new = object.__new__(type(module))
    memo[id(module)] = new
    for param in params_of([unit]):
        if id(param.sharded) not in memo:
            memo[id(param.sharded)] = param.copy_of_sharded()
    vars(new).update(copy.deepcopy(state, memo))
    done = memo.setdefault(id(unit), [])
    done.append((module, new))
    for other in unit.modules:  # the other modules of a list
        copy.deepcopy(other, memo)
    # A module inside another one of the list is reached while that is still being copied.
    if len(done) == len(unit.modules) and memo.pop(id(unit), None) is not None:
        copied = dict(done)
        _copy_unit(unit, [copied[original] for original in unit.modules], memo)
    if registered:
        unit.group.register_unsharded()
    return new


def _copy_unit(unit: Unit, modules: list[nn.Module], memo: dict[int, Any]) -> None:
    with torch.no_grad():
        buckets = [_copy_bucket(bucket, memo) for bucket in unit.group.buckets]
    new = Unit(
        modules, ParamGroup(buckets), unit.policy, unit.reshard_after_forward, unit.device_type
    )
    set_up_precision(new)
    for name in _SETTINGS:
        setattr(new, name, getattr(unit, name))
    new.label = unit.label
    for param in params_of([new]):
        param.unit = new.ref


def _copy_bucket(bucket: Bucket, memo: dict[int, Any]) -> Bucket:
    new = copy.copy(bucket)
    new.set_params([_copy_param(param, memo) for param in bucket.params])
    new.local_views = [torch.empty(0)] * len(new.params)  # so that adopt() copies all
    new.gathering = None
    # step_in_backward updates the original only, and static memory is the original's.
    new.change(on_reduced=None, memory=ON_DEMAND)
    new.adopt()  # makes buffers of its own
    return new


def _copy_param(param: ShardedParam, memo: dict[int, Any]) -> ShardedParam:
    new = copy.copy(param)
    new.take(memo[id(param.sharded)])
    new.module_infos = []
    for holder, name in param.module_infos:
        if isinstance(holder, OwnSetattr):
            new.put_at([(OwnSetattr(memo[id(holder.module())]), name)])
        else:
            new.put_at([(memo[id(holder)], name)])
    first = memo.get(id(param.module()))
    if first is not None:
        new.module = weakref.ref(first)
    return new
