"""register_fsdp_forward_method and share_comm_ctx: what is done to units from outside."""

import functools
import inspect
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from torch import nn

from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.comm import Comm, make_comm
from parallel3d.fsdp.running.members import the_unit, unit_of
from parallel3d.fsdp.state import Unit

__all__ = ["comm_of", "register_fsdp_forward_method", "set_comm", "share_comm_ctx"]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Lets ``module.method_name(...)`` gather and free the unit's parameters as its ``forward`` does.

    The module's class changes, so that nothing refers back to the module and its copies have the
    method too. Does nothing to a module that is no unit.

    Raises:
        Parallel3dError: there is no such method.
    """
    if unit_of(module) is None:
        return
    if not callable(getattr(module, method_name, None)):
        raise Parallel3dError(
            f"{type(module).__name__} has no method {method_name!r} to register; "
            "give the name of one that is called like forward"
        )
    cls = type(module)
    own = f"_parallel3d_own_{method_name}"
    if method_name in vars(module):
        vars(module)[own] = vars(module).pop(method_name)

        def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
            return vars(self)[own](*args, **kwargs)
    elif isinstance(inspect.getattr_static(cls, method_name, None), FunctionType):
        inner = getattr(cls, method_name)
    else:  # static or class methods, and what __getattr__ gives

        def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = getattr(super(wrapped, self), method_name, None)
            if found is None:
                found = type(self).__getattr__(self, method_name)
            return found(*args, **kwargs)

    @functools.wraps(inner)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        unit = the_unit(self)
        depth = unit.depth
        try:
            args, kwargs = unit.pre_forward(self, args, kwargs) or (args, kwargs)
            return unit.post_forward(self, args, inner(self, *args, **kwargs))
        except BaseException:
            unit.leave_failed_forward(depth)
            raise

    namespace = {method_name: method, "__doc__": cls.__doc__, "__module__": cls.__module__}
    wrapped = type(cls.__name__, (cls,), namespace)
    module.__class__ = wrapped


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Lets several root units, such as the chunks of a pipeline stage, communicate on the same streams.

    Raises:
        Parallel3dError: a module is no unit, or they are on different kinds of device.
        StateError: one is in a backward.
    """
    units = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise Parallel3dError(
                f"share_comm_ctx was given {type(module).__name__}, which is no unit; give modules that "
                "fully_shard was applied to"
            )
        if unit.context is not None and unit.context.in_backward:
            raise StateError(f"unit {unit.label} is in a backward; share comms between steps")
        units.append(unit)
    if len({unit.device_type for unit in units}) > 1:
        kinds = ", ".join(sorted({unit.device_type for unit in units}))
        raise Parallel3dError(
            f"share_comm_ctx was given units on {kinds}; share among one device type"
        )
    if not units:
        return
    for unit in units:
        set_comm(unit, comm_of(units[0]))


def comm_of(unit: Unit) -> Comm:
    """What ``unit`` communicates on, or will when it runs."""
    if unit.context is not None:
        return unit.context.comm
    if unit.shared_comm is None:
        unit.shared_comm = make_comm(unit.device_type)
    return unit.shared_comm


def set_comm(unit: Unit, comm: Comm) -> None:
    """Makes ``unit`` communicate on ``comm``."""
    unit.shared_comm = comm
    if unit.context is not None and unit.context.comm is not comm:
        unit.context.comm.finish()  # what the other has in flight
        comm.max_inputs = max(comm.max_inputs, unit.context.comm.max_inputs)
        unit.context.comm = comm
