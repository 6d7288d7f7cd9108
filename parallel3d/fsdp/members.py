"""Which unit a module belongs to, which modules a unit has, and what is put or left on them."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from parallel3d._torch.autograd import gradient_hooks, has_tensor_hooks
from parallel3d._torch.fully_shard import FULLY_SHARD_KEYS
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.param import OwnSetattr, ShardedParam, mark_taken, owner_at, owner_of
from parallel3d.fsdp.placement import DataAxes


class UnitLike(Protocol):
    """A unit, as far as the layers below it know one; see ``Unit``."""

    label: str
    ref: weakref.ref
    group: Any
    context: Any
    depth: int

    @property
    def modules(self) -> list[nn.Module]: ...

    def come_to_rest(self) -> None: ...

    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> Any: ...

    def post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any: ...

    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None: ...


def class_name(module: nn.Module) -> str:
    """The name of the user's class of ``module``: a unit's own is made of that and ``FSDPModule``."""
    classes = type(module).__mro__
    first = classes.index(TorchFSDPModule) + 1 if TorchFSDPModule in classes else 0
    return classes[first].__name__


def unit_of(module: nn.Module) -> Any:
    """The ``Unit`` whose module (or one of whose modules) ``module`` is; None if there is none."""
    return module.__dict__.get(UNIT_ATTRIBUTE)


def get_unit(module: Any) -> Any:
    """The unit of a module that is known to have one."""
    unit = unit_of(module)
    assert unit is not None
    return unit


def units_of(module: Any, recurse: bool) -> Iterator[Any]:
    """The unit of ``module``, and with ``recurse`` those inside it; each once."""
    modules: Iterator[nn.Module] = module.modules() if recurse else iter([module])
    seen: set[int] = set()
    for each in modules:
        unit = unit_of(each)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            yield unit


def parameters_at_rest(module: nn.Module) -> list[nn.Parameter]:
    """``module.parameters()`` as the optimizer knows them, also where ``unshard()`` shows others."""
    at_rest = {
        id(compute): sharded
        for unit in units_of(module, recurse=True)
        if unit.group.is_registered
        for _, _, sharded, compute in unit.group.module_infos
    }
    return [at_rest.get(id(param), param) for param in module.parameters()]


def unit_around(unit: UnitLike) -> Any:
    """The unit that ``unit`` is inside of, if one of that unit's modules is also inside ``unit``.

    Parameters tied across units have then made an outer unit and one further inside the same.
    """
    mine = {id(module) for module in unit.modules}
    for module in unit.modules:
        for other in units_of(module, recurse=True):
            if other is unit or len(other.modules) == 1:
                continue
            if mine <= {id(m) for top in other.modules for m in top.modules()}:
                return other
    return None


class Members:
    """The modules of one unit, which hold it, and are referred to weakly."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []
        self._handles: dict[int, list[RemovableHandle]] = {}
        self._tops: set[int] | None = None
        self._attributes: Attributes | None = None

    @property
    def attributes(self) -> Attributes:
        """What lies on the unit's modules."""
        if self._attributes is None:
            self._attributes = Attributes(self.modules)
        return self._attributes

    @property
    def modules(self) -> list[nn.Module]:
        """The modules given to ``fully_shard``."""
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def tops(self) -> set[int]:
        """Ids of the modules that are not inside another of them."""
        if self._tops is None:  # found in the first forward: looked for with each, many take long
            modules = self.modules
            inside = {id(m) for outer in modules for m in outer.modules() if m is not outer}
            self._tops = {id(m) for m in modules} - inside
        return self._tops

    def attach(self, module: nn.Module, unit: UnitLike) -> None:
        """Makes ``module`` one of them, with the hooks of ``unit``."""
        self._modules.append(weakref.ref(module))
        self._tops = self._attributes = None
        setattr(module, UNIT_ATTRIBUTE, unit)
        self._handles[id(module)] = [
            module.register_forward_pre_hook(unit.pre_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(unit.post_forward),
            module.register_load_state_dict_post_hook(unit.after_load),
        ]

    def detach(self) -> list[nn.Module]:
        """Gives the modules up, and removes the hooks."""
        modules = self.modules
        for module in modules:
            for handle in self._handles[id(module)]:
                handle.remove()
        self._modules, self._handles = [], {}
        return modules

    def forward_handle(self, module: nn.Module, *, before: bool) -> RemovableHandle:
        """The handle of the unit's hook before or after the forwards of ``module``."""
        return self._handles[id(module)][0 if before else 1]

    def take_forward_handle(
        self, module: nn.Module, handle: RemovableHandle, *, before: bool
    ) -> None:
        """``handle`` is of the hook that does now what that one did."""
        self._handles[id(module)][0 if before else 1] = handle

    def hook_ids(self, module: nn.Module) -> list[int]:
        """Keys of the unit's hooks in ``module``'s dicts of hooks."""
        return [handle.id for handle in self._handles[id(module)]]


# What ``fully_shard`` refuses.


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


# Which modules and parameters a unit takes: those that no unit inside it has.


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


# What is registered in a root's modules: Parameters that are assigned, modules put in after
# sharding.
#
# A Parameter assigned where a unit has one (``module.weight = nn.Parameter(...)``,
# ``register_parameter``, ``load_state_dict(assign=True)``) gives it its values at once, and the
# module keeps the unit's own, so that an optimizer made from ``model.parameters()`` afterwards
# trains what forward computes with.
#
# Anything else that is new is looked for when the root's forward begins: what every module has is
# compared, by identity and within C, with what it had in the last one, and only if that differs
# are the modules walked. This rests on no event, so that none can be missed. A trainable parameter
# that no unit has, and nobody has ignored, is an error there: no rank would average its gradient
# with the others'.

REGISTERED_ATTRIBUTE = "_parallel3d_registered"  # of a root's first module, see ``_Registered``
_IGNORED = (
    "_parallel3d_ignored"  # of a module: names of its parameters that a unit was told to ignore
)

_CONTAINERS = attrgetter("_modules", "_parameters")
_IS_TRAINABLE = attrgetter("requires_grad")


# -- a Parameter is assigned ---------------------------------------------------------------------------

_watching = False


def watch_assignments() -> None:
    """From now on units take Parameters when they are assigned."""
    global _watching
    if not _watching:
        _watching = True
        register_module_parameter_registration_hook(_take_assigned)  # type: ignore[arg-type]


def _take_assigned(module: nn.Module, name: str, given: nn.Parameter) -> nn.Parameter | None:
    """Called by torch with every Parameter that is registered in any module; what it returns is put there."""
    owner = owner_at(module, name)
    if owner is None or OwnSetattr.is_putting or given is owner.sharded:
        return None
    unit = owner.unit() if owner.unit is not None else None
    if unit is None or unit.group.is_in_other_form or unit.group.owns(given):
        return None
    unit.come_to_rest()
    if unit.group.is_registered:
        raise StateError(
            f"parameter {owner.name} of unit {unit.label} was assigned while the unit's unsharded parameters "
            "are in its modules; assign it between steps, after reshard() if unshard() was called"
        )
    other = owner_of(given)
    if other is not None and other is not owner:
        raise Parallel3dError(
            f"parameter {owner.name} of unit {unit.label} was assigned {_describe(other)}, which would tie "
            "the two; tie parameters before fully_shard, or copy the values by copy_() under no_grad()"
        )
    unit.group.take(owner, given)
    mark_taken(given, owner)
    return owner.sharded


def _describe(param: ShardedParam) -> str:
    unit = param.unit() if param.unit is not None else None
    return f"parameter {param.name}" + ("" if unit is None else f" of unit {unit.label}")


# -- what is new in a root's modules ---------------------------------------------------------------------


def note_ignored(modules: Iterable[nn.Module], ignored: set[int]) -> None:
    """Notes which parameters of ``modules`` are among ``ignored``, by id."""
    for module in modules if ignored else ():
        names = {name for name, param in module._parameters.items() if id(param) in ignored}
        if names:
            vars(module)[_IGNORED] = names | vars(module).get(_IGNORED, set())


def check_registered(root: UnitLike) -> None:
    """When a forward of ``root`` begins.

    Raises:
        Parallel3dError: a trainable parameter in its modules is of no unit, and was not ignored.
    """
    modules = root.modules
    registered = vars(modules[0]).get(REGISTERED_ATTRIBUTE)
    if registered is None or not registered.is_of(modules):
        vars(modules[0]).pop(REGISTERED_ATTRIBUTE, None)
        assert root.context is not None
        for unit in root.context.units:  # also those that this forward does not come to
            if not unit.group.is_registered and not unit.group.is_in_other_form:
                unit.group.adopt_replaced()
        vars(modules[0])[REGISTERED_ATTRIBUTE] = _Registered(root, modules)


class _Registered:
    """What the modules of one root had when they were last found to be in order.

    The root's first module has it: it refers to what is below that module, and to nothing above.
    """

    def __init__(self, root: UnitLike, modules: Sequence[nn.Module]) -> None:
        loose = list(_check_loose(root, modules))
        tops = set(map(id, modules))
        inside = {id(each): each for module in modules for each in module.modules()}
        self._below = [
            module
            for key, module in inside.items()
            if key not in tops and all(isinstance(each, dict) for each in _CONTAINERS(module))
        ]
        self._found = list(self._read(modules))
        # Nobody ignored them; they were frozen.
        self._frozen = [param for param in loose if not param.requires_grad]

    def _read(self, modules: Iterable[nn.Module]) -> Iterable[Any]:
        containers = chain.from_iterable(map(_CONTAINERS, chain(modules, self._below)))
        return chain.from_iterable(map(dict.values, containers))

    def is_of(self, modules: Sequence[nn.Module]) -> bool:
        """Whether they still have the same, and what was frozen still is."""
        now = list(self._read(modules))
        return (
            len(now) == len(self._found)
            and all(map(is_, now, self._found))
            and not any(map(_IS_TRAINABLE, self._frozen))
        )


def _check_loose(root: UnitLike, modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Raises if a parameter should be of a unit; yields those that need not, but for those ignored."""
    for prefix, module in _all_modules(modules):
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
    root: UnitLike, prefix: str, module: nn.Module, name: str, owner: ShardedParam | None
) -> Parallel3dError:
    full_name = f"{prefix}.{name}" if prefix else name
    where = (
        f"parameter {full_name} of a {type(module).__name__} in unit {_unit_around(root, prefix)}"
    )
    if owner is not None:
        return Parallel3dError(
            f"{where} is {_describe(owner)} too, but was put there after fully_shard: the unit would not "
            "gather it there. Tie parameters, and register parametrizations, before fully_shard"
        )
    return Parallel3dError(
        f"{where} is trainable, but no unit has it: it was put there after fully_shard, and its gradient "
        f"would not be reduced over the ranks. Put it there before fully_shard; or call fully_shard on "
        f"{prefix or 'its module'} with the same mesh, before the optimizer is made; or on that with "
        "ignored_params=[...], if each rank is to train its own; or freeze it: requires_grad_(False)"
    )


def _unit_around(root: UnitLike, prefix: str) -> str:
    """The label of the innermost unit whose module holds the one that ``prefix`` leads to."""
    module, label = root.modules[0], root.label
    for part in filter(None, prefix.split(".")):
        module = module._modules.get(part)  # type: ignore[assignment]
        if module is None:  # of a root of several modules: in another than the first
            return label
        unit = unit_of(module)
        label = label if unit is None else unit.label
    return label


def _all_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """All modules in ``modules``, but for those in units of torch's own engine."""
    seen: set[int] = set()
    waiting = [("", module) for module in reversed(modules)]
    while waiting:
        prefix, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, TorchFSDPModule) and unit_of(module) is None:
            continue
        yield prefix, module
        for name, child in reversed(module._modules.items()):
            if child is not None:
                waiting.append((f"{prefix}.{name}" if prefix else name, child))


# What a forward of a unit leaves behind: the tensors that it returns, and those on its modules' attributes.


UNIT_ATTRIBUTE = "_parallel3d_unit"  # of a module, which a copy of it must not share

_SCALARS = (int, float, str, type(None))  # most of what is found; told apart quickly
_OPAQUE = (
    *(str, bytes, bytearray, int, float, complex, type, ModuleType, BuiltinFunctionType),
    *(nn.Module, torch.dtype, torch.device, torch.Size, torch.Generator, weakref.ref),
)
_MOST = 2000  # objects to look into: who returns a graph of more has an error at worst


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``value``: in containers, dataclasses, objects of any class, closures, generators.

    It sees what the garbage collector sees: not what is in objects of C++.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    stack = [value]
    seen: set[int] = set()
    while stack and len(seen) < _MOST:
        each = stack.pop()
        if isinstance(each, _SCALARS) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (tuple, list)):
            stack += reversed(each)
        elif type(each) is dict:
            stack += reversed(each.values())
        elif isinstance(each, FunctionType):  # not its globals
            stack += each.__closure__ or ()
            stack += each.__defaults__ or ()
        elif isinstance(each, Mapping) and not gc.is_tracked(each):
            stack += each.values()
        elif not isinstance(each, _OPAQUE):
            stack += gc.get_referents(each)


_STANDARD = frozenset((*vars(nn.Module()), *FULLY_SHARD_KEYS, UNIT_ATTRIBUTE))
_NOT_THE_USERS = ("torch.", "parallel3d.")
_PLAIN = frozenset(  # types of values that neither are tensors nor have any
    (int, float, bool, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)
    + (FunctionType, BuiltinFunctionType, MethodType)
)


class Attributes:
    """Those of a unit's modules, without what ``nn.Module`` has by itself.

    Read after each forward, so it looks at types in passes that stay within C, and at values only where one
    may be or hold a tensor.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tops = [weakref.ref(module) for module in modules]
        # Weakly too: the top ones have the unit, which has this.
        self._modules: list[weakref.ref[nn.Module]] = []
        self._sizes: list[int] = []
        self._getters: list[Any] = []
        self._plain: list[Any] | None = (
            None  # the values of last time, where none can be or hold a tensor
        )

    def _list(self) -> list[dict[str, Any]]:
        modules = list(_own_modules([m for ref in self._tops if (m := ref()) is not None]))
        self._modules = [weakref.ref(module) for module in modules]
        dicts = list(map(vars, modules))
        self._sizes = _sizes_of(dicts)
        self._getters, self._plain = [], None
        for attributes in dicts:
            names = [name for name in attributes if name not in _STANDARD]
            # Of one name it gives the value itself, of several a tuple.
            self._getters.append(itemgetter(*names, *names[:1]) if names else _nothing)
        return dicts

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that were computed with autograd's record: on attributes, and in what lies there."""
        dicts = [vars(module) for module in map(call, self._modules) if module is not None]
        if not dicts or _sizes_of(dicts) != self._sizes:
            dicts = self._list()
        try:
            values = self._read(dicts)
        except KeyError:  # one was deleted, and another added
            dicts = self._list()
            values = self._read(dicts)
        plain = self._plain
        if plain is None or not all(map(is_, values, plain)):
            others = [
                value
                for value in values
                if type(value) not in _PLAIN and not _is_plain_tuple(value)
            ]
            self._plain = None if others else values
            yield from _with_graph(others)
        for buffers in filter(None, map(_buffers_of, dicts)):
            if any(b is not None and b.requires_grad for b in buffers.values()):
                yield from _with_graph(buffers.values())

    def _read(self, dicts: list[dict[str, Any]]) -> list[Any]:
        return list(chain.from_iterable(map(call, self._getters, dicts)))


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and _PLAIN.issuperset(map(type, value))


_buffers_of = itemgetter("_buffers")
_children_of = itemgetter("_modules")


def _sizes_of(dicts: list[dict[str, Any]]) -> list[int]:
    """What is another where a module or an attribute was added."""
    return [*map(len, dicts), *map(len, map(_children_of, dicts))]


def _nothing(_: Any) -> tuple:
    return ()


def _own_modules(tops: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """``tops`` and the modules inside, but for those of inner units."""
    stack, seen = list(tops), set()
    first = {id(module) for module in stack}
    while stack:
        module = stack.pop()
        if id(module) in seen or (UNIT_ATTRIBUTE in vars(module) and id(module) not in first):
            continue
        seen.add(id(module))
        yield module
        stack += [child for child in module._modules.values() if child is not None]


def _with_graph(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for tensor in _tensors_near(values):
        if tensor.requires_grad and not tensor.is_leaf:
            yield tensor


def _tensors_near(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors in ``values`` and in containers, and on the attributes of other objects there.

    Not further: a module may have a reference to all of the program.
    """
    stack = list(values)
    seen: set[int] = set()
    while stack and len(seen) < _MOST:
        each = stack.pop()
        if isinstance(each, torch.Tensor):
            yield each
        elif type(each) in _PLAIN or id(each) in seen or isinstance(each, _OPAQUE):
            continue
        else:
            seen.add(id(each))
            if isinstance(each, (list, tuple, set, frozenset, deque)):
                stack += each
            elif isinstance(each, dict):
                stack += each.values()
            elif not type(each).__module__.startswith(_NOT_THE_USERS):
                for value in _attributes_of(each):
                    if isinstance(value, torch.Tensor):
                        yield value
                    elif isinstance(value, (list, tuple, dict, deque)):
                        stack.append(value)


def _attributes_of(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            yield getattr(value, name, None)
