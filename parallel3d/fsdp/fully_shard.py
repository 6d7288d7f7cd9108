"""fully_shard: makes a module (or several as one) a unit of the sharding engine."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TypeVar, overload

import torch
from torch import nn
from torch.distributed import DeviceMesh

from parallel3d._rollback import unchanged_on_error
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.axes import data_axes
from parallel3d.fsdp.bucket import make_buckets
from parallel3d.fsdp.checks import check_ignored, check_modules, check_param
from parallel3d.fsdp.group import ParamGroup
from parallel3d.fsdp.module import FSDPModule
from parallel3d.fsdp.param import ShardedParam, mark_taken
from parallel3d.fsdp.state import Unit, unit_of

__all__ = ["fully_shard"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_classes: dict[type, type] = {}


@overload
def fully_shard(
    module: ModuleT,
    *,
    mesh: DeviceMesh,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> ModuleT: ...
@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> list[nn.Module]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> nn.Module | list[nn.Module]:
    """Shards the parameters of ``module`` that no unit inside it has, and makes it a unit.

    Apply it bottom-up: to the blocks, then to the whole model. At rest each parameter is a DTensor of
    the plain model's global shape; during forward and backward the module sees the whole (under tensor
    parallelism: the whole local) parameter.

    Args:
        module: the unit. A list is one unit whose parameters are gathered when the first of its modules
            runs and freed when all have run.
        mesh: axes ``replicate`` and / or ``shard``, and maybe ``tp``, by name; see ``fsdp.axes``. With a
            ``tp`` axis every parameter becomes a DTensor on the whole mesh.
        reshard_after_forward: free parameters after forward and gather them again in backward. None:
            True except for the root.
        mp_policy: dtypes.
        ignored_params: parameters to leave as they are: not moved, sharded or reduced.

    Returns:
        ``module`` itself, its class extended by ``FSDPModule``.

    Raises:
        Parallel3dError: not a module, a container without a forward, a unit already, a parameter of
            another unit.
        MeshError: a mesh without usable axes.
    """
    modules = check_modules(module)
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"mesh is {mesh!r}; it must be a DeviceMesh, as parallel3d.build_mesh makes"
        )
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise Parallel3dError(
            f"reshard_after_forward is {reshard_after_forward!r}; it must be True, False or None"
        )
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise Parallel3dError(f"mp_policy is {mp_policy!r}; it must be a MixedPrecisionPolicy")
    axes = data_axes(mesh)
    ignored = check_ignored(ignored_params)
    found = list(_managed_params(modules, ignored))
    name = type(modules[0]).__name__
    with ExitStack() as stack, torch.no_grad():
        for each in modules:
            stack.enter_context(unchanged_on_error(each))
        params = [ShardedParam(n, param, places, axes) for n, param, places in found]
        buckets = make_buckets(name, params, axes, mp_policy)
        _move_buffers(modules, mesh.device_type)
        unit = Unit(
            modules, ParamGroup(buckets), mp_policy, reshard_after_forward, mesh.device_type
        )
        for (_, param, _), sharded in zip(found, params, strict=True):
            mark_taken(param, sharded)  # the user's object: a tied use in another unit shows
            sharded.unit = weakref.ref(unit)
        for each in modules:
            each.__class__ = _extended_class(type(each))
    return module


def _managed_params(
    modules: list[nn.Module], ignored: set[int]
) -> Iterator[tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]]:
    """(name, parameter, places that hold it) of the parameters outside inner units."""
    names: dict[int, str] = {}
    params: dict[int, nn.Parameter] = {}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    seen: set[nn.Module] = set()
    for root in modules:
        for prefix, module in _outside_units(root, seen):
            for attribute, param in module._parameters.items():
                if param is None or id(param) in ignored:
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                check_param(name, param)
                names.setdefault(id(param), name)
                params[id(param)] = param
                places.setdefault(id(param), []).append((module, attribute))
    for key, param in params.items():
        yield names[key], param, places[key]


def _outside_units(
    root: nn.Module, seen: set[nn.Module], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    if root in seen or (prefix and unit_of(root) is not None):
        return
    seen.add(root)
    yield prefix, root
    for name, child in root._modules.items():
        if child is not None and unit_of(child) is None:
            yield from _outside_units(child, seen, f"{prefix}.{name}" if prefix else name)


def _move_buffers(modules: list[nn.Module], device_type: str) -> None:
    """Moves buffers to the mesh's device; meta ones stay for ``materialize``."""
    device = torch.device(device_type)
    for root in modules:
        for module in root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type not in (device.type, "meta"):
                    module._buffers[name] = buffer.to(device)


def _extended_class(cls: type) -> type:
    extended = _classes.get(cls)
    if extended is None:
        extended = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__doc__": cls.__doc__})
        extended.__module__ = cls.__module__
        _classes[cls] = extended
    return extended
