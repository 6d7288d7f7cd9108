"""Which modules and parameters a unit takes: those that no unit inside it has."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from parallel3d.fsdp.checks import check_param
from parallel3d.fsdp.param import ShardedParam, owner_of
from parallel3d.fsdp.running.members import unit_of

__all__ = ["Managed", "managed_modules", "managed_params", "units_modules"]


class Managed(NamedTuple):
    """One parameter: its first name within the unit's modules, and all places that hold it.

    ``owner`` is what an older unit has made of it, where it is tied across units.
    """

    name: str
    param: nn.Parameter
    places: list[tuple[nn.Module, str]]
    owner: ShardedParam | None


def managed_params(modules: list[nn.Module], ignored: set[int]) -> Iterator[Managed]:
    """The parameters of ``modules`` outside inner units; checked."""
    found: dict[int, Managed] = {}
    for prefix, module in _outside_units(modules):
        for attribute, param in module._parameters.items():
            if param is None or id(param) in ignored:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            owner = owner_of(param)
            if owner is None:
                check_param(name, param)
            key = id(param) if owner is None else id(owner)
            entry = found.setdefault(key, Managed(name, param, [], owner))
            entry.places.append((module, attribute))
    yield from found.values()


def units_modules(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """``modules`` and those inside that are of no inner unit."""
    return (module for _, module in _outside_units(modules))


def managed_modules(modules: list[nn.Module], ignored: set[int]) -> Iterator[nn.Module]:
    """``modules`` and those inside that are of their unit, but for those with ignored parameters only."""
    for _, module in _outside_units(modules):
        if not ignored or not _is_ignored(module, ignored):
            yield module


def _is_ignored(module: nn.Module, ignored: set[int]) -> bool:
    """Whether all parameters in ``module`` are ignored and it has no buffer, as torch decides it."""
    inside = list(module.modules())
    return not any(m._buffers for m in inside) and all(
        id(p) in ignored for p in module.parameters()
    )


def _outside_units(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    seen: set[nn.Module] = set()
    for root in modules:
        yield from _walk(root, "", seen)


def _walk(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and unit_of(child) is None:
            yield from _walk(child, f"{prefix}.{name}" if prefix else name, seen)
