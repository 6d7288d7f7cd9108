"""OtherForm: other Parameters in place of a unit's sharded ones, for a while between steps.

``full_params`` shows whole ones, ``state_dict`` whole or local ones while it is made. The sharded Parameter
objects stay what the optimizer and the unit have; they come back into the modules on any way out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallel3d.errors import StateError
from parallel3d.fsdp.group import GroupState
from parallel3d.fsdp.slots import of
from parallel3d.fsdp.whole.gathering import check_has_values, whole_tensors

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket
    from parallel3d.fsdp.param import ShardedParam
    from parallel3d.fsdp.state import Unit

__all__ = [
    "Chosen",
    "check_at_rest",
    "check_not_shown",
    "chosen_of",
    "places_of",
    "shown_instead",
    "to_rest",
    "whole_params",
]

Chosen = list[tuple["Bucket", list[int]]]
"""Parameters of a unit: by bucket their indices, in an order that all ranks share."""


def check_not_shown(unit: Unit, what: str) -> None:
    """Raises StateError while the unit shows other Parameters than its own."""
    if unit.group.state is GroupState.WHOLE:
        raise StateError(
            f"{what}: unit {unit.label} shows its parameters in another form already; leave that "
            "full_params (or state_dict) first"
        )


def check_at_rest(unit: Unit, what: str) -> None:
    """Raises StateError if the unit shows other Parameters already, or is in a forward or backward."""
    check_not_shown(unit, what)
    unit.come_to_rest()
    context = unit.context
    running = context is not None and (context.running or context.in_backward)
    if unit.depth or unit.backward_begun or running:
        raise StateError(
            f"{what}: unit {unit.label} is in a forward or backward; call it between steps, or after "
            "reset_iter_state() if an exception has ended one"
        )


def to_rest(unit: Unit) -> None:
    """Brings the shards back into the modules, nothing gathered, with what ordinary calls have put there."""
    group = unit.group
    if unit.context is not None:
        group.hide()
        group.reshard(unit.context.comm)
    group.adopt()
    for bucket in group.buckets:
        check_has_values(bucket)


def whole_params(
    chosen: Chosen, *, keep: bool = True, to_cpu: bool = False
) -> dict[ShardedParam, nn.Parameter]:
    """Gathers ``chosen`` bucket by bucket.

    Args:
        keep: False takes part in the gathers only, and drops each bucket's result at once.
        to_cpu: copies each bucket to the CPU before the next one is gathered.

    Returns:
        Whole Parameters of the parameters' own dtypes, each with memory of its own.
    """
    found: dict[ShardedParam, nn.Parameter] = {}
    for bucket, indices in chosen:
        found.update(_whole_bucket(bucket, indices, keep=keep, to_cpu=to_cpu))
    return found


def _whole_bucket(
    bucket: Bucket, indices: list[int], *, keep: bool, to_cpu: bool
) -> dict[ShardedParam, nn.Parameter]:
    params = [bucket.params[i] for i in indices]
    with torch.inference_mode(False):
        wholes = whole_tensors(bucket, indices, [param.local for param in params])
        if not keep:
            return {}
        return {
            param: nn.Parameter(whole.cpu() if to_cpu else whole, param.sharded.requires_grad)
            for param, whole in zip(params, wholes, strict=True)
        }


@contextmanager
def shown_instead(
    unit: Unit, chosen: Chosen, shown: Callable[[ShardedParam], nn.Parameter | None]
) -> Iterator[None]:
    """The modules have ``shown(param)`` instead of the sharded Parameters; None leaves one as it is."""
    slots: list[tuple[Any, str, nn.Parameter]] = []
    before = unit.group.state
    unit.group.state = GroupState.WHOLE
    try:
        for bucket, indices in chosen:
            for index in indices:
                param = bucket.params[index]
                other = shown(param)
                if other is None:
                    continue
                for holder, name in param.slots:
                    if holder.get(name) is not None:  # the user may have removed one
                        slots.append((holder, name, param.sharded))
                        holder[name] = other
        yield
    finally:
        unit.group.state = before
        for holder, name, sharded in slots:
            holder[name] = sharded


def chosen_of(unit: Unit, module: nn.Module | None = None) -> Chosen:
    """The unit's parameters; with ``module``, one of several that make up the unit, those that it holds."""
    inside = None
    if module is not None and len(unit.modules) > 1:
        inside = {id(each._parameters) for each in module.modules()}
    result: Chosen = []
    for bucket in unit.group.buckets:
        indices = [
            index
            for index, param in enumerate(bucket.params)
            if inside is None or inside & places_of(param)
        ]
        if indices:
            result.append((bucket, indices))
    return result


def places_of(param: ShardedParam) -> set[int]:
    """Ids of the ``_parameters`` of the modules that hold ``param``."""
    return {id(of(holder)) for holder, _ in param.slots}
