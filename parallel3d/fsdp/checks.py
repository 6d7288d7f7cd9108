"""What ``fully_shard`` refuses."""

import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from parallel3d._compat import gradient_hooks, has_tensor_hooks
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.param import owner_of
from parallel3d.fsdp.placing.axes import DataAxes
from parallel3d.fsdp.running.members import unit_of

__all__ = [
    "check_ignored",
    "check_module",
    "check_modules",
    "check_no_spmd",
    "check_param",
    "check_reshard",
]


def check_modules(module: nn.Module | list[nn.Module]) -> list[nn.Module]:
    """The modules of one unit as a list, without those that are inside others of it."""
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
        if (
            isinstance(each, (nn.ModuleList, nn.ModuleDict))
            and type(each).forward is nn.Module.forward
        ):
            raise Parallel3dError(
                f"fully_shard was given an nn.{type(each).__name__}, which has no forward to hook; "
                "apply it to each of its modules, or pass them as one list"
            )
    inside = {id(m) for each in modules for m in each.modules() if m is not each}
    return [each for each in modules if id(each) not in inside]


def check_reshard(value: object, meshes: Iterable[DataAxes]) -> bool | int | None:
    """``reshard_after_forward`` as a unit takes it.

    As in torch, the number of all shard ranks means True, and 1 means False: each rank keeps the whole.

    Args:
        meshes: the axes of the unit's parameters; all must be able to shard over ``value`` ranks.
    """
    if value is None or isinstance(value, bool):
        return value
    sizes = sorted({axes.size(axes.shard) for axes in meshes})
    ranks = " and of ".join(map(str, sizes))
    divisors = [n for n in range(2, sizes[0]) if all(size % n == 0 for size in sizes)]
    choice = f"{', '.join(map(str, divisors))}, or " if divisors else ""
    if not isinstance(value, int) or value < 1 or any(size % value for size in sizes):
        raise Parallel3dError(
            f"reshard_after_forward is {value!r}; it must be True (free the parameters after forward), False "
            "(keep them), None, or a number of ranks to keep them sharded over, which divides the shard axis "
            f"of {ranks} ranks: give {choice}True or False"
        )
    if value == 1:
        warnings.warn(
            "reshard_after_forward=1 is a number of ranks: each keeps the whole parameters, as with False. "
            "Say True to free them after forward",
            stacklevel=3,
        )
        return False
    return True if sizes == [value] else value


def check_no_spmd(axes: DataAxes) -> None:
    """Raises where parameters are DTensors on the data axes: they can't be cut over replicate for HFSDP."""
    if axes.spmd is not None:
        raise Parallel3dError(
            "shard_optimizer_over_replicate=True does not go with dp_mesh_dims; give fully_shard a mesh with "
            "the axes replicate and shard, and plain parameters"
        )


def check_ignored(params: Iterable[nn.Parameter] | None) -> set[int]:
    """The ids of the parameters to leave alone."""
    if params is None:
        return set()
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise Parallel3dError(
            f"ignored_params is {params!r}; it must be a set or list of Parameters"
        )
    given = list(params)
    for param in given:
        if not isinstance(param, nn.Parameter):
            raise Parallel3dError(
                f"ignored_params holds {param!r}; it must hold the Parameters themselves, such as "
                "[model.scale]"
            )
    return {id(param) for param in given}


def check_param(name: str, param: nn.Parameter) -> None:
    """Raises if the engine can't take ``param``."""
    owner = owner_of(param)
    if owner is not None:
        unit = owner.unit() if owner.unit is not None else None
        raise Parallel3dError(
            f"parameter {name} is tied to parameter {owner.name} of the unit "
            f"{unit.label if unit is not None else '(gone)'}; tied parameters must be in one unit: pass "
            "their modules to fully_shard as one list, or leave both to the unit around them"
        )
    if has_tensor_hooks(param) or gradient_hooks(param):
        raise Parallel3dError(
            f"parameter {name} has a hook, which would not be called for its shard; remove it, and use "
            "register_post_accumulate_grad_hook on the sharded parameter: it sees the reduced gradient"
        )
    if is_lazy(param):
        raise Parallel3dError(
            f"parameter {name} has no size yet; run a batch through the model first, or use the module "
            "that is not lazy"
        )
    if param.layout is not torch.strided:
        raise Parallel3dError(
            f"parameter {name} is {param.layout}; the engine takes dense ones: hold it as a dense "
            "parameter (to_dense()), or as a buffer"
        )


def check_module(module: object) -> None:
    """Raises unless ``module`` is one."""
    if not isinstance(module, nn.Module):
        raise Parallel3dError(f"{module!r} is no nn.Module; give the model, or a module inside it")
