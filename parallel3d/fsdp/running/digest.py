"""What the ranks of a model compare before it communicates for the first time.

Each may have changed its parameters since ``fully_shard``, such as frozen one; and plain ``fully_shard``
compares nothing. The ranks of each mesh compare what lies on it: those of another may have another model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from parallel3d.fsdp.group import GroupState
from parallel3d.guards.digest import compare_digests
from parallel3d.mesh.store import others

if TYPE_CHECKING:
    from parallel3d.fsdp.param import ShardedParam
    from parallel3d.fsdp.running.context import RunContext
    from parallel3d.fsdp.state import Unit

__all__ = ["begins_to_communicate", "compare_gradients", "compare_ranks", "ranks_of"]


def ranks_of(units: Iterable[Unit]) -> list[int]:
    """All ranks that the units' parameters lie on."""
    return sorted({rank for unit in units for param in _params(unit) for rank in _ranks(param)})


def begins_to_communicate(units: Iterable[Unit]) -> str:
    """Whether a "forward" of the units does, or only a "backward": where their parameters are whole.

    A rank may then run forward by itself.
    """
    for unit in units:
        for bucket in unit.group.buckets:
            if bucket.shard_group is not None or any(p.tp_size > 1 for p in bucket.params):
                return "forward"
    return "backward"


def compare_ranks(context: RunContext, *, forward: bool) -> None:
    """Before the first communication, in a forward or backward. A forward that gathers nothing puts it off.

    Raises:
        AgreementError: the ranks have other units or parameters; the same error on all of them.
    """
    units = context.units
    if forward and not torch.is_grad_enabled() and _are_gathered(units):
        return  # by ``unshard()``: one rank may look at its model alone
    context.to_compare = ""
    if others() is None:
        return
    by_ranks: dict[tuple[int, ...], list[tuple[Unit, ShardedParam]]] = {}
    for unit in units:
        for param in _params(unit):
            by_ranks.setdefault(_ranks(param), []).append((unit, param))
    names = _names(context)
    for ranks in sorted(by_ranks):  # in one order on all ranks: none waits in a circle
        found = by_ranks[ranks]
        compare_digests("model", ranks, lambda found=found: _texts(found, names))  # type: ignore[misc]


def compare_gradients(context: RunContext) -> bool:
    """After the first backward that reduces all: which parameters have a gradient. Whether it was that one.

    A parameter that some ranks alone have used has a gradient on those ranks alone: its shards would part.
    Only of the first one: later ones would cost a round trip each.

    Raises:
        AgreementError: other parameters have one on another rank; the same error on all of them.
    """
    units = context.units
    if any(not (unit.sync and unit.all_reduce) or unit.guard is not None for unit in units):
        return False
    if others() is None or any(unit.reduce_unused for unit in units):
        return True
    names = _names(context)
    by_ranks: dict[tuple[int, ...], dict[str, str]] = {}
    for unit in units:
        for param in _params(unit):
            has = "has a gradient" if param.sharded.grad is not None else "has none"
            by_ranks.setdefault(_ranks(param), {})[_name(param, names)] = has
    for ranks in sorted(by_ranks):
        found = by_ranks[ranks]
        compare_digests(_GRADIENTS, ranks, lambda found=found: found)  # type: ignore[misc]
    return True


_GRADIENTS = (
    "gradients of the first backward (where ranks use different parameters: "
    "set_reduce_scatter_unused_params(True))"
)


def _are_gathered(units: Iterable[Unit]) -> bool:
    groups = [unit.group for unit in units if unit.group.buckets]
    return all(group.state is GroupState.UNSHARDED for group in groups)


def _params(unit: Unit) -> Iterator[ShardedParam]:
    return (param for bucket in unit.group.buckets for param in bucket.params)


def _ranks(param: ShardedParam) -> tuple[int, ...]:
    return tuple(sorted(int(rank) for rank in param.on.mesh.mesh.flatten().tolist()))


def _names(context: RunContext) -> dict[int, str]:
    """Of the places that hold parameters (``module._parameters``): their modules' names."""
    return {
        id(module._parameters): name
        for top in context.root.modules
        for name, module in top.named_modules()
    }


def _texts(found: list[tuple[Unit, ShardedParam]], names: dict[int, str]) -> dict[str, str]:
    """What must be alike, by name; the order of names too."""
    units: dict[str, str] = {}
    params: dict[str, str] = {}
    for unit, param in found:
        units.setdefault(unit.label, f"reshard_after_forward={unit.reshards()} {unit.policy}")
        params[_name(param, names)] = _describe(param)
    return {
        "units in order": ", ".join(units),
        **{f"unit {label}": text for label, text in units.items()},
        **params,
        "parameters in order": ", ".join(params),
    }


def _name(param: ShardedParam, names: dict[int, str]) -> str:
    """All its names, as tied parameters have several."""
    return " = ".join(
        f"{prefix}.{attribute}" if (prefix := names.get(id(holder), "?")) else attribute
        for holder, attribute in param.slots
    )


def _describe(param: ShardedParam) -> str:
    mesh = param.on.mesh
    axes = " x ".join(
        f"{name} {size}"
        for name, size in zip(mesh.mesh_dim_names or "?" * mesh.ndim, mesh.shape, strict=True)
    )
    trained = "trained" if param.sharded.requires_grad else "frozen"
    placements = ", ".join(map(str, param.spec.placements))
    layout = f"{param.layout.compute}, {param.layout.tp_grad} gradient"
    return f"{trained} {tuple(param.global_shape)} {param.dtype}, {placements} on {axes}, {layout}"
