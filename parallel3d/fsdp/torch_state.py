"""What torch's own code asks of a module that its ``fully_shard`` was applied to, answered for our units.

- Pipeline schedules never call ``.backward()`` on a stage as a whole. They switch gradient synchronisation
  off, and end a step with ``fully_shard.state(stage)``: for each of ``_state_ctx.all_states`` and its
  ``_fsdp_param_groups`` they call ``post_backward()``, then ``_root_post_backward_final_callback()``.
- ``register_fsdp_forward_method`` and ``share_comm_ctx``, where they are torch's: ``_pre_forward``,
  ``_post_forward``, ``_comm_ctx``.
- ``replicate``: the registry of what was applied to a module.
- Transformer Engine's tensors: ``_fsdp_param_group._reshard_after_forward``.

The objects hold nothing of their own: all they say and do is the unit's.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from parallel3d._compat import fully_shard_state, set_fully_shard_state
from parallel3d.errors import StateError
from parallel3d.fsdp.comm import Comm
from parallel3d.fsdp.functions import comm_of, set_comm
from parallel3d.fsdp.running.members import the_unit
from parallel3d.fsdp.state import Unit

__all__ = ["TorchParamGroup", "TorchState", "register_state", "state_of"]


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
        return TorchState(memo.get(id(module), module))

    @property
    def _unit(self) -> Unit:
        module = self._module()
        if module is None:
            raise StateError("the module that this state was of is gone")
        return the_unit(module)

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

    def _lazy_init(self) -> None:
        self._unit.ready_context()

    def _root_post_backward_final_callback(self) -> None:
        self._unit.ready_context().finish_backward()

    # -- torch's register_fsdp_forward_method and share_comm_ctx -------------------------------------

    def _pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return self._unit.pre_forward(module, args, kwargs) or (args, kwargs)

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

    def post_backward(self, *_: Any) -> None:
        """Ends the unit's part of a step: reshards it and issues the reduction of what has come together.

        That is what waits in ``.grad`` of the sharded Parameters, and what was put into ``.grad`` of the
        unsharded ones by hand, as zero-bubble schedules do with the gradients they compute apart.

        Raises:
            StateError: backwards came through the unit, but left it no gradient.
        """
        unit = self._unit
        context = unit.ready_context()
        if unit.reached and unit.sync and not self._has_gradients():
            raise StateError(
                f"unit {unit.label}: backwards came through it, but none of its {unit.group.trainable} "
                "trainable parameters has a gradient. A zero-bubble schedule looks for them where the "
                "parameters are between forward and backward: give fully_shard reshard_after_forward=False"
            )
        unit.reached = False
        before, context.in_backward = context.in_backward, True  # it ends by the caller's callback
        try:
            self._take_gradients()
            unit.leave_backward(context)
            context.reduce(unit)
        finally:
            context.in_backward = before

    def _take_gradients(self) -> None:
        """Takes gradients that were put into the unsharded parameters by hand, not by a backward."""
        for bucket in self._unit.group.buckets:
            for index, param in enumerate(bucket.compute_params):
                if param.grad is not None:
                    self._unit.on_grad(bucket, index, param)

    def _has_gradients(self) -> bool:
        group = self._unit.group
        return not group.trainable or any(
            bucket.grads.has_work(sync=True, all_reduce=True)
            or any(p.grad is not None for p in bucket.compute_params)
            for bucket in group.buckets
        )
