"""fully_shard: makes a module (or several as one) a unit of the sharding engine."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TypeVar, overload

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d._compat import gradient_hooks, has_tensor_hooks
from parallel3d._rollback import unchanged_on_error
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.axes import data_axes
from parallel3d.fsdp.bucket import make_buckets
from parallel3d.fsdp.group import ParamGroup
from parallel3d.fsdp.module import FSDPModule
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.state import Unit, unit_of

__all__ = ["fully_shard"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_TAKEN = "_parallel3d_taken_by"
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
    modules = _check_modules(module)
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
    ignored = _check_ignored(ignored_params)
    found = list(_managed_params(modules, ignored))
    name = type(modules[0]).__name__
    with ExitStack() as stack, torch.no_grad():
        for each in modules:
            stack.enter_context(unchanged_on_error(each))
        params = [ShardedParam(n, param, slots, axes) for n, param, slots in found]
        buckets = make_buckets(name, params, axes, mp_policy)
        _move_buffers(modules, mesh.device_type)
        for _, param, _ in found:
            setattr(param, _TAKEN, name)  # the user's object: a tied use in another unit shows
        Unit(modules, ParamGroup(buckets), mp_policy, reshard_after_forward, mesh.device_type)
        for each in modules:
            each.__class__ = _extended_class(type(each))
    return module


def _check_modules(module: nn.Module | list[nn.Module]) -> list[nn.Module]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise Parallel3dError("fully_shard was given an empty list; it needs at least one module")
    if len({id(each) for each in modules}) < len(modules):
        raise Parallel3dError(
            f"fully_shard was given a list of {len(modules)} modules in which one stands twice; "
            "list each once"
        )
    for each in modules:
        if not isinstance(each, nn.Module):
            raise Parallel3dError(
                f"fully_shard was given {each!r}; it needs an nn.Module or a list of them"
            )
        if unit_of(each) is not None:
            raise Parallel3dError(
                f"fully_shard was already applied to this {type(each).__name__}; "
                "apply it once to each unit, inner units first"
            )
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)):
            raise Parallel3dError(
                f"fully_shard was given an nn.{type(each).__name__}, which has no forward to hook; "
                "apply it to each of its modules, or pass them as one list"
            )
    return modules


def _check_ignored(params: Iterable[nn.Parameter] | None) -> set[int]:
    given = list(params or ())
    for param in given:
        if not isinstance(param, nn.Parameter):
            raise Parallel3dError(
                f"ignored_params holds {param!r}; it must hold the Parameters themselves, such as "
                "[model.scale]"
            )
    return {id(param) for param in given}


def _managed_params(
    modules: list[nn.Module], ignored: set[int]
) -> Iterator[tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]]:
    """(name, parameter, places that hold it) of the parameters outside inner units."""
    names: dict[int, str] = {}
    params: dict[int, nn.Parameter] = {}
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    seen: set[nn.Module] = set()
    for root in modules:
        for prefix, module in _outside_units(root, seen):
            for attribute, param in module._parameters.items():
                if param is None or id(param) in ignored:
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                _check_param(name, param)
                names.setdefault(id(param), name)
                params[id(param)] = param
                slots.setdefault(id(param), []).append((module, attribute))
    for key, param in params.items():
        yield names[key], param, slots[key]


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


def _check_param(name: str, param: nn.Parameter) -> None:
    taken_by = getattr(param, _TAKEN, None)
    if taken_by is not None:
        raise Parallel3dError(
            f"parameter {name} is tied to one that the unit {taken_by} already has; tied parameters "
            "must be in one unit: pass their modules to fully_shard as one list, or leave both "
            "to the unit around them"
        )
    if has_tensor_hooks(param) or gradient_hooks(param):
        raise Parallel3dError(
            f"parameter {name} has a hook, which would not be called for its shard; remove it, and use "
            "register_post_accumulate_grad_hook on the sharded parameter: it sees the reduced gradient"
        )
    if param.dtype.is_complex:
        raise Parallel3dError(
            f"parameter {name} is {param.dtype}; the engine reduces real dtypes: keep it as "
            "two real parameters (torch.view_as_real), or pass it in ignored_params"
        )
    if isinstance(param, DTensor) and param.device_mesh.ndim > 1:
        raise MeshError(
            f"parameter {name} is already a DTensor on the mesh {param.device_mesh}; the engine takes "
            "plain parameters and DTensors on one tp axis: is the model parallel already?"
        )


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
