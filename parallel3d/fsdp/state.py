"""Unit and RunContext: the hooks that move a unit's parameters through forward and backward.

Forward: unshard, show, compute, hide, reshard. Backward: a hook on the outputs unshards and shows; gradients
are taken as they arrive; when all have, and the gradients of the unit's inputs are done, the unit is
hidden and resharded and its reduction issued. What remains (parameters without a gradient) is settled in
one callback at the end of the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallel3d._compat import in_backward_pass, queue_backward_callback
from parallel3d._trace import issuing
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.comm import Comm, make_comm
from parallel3d.fsdp.group import GroupState, ParamGroup
from parallel3d.fsdp.tree import map_tensors, tensors_in

__all__ = ["RunContext", "Unit", "unit_of"]

_ATTRIBUTE = "_parallel3d_unit"


def unit_of(module: nn.Module) -> Unit | None:
    """The unit whose module (or one of whose modules) ``module`` is."""
    return module.__dict__.get(_ATTRIBUTE)


class Call:
    """One forward call of a unit, and when its backward is over.

    It passes the inputs on as aliases, whose gradients are this call's share alone: a hook on an input
    itself would wait for everything else that uses the input.

    Attributes:
        position: place in the order of forwards.
        inputs: number of inputs that have a gradient; when all have theirs, the backward is over.
        remaining: of them, those whose gradient is still to come.
    """

    __slots__ = ("inputs", "position", "remaining", "unit")

    def __init__(self, unit: Unit, position: int) -> None:
        self.unit = unit
        self.position = position
        self.inputs = self.remaining = 0

    def alias(self, value: Any) -> Any:
        """``value`` with its tensors aliased. Other containers stay: the module may write to them."""
        if type(value) is tuple:
            return tuple(map(self.alias, value))
        if not isinstance(value, torch.Tensor):
            for tensor in tensors_in(value):
                if tensor.requires_grad:
                    tensor.register_hook(self.input_done)
                    self.inputs += 1
            return value
        if not value.requires_grad:
            return value
        view = value.view_as(value)
        view.register_hook(self.input_done)
        self.inputs += 1
        return view

    def begin_backward(self, _: torch.Tensor) -> None:
        """Hook on every output: the first gradient to reach this call."""
        if self not in self.unit.begun:
            self.unit.begun.add(self)
            self.remaining = self.inputs
        self.unit.pre_backward(self)

    def input_done(self, _: torch.Tensor) -> None:
        """Hook on every alias."""
        self.remaining -= 1
        if self.remaining == 0:
            self.unit.begun.discard(self)
            self.unit.maybe_end_backward()


class RunContext:
    """What the units under one root share.

    Attributes:
        order: units in the order of their forwards, this iteration.
        last_order: the same of the iteration before, for forward prefetch.
        in_backward: whether the end-of-backward callback is queued.
        iteration: number of the root's forwards so far.
        running: whether one is under way.
    """

    def __init__(self, root: Unit, device_type: str) -> None:
        self.root = root
        self.comm: Comm = make_comm(device_type)
        self.units: list[Unit] = []
        self.order: list[Unit] = []
        self.last_order: list[Unit] = []
        self.in_backward = False
        self.iteration = 0
        self.running = False

    def begin_forward(self) -> None:
        """The root's forward begins."""
        self.iteration += 1
        self.running = True
        for unit in self.units:
            if unit.group.state is GroupState.GATHERING:  # the last forward did not get there
                unit.group.reshard(self.comm)
        if self.order:
            self.last_order, self.order = self.order, []

    def prefetch_forward(self, position: int) -> None:
        """Issues the all-gather of the unit that came after ``position`` in the last iteration."""
        order = self.last_order
        if position + 1 < len(order) and order[position] is self.order[position]:
            order[position + 1].issue_unshard(self)

    def prefetch_backward(self, position: int) -> None:
        """Issues the all-gather of the unit whose backward comes after that of ``position``."""
        for unit in reversed(self.order[:position]):
            if unit.group.buckets and not unit.backward_begun:
                if unit.unshard_in_backward:
                    unit.group.issue_unshard(self.comm)
                return

    def enter_backward(self) -> None:
        """Called by every pre-backward hook; queues the callback once."""
        if not self.in_backward:
            self.in_backward = True
            queue_backward_callback(self.finish_backward)

    def leave_broken_backward(self) -> None:
        """After a backward that an exception ended: autograd has dropped the callback with it."""
        self.comm = make_comm(self.root.device_type)
        for unit in self.units:
            unit.end_backward()
            for bucket in unit.group.buckets:
                bucket.grads.forget()
        self.in_backward = False

    def finish_backward(self) -> None:
        """Settles what the backward has left, in the same order on every rank."""
        for unit in reversed(self.units):
            unit.reduce_rest()
        self.comm.finish()
        for unit in self.units:
            unit.end_backward()
        self.in_backward = False
        issuing.unit = ""


class Unit:
    """One module (or list of modules) given to ``fully_shard``.

    Attributes:
        group: its parameters.
        reshard_after_forward: True, False, or None: True unless the unit is the root.
        unshard_in_backward: False where backward doesn't read the parameters (an embedding).
        sync, all_reduce: whether backward reduces over all data axes, and over replicate.
        call: the forward call under way, or the last one.
        begun: calls that this backward has reached and not yet left.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        group: ParamGroup,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        device_type: str,
    ) -> None:
        self.modules = modules
        self.group = group
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.device_type = device_type
        self.unshard_in_backward = True
        self.sync = True
        self.all_reduce = True
        self.label = type(modules[0]).__name__
        self.context: RunContext | None = None
        self.to_run: set[nn.Module] = set()
        self.position = 0
        self.begun: set[Call] = set()
        self.gathered_in = -1  # the iteration whose forward gathered the group
        self.call: Call | None = None
        self.arrived = 0
        self.backward_begun = False
        group.watch_gradients(self.on_grad)
        for module in modules:
            setattr(module, _ATTRIBUTE, self)
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            # Also when forward raises: the module must show its shards again.
            module.register_forward_hook(self.post_forward, always_call=True)
            module.register_load_state_dict_post_hook(self.after_load)

    # -- context -------------------------------------------------------------------------------------

    def ready_context(self) -> RunContext:
        """The shared context; made here if this unit is the first to run, as the root of those below."""
        if self.context is not None:
            return self.context
        context = RunContext(self, self.device_type)
        seen: set[int] = set()
        for root_module in self.modules:
            for name, module in root_module.named_modules():
                unit = unit_of(module)
                if unit is None or id(unit) in seen:
                    continue
                seen.add(id(unit))
                if unit.context is not None and unit.group.state is GroupState.GATHERING:
                    unit.group.unshard(unit.context.comm)  # issued there, so finished there
                unit.context = context
                unit.name(name or type(root_module).__name__)
                context.units.append(unit)
        return context

    def name(self, name: str) -> None:
        """Names the unit in messages and records."""
        self.label = name
        for bucket in self.group.buckets:
            bucket.unit = name

    @property
    def is_root(self) -> bool:
        """Whether the unit is the outermost of those that have run together."""
        return self.context is not None and self.context.root is self

    # -- forward -------------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Hook before each module's forward."""
        context = self.ready_context()
        if not self.to_run or not self.group.shown:
            self._begin_forward(context)
            if torch.is_grad_enabled():
                self.call = call = Call(self, self.position)
                args = call.alias(args)
                kwargs = {key: call.alias(value) for key, value in kwargs.items()}
            issuing.unit = self.label
            if len(self.modules) > 1:
                self.to_run = set(self.modules)
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = map_tensors(lambda t: _cast(t, dtype), (args, kwargs))
        return args, kwargs

    def _begin_forward(self, context: RunContext) -> None:
        self.come_to_rest()
        if self.is_root and not context.in_backward:
            context.begin_forward()
        self.issue_unshard(context)
        self.group.unshard(context.comm)
        self.group.show()
        self.position = 0
        if context.running and not context.in_backward:
            self.position = len(context.order)
            context.order.append(self)
            context.prefetch_forward(self.position)

    def issue_unshard(self, context: RunContext) -> None:
        """Starts a forward's all-gather, with what the user has changed since the last one."""
        group = self.group
        if not context.in_backward:
            current = context.running and self.gathered_in == context.iteration
            if group.state is GroupState.UNSHARDED and not (current or group.kept):
                # Left over from another forward: the weights may have changed since, and no version
                # counter tells (fused and foreach optimizers don't touch a DTensor's).
                group.hide()
                group.reshard(context.comm)
            self.gathered_in = context.iteration
            if group.state is GroupState.SHARDED:
                group.adopt()
                group.count_trainable()
        group.issue_unshard(context.comm)

    def post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Hook after each module's forward."""
        context = self.context
        assert context is not None
        dtype = self.policy.output_dtype
        if dtype is not None:
            output = map_tensors(lambda t: _cast(t, dtype), output)
        grad = torch.is_grad_enabled()
        call = self.call
        if grad and call is not None:
            for tensor in tensors_in(output):
                self._check_output(tensor)
                if tensor.requires_grad:
                    tensor.register_hook(call.begin_backward)
        self.to_run.discard(module)
        if self.to_run or context.in_backward:  # recomputed for a backward that comes next
            return output
        self.group.hide()
        reshard = self.reshard_after_forward
        if not grad or reshard or (reshard is None and not self.is_root):
            self.group.reshard(context.comm)
        if self.is_root:
            self._settle(context, backward_to_come=grad)
        return output

    def _check_output(self, tensor: torch.Tensor) -> None:
        """A parameter, or a view of one, must not leave its unit: its memory is about to be freed."""
        base = tensor._base if tensor._base is not None else tensor
        if self.group.owns(base):
            raise Parallel3dError(
                f"unit {self.label} returns a parameter of its own, or a view of one, of shape "
                f"{tuple(tensor.shape)}; return a copy (.clone()), or use it inside the unit"
            )

    def _settle(self, context: RunContext, *, backward_to_come: bool) -> None:
        """At the end of the root's forward all units show their shards; without a backward that is all."""
        context.running = False
        for unit in context.units:
            unit.to_run.clear()
            unit.group.hide()
            if not backward_to_come:
                unit.group.reshard(context.comm)

    # -- backward ------------------------------------------------------------------------------------

    def pre_backward(self, call: Call) -> None:
        """A gradient has reached ``call``: the parameters must be there."""
        context = self.context
        assert context is not None
        context.enter_backward()
        if self.backward_begun:
            return
        if torch.is_grad_enabled() and any(b.has_own_unsharded for b in self.group.buckets):
            raise StateError(
                f"unit {self.label}: a backward with create_graph=True would need its parameters again "
                "after they are freed; compute such gradients with the plain model, or on a mesh with "
                "shard=1 in full precision"
            )
        self.backward_begun = True
        if self.unshard_in_backward:
            self.group.unshard(context.comm)
        self.group.show()
        context.prefetch_backward(call.position)
        issuing.unit = self.label

    def on_grad(self, bucket: Bucket, index: int, param: nn.Parameter) -> None:
        """Hook on every gradient's arrival."""
        grad, param.grad = param.grad, None
        assert grad is not None
        fresh = index not in bucket.grads.arrived
        bucket.grads.accept(index, grad, sync=self.sync)
        if fresh:
            self.arrived += 1
            self.maybe_end_backward()

    def maybe_end_backward(self) -> None:
        """Ends the unit's backward once nothing in it will read the parameters again.

        That is when all gradients have arrived and those of every call's inputs are complete. A call
        without inputs that have a gradient is over when the whole backward is.
        """
        if self.begun or self.arrived < self.group.trainable:
            return
        context = self.context
        assert context is not None
        context.enter_backward()
        self.group.hide()
        self.group.reshard(context.comm)
        if self.sync:
            for bucket in self.group.buckets:
                if bucket.grads.arrived:
                    context.comm.reduce(bucket, all_reduce=self.all_reduce)
        self.arrived = 0
        self.backward_begun = False

    def reduce_rest(self) -> None:
        """At the end of the backward: reduces what ``maybe_end_backward`` never saw complete."""
        context = self.context
        assert context is not None
        for bucket in self.group.buckets:
            if bucket.grads.has_work(sync=self.sync, all_reduce=self.all_reduce):
                context.comm.reduce(bucket, all_reduce=self.all_reduce)

    def end_backward(self) -> None:
        """After the reductions: back to rest."""
        context = self.context
        assert context is not None
        self.to_run.clear()
        self.group.hide()
        self.group.reshard(context.comm)
        for bucket in self.group.buckets:
            bucket.grads.arrived.clear()
        self.begun.clear()
        self.arrived = 0
        self.backward_begun = False

    def come_to_rest(self) -> None:
        """Shows the shards again where an exception has ended a backward half-way."""
        context = self.context
        if context is not None and context.in_backward and not in_backward_pass():
            context.leave_broken_backward()

    # -- state dict ----------------------------------------------------------------------------------

    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Hook after ``load_state_dict``: ``assign=True`` has replaced the Parameters."""
        if not self.group.shown:
            self.group.adopt()


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
