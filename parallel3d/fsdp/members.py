"""Which unit a module belongs to, which modules and parameters a unit takes, and what is put into them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.nn.parameter import is_lazy

from parallel3d._torch.autograd import gradient_hooks, have_tensor_hooks
from parallel3d.errors import Parallel3dError, RefusedStateError, StateError
from parallel3d.fsdp.param import ShardedParam, named, owner_at, owner_of
from parallel3d.fsdp.placement import DataAxes

UNIT_ATTRIBUTE = "_parallel3d_unit"  # of a module, which a copy of it must not share


def class_name(module: nn.Module) -> str:
    """Returns the name of the user's class of ``module``, also after ``fully_shard`` has changed it."""
    classes = type(module).__mro__
    first = classes.index(TorchFSDPModule) + 1 if TorchFSDPModule in classes else 0
    return classes[first].__name__


def unit_of(module: nn.Module) -> Any:
    """Returns the ``Unit`` that ``fully_shard`` has made of ``module``; None if it was not applied to it."""
    return module.__dict__.get(UNIT_ATTRIBUTE)


def get_unit(module: Any) -> Any:
    unit = unit_of(module)
    assert unit is not None
    return unit


def units_of(module: Any, recurse: bool) -> Iterator[Any]:
    """Yields the unit of ``module`` if it has one, and with ``recurse`` the units inside; each once."""
    modules: Iterator[nn.Module] = module.modules() if recurse else iter([module])
    seen: set[int] = set()
    for each in modules:
        unit = unit_of(each)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            yield unit


def refuse_torch_units(module: nn.Module, what: str) -> None:
    """Raises Parallel3dError if ``module`` or one inside it is sharded by torch's ``fully_shard``. ``what``:
    the feature, for the message, which works with our units only."""
    for name, each in module.named_modules():
        if _is_unit_of_torch(each):
            raise Parallel3dError(
                f"{what}: {name or 'the model'} ({class_name(each)}) is sharded by torch's fully_shard; use "
                'parallelize(..., engine="parallel3d")'
            )


def params_of(units: Iterable[Any]) -> Iterator[ShardedParam]:
    return (param for unit in units for bucket in unit.group.buckets for param in bucket.params)


def parameters_at_rest(module: nn.Module) -> list[nn.Parameter]:
    """Returns ``module.parameters()`` with sharded Parameters in place of unsharded ones."""
    at_rest = {
        id(compute): sharded
        for unit in units_of(module, recurse=True)
        if unit.group.is_registered
        for _, _, sharded, compute in unit.group.module_infos
    }
    return [at_rest.get(id(param), param) for param in module.parameters()]


def unit_around(unit: Any) -> Any:
    """Returns another unit, of several modules, that contains all modules of ``unit`` while one of them is
    inside ``unit``; or None.

    This happens where tied parameters have made one unit of an outer and an inner module.
    """
    mine = {id(module) for module in unit.modules}
    for module in unit.modules:
        for other in units_of(module, recurse=True):
            if other is unit or len(other.modules) == 1:
                continue
            if mine <= {id(m) for top in other.modules for m in top.modules()}:
                return other
    return None


# What ``fully_shard`` refuses.


def check_modules(module: nn.Module | list[nn.Module]) -> list[nn.Module]:
    """Checks the modules given to ``fully_shard``; returns those that are not inside another of them."""
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise Parallel3dError("fully_shard was given an empty list; it needs at least one module")
    if len({id(each) for each in modules}) < len(modules):
        raise Parallel3dError(
            f"fully_shard was given a list of {len(modules)} modules that has one of them twice; "
            "list each once"
        )
    for each in modules:
        if not isinstance(each, nn.Module):
            raise Parallel3dError(
                f"fully_shard was given {each!r}; it needs an nn.Module or a list of them"
            )
        if unit_of(each) is not None:
            raise RefusedStateError(
                f"fully_shard was already applied to this {type(each).__name__}; "
                "apply it once to each unit, inner units first"
            )
        is_container = isinstance(each, (nn.ModuleList, nn.ModuleDict))
        if is_container and type(each).forward is nn.Module.forward:
            raise Parallel3dError(
                f"fully_shard was given an nn.{type(each).__name__}, which has no forward to hook; "
                "apply it to each of its modules, or pass them as one list"
            )
    inside = {id(m) for each in modules for m in each.modules() if m is not each}
    return [each for each in modules if id(each) not in inside]


def check_reshard(value: object, meshes: Iterable[DataAxes]) -> bool | int | None:
    """Checks ``reshard_after_forward`` for a unit on ``meshes``; returns a bool, None or number of ranks.

    As in torch, the number of all shard ranks means True, and 1 means False: each rank keeps the whole.
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


def check_ignored(params: Iterable[nn.Parameter] | None) -> set[int]:
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
    owner = owner_of(param)
    if owner is not None:
        unit = owner.unit()
        raise Parallel3dError(
            f"parameter {name} is tied to parameter {owner.name} of the unit "
            f"{unit.label if unit is not None else '(gone)'}; tied parameters must be in one unit: pass "
            "their modules to fully_shard as one list, or leave both to the unit around them"
        )
    if have_tensor_hooks([param]) or gradient_hooks(param):
        raise Parallel3dError(_has_hook(f"parameter {name}"))
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
    _check_bitsandbytes(name, param)


def hook_error(units: Iterable[Any]) -> StateError:
    """Returns the error for ``register_hook`` on a sharded Parameter of ``units``: it would not be called."""
    hooked = next(param for param in params_of(units) if have_tensor_hooks([param.sharded]))
    return StateError(_has_hook(named(hooked)))


def _has_hook(what: str) -> str:
    return (
        f"{what} has a hook, as of register_hook and register_multi_grad_hook, which would not be called for "
        "its shard; remove it, and use register_post_accumulate_grad_hook on the sharded parameter: it sees "
        "the reduced gradient in .grad, and may change it in place"
    )


def _check_sparse(name: str, param: nn.Parameter, module: nn.Module) -> None:
    if param.requires_grad and getattr(module, "sparse", False) is True:
        raise Parallel3dError(
            f"parameter {name} of {type(module).__name__}(sparse=True) gets sparse gradients, which can't be "
            "reduced over ranks; set sparse=False, or freeze it: requires_grad_(False)"
        )


def refuse_resizing(*_: Any, **__: Any) -> None:
    """Raises StateError; it replaces ``resize_token_embeddings`` of transformers' models in units."""
    raise StateError(
        "resize_token_embeddings was called on a sharded model, of whose embedding each rank has a part; "
        "resize the plain model, before parallelize or fully_shard"
    )


def _check_bitsandbytes(name: str, param: Any) -> None:
    """Raises Parallel3dError if ``param`` is a weight of bitsandbytes that does not work when sharded."""
    if type(param).__module__.partition(".")[0] != "bitsandbytes":
        return
    kind, problem = type(param).__name__, ""
    if kind != "Params4bit":
        problem = (
            "which computes with a whole copy beside the parameter: every rank would keep it all"
        )
    elif param.quant_state is None:
        problem = "which is not quantised yet; call model.to(device) first"
    elif param.dtype.is_floating_point:
        problem = (
            f"whose packed values have the dtype {param.dtype}, in which a cast (mp_policy) would destroy "
            "them; set quant_storage=torch.uint8"
        )
    if problem:
        raise Parallel3dError(
            f"parameter {name} is a {kind} of bitsandbytes, {problem}. Linear4bit with "
            "quant_storage=torch.uint8 can be sharded, and torchao's NF4 (to_nf4)"
        )


def check_settings_of_root(root: Any) -> None:
    """Raises StateError if a unit inside ``root`` has settings that only the outermost unit may have."""
    for module in root.modules:
        for unit in units_of(module, recurse=True):
            if unit is root:
                continue
            if unit.prefetch is not None:
                raise StateError(
                    f"{unit.label!r} was given a schedule of gathers (set_backward_prefetch, "
                    f"set_forward_prefetch or set_limit_all_gathers), but it is inside {root.label!r}; call "
                    "the methods on the outermost unit"
                )
            if unit.manual_finalization:
                raise StateError(
                    f"set_manual_backward_finalization(True) was called on {unit.label!r}, which is inside "
                    f"{root.label!r}; call it on the outermost unit"
                )


def check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise Parallel3dError(
            f"{module!r} is not an nn.Module; give the model, or a module inside it"
        )


# Which modules and parameters a unit takes: those that no unit inside it has.


class Managed(NamedTuple):
    """A parameter that a unit manages: it is in the unit's modules, and in no unit inside them.

    Attributes:
        name: its first name within the unit's modules.
        places: all (module, attribute) that hold it.
        owner: its ShardedParam if another unit has sharded it already (tied across units); else None.
    """

    name: str
    param: nn.Parameter
    places: list[tuple[nn.Module, str]]
    owner: ShardedParam | None


def managed_params(modules: list[nn.Module], ignored: set[int]) -> list[Managed]:
    """Returns the parameters that a unit of ``modules`` manages; raises if one of them can't be sharded.
    ``ignored``: ids of those to leave out."""
    found: dict[int, Managed] = {}
    for prefix, module in _walk(modules, unit_of):
        for attribute, param in module._parameters.items():
            if param is None or id(param) in ignored:
                continue
            name = _joined(prefix, attribute)
            owner = owner_of(param)
            if owner is None:
                check_param(name, param)
                _check_sparse(name, param, module)
            key = id(param) if owner is None else id(owner)
            entry = found.setdefault(key, Managed(name, param, [], owner))
            entry.places.append((module, attribute))
    return list(found.values())


def units_modules(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Returns ``modules`` and all modules inside, without units inside and what these contain."""
    return (module for _, module in _walk(modules, unit_of))


def managed_modules(modules: list[nn.Module], ignored: set[int]) -> Iterator[nn.Module]:
    """Yields the modules of ``units_modules`` that have a parameter that is not ignored, or buffers."""
    for module in units_modules(modules):
        # As in torch: modules with buffers too, and all of them if no parameter is ignored.
        if (
            not ignored
            or any(inner._buffers for inner in module.modules())
            or any(id(param) not in ignored for param in module.parameters())
        ):
            yield module


def _walk(
    modules: Sequence[nn.Module], leave_out: Callable[[nn.Module], object]
) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module) of ``modules`` and those inside, without those that ``leave_out`` excludes."""
    seen: set[int] = set()
    waiting = [("", module) for module in reversed(modules)]
    while waiting:
        prefix, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield prefix, module
        for name, child in reversed(module._modules.items()):
            if child is not None and not leave_out(child):
                waiting.append((_joined(prefix, name), child))


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


# What was put into a root's modules after sharding is looked for when the root's forward begins, see
# ``group.check_registered``. A trainable parameter that no unit has, and nobody has ignored, is an error
# there: no rank would average its gradient with the others'.

_IGNORED = "_parallel3d_ignored"  # attribute of a module: names of its ignored parameters


def missing_values(modules: Iterable[nn.Module]) -> StateError:
    """Returns an error that names the parameters in ``modules`` that are on the meta device."""
    named = (pair for module in modules for pair in module.named_parameters())
    names = [name for name, param in named if param.is_meta]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return StateError(
        f"parameters are still on the meta device, without values: {shown}. Give them some before "
        "the first forward: parallel3d.materialize(model, seed=...) initialises them, the same on every "
        "mesh; model.load_state_dict(state, assign=True) or parallel3d.checkpoint load them"
    )


def note_ignored(modules: Iterable[nn.Module], ignored: set[int]) -> None:
    """Stores in each of ``modules`` the names of its parameters whose ids are in ``ignored``."""
    for module in modules if ignored else ():
        names = {name for name, param in module._parameters.items() if id(param) in ignored}
        if names:
            vars(module)[_IGNORED] = names | vars(module).get(_IGNORED, set())


def check_loose(root: Any, modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Yields the frozen parameters in ``modules`` that belong to no unit and were not ignored; raises
    Parallel3dError if there is a trainable one."""
    for prefix, module in _walk(modules, _is_unit_of_torch):
        for name, param in module._parameters.items():
            if param is None or owner_at(module, name) is not None:
                continue
            if name in vars(module).get(_IGNORED, ()):
                continue
            owner = owner_of(param)
            if param.requires_grad or (owner is not None and param is owner.sharded):
                raise _loose_error(root, prefix, module, name, owner)
            yield param


def _loose_error(
    root: Any, prefix: str, module: nn.Module, name: str, owner: ShardedParam | None
) -> Parallel3dError:
    label = _label_around(root, prefix)
    where = f"parameter {_joined(prefix, name)} of a {type(module).__name__} in unit {label}"
    if owner is not None:
        return Parallel3dError(
            f"{where} is {named(owner)} too, but was put there after fully_shard: the unit would not "
            "gather it there. Tie parameters, and register parametrizations, before fully_shard"
        )
    return Parallel3dError(
        f"{where} is trainable, but no unit has it: it was put there after fully_shard, and its gradient "
        f"would not be reduced over the ranks. Put it there before parallelize or fully_shard; or, without "
        f"tp, call fully_shard on {prefix or 'its module'} with the same mesh, before the optimizer is made; "
        "or on that with ignored_params=[...], if each rank is to train its own; or freeze it: "
        "requires_grad_(False)"
    )


def _label_around(root: Any, prefix: str) -> str:
    """Returns the label of the innermost unit that contains the module named ``prefix``."""
    module, label = root.modules[0], root.label
    for part in filter(None, prefix.split(".")):
        module = module._modules.get(part)
        if module is None:  # of a root of several modules: in another than the first
            return label
        unit = unit_of(module)
        label = label if unit is None else unit.label
    return label


def _is_unit_of_torch(module: nn.Module) -> bool:
    return isinstance(module, TorchFSDPModule) and unit_of(module) is None
