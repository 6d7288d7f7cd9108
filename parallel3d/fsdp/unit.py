"""Unit: the hooks that move one unit's parameters through forward and backward.

Forward: unshard, register, compute, register the sharded ones again, reshard. Backward: a hook on the outputs
unshards and registers; gradients are taken as they arrive; when all have, and the gradients of the unit's
inputs are done, the unit is resharded and its reduction issued. What remains (parameters without a gradient)
is settled in one callback at the end of the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallel3d._torch.autograd import (
    before_changes,
    functorch_is_active,
    in_backward_pass,
    next_backward_order,
    no_frame_of_its_own,
    untraced,
)
from parallel3d._util.reachable import tensors_of
from parallel3d._util.trace import issuing
from parallel3d._util.trees import cast_floats, map_tensors, tensors_in, to_device
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.api import MixedPrecisionPolicy, input_dtype
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.comm import Comm
from parallel3d.fsdp.context import RunContext
from parallel3d.fsdp.events import Option, Registrar
from parallel3d.fsdp.group import Members, ParamGroup, Registered, Retain
from parallel3d.fsdp.members import UNIT_ATTRIBUTE, class_name, unit_around
from parallel3d.fsdp.schedule import PrefetchSettings
from parallel3d.fsdp.watch import check_inputs, explain, explain_call, watch_torch
from parallel3d.guards.nan_losses import nan_losses


class UnitModule:
    """Base of the class that ``fully_shard`` gives a module: however a forward ends, its unit is at rest."""

    @no_frame_of_its_own
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a forward of the module. Afterwards its unit is at rest or waits for its backward, also where
        the forward ends by what hooks of ``nn.Module`` don't see: ``KeyboardInterrupt`` or ``SystemExit``.
        """
        unit = vars(self)[UNIT_ATTRIBUTE]
        depth = unit.depth
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            message = explain_call(error)
            unit.leave_failed_forward(depth, error)
            if message is None:
                raise
            raise StateError(message) from error


@dataclass(slots=True)
class ForwardPass:
    """A forward of a unit, from its first module's begin to its last one's end.

    Attributes:
        depth: forwards of the unit's modules under way, one inside the other.
        to_run: ids of those of several modules that are still to run.
        position: its place in the order of forwards under the root.
        call: what its outputs' hooks call in backward; None without autograd.
    """

    depth: int = 0
    to_run: set[int] = field(default_factory=set)
    position: int = 0
    call: Call | None = None


@dataclass(slots=True)
class BackwardPass:
    """A backward of a unit, from the first gradient that reaches it until it is resharded.

    Attributes:
        calls: ids of the calls (which hold the unit) that it has reached and not yet left.
        arrived: number of parameters whose gradient has arrived.
        has_begun: whether a gradient has reached one of the unit's outputs, so that its parameters are there.
    """

    calls: set[int] = field(default_factory=set)
    arrived: int = 0
    has_begun: bool = False


class Unit:
    """One module (or list of modules) given to ``fully_shard``.

    Attributes that ``FSDPModule``'s methods set:
        reshard_after_forward: True, False, None (True unless the unit is the root), or the number of ranks
            over which the parameters stay sharded between forward and backward.
        keep_between_forwards: whether the next forward uses what an evaluation has left gathered, and
            HFSDP's copy, as long as no change of the weights was seen.
        reshard_after_backward: False keeps the parameters gathered for the next micro-batch.
        unshard_in_backward: False where backward doesn't read the parameters (an embedding).
        forward_prefetch, backward_prefetch: units to gather ahead; None: the next in order.
        prefetch: only of the root: settings of when units are gathered ahead of their use; None: the default.
        sync, all_reduce: whether backward reduces over all data axes, and over replicate.
        post_optim_event: only of the root: event that the next forward's first gather waits for.
        shared_comm: the communication side shared with other roots.
        manual_finalization: only of the root: whether the user ends backwards; see ``options/finalization``.
        form: kind of the state dicts that ``state_dict`` returns, see ``state_dict_type``; None: sharded.

    Attributes:
        group: its parameters.
        members: its modules, and the hooks on them.
        options: what is told of it, see ``Option``.
        registrar: the option that registers its parameters for the whole of the root's passes, if one does.
        forward, backward: the passes under way; None outside of them.
        computed_with: the version of the weights in the last forward, see ``ParamGroup.weights``.
        input_dtype: what inputs are cast to, or None.
        has_unreduced: whether a backward has come through that was not reduced yet.
        put_off: whether the last backward was not to be reduced, or not over all axes.
        tracked: whether torch's memory tracker has put itself around hooks and methods of the unit.
        is_new_to_tracker: whether it does not know the unit's buffers yet.
    """

    tracked = is_new_to_tracker = False

    def __init__(
        self,
        modules: list[nn.Module],
        group: ParamGroup,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
        device_type: str,
    ) -> None:
        self.reshard_after_forward = reshard_after_forward
        self.keep_between_forwards = False
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.forward_prefetch: list[weakref.ref[Unit]] | None = None
        self.backward_prefetch: list[weakref.ref[Unit]] | None = None
        self.prefetch: PrefetchSettings | None = None
        self.sync = True
        self.all_reduce = True
        self.post_optim_event: Any = None
        self.shared_comm: Comm | None = None
        self.options: list[Option] = []
        self.registrar: Registrar | None = None
        self.manual_finalization = False
        self.form: Any = None
        self.ref = weakref.ref(self)
        self.group = group
        self.policy = policy
        self.input_dtype = input_dtype(policy, is_root=False)
        self.device_type = device_type
        self.label = class_name(modules[0])
        self.context: RunContext | None = None
        self.forward: ForwardPass | None = None
        self.backward: BackwardPass | None = None
        self.gathered_in = -1  # the iteration whose forward gathered the group
        self.computed_with: list[int] | None = None
        self.has_unreduced = self.put_off = False
        self.members = Members()
        watch_torch(run_backward)
        group.watch_gradients(self.ref)
        for module in modules:
            self.members.attach(module, self)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules given to ``fully_shard``."""
        return self.members.modules

    @property
    def depth(self) -> int:
        """How many forwards of the unit's modules are under way, one inside the other."""
        return 0 if self.forward is None else self.forward.depth

    @property
    def backward_begun(self) -> bool:
        """Whether a backward has reached the unit, and is not over there."""
        return self.backward is not None and self.backward.has_begun

    # -- context -------------------------------------------------------------------------------------

    def ready_context(self) -> RunContext:
        """Returns the context. The first unit to run is the root of those inside it, and makes theirs."""
        if self.context is not None:
            return self.context
        outer = unit_around(self)
        if outer is not None and self in (context := outer.ready_context()).units:
            return context
        return RunContext.of_root(self)

    def name(self, name: str) -> None:
        """Sets the name that messages and records have for the unit."""
        self.label = name
        for bucket in self.group.buckets:
            bucket.unit = name

    @property
    def is_root(self) -> bool:
        """Whether the unit is the outermost of those that have run together."""
        return self.context is not None and self.context.root is self

    @property
    def reduce_unused(self) -> bool:
        """Whether parameters without a gradient are reduced as zeros, since other ranks may have one."""
        buckets = self.group.buckets
        return bool(buckets) and buckets[0].settings.reduce_unused

    # -- forward -------------------------------------------------------------------------------------

    @untraced
    def pre_forward(
        self, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """Hook before each module's forward."""
        if self.registrar is not None and self.registrar.has_registered(self):
            issuing.unit = self.label
            self.registrar.before_unit(self)
            return None
        context = self.ready_context()
        for option in self.options:
            option.begin_call(self)
        forward = self.forward
        if forward is None:
            forward = self.forward = ForwardPass()
        forward.depth += 1
        if forward.depth > 1 and self.group.is_stale:
            self.group.gather_anew(context.comm)
            if forward.call is not None:
                forward.call.weights = self.group.weights
        again = self.is_root and id(module) not in forward.to_run
        if forward.depth == 1 and (again or not forward.to_run or not self.group.is_registered):
            if context.on_meta and not context.running:
                context.note_meta((args, kwargs))
            self._begin_forward(forward, context)
            if self.device_type != "cpu" and self.is_root:
                args, kwargs = to_device((args, kwargs), self.device_type)
            forward.call = None
            issuing.unit = self.label
            if len(self.members.tops) > 1:
                forward.to_run = set(self.members.tops)
        if forward.call is None and torch.is_grad_enabled():  # of a list, the first may run without
            call = forward.call = Call(self, forward.position)
            for option in self.options:
                option.note_call(call)
            args = call.alias(args)
            if kwargs:
                kwargs = {key: call.alias(value) for key, value in kwargs.items()}
        if self.input_dtype is not None:
            args, kwargs = cast_inputs(self, module, (args, kwargs))
        return args, kwargs

    def _begin_forward(self, forward: ForwardPass, context: RunContext) -> None:
        self.come_to_rest()
        recomputes = context.backward is not None
        begins = self.is_root and not recomputes
        for option in self.options:
            option.begin_forward(self, begins=begins, within=context.running, recomputes=recomputes)
        if begins:
            context.begin_forward()
        for option in self.options:
            option.prepare(self, context)
        compute = context.comm.current_stream()
        self.issue_unshard(context, compute)
        self.group.unshard(context.comm, compute)
        if self.group.direct:
            self.group.note_changes()
        if not recomputes:
            self.computed_with = self.group.weights
        elif self.computed_with not in (None, self.group.weights):
            raise self.weights_changed()  # the forward before was of others
        self.group.register_unsharded()
        forward.position = 0
        if context.running and not recomputes:
            forward.position = context.schedule.begin_forward(self.ref)
            context.issue_gathers(compute)

    def issue_unshard(self, context: RunContext, compute: Any = None) -> None:
        """Issues a forward's all-gather, after taking over the user's changes; ``compute``: see ``Comm``."""
        group = self.group
        if self.is_registered_by_root:
            return
        if context.backward is None:
            if self.forward is None:
                for option in self.options:
                    option.prepare(self, context)
            current = context.running and self.gathered_in == context.iteration
            if not current:
                # Left over from another forward: the weights may have changed since, and no version
                # counter tells (fused and foreach optimizers don't touch a DTensor's).
                group.drop_stale(context.comm)
            self.gathered_in = context.iteration
            if group.is_in_other_form or not group.is_sharded:
                pass
            else:
                group.register_sharded()  # an option's doing, if it was converted within this forward
                group.adopt()
                # A forward of the root without gradients may be between one and its backward, which trains
                # what that has used. (A block that reentrant checkpointing runs has none either.)
                if context.trains if context.running else torch.is_grad_enabled():
                    group.count_trainable()
                if group.renewed:  # a forward of the root has renewed them
                    keep = context.running or self.keep_between_forwards
                    group.renew_copies(context.comm, if_changed=keep)
        else:
            for option in self.options:
                option.gather_in_backward(self)
        group.issue_unshard(context.comm, compute)

    @untraced
    def post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Hook after each module's forward."""
        context, forward = self.context, self.forward
        assert context is not None
        if self.registrar is not None and self.registrar.has_registered(self):
            self.registrar.after_unit(self, output)
            return output
        if self.policy.output_dtype is not None:
            output = cast_floats(output, self.policy.output_dtype)
        if forward is None:  # ``reset_iter_state`` was called within it
            return output
        grad = torch.is_grad_enabled()
        ends = forward.depth == 1 and context.backward is None
        output = watch_output(self, output, forward.call if grad else None, attributes=ends)
        forward.depth -= 1
        forward.to_run.discard(id(module))
        if not forward.depth and not forward.to_run:
            self.group.check_unwritten()
            self._leave_forward(context, backward_to_come=grad)
        return output

    @untraced
    def leave_failed_forward(self, depth: int, error: BaseException) -> None:
        """Ends a forward of one of the modules that ``error`` has broken off, unless it is over.

        ``depth`` is what ``self.depth`` was before it.
        """
        context, forward = self.context, self.forward
        if context is not None and context.same_order is not None:
            context.same_order.note_error(error)
        if depth:
            if forward is not None and forward.depth > depth:
                forward.depth = depth
                forward.to_run.clear()
        elif context is None:
            self.forward = None
        elif forward is not None or (context.running and self.is_root):
            self._leave_forward(context, backward_to_come=False)

    def forget_modules_to_run(self) -> None:
        """Ends a forward of several modules of which some did not run."""
        if self.forward is not None:
            self.forward.to_run.clear()
            if not self.forward.depth:
                self.forward = None

    def _leave_forward(self, context: RunContext, *, backward_to_come: bool) -> None:
        self.forward = None
        if self.is_root:
            self.come_to_rest()  # after a backward within the forward
        if context.backward is not None:  # recomputed for a backward that comes next
            return
        reshard = self.reshards()
        if reshard or self.group.retain is not Retain.USER:
            self.group.register_sharded()
            self.group.retain = Retain.NO
        if not backward_to_come:
            self.leave_evaluation(context)
        elif reshard:
            self.group.reshard(context.comm, None if reshard is True else reshard)
        if self.is_root:
            context.end_forward(backward_to_come=backward_to_come)

    def leave_evaluation(self, context: RunContext) -> None:
        """Reshards the group after a forward that no backward follows, unless it is kept between forwards."""
        group = self.group
        if self.keep_between_forwards and not self.reshards() and not group.is_sharded:
            group.hold()
        elif group.retain is Retain.NO:
            group.reshard(context.comm)

    def reshards(self) -> bool | int:
        """Whether the end of a forward frees the parameters, or over how many ranks it keeps them sharded."""
        reshard = self.reshard_after_forward
        return not self.is_root if reshard is None else reshard

    # -- backward ------------------------------------------------------------------------------------

    def pre_backward(self, call: Call) -> None:
        """A gradient has reached ``call``: the parameters must be there."""
        context = self.context
        assert context is not None
        root_backward = context.enter_backward()
        backward = self.backward
        if backward is None:
            backward = self.backward = BackwardPass()
        if id(call) not in backward.calls:
            backward.calls.add(id(call))
            call.left = call.inputs
        for option in self.options:
            option.reach_call(call, context)
        backward = self.backward  # an option may have begun another
        if backward is None or backward.has_begun:
            return
        if torch.is_grad_enabled():
            root_backward.creates_graph = True
        backward.has_begun = self.has_unreduced = True
        for option in self.options:
            option.begin_backward(self)
        compute = context.comm.current_stream()
        if self.unshard_in_backward:
            self.group.unshard(context.comm, compute)
            if self.group.direct:
                self.group.note_changes()
            if call.weights != self.group.weights:
                raise self.weights_changed()
        self.group.register_unsharded()
        context.begin_unit_backward(self, call.position, compute)
        issuing.unit = self.label

    def weights_changed(self) -> StateError:
        """Returns the error for a backward whose weights are not those of its forward."""
        return StateError(
            f"unit {self.label}: its parameters were changed (an optimizer step, an in-place change) between "
            "this forward and its backward, and the values that the forward used are freed; call backward "
            "before the weights change, or give the unit reshard_after_forward=False, which keeps them"
        )

    def take_gradient(self, bucket: Bucket, index: int, grad: torch.Tensor | None) -> None:
        """Takes the gradient of parameter ``index`` of ``bucket``, or a further summand of it. None, which an
        autograd function may give: there is nothing to reduce, and the unit does not wait for it."""
        context = self.context
        if context is not None and context.backward is None:
            context.enter_backward()  # the parameter was used outside a forward of ours
        for option in self.options:
            option.take_gradient(self)
        if grad is not None and grad.requires_grad:
            raise StateError(
                f"unit {self.label}: .backward(create_graph=True) gives parameters gradients with a graph, "
                "but it would end at their reduction over ranks; use torch.autograd.grad(loss, inputs, "
                "create_graph=True)"
            )
        is_first = index not in bucket.grads.arrived
        if grad is not None:
            bucket.grads.accept(index, grad, sync=self.sync)
        del grad  # what follows may free it
        if is_first:
            backward = self.backward
            if backward is None:
                backward = self.backward = BackwardPass()
            backward.arrived += 1
            if backward.arrived >= self.group.trainable:
                self.maybe_end_backward()

    def take_gradients_put_by_hand(self) -> bool:
        """Takes what was put into ``.grad`` of the unsharded parameters, as zero-bubble schedules do with the
        gradients that they compute apart. Returns whether there was any."""
        found = False
        for bucket in self.group.buckets:
            for index, param in enumerate(bucket.precision.compute_params):
                if param.grad is not None:
                    grad, param.grad = param.grad, None
                    self.take_gradient(bucket, index, grad)
                    found = True
        return found

    def maybe_end_backward(self) -> None:
        """Ends the unit's backward once nothing in it will read the parameters again.

        That is when the gradients of all parameters have arrived (not needed if ``reduce_unused``), and those
        of all inputs of every call. A call without inputs that require a gradient ends with the whole
        backward.
        """
        backward = self.backward
        if backward is None or backward.calls:
            return
        if backward.arrived < self.group.trainable and not self.reduce_unused:
            return
        context = self.context
        assert context is not None
        context.enter_backward()
        self.finish_backward(context)

    def finish_backward(self, context: RunContext) -> None:
        """Reshards the group and issues its reduction."""
        deferred = None if context.backward is None else context.backward.deferred
        if deferred is not None and deferred.unit is self.ref:
            context.issue_deferred()
        self.group.check_unwritten()
        self.leave_backward(context)
        context.end_unit_backward(self)
        self.backward = None

    def leave_backward(self, context: RunContext) -> None:
        """Reshards the group, unless it is to stay gathered for the next micro-batch."""
        if self.depth or self.is_registered_by_root:  # a forward around this backward goes on
            return
        # What the user keeps gathered, a backward of this backward may read.
        creates_graph = context.backward is not None and context.backward.creates_graph
        if self.reshard_after_backward and not (creates_graph and self.group.retain is Retain.USER):
            self.group.register_sharded()
            self.group.reshard(context.comm)
        else:
            self.group.hold()

    def reduce(self, comm: Comm, reduced: set[int]) -> None:
        """Issues the reductions that are due, and adds the unit to ``reduced``: the ids of the units whose
        reductions this backward has issued."""
        for index, bucket in enumerate(self.group.buckets):
            due = bucket.grads.has_work(sync=self.sync, all_reduce=self.all_reduce)
            if not due and bucket.settings.reduce_unused and self.sync and id(self) not in reduced:
                due = any(p.requires_grad for p in bucket.precision.compute_params)
            if due:
                for option in self.options:
                    option.begin_reduction(self)
                merged = bucket.grads.merged
                if merged is None or not merged.take(self, index):
                    self.reduce_bucket(index, comm)
        reduced.add(id(self))
        self.has_unreduced = self.has_unreduced and not self.sync

    def reduce_bucket(self, index: int, comm: Comm) -> None:
        """Issues the reduction of bucket ``index``."""
        if self.context is not None and self.context.same_order is not None:
            self.context.same_order.reduces(self, index, all_reduce=self.all_reduce)
        comm.reduce(self.group.buckets[index], all_reduce=self.all_reduce)

    def end_backward(self) -> None:
        """Brings the unit to rest after the root's backward, whether it is complete or broken off."""
        context = self.context
        assert context is not None
        if self.is_root:
            for option in self.options:
                option.end_backward(self)
        self.forget_modules_to_run()
        self.leave_backward(context)
        for bucket in self.group.buckets:
            bucket.grads.arrived.clear()
        self.backward = None
        self.note_put_off()

    def note_put_off(self) -> None:
        """Notes whether a backward that ends now leaves sums that wait, on this rank or on others."""
        self.put_off = not (self.sync and self.all_reduce)

    # -- at rest -------------------------------------------------------------------------------------

    @property
    def is_registered_by_root(self) -> bool:
        """Whether an option has registered its parameters, so that there is nothing to do for it now."""
        return self.registrar is not None and self.registrar.has_registered(self)

    def abandon(self, comm: Comm) -> None:
        """After an exception: at rest, nothing in flight."""
        for option in self.options:
            option.abandon(self)
        self.forward = self.backward = None
        self.has_unreduced = False
        self.group.abandon(comm)

    def show_shards(self) -> None:
        """Registers the sharded parameters for whoever saves or loads, unless a forward uses the others."""
        self.come_to_rest()
        busy = self.depth or self.backward_begun or self.is_registered_by_root
        if self.group.is_registered and not busy:
            self.group.register_sharded()
            self.group.reshard(self.ready_context().comm)

    def come_to_rest(self) -> None:
        """Ends a backward that an exception has broken off."""
        context = self.context
        if context is not None and context.backward_has_failed:
            context.abandon(backward_only=True)

    @untraced
    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Hook after ``load_state_dict``: ``assign=True`` has replaced the Parameters."""
        if self.group.registered is Registered.SHARDED:
            self.group.adopt(partly=len(self.modules) > 1)


_WATCHERS = "_parallel3d_watchers"  # of a tensor on an attribute: the units that its gradient tells


class Call:
    """One forward call of a unit.

    The module is given aliases of its inputs, so that a hook on an alias sees this call's share of the
    gradient alone: a hook on the input itself would wait for everything else that uses the input.

    The autograd graph holds the call and the call holds the unit, so that a backward still works after
    the model itself is gone. The unit lets go of the call when its forward ends.

    Attributes:
        position: the index of this call in the order of forwards.
        weights: for each bucket the version of the weights that the call computed with; see
            ``ParamGroup.weights``.
        first: ``next_backward_order()`` when the call began.
        inputs: number of inputs that require a gradient. The call's backward is over when all have got it.
        left: number of those inputs that have not got their gradient yet.
    """

    __slots__ = ("__weakref__", "first", "inputs", "left", "position", "unit", "weights")

    def __init__(self, unit: Unit, position: int) -> None:
        self.unit = unit
        self.position = position
        self.weights = unit.group.weights
        self.first = next_backward_order()
        self.inputs = self.left = 0

    def alias(self, value: Any) -> Any:
        """Returns ``value`` with its tensors aliased, in tuples too. Other containers stay as they are, since
        the module may write to them; their tensors are hooked themselves."""
        if type(value) is tuple:
            return tuple(map(self.alias, value))
        if not isinstance(value, torch.Tensor):
            for tensor in tensors_in(value):
                if tensor.requires_grad:
                    self.hook(tensor, self.input_done)
                    self.inputs += 1
            return value
        if not value.requires_grad:
            return value
        view = value.view_as(value)
        if view.requires_grad:  # else a transform of torch.func has it on an inner level
            view.register_hook(self.input_done)
            self.inputs += 1
        return view

    def hook(self, tensor: torch.Tensor, method: Callable[[torch.Tensor], Any]) -> None:
        """Calls ``method``, of this call, with the gradient of ``tensor``.

        A leaf outlives the graph: its hook refers to this call weakly, and is removed when this call is gone.
        """
        if not tensor.is_leaf:
            tensor.register_hook(method)
            return
        weak = weakref.WeakMethod(method)

        def on_gradient(grad: torch.Tensor) -> Any:
            alive = weak()
            return None if alive is None else alive(grad)

        weakref.finalize(self, tensor.register_hook(on_gradient).remove)

    def watch(self, tensor: torch.Tensor) -> None:
        """Hooks ``begin_backward`` to ``tensor`` and to its base, as ``tensor`` may be changed in place."""
        self.hook(tensor, self.begin_backward)
        base = before_changes(tensor, self.first)
        if base is not tensor:
            self.hook(base, self.begin_backward)

    def watched(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an alias of ``tensor``. A gradient that reaches it calls ``begin_backward``, also within
        transforms of ``torch.func``, which do not see hooks on tensors."""
        if tensor.is_floating_point() or tensor.is_complex():
            return _Watched.apply(self, tensor)
        return tensor

    @untraced
    def begin_backward(self, _: torch.Tensor) -> None:
        """Hook on every output: a gradient has reached this call."""
        self.unit.pre_backward(self)

    @untraced
    def input_done(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Hook on every alias of an input. With ``create_graph=True`` the gradient is watched as outputs are:
        a backward that comes to it needs the parameters again.
        """
        self.left -= 1
        if self.left == 0 and self.unit.backward is not None:
            self.unit.backward.calls.discard(id(self))
            self.unit.maybe_end_backward()
        return None if grad is None or not torch.is_grad_enabled() else self.watched(grad)


def watch_output(unit: Unit, output: Any, call: Call | None, *, attributes: bool) -> Any:
    """Hooks ``call`` to the outputs of a forward, and to the tensors that it has left on modules' attributes.

    Args:
        call: None: no backward can follow.
        attributes: whether to look at the attributes, as the outermost forward of a module has ended.

    Raises:
        Parallel3dError: an output is a parameter, whose memory is freed now.
    """
    retained = unit.group.retain is Retain.USER
    frees = bool(unit.reshards()) or (call is None and not retained)
    for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_of(output):
        if id(tensor if tensor._base is None else tensor._base) in unit.group.computing:
            if frees:
                raise Parallel3dError(
                    f"unit {unit.label} returns a parameter of its own, or a view of one, of shape "
                    f"{tuple(tensor.shape)}, whose memory is freed now; return a copy (.clone()), use "
                    "it inside the unit, or give the unit reshard_after_forward=False"
                )
        elif call is not None and tensor.requires_grad:
            call.watch(tensor)
    if call is not None and attributes:
        for tensor in unit.members.attributes.tensors():
            watchers = vars(tensor).setdefault(_WATCHERS, set())
            if unit.ref not in watchers:  # it may stay there for many forwards
                watchers.add(unit.ref)
                call.watch(tensor)
    if call is not None and functorch_is_active():  # a hook is of one level of its transforms
        return map_tensors(call.watched, output)
    return output


class _Watched(torch.autograd.Function):
    """The identity, of tensors and tangents; its backward begins the call's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.call = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.call.begin_backward(grads[0])
        return None, grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return None if tangents[1] is None else _Watched.apply(ctx.call, tangents[1])


def cast_inputs(unit: Unit, module: nn.Module, inputs: tuple[tuple, dict]) -> tuple[tuple, dict]:
    """Returns (args, kwargs) as the forward of ``module`` sees them in a unit that casts inputs."""
    lower = unit.input_dtype
    assert lower is not None
    if isinstance(module, unit.policy.full_precision_modules):
        return inputs  # it casts them itself, to its own dtype
    if not unit.group.own_dtype:
        args, kwargs = inputs
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:  # as of most blocks
            if args[0].dtype == lower or not args[0].is_floating_point():
                return inputs
            return (args[0].to(lower),), kwargs
        return map_tensors(lambda t: t.to(lower) if t.is_floating_point() else t, inputs)
    own = unit.group.dtype
    if own is None or own == lower:
        return inputs
    return map_tensors(lambda t: t.to(own) if t.dtype == lower else t, inputs)


# Hooks on tensors see a backward only when it comes to them. That sharded Parameters were given as its
# ``inputs``, which no graph leads to, and what its error was, is known where the engine is called alone.


def run_backward(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``watch`` puts around autograd's engine."""
    inputs = args[4] if len(args) > 4 else kwargs.get("inputs")
    if inputs:
        check_inputs(args[0], inputs)
    loss: Any = next(iter(args[0]), None)
    before = issuing.backwards
    # Fake and simulated tensors are of other types; on an accelerator nobody waits for the value.
    looks = nan_losses.looks and type(loss) is torch.Tensor and loss.numel() == 1
    if looks and loss.device.type == "cpu" and (value := loss.item()) != value:
        nan_losses.post(issuing.forwards)
    try:
        result = run(*args, **kwargs)
    except RuntimeError as error:
        message = explain(error, args[0])
        if message is None:
            raise
        raise StateError(message) from error
    if issuing.backwards != before:
        if not nan_losses.looks:
            nan_losses.say()
        elif looks and loss.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            nan_losses.look_later(loss)
    if issuing.after_backward is not None and not in_backward_pass():
        then, issuing.after_backward = issuing.after_backward, None
        then()
    return result
