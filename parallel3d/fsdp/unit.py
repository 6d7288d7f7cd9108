"""Unit: the hooks that move one unit's parameters through forward and backward.

Forward: unshard, register, compute, register the sharded ones again, reshard. Backward: a hook on the outputs
unshards and registers; gradients are taken as they arrive; when all have, and those of the unit's inputs are
done, the unit is resharded and its reduction issued. One callback at the end settles what remains.
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
    hook_gradient,
    in_backward_pass,
    next_backward_order,
    no_frame_of_its_own,
    untraced,
)
from parallel3d._util.trace import issuing
from parallel3d._util.trees import cast_floats, map_tensors, tensors_in, tensors_of, to_device
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.api import MixedPrecisionPolicy, input_dtype
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.context import RunContext
from parallel3d.fsdp.events import Option, Registrar
from parallel3d.fsdp.group import Members, ParamGroup, Registered, Retain
from parallel3d.fsdp.members import UNIT_ATTRIBUTE, class_name, unit_around
from parallel3d.fsdp.reduction import Comm
from parallel3d.fsdp.schedule import PrefetchSettings
from parallel3d.fsdp.watch import check_inputs, explain, explain_call, watch_torch
from parallel3d.guards.nan_losses import nan_losses


class UnitModule:
    """Base class that ``fully_shard`` adds to a module's class. Its unit is at rest however forward ends."""

    @no_frame_of_its_own
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a forward of the module. If it raises, also a ``KeyboardInterrupt`` or ``SystemExit``, for
        which torch calls no hook, the unit's forward is ended and the unit resharded."""
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
    """State of a unit's forward, from the begin of its first module to the end of its last one."""

    depth: int = 0  # forwards of the unit's modules under way, one inside the other
    to_run: set[int] = field(default_factory=set)  # ids of those of several modules that are to run
    position: int = 0  # in the order of forwards under the root
    call: Call | None = None  # what its outputs' hooks call in backward; None without autograd


@dataclass(slots=True)
class BackwardPass:
    """State of a unit's backward, from the first gradient that reaches the unit until it is resharded."""

    calls: set[int] = field(default_factory=set)  # ids of those that it has reached, and not left
    arrived: int = 0  # number of parameters whose gradient has arrived
    has_begun: bool = False  # whether a gradient has reached an output: the parameters are there


class Unit:
    """One module (or list of modules) given to ``fully_shard``, with the hooks that run on it.

    Attributes:
        reshard_after_forward: True, False, None (True unless the unit is the root), or the number of ranks
            over which the parameters stay sharded between forward and backward.
        group: its parameters.
        members: its modules, and the hooks on them.
        options: the options that are called for events of this unit. registrar: the option that registers its
            parameters instead of the unit's own hooks, or None.
        forward, backward: state of the forward and backward under way; None outside of them.
        computed_with: ``ParamGroup.weights`` in the last forward.
        input_dtype: dtype that floating-point inputs are cast to; None: they are not cast.
        has_unreduced: whether gradients of a backward were not reduced yet.
        put_off: whether the last backward ended without gradient sync, or without all-reduce.
        tracked, is_new_to_tracker: whether torch's FSDPMemTracker has wrapped the unit's hooks and methods,
            and whether it has yet to see the unit's buffers.
    """

    tracked = is_new_to_tracker = False

    # What ``FSDPModule``'s methods set.
    # Whether the next forward uses what an evaluation has left gathered, and HFSDP's copy, as long as no
    # change of the weights was seen.
    keep_between_forwards = False
    reshard_after_backward = True  # False keeps the parameters gathered for the next micro-batch
    unshard_in_backward = True  # False: backward doesn't read the parameters (an embedding)
    forward_prefetch: list[weakref.ref[Unit]] | None = None  # to gather ahead; None: the next one
    backward_prefetch: list[weakref.ref[Unit]] | None = None
    sync = all_reduce = True  # whether backward reduces over all data axes, and over replicate
    # Whether parameters without a gradient are reduced as zeros, since other ranks may have one; False: there
    # are no parameters.
    reduce_unused = False
    form: Any = None  # kind of state dicts, see ``state_dict_type``; None: sharded
    # Of the root alone.
    prefetch: PrefetchSettings | None = None  # None: the default
    post_optim_event: Any = None  # the next forward's first gather waits for it
    shared_comm: Comm | None = None  # shared with other roots
    manual_finalization = False  # whether the user ends backwards; see ``options/finalization``

    def __init__(
        self,
        modules: list[nn.Module],
        group: ParamGroup,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
        device_type: str,
    ) -> None:
        self.reshard_after_forward = reshard_after_forward
        self.options: list[Option] = []
        self.registrar: Registrar | None = None
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
        return self.members.modules

    @property
    def depth(self) -> int:
        """How many forwards of the unit's modules are under way: 2 if one module's forward calls another."""
        return 0 if self.forward is None else self.forward.depth

    @property
    def backward_begun(self) -> bool:
        """Whether a gradient has reached an output of the unit and its backward has not ended."""
        return self.backward is not None and self.backward.has_begun

    # -- context -------------------------------------------------------------------------------------

    def ready_context(self) -> RunContext:
        """Returns the root's context. If there is none, this unit is the root and makes it."""
        if self.context is not None:
            return self.context
        outer = unit_around(self)
        if outer is not None and self in (context := outer.ready_context()).units:
            return context
        return RunContext.of_root(self)

    @property
    def is_root(self) -> bool:
        return self.context is not None and self.context.root is self

    # -- forward -------------------------------------------------------------------------------------

    @untraced
    def pre_forward(
        self, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
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
        """Issues the unit's all-gather for a forward or backward. Before a forward it adopts Parameters that
        the user has replaced. ``compute``: the current stream if known."""
        group = self.group
        if self.is_registered_by_root:
            return
        if context.backward is None:
            if self.forward is None:
                for option in self.options:
                    option.prepare(self, context)
            current = context.running and self.gathered_in == context.iteration
            if not current:  # left over from another forward: the weights may have changed since
                group.drop_stale(context.comm)
            self.gathered_in = context.iteration
            if group.is_sharded and not group.is_in_other_form:
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
        """Ends a module's forward that has raised ``error``; ``depth`` is what ``self.depth`` was before."""
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
        """Ends the forward of a unit of several modules of which some did not run."""
        assert self.forward is not None
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
        """Reshards the unit after a forward without backward, unless ``keep_between_forwards`` applies."""
        group = self.group
        if self.keep_between_forwards and not self.reshards() and not group.is_sharded:
            group.hold()
        elif group.retain is Retain.NO:
            group.reshard(context.comm)

    def reshards(self) -> bool | int:
        """Whether forward frees the parameters, or the number of ranks that it keeps a shard over."""
        reshard = self.reshard_after_forward
        return not self.is_root if reshard is None else reshard

    # -- backward ------------------------------------------------------------------------------------

    def pre_backward(self, call: Call) -> None:
        """Called when a gradient has reached an output of ``call``: begins the unit's backward, unshards."""
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
        """Returns the error of a backward whose forward has used other weights than the present ones."""
        return StateError(
            f"unit {self.label}: its parameters were changed (an optimizer step, an in-place change) between "
            "this forward and its backward, and the values that the forward used are freed; call backward "
            "before the weights change, or give the unit reshard_after_forward=False, which keeps them"
        )

    @staticmethod
    @untraced
    def take_gradient(
        ref: weakref.ref[Unit], bucket_ref: weakref.ref[Bucket], index: int, param: torch.Tensor
    ) -> None:
        """Post-accumulate hook of the unsharded parameter ``index`` of a bucket: passes its gradient to the
        bucket and clears ``.grad``. It is called again for a further gradient of the same backward. None, as
        an autograd function may return it, counts as arrived, too. ``ref``, ``bucket_ref``: weak references.
        """
        unit, bucket = ref(), bucket_ref()
        if unit is None or bucket is None:
            return
        grad, param.grad = param.grad, None
        context = unit.context
        if context is not None and context.backward is None:
            context.enter_backward()  # the parameter was used outside a forward of ours
        for option in unit.options:
            option.take_gradient(unit)
        is_first = index not in bucket.grads.arrived
        if grad is not None:
            if grad.requires_grad:
                raise StateError(
                    f"unit {unit.label}: .backward(create_graph=True) gives parameters gradients with a "
                    "graph, but it would end at their reduction over ranks; use torch.autograd.grad(loss, "
                    "inputs, create_graph=True)"
                )
            bucket.grads.accept(index, grad, sync=unit.sync)
        del grad  # what follows may free it
        if is_first:
            backward = unit.backward
            if backward is None:
                backward = unit.backward = BackwardPass()
            backward.arrived += 1
            if backward.arrived >= unit.group.trainable:
                unit.maybe_end_backward()

    def take_gradients_put_by_hand(self) -> bool:
        """Takes gradients that a zero-bubble pipeline schedule has assigned to ``.grad`` of unsharded
        parameters; returns whether there were any."""
        found = False
        for bucket in self.group.buckets:
            for index, param in enumerate(bucket.precision.compute_params):
                if param.grad is not None:
                    self.take_gradient(self.ref, weakref.ref(bucket), index, param)
                    found = True
        return found

    def maybe_end_backward(self) -> None:
        """Ends the unit's backward if nothing in it will read the parameters again: if the gradients of all
        inputs of all calls have arrived, and those of all parameters (not with ``reduce_unused``). A call
        without inputs that require a gradient ends with the root's backward."""
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
        if self.is_registered_by_root:
            context.reduce(self)
        else:
            deferred = None if context.backward is None else context.backward.deferred
            if deferred is not None and deferred.unit is self.ref:
                context.issue_deferred()
            self.group.check_unwritten()
            self.leave_backward(context)
            context.end_unit_backward(self)
        self.backward = None

    def leave_backward(self, context: RunContext) -> None:
        """Reshards the unit, unless a setting or a forward around this backward keeps it unsharded."""
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
        """Issues the reductions of buckets that have gradients to reduce. ``reduced``: ids of the
        ``reduce_unused`` units that were reduced in this backward; this unit's is added."""
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
        if self.reduce_unused:
            reduced.add(id(self))
        self.has_unreduced = self.has_unreduced and not self.sync

    def reduce_bucket(self, index: int, comm: Comm) -> None:
        if self.context is not None and self.context.same_order is not None:
            self.context.same_order.reduces(self, index, all_reduce=self.all_reduce)
        comm.reduce(self.group.buckets[index], all_reduce=self.all_reduce)

    def end_backward(self) -> None:
        """Brings the unit to rest when the root's backward has ended or failed."""
        context = self.context
        assert context is not None
        if self.options and self.is_root:
            for option in self.options:
                option.end_backward(self)
        if self.forward is not None:
            self.forget_modules_to_run()
        self.leave_backward(context)
        for bucket in self.group.buckets:
            bucket.grads.arrived.clear()
        self.backward = None
        self.note_put_off()

    def note_put_off(self) -> None:
        self.put_off = not (self.sync and self.all_reduce)

    # -- at rest -------------------------------------------------------------------------------------

    @property
    def is_registered_by_root(self) -> bool:
        """Whether the ``registrar`` has registered the parameters, so that the unit's hooks do nothing."""
        return self.registrar is not None and self.registrar.has_registered(self)

    def abandon(self, comm: Comm) -> None:
        """Drops the unit's forward and backward after an exception, and reshards it."""
        for option in self.options:
            option.abandon(self)
        self.forward = self.backward = None
        self.has_unreduced = False
        self.group.abandon(comm)

    def show_shards(self) -> None:
        """Reshards and registers sharded parameters, to save or load, unless a forward or backward runs."""
        self.come_to_rest()
        busy = self.depth or self.backward_begun or self.is_registered_by_root
        if self.group.is_registered and not busy:
            self.group.register_sharded()
            self.group.reshard(self.ready_context().comm)

    def come_to_rest(self) -> None:
        """If an exception has ended the root's backward, drops what is left of that backward."""
        context = self.context
        if context is not None and context.backward_has_failed:
            context.abandon(backward_only=True)

    @untraced
    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Hook after ``load_state_dict``: copies Parameters that ``assign=True`` has set into the buckets."""
        if self.group.registered is Registered.SHARDED:
            self.group.adopt(partly=len(self.modules) > 1)


_WATCHERS = "_parallel3d_watchers"  # of a tensor on an attribute: the units that its gradient tells


class Call:
    """One forward call of a unit, which the hooks on its outputs and inputs refer to in backward.

    The module is given aliases of its input tensors: a hook on an alias gets this call's part of the
    gradient, where a hook on the input itself would wait for all other uses of it. The autograd graph holds
    the call and the call holds the unit, so that a backward works after the model was deleted.

    Attributes:
        position: index of this call in the order of forwards under the root.
        weights: ``ParamGroup.weights`` that the call computed with.
        first: ``next_backward_order()`` when the call began: nodes of the graph with lower numbers are older.
        inputs: number of inputs that require a gradient; the call's backward is over when all have got it.
        left: number of these inputs that have not got their gradient yet.
    """

    __slots__ = ("__weakref__", "first", "inputs", "left", "position", "unit", "weights")

    def __init__(self, unit: Unit, position: int) -> None:
        self.unit = unit
        self.position = position
        self.weights = unit.group.weights
        self.first = next_backward_order()
        self.inputs = self.left = 0

    def alias(self, value: Any) -> Any:
        """Returns ``value`` with an alias (``view_as``) in place of each tensor, also in tuples. Tensors in
        other containers, which the module may write to, are kept, and hooked themselves."""
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
        """Calls ``method``, a method of this call, with the gradient of ``tensor``. On a leaf, which outlives
        the graph, the hook refers to this call weakly and is removed when the call is deleted."""
        if not tensor.is_leaf:
            hook_gradient(tensor, method)
            return
        weak = weakref.WeakMethod(method)

        def on_gradient(grad: torch.Tensor) -> Any:
            alive = weak()
            return None if alive is None else alive(grad)

        weakref.finalize(self, tensor.register_hook(on_gradient).remove)

    def watch(self, tensor: torch.Tensor) -> None:
        """Hooks ``begin_backward`` on ``tensor``, and on what it was before in-place changes."""
        self.hook(tensor, self.begin_backward)
        base = before_changes(tensor, self.first)
        if base is not tensor:
            self.hook(base, self.begin_backward)

    def watched(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an alias of ``tensor`` whose backward calls ``begin_backward``, also within transforms of
        ``torch.func``, where tensor hooks don't work."""
        if tensor.is_floating_point() or tensor.is_complex():
            return _Watched.apply(self, tensor)
        return tensor

    @untraced
    def begin_backward(self, _: torch.Tensor) -> None:
        """Hook on every output of the call: its gradient has arrived, so the unit's backward begins."""
        self.unit.pre_backward(self)

    @untraced
    def input_done(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Hook on every alias of an input: counts its gradient; the last one may end the unit's backward.
        With ``create_graph=True`` it returns a watched gradient, for a second backward."""
        self.left -= 1
        if self.left == 0 and self.unit.backward is not None:
            self.unit.backward.calls.discard(id(self))
            self.unit.maybe_end_backward()
        return None if grad is None or not torch.is_grad_enabled() else self.watched(grad)


def watch_output(unit: Unit, output: Any, call: Call | None, *, attributes: bool) -> Any:
    """Hooks ``call`` on the tensors in ``output``, and on those that forward has left on modules' attributes.
    Returns ``output``, under ``torch.func`` with aliases as its tensors.

    Args:
        call: the call that has ended; None: no backward can follow.
        attributes: whether to look at attributes: at the end of a module's outermost forward.

    Raises:
        Parallel3dError: an output is a parameter, or a view of one, whose memory is freed now.
    """
    retained = unit.group.retain is Retain.USER
    frees = bool(unit.reshards()) or (call is None and not retained)
    for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_of(output):
        is_own = id(tensor if tensor._base is None else tensor._base) in unit.group.computing
        if is_own or (frees and not tensor.requires_grad and unit.group.holds(tensor)):
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
    """The identity, under ``torch.func`` too. Its backward, and its jvp's, calls ``Call.begin_backward``."""

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
    """Returns ``inputs``, (args, kwargs), cast as the unit's mixed precision policy says for ``module``."""
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
    own = next((b.dtype for b in unit.group.buckets if b.dtype.is_floating_point), None)
    if own is None or own == lower:
        return inputs
    return map_tensors(lambda t: t.to(own) if t.dtype == lower else t, inputs)


def run_backward(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps each call of autograd's engine from Python, ``run(*args, **kwargs)``. It refuses sharded
    Parameters as ``inputs``, explains errors that a unit's parameters have caused, and looks for nan losses.
    """
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
