"""Unit: the hooks that move one unit's parameters through forward and backward.

Forward: unshard, show, compute, hide, reshard. Backward: a hook on the outputs unshards and shows; gradients
are taken as they arrive; when all have, and the gradients of the unit's inputs are done, the unit is
hidden and resharded and its reduction issued. What remains (parameters without a gradient) is settled in
one callback at the end of the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from parallel3d._torch.autograd import functorch_is_active, hook_gradient, untraced
from parallel3d._util.trace import issuing
from parallel3d._util.trees import cast_floats, map_tensors, tensors_in, to_device
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.api import MixedPrecisionPolicy, input_dtype
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.comm import Comm
from parallel3d.fsdp.context import RunContext
from parallel3d.fsdp.group import ParamGroup, Registered, Retain
from parallel3d.fsdp.members import Members, class_name, tensors_of, unit_around
from parallel3d.fsdp.schedule import PrefetchSettings
from parallel3d.fsdp.versions import watch_backwards


class Observer:
    """What an option is told of one unit, or of several. Units have those that options have given them."""

    def prepare(self, unit: Unit, context: RunContext) -> None:
        """A forward comes that is no recomputation: before the unit's parameters are gathered for it."""

    def begin_call(self, unit: Unit) -> None:
        """Before a forward of one of its modules."""

    def note_call(self, call: Call) -> None:
        """That forward is one that a backward may follow."""

    def begin_forward(self, unit: Unit, *, begins: bool, within: bool, recomputes: bool) -> None:
        """A forward of the unit begins: with ``begins`` the root's, ``within`` one of that, or alone."""

    def unshard(self, unit: Unit) -> None:
        """The user calls ``unshard()``."""

    def reach_call(self, call: Call, context: RunContext) -> None:
        """A gradient has reached ``call``."""

    def begin_backward(self, unit: Unit) -> None:
        """It is the first to reach the unit in this backward."""

    def take_gradient(self, unit: Unit) -> None:
        """A gradient of a parameter has arrived."""

    def begin_reduction(self, unit: Unit) -> None:
        """A reduction of its gradients comes."""

    def end_backward(self, unit: Unit) -> None:
        """The root's backward is over, its reductions too."""

    def abandon(self, unit: Unit) -> None:
        """After an exception."""


class Stand(Protocol):
    """An option that registers a unit's parameters for the whole of the root's passes; see ``replicated``."""

    def shows(self, unit: Unit) -> bool:
        """Whether they are registered by it now, so that there is nothing to do for the unit itself."""

    def begin_unit(self, unit: Unit) -> None:
        """Before such a forward of the unit."""

    def end_unit(self, unit: Unit, output: Any) -> None:
        """After it."""


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
        prefetch: of the root: when units are gathered ahead of their use; None: as usual.
        sync, all_reduce: whether backward reduces over all data axes, and over replicate.
        post_optim_event: of the root: what the next forward's first gather waits for.
        shared_comm: the communication side shared with other roots.
        manual_finalization: of the root: whether the user ends backwards; see ``Finalization``.
        form: of its state dicts, see ``state_dict_type``; None: sharded.

    Attributes:
        group: its parameters.
        members: its modules, and the hooks on them.
        observers: what options want to be told.
        shown_by: the option that registers its parameters for the whole of the root's passes, if one does.
        to_run: ids of those of several modules that have not run since the unit was gathered.
        depth: forwards of the unit's modules under way, one inside the other.
        call: the forward call under way.
        begun: ids of the calls (which hold the unit) that this backward has reached and not yet left.
        computed_with: the numbers of the weights' values of the last forward, see ``ParamGroup.weights``.
        input_dtype: what inputs are cast to, or None.
        reached: whether a backward has come through that was not reduced yet.
        ended, reduced: whether this backward is over here, and its reduction issued.
        put_off: whether the last one was not to be reduced, or not over all axes.
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
        self.observers: list[Observer] = []
        self.shown_by: Stand | None = None
        self.manual_finalization = False
        self.form: Any = None
        self.ref = weakref.ref(self)
        self.group = group
        self.policy = policy
        self.input_dtype = input_dtype(policy, is_root=False)
        self.device_type = device_type
        self.label = class_name(modules[0])
        self.context: RunContext | None = None
        self.to_run: set[int] = set()
        self.depth = 0
        self.position = 0
        self.begun: set[int] = set()
        self.gathered_in = -1  # the iteration whose forward gathered the group
        self.call: Call | None = None
        self.computed_with: list[int] | None = None
        self.arrived = 0
        self.backward_begun = False
        self.reached = False
        self.ended = False
        self.reduced = self.put_off = False
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
        if self.shown_by is not None and self.shown_by.shows(self):
            issuing.unit = self.label
            self.shown_by.begin_unit(self)
            return None
        context = self.ready_context()
        for observer in self.observers:
            observer.begin_call(self)
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
            for observer in self.observers:
                observer.note_call(call)
            args = call.alias(args)
            if kwargs:
                kwargs = {key: call.alias(value) for key, value in kwargs.items()}
        if self.input_dtype is not None:
            args, kwargs = cast_inputs(self, module, (args, kwargs))
        return args, kwargs

    def _is_fresh(self, module: nn.Module) -> bool:
        """Whether a forward of the unit begins with ``module``, and does not go on with it."""
        if not self.to_run or not self.group.is_registered:
            return True
        return self.is_root and id(module) not in self.to_run

    def _begin_forward(self, context: RunContext) -> Sequence[Unit]:
        others: Sequence[Unit] = ()
        self.come_to_rest()
        self.depth = 1
        begins = self.is_root and not context.in_backward
        for observer in self.observers:
            observer.begin_forward(
                self, begins=begins, within=context.running, recomputes=context.in_backward
            )
        if begins:
            others = context.begin_forward()
        for observer in self.observers:
            observer.prepare(self, context)
        self.issue_unshard(context)
        self.group.unshard(context.comm)
        self._check_recomputed(context)
        self.group.register_unsharded()
        self.position = 0
        if context.running and not context.in_backward:
            self.position = context.schedule.begin_forward(self.ref)
            context.issue_gathers()
        return others

    def _check_recomputed(self, context: RunContext) -> None:
        """What is recomputed in a backward computes with the weights of the forward before."""
        if self.group.direct:
            self.group.note_changes()
        weights = self.group.weights
        if not context.in_backward:
            self.computed_with = weights
        elif self.computed_with not in (None, weights):
            raise self.weights_changed()

    def issue_unshard(self, context: RunContext) -> None:
        """Starts a forward's all-gather, with what the user has changed since the last one."""
        group = self.group
        if not context.in_backward:
            if not (self.depth or self.to_run):
                for observer in self.observers:
                    observer.prepare(self, context)
            current = context.running and self.gathered_in == context.iteration
            if not current:
                # Left over from another forward: the weights may have changed since, and no version
                # counter tells (fused and foreach optimizers don't touch a DTensor's).
                group.drop_stale(context.comm)
            self.gathered_in = context.iteration
            if group.is_in_other_form or not group.is_sharded:
                pass
            elif (
                group.stands_in and group.is_registered
            ):  # its backward may come when it no longer is
                group.note_weights(context.comm)
            else:
                group.register_sharded()  # an option's doing, if it was converted within this forward
                group.adopt()
                group.count_trainable()
                if group.renewed:  # a forward of the root has renewed them
                    keep = context.running or self.keep_between_forwards
                    group.renew_copies(context.comm, if_changed=keep)
        group.issue_unshard(context.comm)

    @untraced
    def post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Hook after each module's forward."""
        context = self.context
        assert context is not None
        if self.shown_by is not None and self.shown_by.shows(self):
            self.shown_by.end_unit(self, output)
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
        if reshard or self.group.retain is not Retain.USER:
            self.group.register_sharded()
            self.group.retain = Retain.NO
        if not backward_to_come:
            if self.keep_between_forwards and not reshard:
                self.group.hold()
            elif self.group.retain is Retain.NO:
                self.group.reshard(context.comm)
        elif reshard:
            self.group.reshard(context.comm, None if reshard is True else reshard)

    # -- backward ------------------------------------------------------------------------------------

    def pre_backward(self, call: Call) -> None:
        """A gradient has reached ``call``: the parameters must be there."""
        context = self.context
        assert context is not None
        context.enter_backward()
        for observer in self.observers:
            observer.reach_call(call, context)
        if self.backward_begun:
            return
        if torch.is_grad_enabled():
            context.creates_graph = True
        self.backward_begun = self.reached = True
        for observer in self.observers:
            observer.begin_backward(self)
        if self.unshard_in_backward:
            self.group.unshard(context.comm)
            if self.group.direct:
                self.group.note_changes()
            if call.weights != self.group.weights:
                raise self.weights_changed()
        self.group.register_unsharded()
        context.begin_unit_backward(self, call.position)
        issuing.unit = self.label

    def weights_changed(self) -> StateError:
        """The error of a backward that comes to other weights than its forward had."""
        return StateError(
            f"unit {self.label}: its parameters were changed (an optimizer step, an in-place change) between "
            "this forward and its backward, and what the forward has computed with is freed; call backward "
            "before the weights change, or give the unit reshard_after_forward=False, which keeps that"
        )

    def take_gradient(self, bucket: Bucket, index: int, grad: torch.Tensor) -> None:
        """Takes what a backward has brought for parameter ``index`` of ``bucket``."""
        context = self.context
        if context is not None and not context.in_backward:
            context.enter_backward()  # the parameter was used outside a forward of ours
        for observer in self.observers:
            observer.take_gradient(self)
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
        if context.deferred is not None and context.deferred.unit is self.ref:
            context.issue_deferred()
        self.leave_backward(context)
        context.end_unit_backward(self)
        context.reduce(self)
        self.arrived = 0
        self.backward_begun = False

    def leave_backward(self, context: RunContext) -> None:
        """Reshards the group, unless it is to stay gathered for the next micro-batch."""
        if self.depth:  # a forward around this backward goes on
            return
        if self.group.stands_in:
            return  # to the option that has made it so
        # What the user keeps gathered may be differentiated again by what a graph was made for.
        wanted = context.creates_graph and self.group.retain is Retain.USER
        if self.reshard_after_backward and not wanted:
            self.group.register_sharded()
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
                for observer in self.observers:
                    observer.begin_reduction(self)
                comm.reduce(bucket, all_reduce=self.all_reduce)
        self.reduced = True
        self.reached = self.reached and not self.sync

    def end_backward(self) -> None:
        """After the reductions: back to rest."""
        context = self.context
        assert context is not None
        if self.is_root:
            for observer in self.observers:
                observer.end_backward(self)
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

    # -- at rest -------------------------------------------------------------------------------------

    @property
    def is_shown_by_root(self) -> bool:
        """Whether an option has registered its parameters, so that there is nothing to do for it now."""
        return self.shown_by is not None and self.shown_by.shows(self)

    @property
    def is_untouched(self) -> bool:
        """Whether a backward has brought nothing to it but what an option has taken."""
        begun = self.backward_begun or self.begun or self.arrived or self.reduced
        if begun or not self.group.stands_in:
            return False
        return not any(
            bucket.grads.is_busy or bucket.reduce_unused for bucket in self.group.buckets
        )

    def reset(self) -> None:
        """After an exception, what ``reset_iter_state`` promises."""
        self.call = None
        for observer in self.observers:
            observer.abandon(self)
        self.to_run.clear()
        self.begun.clear()
        self.depth = self.arrived = 0
        self.backward_begun = self.reached = self.ended = self.reduced = False

    def show_shards(self) -> None:
        """The sharded parameters for whoever saves or loads, unless a forward is using the others."""
        self.come_to_rest()
        busy = self.depth or self.backward_begun or self.is_shown_by_root
        if self.group.is_registered and not busy:
            self.group.register_sharded()
            self.group.reshard(self.ready_context().comm)

    def come_to_rest(self) -> None:
        """Shows the shards again where an exception has ended a backward half-way."""
        context = self.context
        if context is not None and context.backward_has_failed:
            context.leave_broken_backward()

    @untraced
    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Hook after ``load_state_dict``: ``assign=True`` has replaced the Parameters."""
        if self.group.registered is Registered.SHARDED:
            self.group.adopt(partly=len(self.modules) > 1)

    def take_settings(self, other: Unit) -> None:
        """Those of ``other``, of which this is a copy, but for what refers to units and streams."""
        if other.prefetch is not None:
            self.prefetch = replace(other.prefetch)
        for name in (
            "keep_between_forwards",
            "reshard_after_backward",
            "unshard_in_backward",
            "sync",
            "all_reduce",
            "manual_finalization",
        ):
            setattr(self, name, getattr(other, name))


def cast_inputs(unit: Unit, module: nn.Module, inputs: tuple[tuple, dict]) -> tuple[tuple, dict]:
    """(args, kwargs) as the forward of ``module``, one of a unit that casts its inputs, is to see them."""
    lower = unit.input_dtype
    assert lower is not None
    if isinstance(module, unit.policy.full_precision_modules):
        return inputs  # it casts them itself, to its own dtype
    if not unit.group.own_dtype:
        args, kwargs = inputs
        if (
            len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor
        ):  # most blocks' only input
            if args[0].dtype == lower or not args[0].is_floating_point():
                return inputs
            return (args[0].to(lower),), kwargs
        return map_tensors(lambda t: t.to(lower) if t.is_floating_point() else t, inputs)
    own = unit.group.dtype
    if own is None or own == lower:
        return inputs
    return map_tensors(lambda t: t.to(own) if t.dtype == lower else t, inputs)


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
        weights: the numbers of the weights' values that it computed with.
        inputs: number of inputs that have a gradient; when all have theirs, the backward is over.
        remaining: of them, those whose gradient is still to come.
    """

    __slots__ = (*("__weakref__", "inputs", "others", "position", "remaining", "unit", "weights"),)

    def __init__(self, unit: Unit, position: int, others: Sequence[Unit] = ()) -> None:
        self.unit = unit
        self.others = others
        self.position = position
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
    retained = unit.group.retain is Retain.USER
    frees = bool(unit.reshards()) or (call is None and not retained)
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
