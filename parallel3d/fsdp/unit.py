"""Unit: the hooks that move one unit's parameters through forward and backward.

Forward: unshard, show, compute, hide, reshard. Backward: a hook on the outputs unshards and shows; gradients
are taken as they arrive; when all have, and the gradients of the unit's inputs are done, the unit is
hidden and resharded and its reduction issued. What remains (parameters without a gradient) is settled in
one callback at the end of the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallel3d._torch.autograd import functorch_is_active, hook_gradient, untraced
from parallel3d._util.trace import issuing
from parallel3d._util.trees import cast_floats, map_tensors, tensors_in, to_device
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.api import MixedPrecisionPolicy, input_dtype
from parallel3d.fsdp.backward_calls import watch_backwards
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.comm import Comm
from parallel3d.fsdp.context import RunContext
from parallel3d.fsdp.group import GroupState, ParamGroup
from parallel3d.fsdp.members import Members, class_name, unit_around
from parallel3d.fsdp.options.checks import StepGuard
from parallel3d.fsdp.options.precision import (
    BufferCasts,
    cast_inputs,
    follow_mode,
    go_back_to,
    outside_full,
)
from parallel3d.fsdp.options.replicated import hook_outputs
from parallel3d.fsdp.outputs import tensors_of

if TYPE_CHECKING:
    from parallel3d.fsdp.options.checks import OrderCheck
    from parallel3d.fsdp.schedule import GatherSchedule
    from parallel3d.fsdp.state_dict.state_dict_type import Form


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
        schedule: of the root: when units are gathered ahead of their use; None: as usual.
        sync, all_reduce: whether backward reduces over all data axes, and over replicate.
        post_optim_event: of the root: what the next forward's first gather waits for.
        shared_comm: the communication side shared with other roots.
        order_check: what ``check_execution_order`` has set.
        manual_finalization: of the root: whether the user ends backwards; see ``Finalization``.
        form: of its state dicts, see ``state_dict_type``; None: sharded.

    Attributes:
        group: its parameters.
        members: its modules, and the hooks on them.
        to_run: ids of those of several modules that have not run since the unit was gathered.
        depth: forwards of the unit's modules under way, one inside the other.
        call: the forward call under way.
        begun: ids of the calls (which hold the unit) that this backward has reached and not yet left.
        computed_with: the numbers of the weights' values of the last forward, see ``ParamGroup.weights``.
        input_dtype: what inputs are cast to, or None.
        follows_mode: whether the unit computes in its parameters' own dtype in eval mode.
        reached: whether a backward has come through that was not reduced yet.
        ended, reduced: whether this backward is over here, and its reduction issued.
        put_off: whether the last one was not to be reduced, or not over all axes.
        guard: where the parameters are updated within the backward: see ``StepGuard``.
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
        self.schedule: GatherSchedule | None = None
        self.sync = True
        self.all_reduce = True
        self.post_optim_event: Any = None
        self.shared_comm: Comm | None = None
        self.order_check: OrderCheck | None = None
        self.manual_finalization = False
        self.form: Form | None = None
        self.ref = weakref.ref(self)
        self.group = group
        self.policy = policy
        self.input_dtype = input_dtype(policy, is_root=False)
        self.follows_mode = policy.full_precision_in_eval
        if policy.buffer_dtype is not None:
            group.buffers = BufferCasts(outside_full(modules, policy), policy.buffer_dtype)
        self.device_type = device_type
        self.label = class_name(modules[0])
        self.context: RunContext | None = None
        self.to_run: set[int] = set()
        self.depth = 0
        self.position = self.backward_position = 0
        self.begun: set[int] = set()
        self.gathered_in = -1  # the iteration whose forward gathered the group
        self.call: Call | None = None
        self.computed_with: list[int] | None = None
        self.arrived = 0
        self.backward_begun = False
        self.reached = False
        self.ended = False
        self.reduced = self.put_off = False
        self.guard: StepGuard | None = None
        self.members = Members()
        watch_backwards()
        group.watch_gradients(self.ref)
        for module in modules:
            self.members.attach(module, self)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules given to ``fully_shard``."""
        return self.members.modules

    # -- context -------------------------------------------------------------------------------------

    def ready_context(self) -> RunContext:
        """The shared context; made here if this unit is the first to run, as the root of those below."""
        if self.context is not None:
            return self.context
        outer = unit_around(self)
        if outer is not None and self in (context := outer.ready_context()).units:
            return context
        return RunContext.of_root(self)

    def name(self, name: str) -> None:
        """Names the unit in messages and records."""
        self.label = name
        for bucket in self.group.buckets:
            bucket.unit = name

    @property
    def is_root(self) -> bool:
        """Whether the unit is the outermost of those that have run together."""
        return self.context is not None and self.context.root is self

    @property
    def reduce_unused(self) -> bool:
        """Whether parameters without a gradient are reduced as zeros, as other ranks may have one."""
        buckets = self.group.buckets
        return bool(buckets) and buckets[0].reduce_unused

    # -- forward -------------------------------------------------------------------------------------

    @untraced
    def pre_forward(
        self, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """Hook before each module's forward."""
        if self.is_shown_by_root:
            issuing.unit = self.label
            changed = self.context.residents.changed if self.context is not None else ()
            if changed and self.group in changed:
                raise self._changed()
            return None
        context = self.ready_context()
        if self.guard is not None:
            self.guard.begin_forward()
        self.depth += 1
        others: Sequence[Unit] = ()
        if self.depth > 1 and self.group.is_stale:
            self.group.gather_anew(context.comm)
            if self.call is not None:
                self.call.weights = self.group.weights
        if self.depth == 1 and self._is_fresh(module):
            if context.on_meta and not context.running:
                context.note_meta((args, kwargs))
            others = self._begin_forward(context)
            if self.device_type != "cpu" and self.is_root:
                args, kwargs = to_device((args, kwargs), self.device_type)
            self.call = None
            issuing.unit = self.label
            if len(self.members.tops) > 1:
                self.to_run = set(self.members.tops)
        if self.call is None and torch.is_grad_enabled():  # of a list, the first may run without
            call = self.call = Call(self, self.position, others)
            if self.guard is not None:
                self.guard.note(call)
            args = call.alias(args)
            if kwargs:
                kwargs = {key: call.alias(value) for key, value in kwargs.items()}
        if self.input_dtype is not None:
            args, kwargs = cast_inputs(self, module, (args, kwargs))
        return args, kwargs

    def _is_fresh(self, module: nn.Module) -> bool:
        """Whether a forward of the unit begins with ``module``, and does not go on with it."""
        if not self.to_run or not self.group.shown:
            return True
        return self.is_root and id(module) not in self.to_run

    def _begin_forward(self, context: RunContext) -> Sequence[Unit]:
        others: Sequence[Unit] = ()
        self.come_to_rest()
        self.depth = 1
        begins = self.is_root and not context.in_backward
        if self.order_check is not None:
            self.order_check.forward(
                self, begins=begins, within=context.running, recomputes=context.in_backward
            )
        if begins:
            others = context.begin_forward()
        if self.follows_mode:
            follow_mode(self, context)
        self.issue_unshard(context)
        self.group.unshard(context.comm)
        self._check_recomputed(context)
        self.group.show()
        self.position = 0
        if context.running and not context.in_backward:
            self.position = len(context.order)
            context.order.append(self.ref)
            context.prefetch_forward(self)
        return others

    def _check_recomputed(self, context: RunContext) -> None:
        """What is recomputed in a backward computes with the weights of the forward before."""
        if self.group.direct:
            self.group.note_changes()
        weights = self.group.weights
        if not context.in_backward:
            self.computed_with = weights
        elif self.computed_with not in (None, weights):
            raise self._changed()

    def issue_unshard(self, context: RunContext) -> None:
        """Starts a forward's all-gather, with what the user has changed since the last one."""
        group = self.group
        if not context.in_backward:
            if self.follows_mode and not (self.depth or self.to_run):
                follow_mode(self, context)
            current = context.running and self.gathered_in == context.iteration
            if not current:
                # Left over from another forward: the weights may have changed since, and no version
                # counter tells (fused and foreach optimizers don't touch a DTensor's).
                group.drop_stale(context.comm)
            self.gathered_in = context.iteration
            if group.state is not GroupState.SHARDED:
                pass
            elif group.gated and group.shown:  # its backward may come when it no longer is
                group.note_weights(context.comm)
            else:
                group.hide()  # what its root has shown, if it was converted within this forward
                group.adopt()
                group.count_trainable()
                if group.hybrids:  # a forward of the root has renewed them
                    keep = context.running or self.keep_between_forwards
                    group.renew_copies(context.comm, if_changed=keep)
        group.issue_unshard(context.comm)

    @untraced
    def post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Hook after each module's forward."""
        context = self.context
        assert context is not None
        if self.is_shown_by_root:
            if torch.is_grad_enabled() and not context.in_backward:
                hook_outputs(self, output)
            return output
        if self.policy.output_dtype is not None:
            output = cast_floats(output, self.policy.output_dtype)
        grad = torch.is_grad_enabled()
        ends = self.depth == 1 and not context.in_backward
        output = watch_output(self, output, self.call if grad else None, attributes=ends)
        self.depth -= 1
        self.to_run.discard(id(module))
        if not self.depth and not self.to_run:
            self._leave_forward(context, backward_to_come=grad)
        return output

    @untraced
    def leave_failed_forward(self, depth: int) -> None:
        """After an exception of any kind in a forward of one of the modules, before which ``self.depth`` was
        ``depth``. Nothing is left to do where the forward had been left, or not been entered.
        """
        context = self.context
        if self.depth <= depth:
            goes_on = context is not None and context.running and self.is_root
            if depth or not (self.to_run or goes_on):
                return
        self.depth = depth
        self.to_run.clear()
        if not depth and context is not None:
            self._leave_forward(context, backward_to_come=False)

    def _leave_forward(self, context: RunContext, *, backward_to_come: bool) -> None:
        self.call = None
        if self.is_root:
            self.come_to_rest()  # after a backward within the forward
        if context.in_backward:  # recomputed for a backward that comes next
            return
        self._end_forward(context, backward_to_come=backward_to_come)
        if self.is_root:
            context.end_forward(backward_to_come=backward_to_come)

    def reshards(self) -> bool | int:
        """Whether the end of a forward frees the parameters, or to how many ranks it reshards them."""
        reshard = self.reshard_after_forward
        return not self.is_root if reshard is None else reshard

    def _end_forward(self, context: RunContext, *, backward_to_come: bool) -> None:
        reshard = self.reshards()
        if not self.group.kept or reshard:
            self.group.hide()
            self.group.held = False
        if not backward_to_come:
            if self.keep_between_forwards and not reshard:
                self.group.hold()
            elif reshard or not self.group.kept:
                self.group.reshard(context.comm)
        elif reshard:
            self.group.reshard(context.comm, None if reshard is True else reshard)

    # -- backward ------------------------------------------------------------------------------------

    def pre_backward(self, call: Call) -> None:
        """A gradient has reached ``call``: the parameters must be there."""
        context = self.context
        assert context is not None
        context.enter_backward()
        if self.guard is not None:
            self.guard.begin_backward(call)
        if self.follows_mode and call.full is not self.group.full:
            go_back_to(self, call, context)
        if self.backward_begun:
            return
        if torch.is_grad_enabled():
            context.creates_graph = True
        self.backward_begun = self.reached = True
        if self.order_check is not None:
            self.order_check.at("backward", self)
        if self.unshard_in_backward:
            self.group.unshard(context.comm)
            if self.group.direct:
                self.group.note_changes()
            if call.weights != self.group.weights:
                raise self._changed()
        self.group.show()
        context.prefetch_backward(self, call.position)
        issuing.unit = self.label

    def _changed(self) -> StateError:
        return StateError(
            f"unit {self.label}: its parameters were changed (an optimizer step, an in-place change) between "
            "this forward and its backward, and what the forward has computed with is freed; call backward "
            "before the weights change, or give the unit reshard_after_forward=False, which keeps that"
        )

    @untraced
    def begin_backward(self, _: torch.Tensor) -> None:
        """Hook on outputs of a unit that its root shows."""
        assert self.context is not None
        self.context.enter_backward()
        issuing.unit = self.label

    def take_gradient(self, bucket: Bucket, index: int, grad: torch.Tensor) -> None:
        """Takes what a backward has brought for parameter ``index`` of ``bucket``."""
        context = self.context
        if context is not None and not context.in_backward:
            context.enter_backward()  # the parameter was used outside a forward of ours
        if self.guard is not None:
            self.guard.take_gradient()
        if grad.requires_grad:
            raise StateError(
                f"unit {self.label}: .backward(create_graph=True) gives parameters gradients with a graph, "
                "but it would end at their reduction over ranks; use torch.autograd.grad(loss, inputs, "
                "create_graph=True)"
            )
        fresh = index not in bucket.grads.arrived
        bucket.grads.accept(index, grad, sync=self.sync)
        del grad  # what follows may free it
        if fresh:
            self.arrived += 1
            if self.arrived >= self.group.trainable:
                self.maybe_end_backward()

    def take_gradients_put_by_hand(self) -> bool:
        """Takes what was put into ``.grad`` of the unsharded parameters, as zero-bubble schedules do with the
        gradients that they compute apart. Whether there was any."""
        found = False
        for bucket in self.group.buckets:
            for index, param in enumerate(bucket.compute_params):
                if param.grad is not None:
                    grad, param.grad = param.grad, None
                    self.take_gradient(bucket, index, grad)
                    found = True
        return found

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
        self.finish_backward(context)

    def finish_backward(self, context: RunContext) -> None:
        """Reshards the group and issues its reduction."""
        if context.half_way is not None and context.half_way.unit is self.ref:
            context.half_way.issue()
        self.leave_backward(context)
        if context.schedule is not None:
            context.schedule.end_backward(self, context)
        context.reduce(self)
        self.arrived = 0
        self.backward_begun = False

    def leave_backward(self, context: RunContext) -> None:
        """Reshards the group, unless it is to stay gathered for the next micro-batch."""
        if self.depth:  # a forward around this backward goes on
            return
        if self.group.gated:
            return  # to the root
        # What the user keeps gathered may be differentiated again by what a graph was made for.
        wanted = context.creates_graph and self.group.kept
        if self.reshard_after_backward and not wanted:
            self.group.hide()
            self.group.reshard(context.comm)
        else:
            self.group.hold()

    def reduce(self, comm: Comm) -> None:
        """Issues the reductions that are due."""
        for bucket in self.group.buckets:
            due = bucket.grads.has_work(sync=self.sync, all_reduce=self.all_reduce)
            if not due and bucket.reduce_unused and self.sync and not self.reduced:
                due = any(p.requires_grad for p in bucket.compute_params)
            if due:
                if self.order_check is not None:
                    self.order_check.at("reduction", self)
                comm.reduce(bucket, all_reduce=self.all_reduce)
        self.reduced = True
        self.reached = self.reached and not self.sync

    def end_backward(self) -> None:
        """After the reductions: back to rest."""
        context = self.context
        assert context is not None
        if self.order_check is not None and self.is_root:
            self.order_check.at("end of the backward", self)
        self.to_run.clear()
        self.leave_backward(context)
        for bucket in self.group.buckets:
            bucket.grads.arrived.clear()
        self.begun.clear()
        self.arrived = 0
        self.backward_begun = self.ended = self.reduced = False
        self.note_put_off()

    def note_put_off(self) -> None:
        """Whether a backward that ends now leaves sums that wait, on this rank or on others."""
        self.put_off = not (self.sync and self.all_reduce)

    # -- at rest, and while the root shows the unit ----------------------------------------------------

    @property
    def is_shown_by_root(self) -> bool:
        """Whether there is nothing to do for the unit itself now; see ``Residents``."""
        group, context = self.group, self.context
        if not (group.gated and group.shown) or self.depth or self.to_run or context is None:
            return False
        if context.backward_has_failed:
            return False
        return context.residents.shown

    @property
    def is_untouched(self) -> bool:
        """Whether a backward has brought nothing but to the gates."""
        begun = self.backward_begun or self.begun or self.arrived or self.reduced
        if begun or not self.group.gated:
            return False
        return not any(
            bucket.grads.is_busy or bucket.reduce_unused for bucket in self.group.buckets
        )

    def reset(self) -> None:
        """After an exception, what ``reset_iter_state`` promises."""
        self.call = None
        if self.order_check is not None:
            self.order_check.abandon()
        self.to_run.clear()
        self.begun.clear()
        self.depth = self.arrived = 0
        self.backward_begun = self.reached = self.ended = self.reduced = False

    def show_shards(self) -> None:
        """The sharded parameters for whoever saves or loads, unless a forward is using the others."""
        self.come_to_rest()
        busy = self.depth or self.backward_begun or self.is_shown_by_root
        if self.group.shown and not busy:
            self.group.hide()
            self.group.reshard(self.ready_context().comm)

    def come_to_rest(self) -> None:
        """Shows the shards again where an exception has ended a backward half-way."""
        context = self.context
        if context is not None and context.backward_has_failed:
            context.leave_broken_backward()

    @untraced
    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Hook after ``load_state_dict``: ``assign=True`` has replaced the Parameters."""
        if not self.group.shown and self.group.state is not GroupState.WHOLE:
            self.group.adopt(partly=len(self.modules) > 1)

    def take_settings(self, other: Unit) -> None:
        """Those of ``other``, of which this is a copy, but for what refers to units and streams."""
        if other.schedule is not None:
            self.schedule = other.schedule.copy()
        for name in (
            "keep_between_forwards",
            "reshard_after_backward",
            "unshard_in_backward",
            "sync",
            "all_reduce",
            "manual_finalization",
        ):
            setattr(self, name, getattr(other, name))


# Call: one forward call of a unit, and when its backward is over.

_WATCHERS = "_parallel3d_watchers"  # of a tensor on an attribute: the units that its gradient tells


class Call:
    """It passes the inputs on as aliases, whose gradients are this call's share alone: a hook on an
    input itself would wait for everything else that uses the input.

    The autograd graph holds the call and the call holds the unit, so that a backward still works after
    the model itself is gone. The unit lets go of the call when its forward ends.

    Attributes:
        position: place in the order of forwards.
        others: where the unit is a root, all units: those that it shows have no calls of their own.
        full: whether the unit computed in its parameters' own dtype.
        weights: the numbers of the weights' values that it computed with.
        inputs: number of inputs that have a gradient; when all have theirs, the backward is over.
        remaining: of them, those whose gradient is still to come.
    """

    __slots__ = (
        *("__weakref__", "full", "inputs", "others", "position", "remaining", "unit", "weights"),
    )

    def __init__(self, unit: Unit, position: int, others: Sequence[Unit] = ()) -> None:
        self.unit = unit
        self.others = others
        self.position = position
        self.full = unit.group.full
        self.weights = unit.group.weights
        self.inputs = self.remaining = 0

    def alias(self, value: Any) -> Any:
        """``value`` with its tensors aliased. Other containers stay: the module may write to them."""
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
            hook_gradient(view, self.input_done)
            self.inputs += 1
        return view

    def hook(self, tensor: torch.Tensor, method: Callable[[torch.Tensor], Any]) -> None:
        """Calls ``method``, of this call, with the gradient of ``tensor``.

        A leaf outlives the graph. Its hook must not keep this call, and goes with it.
        """
        if not (tensor.is_leaf or getattr(tensor, "_is_param", False)):
            hook_gradient(tensor, method)
            return
        weak = weakref.WeakMethod(method)

        def on_gradient(grad: torch.Tensor) -> Any:
            alive = weak()
            return None if alive is None else alive(grad)

        weakref.finalize(self, tensor.register_hook(on_gradient).remove)

    def watched(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, but a gradient that reaches it at any level of ``torch.func`` begins a backward."""
        if tensor.is_floating_point() or tensor.is_complex():
            return _Watched.apply(self, tensor)
        return tensor

    @untraced
    def begin_backward(self, _: torch.Tensor) -> None:
        """Hook on every output: the first gradient to reach this call."""
        if id(self) not in self.unit.begun:
            self.unit.begun.add(id(self))
            self.remaining = self.inputs
        self.unit.pre_backward(self)

    @untraced
    def input_done(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Hook on every alias. With ``create_graph=True`` the gradient is an output as those of forward are:
        a backward that comes to it needs the parameters again.
        """
        self.remaining -= 1
        if self.remaining == 0:
            self.unit.begun.discard(id(self))
            self.unit.maybe_end_backward()
        return self.watched(grad) if torch.is_grad_enabled() else None


def watch_output(unit: Unit, output: Any, call: Call | None, *, attributes: bool) -> Any:
    """Hooks ``call`` to the outputs of ``unit``, and to what is left on its modules.

    Args:
        attributes: whether to look there: a forward of the unit's has ended, or of one of its modules.

    Raises:
        Parallel3dError: an output is a parameter, whose memory is freed now.
    """
    frees = bool(unit.reshards()) or (call is None and not unit.group.kept)
    for tensor in tensors_of(output):
        if unit.group.owns(tensor if tensor._base is None else tensor._base):
            if frees:
                raise Parallel3dError(
                    f"unit {unit.label} returns a parameter of its own, or a view of one, of shape "
                    f"{tuple(tensor.shape)}, whose memory is freed now; return a copy (.clone()), use "
                    "it inside the unit, or give the unit reshard_after_forward=False"
                )
        elif call is not None and tensor.requires_grad:
            call.hook(tensor, call.begin_backward)
    if call is not None and attributes:
        for tensor in unit.members.attributes.tensors():
            watchers = vars(tensor).setdefault(
                _WATCHERS, set()
            )  # it may stay there for many forwards
            if unit.ref not in watchers:
                watchers.add(unit.ref)
                call.hook(tensor, call.begin_backward)
    if call is not None and functorch_is_active():  # a hook is of one level of its transforms
        return map_tensors(call.watched, output)
    return output


class _Watched(torch.autograd.Function):
    """The identity, whose backward begins the call's; of tangents too."""

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
