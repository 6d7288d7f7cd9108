"""Which unit a module belongs to, and which modules a unit has."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.utils.hooks import RemovableHandle

from parallel3d.fsdp.running.outputs import UNIT_ATTRIBUTE, Attributes

if TYPE_CHECKING:
    from parallel3d.fsdp.state import Unit

__all__ = [
    "UNIT_ATTRIBUTE",
    "Members",
    "class_name",
    "parameters_at_rest",
    "the_unit",
    "unit_around",
    "unit_of",
    "units_of",
]


def class_name(module: nn.Module) -> str:
    """The name of the user's class of ``module``: a unit's own is made of that and ``FSDPModule``."""
    classes = type(module).__mro__
    first = classes.index(TorchFSDPModule) + 1 if TorchFSDPModule in classes else 0
    return classes[first].__name__


def unit_of(module: nn.Module) -> Unit | None:
    """The unit whose module (or one of whose modules) ``module`` is."""
    return module.__dict__.get(UNIT_ATTRIBUTE)


def the_unit(module: Any) -> Unit:
    """The unit of a module that is known to have one."""
    unit = unit_of(module)
    assert unit is not None
    return unit


def units_of(module: Any, recurse: bool) -> Iterator[Unit]:
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
        if unit.group.shown
        for _, _, sharded, compute in unit.group.slots
    }
    return [at_rest.get(id(param), param) for param in module.parameters()]


def unit_around(unit: Unit) -> Unit | None:
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

    def attach(self, module: nn.Module, unit: Unit) -> None:
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
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in self.hook_ids(module):
                    hooks.pop(key, None)  # see ``HooksOff``
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
