"""What is registered in a root's modules: Parameters that are assigned, modules put in after sharding.

A Parameter assigned where a unit has one (``module.weight = nn.Parameter(...)``, ``register_parameter``,
``load_state_dict(assign=True)``) gives it its values at once, and the module keeps the unit's own, so that an
optimizer made from ``model.parameters()`` afterwards trains what forward computes with.

Anything else that is new is looked for when the root's forward begins: what every module has is compared, by
identity and within C, with what it had in the last one, and only if that differs are the modules walked. This
rests on no event, so that none can be missed. A trainable parameter that no unit has, and nobody has ignored,
is an error there: no rank would average its gradient with the others'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.nn.modules.module import register_module_parameter_registration_hook

from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.param import ShardedParam, mark_taken, owner_at, owner_of
from parallel3d.fsdp.running.members import unit_of
from parallel3d.fsdp.slots import OwnSetattr

if TYPE_CHECKING:
    from parallel3d.fsdp.state import Unit

__all__ = ["REGISTERED_ATTRIBUTE", "check_registered", "note_ignored", "watch_assignments"]

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
    if unit.group.shown:
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


def check_registered(root: Unit) -> None:
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
            if not unit.group.shown and not unit.group.is_in_other_form:
                unit.group.adopt_replaced()
        vars(modules[0])[REGISTERED_ATTRIBUTE] = _Registered(root, modules)


class _Registered:
    """What the modules of one root had when they were last found to be in order.

    The root's first module has it: it refers to what is below that module, and to nothing above.
    """

    def __init__(self, root: Unit, modules: Sequence[nn.Module]) -> None:
        loose = list(_check(root, modules))
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


def _check(root: Unit, modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Raises if a parameter should be of a unit; yields those that need not, but for those ignored."""
    for prefix, module in _walk(modules):
        for name, param in module._parameters.items():
            if param is None or owner_at(module, name) is not None:
                continue
            if name in vars(module).get(_IGNORED, ()):
                continue
            owner = owner_of(param)
            if param.requires_grad or (owner is not None and param is owner.sharded):
                raise _error(root, prefix, module, name, owner)
            yield param


def _error(
    root: Unit, prefix: str, module: nn.Module, name: str, owner: ShardedParam | None
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


def _unit_around(root: Unit, prefix: str) -> str:
    """The label of the innermost unit whose module holds the one that ``prefix`` leads to."""
    module, label = root.modules[0], root.label
    for part in filter(None, prefix.split(".")):
        module = module._modules.get(part)  # type: ignore[assignment]
        if module is None:  # of a root of several modules: in another than the first
            return label
        unit = unit_of(module)
        label = label if unit is None else unit.label
    return label


def _walk(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
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
