"""What torch's own code asks of a module that its ``fully_shard`` was applied to, answered for our units.

- Pipeline schedules never call ``.backward()`` on a stage as a whole. They switch gradient synchronisation
  off, and end a step with ``fully_shard.state(stage)``: for each of ``_state_ctx.all_states`` and its
  ``_fsdp_param_groups`` they call ``post_backward()``, then ``_root_post_backward_final_callback()``.
- ``register_fsdp_forward_method`` and ``share_comm_ctx``, where they are torch's: ``_pre_forward``,
  ``_post_forward``, ``_comm_ctx``.
- ``replicate``: the registry of what was applied to a module.
- Transformer Engine's tensors: ``_fsdp_param_group._reshard_after_forward``.

And what other programs read of torch's private names; each property here names who does. They are read-only:
a setting is changed by the methods of ``FSDPModule``. Torch's memory tracker alone writes, to put itself
around the unit's hooks and its backward. A name that is not answered raises an AttributeError that says what
is.

The objects hold nothing of their own: all they say and do is the unit's.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from parallel3d._torch.fully_shard import (
    FSDPState,
    enter_module_state,
    fully_shard_state,
    set_fully_shard_state,
)
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.comm import Comm, make_comm
from parallel3d.fsdp.members import get_unit, unit_of
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.unit import Unit

# register_fsdp_forward_method and share_comm_ctx: what is done to units from outside.


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
        unit = get_unit(self)
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


def register_state(module: nn.Module) -> None:
    """Lets torch find the unit of ``module``. A copy of the module has a state of its own."""
    set_fully_shard_state(module, TorchState(module))


def state_of(module: nn.Module) -> TorchState:
    """What ``torch.distributed.fsdp.fully_shard.state(module)`` returns."""
    return fully_shard_state(module)


class _Answers:
    """Says what is not answered."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(k for k in dir(type(self)) if not k.startswith("__"))
        raise AttributeError(
            f"{name!r} is a part of torch's sharding engine that parallel3d's has none of; "
            f"{type(self).__name__} answers {known}"
        )


class TorchState(_Answers):
    """Torch's ``FSDPState``, and its ``FSDPStateContext``, of one module."""

    __slots__ = ("__weakref__", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # which has this among its attributes

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
        """For ``isinstance``: torch's ``_get_module_fsdp_state``, which quantisation code calls to find
        out whether a module is sharded, takes no other."""
        return FSDPState

    @property
    def _alive(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise StateError("the module that this state was of is gone")
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
        return [state_of(unit.modules[0]) for unit in self._unit.ready_context().units]

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
        """MindSpeed-MM and finetuning-scheduler read dtypes there, to cast a batch or to check them."""
        return self._unit.policy

    @property
    def _pre_forward_hook_handle(self) -> RemovableHandle:
        """Torch's FSDPMemTracker puts a hook of its own in its place, which calls ``_pre_forward``."""
        return self._unit.members.handles[id(self._alive)][0]

    @_pre_forward_hook_handle.setter
    def _pre_forward_hook_handle(self, handle: RemovableHandle) -> None:
        self._unit.members.handles[id(self._alive)][0] = handle

    @property
    def _post_forward_hook_handle(self) -> RemovableHandle:
        """The same, and ``_post_forward``."""
        return self._unit.members.handles[id(self._alive)][1]

    @_post_forward_hook_handle.setter
    def _post_forward_hook_handle(self, handle: RemovableHandle) -> None:
        self._unit.members.handles[id(self._alive)][1] = handle

    def _lazy_init(self) -> None:
        self._unit.ready_context()

    def _root_post_backward_final_callback(self) -> None:
        self._unit.ready_context().finish_backward()

    # -- torch's register_fsdp_forward_method and share_comm_ctx -------------------------------------

    def _pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        unit = self._unit
        if unit.is_new_to_tracker:
            for each in unit.ready_context().units:
                if each.is_new_to_tracker:
                    each.is_new_to_tracker = False
                    each.group.renew_buffers()
        return unit.pre_forward(module, args, kwargs) or (args, kwargs)

    def _post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return self._unit.post_forward(module, args, output)

    @property
    def _comm_ctx(self) -> Comm:
        return comm_of(self._unit)

    @_comm_ctx.setter
    def _comm_ctx(self, comm: Comm) -> None:
        set_comm(self._unit, comm)


class TorchParamGroup(_Answers):
    """Torch's ``FSDPParamGroup`` of one unit."""

    __slots__ = ("_unit",)

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def _reshard_after_forward(self) -> bool:
        reshard = self._unit.reshard_after_forward
        return not self._unit.is_root if reshard is None else bool(reshard)

    @property
    def comm_ctx(self) -> Comm:
        """What share_comm_ctx sets on each group as on its state."""
        return comm_of(self._unit)

    @comm_ctx.setter
    def comm_ctx(self, comm: Comm) -> None:
        set_comm(self._unit, comm)

    @property
    def fsdp_params(self) -> list[TorchParam]:
        """Optimizers that split the model's parameters (Muon beside AdamW), checks of dtypes and of NaN, and
        torch's FSDPMemTracker."""
        return [
            TorchParam(param, compute)
            for bucket in self._unit.group.buckets
            for param, compute in zip(bucket.params, bucket.compute_params, strict=True)
        ]

    @property
    def pre_backward(self) -> Callable[..., None]:
        """Torch's FSDPMemTracker puts a function of its own around it."""
        return self._unit.pre_backward

    @pre_backward.setter
    def pre_backward(self, function: Callable[..., None]) -> None:
        self._wrap("pre_backward", function, type(self._unit).pre_backward)

    @property
    def post_backward(self) -> Callable[..., None]:
        """Pipeline schedules call it; torch's FSDPMemTracker puts a function of its own around it."""
        return self._post_backward

    @post_backward.setter
    def post_backward(self, function: Callable[..., None]) -> None:
        self._wrap("finish_backward", function, TorchParamGroup._post_backward)

    def _wrap(self, name: str, function: Callable[..., None], own: Callable[..., None]) -> None:
        """Lets the engine call ``function`` where it calls the unit's method ``name``, or that again."""
        attributes = vars(self._unit)
        if getattr(function, "__func__", None) is own:
            attributes.pop(name, None)
        else:
            attributes[name] = function
            self._unit.is_new_to_tracker = True
        self._unit.tracked = not {"pre_backward", "finish_backward"}.isdisjoint(attributes)

    def _post_backward(self, *called_by_the_engine: Any) -> None:
        """Ends the unit's part of a step: reshards it and issues the reduction of what has come together.

        That is what waits in ``.grad`` of the sharded Parameters, and what was put into ``.grad`` of the
        unsharded ones by hand, as zero-bubble schedules do with the gradients they compute apart.

        Raises:
            StateError: backwards came through the unit, but left it no gradient.
        """
        unit = self._unit
        if called_by_the_engine:  # through what a tracker has put around
            type(unit).finish_backward(unit, *called_by_the_engine)
            return
        context = unit.ready_context()
        if unit.has_unreduced and unit.sync and not self._has_gradients():
            raise StateError(
                f"unit {unit.label}: backwards came through it, but none of its {unit.group.trainable} "
                "trainable parameters has a gradient. A zero-bubble schedule looks for them where the "
                "parameters are between forward and backward: give fully_shard reshard_after_forward=False"
            )
        unit.has_unreduced = False
        with context.reducing():  # the backward ends by the caller's callback
            unit.take_gradients_put_by_hand()
            unit.leave_backward(context)
            context.reduce(unit)

    def _has_gradients(self) -> bool:
        group = self._unit.group
        return not group.trainable or any(
            bucket.grads.has_work(sync=True, all_reduce=True)
            or any(p.grad is not None for p in bucket.compute_params)
            for bucket in group.buckets
        )


class TorchParam(_Answers):
    """Torch's ``FSDPParam`` of one parameter."""

    __slots__ = ("_compute", "_param")

    def __init__(self, param: ShardedParam, compute: nn.Parameter) -> None:
        self._param = param
        self._compute = compute

    @property
    def sharded_param(self) -> nn.Parameter:
        """Optimizers that take their parameters from the groups; checks of dtypes."""
        return self._param.sharded

    @property
    def unsharded_param(self) -> nn.Parameter:
        """Torch's FSDPMemTracker, within a forward."""
        return self._compute

    @property
    def _unsharded_param(self) -> nn.Parameter:
        """The same within a backward; zero-bubble schedules of NeMo Automodel."""
        return self._compute

    @property
    def _orig_size(self) -> torch.Size:
        """finetuning-scheduler, and optimizers that choose by shape."""
        return torch.Size(self._param.compute_shape)

    @property
    def sharded_size(self) -> torch.Size:
        """finetuning-scheduler."""
        return torch.Size(self._param.local_shape)

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """NeMo Automodel's zero-bubble schedules, before ``post_backward``: that takes the gradients here."""

    def to_accumulated_grad_if_needed(self) -> None:
        """The same."""
