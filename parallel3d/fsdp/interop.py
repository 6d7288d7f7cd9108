"""Attributes and functions that code written for torch's ``fully_shard`` uses, implemented for our units.

Pipeline schedules never call ``.backward()`` on a stage as a whole. They switch gradient synchronisation off,
and end a step with ``fully_shard.state(stage)``: for each of ``_state_ctx.all_states`` and its
``_fsdp_param_groups`` they call ``post_backward()``, then ``_root_post_backward_final_callback()``. torch's
``register_fsdp_forward_method`` and ``share_comm_ctx`` use ``_pre_forward``, ``_post_forward`` and
``_comm_ctx``. The docstrings below name the programs that read other private names.

The objects store nothing: they read and call the unit. Only torch's memory tracker assigns to properties, to
wrap the unit's hooks and its backward. Other names raise an AttributeError that lists those supported.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from parallel3d._torch.fully_shard import FSDPState, enter_module_state, fully_shard_state
from parallel3d._util.forwards import set_class
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.members import get_unit, unit_of
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.reduction import Comm
from parallel3d.fsdp.streams import make_comm
from parallel3d.fsdp.unit import Unit
from parallel3d.fsdp.watch import DDP_REFUSED


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes ``module.method_name(...)`` unshard and reshard the unit's parameters as ``forward`` does.

    It changes the module's class, so that nothing refers back to the module and copies have the method too.
    It does nothing to a module that is no unit.

    Args:
        module: a unit.
        method_name: the name of a method that reads the unit's parameters, such as "generate".

    Raises:
        Parallel3dError: the module has no such method.
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

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        unit = get_unit(self)
        depth = unit.depth
        try:
            args, kwargs = unit.pre_forward(self, args, kwargs) or (args, kwargs)
            # Looked up with whole parameters, which a property may read.
            inner = vars(self).get(own) or getattr(super(wrapped, self), method_name, None)
            if inner is None:
                inner = type(self).__getattr__(self, method_name)
            return unit.post_forward(self, args, inner(*args, **kwargs))
        except BaseException as error:
            unit.leave_failed_forward(depth, error)
            raise

    of_class = inspect.getattr_static(cls, method_name, None)
    if isinstance(of_class, FunctionType):  # others may refer to the module
        functools.update_wrapper(method, of_class)
    namespace = {method_name: method, "__doc__": cls.__doc__, "__module__": cls.__module__}
    wrapped = type(cls.__name__, (cls,), namespace)
    set_class(module, wrapped)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Makes several root units, such as the chunks of a pipeline stage, communicate on the same streams.

    Args:
        modules: root units, on one kind of device.

    Raises:
        Parallel3dError: a module is no unit, or the units are on different kinds of device.
        StateError: a unit is in a backward.
    """
    units = [unit_given("share_comm_ctx", module) for module in modules]
    for unit in units:
        if unit.context is not None and unit.context.backward is not None:
            raise StateError(f"unit {unit.label} is in a backward; share comms between steps")
    kinds = sorted({unit.device_type for unit in units})
    if len(kinds) > 1:
        raise Parallel3dError(
            f"share_comm_ctx was given units on {', '.join(kinds)}; share among one device type"
        )
    for unit in units:
        set_comm(unit, comm_of(units[0]))


def unit_given(function: str, module: object) -> Unit:
    """Returns the unit of ``module``; raises Parallel3dError, naming ``function``, if it is no unit."""
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    if unit is None:
        raise Parallel3dError(
            f"{function} was given {type(module).__name__}, which is not a unit; give modules that "
            "fully_shard was applied to"
        )
    return unit


def comm_of(unit: Unit) -> Comm:
    """Returns the ``Comm`` that ``unit`` uses, or will use when it first runs."""
    if unit.context is not None:
        return unit.context.comm
    if unit.shared_comm is None:
        unit.shared_comm = make_comm(unit.device_type)
    return unit.shared_comm


def set_comm(unit: Unit, comm: Comm) -> None:
    unit.shared_comm = comm
    if unit.context is not None and unit.context.comm is not comm:
        unit.context.comm.finish()  # completes what is in flight on the previous one
        comm.max_inputs = max(comm.max_inputs, unit.context.comm.max_inputs)
        unit.context.comm = comm


class RefusesDdp:
    """Descriptor for ``_ddp_params_and_buffers_to_ignore``, which DistributedDataParallel reads first of its
    module: raises Parallel3dError there."""

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if isinstance(sys._getframe(1).f_locals.get("self"), nn.parallel.DistributedDataParallel):
            raise Parallel3dError(DDP_REFUSED)
        raise AttributeError("_ddp_params_and_buffers_to_ignore")


class _TorchNames:
    """Base of the classes below: other attributes raise an AttributeError that lists the supported ones."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(k for k in dir(type(self)) if not k.startswith("__"))
        raise AttributeError(
            f"{name!r} is a part of torch's sharding engine, and parallel3d's has no such part; "
            f"{type(self).__name__} has {known}"
        )


_comm_property: Any = property(
    lambda state: comm_of(state._unit),
    lambda state, comm: set_comm(state._unit, comm),
    doc="The Comm of the unit; torch's share_comm_ctx reads and sets it.",
)


def _hook_handle(place: int) -> Any:
    """Returns a property for the handle of a unit's hook; ``place``: 0 pre-forward, 1 post-forward."""

    def put(state: TorchState, handle: RemovableHandle) -> None:
        state._unit.members.handles[id(state._alive)][place] = handle

    return property(
        lambda state: state._unit.members.handles[id(state._alive)][place],
        put,
        doc="Handle of a forward hook; torch's FSDPMemTracker replaces the hook by one that calls it.",
    )


class TorchState(_TorchNames):
    """Has what programs use of torch's ``FSDPState`` and its ``FSDPStateContext``, for one module."""

    __slots__ = ("__weakref__", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # an attribute of the module refers to this object

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchState:
        module = self._module()
        assert module is not None
        copied = memo.get(id(module), module)
        state = TorchState(copied)
        if copied is not module:
            enter_module_state(copied, state)
        return state

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """torch's class, as ``_get_module_fsdp_state``, called by quantisation code, checks it."""
        return FSDPState

    @property
    def _alive(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise StateError("the module that this state belongs to no longer exists")
        return module

    @property
    def _unit(self) -> Unit:
        return get_unit(self._alive)

    @property
    def _state_ctx(self) -> TorchState:
        return self

    @property
    def all_states(self) -> list[TorchState]:
        """The states of all units under the same root, outer before inner."""
        return [fully_shard_state(unit.modules[0]) for unit in self._unit.ready_context().units]

    @property
    def _fsdp_param_groups(self) -> list[TorchParamGroup]:
        return [TorchParamGroup(self._unit)] if self._unit.group.buckets else []

    @property
    def _fsdp_param_group(self) -> TorchParamGroup | None:
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _is_root(self) -> bool | None:
        return self._unit.is_root if self._unit.context is not None else None

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        """The unit's policy. MindSpeed-MM and finetuning-scheduler read its dtypes."""
        return self._unit.policy

    _pre_forward_hook_handle = _hook_handle(0)
    _post_forward_hook_handle = _hook_handle(1)
    _comm_ctx = _comm_property

    def _lazy_init(self) -> None:
        self._unit.ready_context()

    def _root_post_backward_final_callback(self) -> None:
        self._unit.ready_context().finish_backward()

    def _pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        unit = self._unit
        if unit.is_new_to_tracker:
            for new in unit.ready_context().units:
                if new.is_new_to_tracker:
                    new.is_new_to_tracker = False
                    new.group.renew_buffers()
        return unit.pre_forward(module, args, kwargs) or (args, kwargs)

    def _post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return self._unit.post_forward(module, args, output)


class TorchParamGroup(_TorchNames):
    """Has what programs use of torch's ``FSDPParamGroup``, for one unit."""

    __slots__ = ("_unit",)

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    comm_ctx = _comm_property

    @property
    def _reshard_after_forward(self) -> bool:
        """Whether forward reshards the unit; Transformer Engine's tensors read it."""
        return bool(self._unit.reshards())

    def _set_post_forward_mesh_info(self, info: object) -> None:
        """Setter: None, which programs set, means ``set_reshard_after_forward(False)`` for this unit."""
        if info is not None:
            raise Parallel3dError(
                f"unit {self._unit.label}: post_forward_mesh_info was set to {info!r}; set it to None, or "
                "call module.set_reshard_after_forward(True, False or a number of ranks)"
            )
        self._unit.reshard_after_forward = False

    post_forward_mesh_info = property(None, _set_post_forward_mesh_info)

    @property
    def fsdp_params(self) -> list[TorchParam]:
        """The unit's parameters; read by optimizers (Muon beside AdamW), checks, and FSDPMemTracker."""
        return [
            TorchParam(param, compute)
            for bucket in self._unit.group.buckets
            for param, compute in zip(bucket.params, bucket.precision.compute_params, strict=True)
        ]

    @property
    def pre_backward(self) -> Callable[..., None]:
        """The unit's ``pre_backward``, which torch's FSDPMemTracker replaces by a wrapper."""
        return self._unit.pre_backward

    @pre_backward.setter
    def pre_backward(self, function: Callable[..., None]) -> None:
        self._wrap("pre_backward", function, type(self._unit).pre_backward)

    @property
    def post_backward(self) -> Callable[..., None]:
        """Ends the unit's backward: pipeline schedules call it, torch's FSDPMemTracker wraps it."""
        return self._post_backward

    @post_backward.setter
    def post_backward(self, function: Callable[..., None]) -> None:
        self._wrap("finish_backward", function, TorchParamGroup._post_backward)

    def _wrap(self, name: str, function: Callable[..., None], own: Callable[..., None]) -> None:
        """Makes the engine call ``function`` in place of the unit's method ``name``. If ``function`` is a
        bound ``own``, the original, removes the wrapper again."""
        attributes = vars(self._unit)
        if getattr(function, "__func__", None) is own:
            attributes.pop(name, None)
        else:
            attributes[name] = function
            self._unit.is_new_to_tracker = True
        self._unit.tracked = not {"pre_backward", "finish_backward"}.isdisjoint(attributes)

    def _post_backward(self, *called_by_the_engine: Any) -> None:
        """Ends the unit's part of a step: reshards it and issues the reduction of its gradients.

        It reduces the sums accumulated in ``.grad`` of the sharded Parameters, and gradients that zero-bubble
        schedules assign to ``.grad`` of the unsharded ones. If there are none it raises StateError. Called by
        a tracker's wrapper, with arguments, it ends the unit's backward as usual.
        """
        unit = self._unit
        if called_by_the_engine:  # through a tracker's wrapper
            type(unit).finish_backward(unit, *called_by_the_engine)
            return
        context = unit.ready_context()
        has_gradients = not unit.group.trainable or any(
            bucket.grads.has_work(sync=True, all_reduce=True)
            or any(p.grad is not None for p in bucket.precision.compute_params)
            for bucket in unit.group.buckets
        )
        if unit.has_unreduced and unit.sync and not has_gradients:
            raise StateError(
                f"unit {unit.label}: backwards reached it, but none of its {unit.group.trainable} trainable "
                "parameters has a gradient; zero-bubble schedules need reshard_after_forward=False"
            )
        unit.has_unreduced = False
        with context.reducing():  # the backward ends by the caller's callback
            unit.take_gradients_put_by_hand()
            unit.leave_backward(context)
            context.reduce(unit)


class TorchParam(_TorchNames):
    """Has what programs use of torch's ``FSDPParam``, for one parameter."""

    __slots__ = ("_compute", "_param")

    def __init__(self, param: ShardedParam, compute: nn.Parameter) -> None:
        self._param = param
        self._compute = compute

    @property
    def sharded_param(self) -> nn.Parameter:
        """The sharded Parameter, for optimizers that take it from the groups, and checks of dtypes."""
        return self._param.sharded

    @property
    def unsharded_param(self) -> nn.Parameter:
        """The unsharded parameter, for torch's FSDPMemTracker; ``_unsharded_param`` for NeMo Automodel."""
        return self._compute

    _unsharded_param = unsharded_param

    @property
    def _orig_size(self) -> torch.Size:
        """The unsharded shape, for finetuning-scheduler and optimizers that select parameters by shape."""
        return torch.Size(self._param.geometry.compute_shape)

    @property
    def sharded_size(self) -> torch.Size:
        """The shape of this rank's shard, for finetuning-scheduler."""
        return torch.Size(self._param.geometry.local_shape)

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Does nothing; NeMo Automodel calls it before ``post_backward``, which takes the gradients."""

    to_accumulated_grad_if_needed = accumulate_unsharded_grad_if_needed
