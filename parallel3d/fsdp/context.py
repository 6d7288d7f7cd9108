"""RunContext: what the units under one root share: their order, the communication, the end of a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum, auto
from threading import get_ident
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from parallel3d._torch.autograd import (
    backward_id,
    in_backward_pass,
    queue_backward_callback,
    untraced,
)
from parallel3d._util.trace import issuing
from parallel3d._util.trees import tensors_in
from parallel3d.errors import StateError
from parallel3d.fsdp.api import MixedPrecisionPolicy, input_dtype
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.comm import Comm, limit_inputs, make_comm
from parallel3d.fsdp.group import ParamGroup, Retain, ShardedState
from parallel3d.fsdp.members import UnitLike, check_registered, class_name, unit_of, units_of
from parallel3d.fsdp.schedule import GatherSchedule, PrefetchSettings


class ContextUnit(UnitLike, Protocol):
    """A unit, as far as its context knows it; see ``Unit``."""

    group: ParamGroup
    context: RunContext | None
    policy: MixedPrecisionPolicy
    input_dtype: torch.dtype | None
    observers: list[Any]
    forward_prefetch: list[weakref.ref] | None
    backward_prefetch: list[weakref.ref] | None
    prefetch: PrefetchSettings | None
    unshard_in_backward: bool
    reshard_after_backward: bool
    keep_between_forwards: bool
    sync: bool
    manual_finalization: bool
    shared_comm: Comm | None
    post_optim_event: Any
    device_type: str
    to_run: set[int]
    arrived: int
    backward_begun: bool
    ended: bool
    reduced: bool
    put_off: bool

    @property
    def reduce_unused(self) -> bool: ...

    @property
    def is_untouched(self) -> bool: ...

    def name(self, name: str) -> None: ...

    def issue_unshard(self, context: RunContext) -> None: ...

    def take_gradients_put_by_hand(self) -> bool: ...

    def note_put_off(self) -> None: ...

    def leave_backward(self, context: RunContext) -> None: ...

    def reduce(self, comm: Comm) -> None: ...

    def end_backward(self) -> None: ...

    def reset(self) -> None: ...


class RootOption:
    """Something that a root does beside running its units.

    An option registers, in ``root_options``, what makes one for a context; None where its units have no use
    for it.
    """

    def before_forward(self, units: Sequence[Any]) -> Sequence[Any]:
        """A forward of the root begins. Returns those of ``units`` that the context is to prepare."""
        return units

    def begin_forward(self) -> None:
        """They are prepared."""

    def end_forward(self, units: Sequence[Any], *, backward_to_come: bool) -> Sequence[Any]:
        """It ends. Returns those of ``units`` that the context is to bring to rest."""
        return units

    def before_backward(self) -> None:
        """A backward begins; nothing has communicated in it."""

    def begin_backward(self) -> None:
        """The context has entered it."""

    def reduce(self) -> None:
        """It has brought all its gradients: issues reductions that are not the units' own."""

    def end_backward(self, *, keep: bool) -> None:
        """After the reductions, or an exception. ``keep``: a forward around this backward goes on."""

    def after_reductions(self) -> None:
        """The gradients of a backward are complete."""

    def leave(self, unit: Any) -> None:
        """``unit`` goes over to another root."""


root_options: list[Callable[[Any], RootOption | None]] = []


# Finalization: of the backwards of one root, where the user says when their gradients are to be
# complete.
#
# Each backward issues its reductions, and ends without a wait for them. So their results are not
# in ``.grad`` until ``finalize_backward``, and whoever steps or clips before it would do so with
# what was there: that is an error. At most one backward's reductions are left behind at a time:
# the next one completes them before it begins, so that an exception in it ends its own only.

_unfinished: weakref.WeakSet[Finalization] = weakref.WeakSet()
_watched = False


class Stage(Enum):
    """Where the reductions of the backwards so far are."""

    COMPLETE = auto()  # in ``.grad``, or waiting there as sums
    DUE = auto()  # a backward has ended, and was not finalized
    REDUCING = auto()  # finalized, and nobody has waited yet


class Finalization:
    """Of one context.

    Attributes:
        manual: whether the user finalizes backwards.
        stage: see ``Stage``.
        number: of the finalization that is under way or comes next.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = weakref.ref(context)
        self.manual = False
        self.stage = Stage.COMPLETE
        self.number = 0
        self._dropped = -1

    @property
    def context(self) -> RunContext:
        """The context whose backwards these are."""
        context = self._context()
        assert context is not None
        return context

    # -- backwards -----------------------------------------------------------------------------------

    def put_off(self) -> None:
        """At the end of a backward: leaves its reductions as they are."""
        comm = self.context.comm
        comm.settle_host()
        comm.left_by = self._context
        self._enter(Stage.DUE)

    def take_over(self) -> None:
        """Before a backward: what another one has left behind is completed."""
        if self.stage is Stage.REDUCING:
            self.complete()
        comm = self.context.comm
        if comm.left_by is not None:  # by this root, or by another one that shares the comm
            comm.finish()

    def check_waited(self) -> None:
        """Before a forward.

        Raises:
            StateError: an asynchronous finalization was not waited on.
        """
        if self.stage is Stage.REDUCING:
            raise _not_waited("a forward", self.context)

    def spare_others(self) -> None:
        """Before the reductions in flight are dropped: completes those that another root has left."""
        comm = self.context.comm
        if comm.left_by is not None and comm.left_by() is not self.context:
            comm.finish()

    def drop(self) -> None:
        """After an exception: the reductions are no more."""
        self._dropped = self.number
        self._end()

    # -- the user's calls ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Issues what is still to be issued."""
        context = self.context
        root = context.root.label
        if not self.manual:
            raise StateError(
                f"finalize_backward() of {root!r}: each backward completes its own reductions; call "
                "set_manual_backward_finalization(True) before the backwards"
            )
        if context.in_backward:
            raise StateError(f"finalize_backward() of {root!r} within a backward; call it after it")
        if self.stage is Stage.REDUCING:
            raise _not_waited("finalize_backward()", context)
        context.in_backward = True  # which ends here
        try:
            for unit in reversed(context.units):
                if unit.take_gradients_put_by_hand() or unit.put_off:
                    unit.reduce(context.comm)
                    unit.arrived, unit.reduced = 0, False
                    unit.note_put_off()
                if unit.reshard_after_backward:  # which it may not have been before
                    unit.leave_backward(context)
        finally:
            context.in_backward = False
        context.comm.left_by = self._context
        self._enter(Stage.REDUCING)

    def wait(self, number: int) -> None:
        """Completes the finalization of that number, if nothing else has.

        Raises:
            StateError: it was dropped.
        """
        if number == self._dropped:
            raise StateError(
                "this finalize_backward(async_op=True) was ended by reset_iter_state(), which has dropped "
                "the reductions; begin the step anew, with zero_grad()"
            )
        if number == self.number and self.stage is Stage.REDUCING:
            self.complete()

    def complete(self) -> None:
        """Waits for the reductions, and puts their results into ``.grad``."""
        self.context.comm.finish()
        self._end()
        self.context.gradients_are_complete()

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        _watch_steps()
        _unfinished.add(self)

    def _end(self) -> None:
        if self.stage is Stage.REDUCING:
            self.number += 1
        self.stage = Stage.COMPLETE
        _unfinished.discard(self)


def check_inner_finalization(root: ContextUnit) -> None:
    """Raises StateError if a unit inside ``root`` was told to be finalized by itself."""
    for module in root.modules:
        for unit in units_of(module, recurse=True):
            if unit.manual_finalization and unit is not root:
                raise StateError(
                    f"set_manual_backward_finalization(True) was called on {unit.label!r}, which is inside "
                    f"{root.label!r}; call it on the outermost unit"
                )


def refuse_unfinalized(params: Iterable[torch.Tensor], what: str) -> None:
    """Raises StateError if gradients of one of ``params`` are still to come."""
    for finalization in list(_unfinished):
        context = finalization.context
        mine = {
            id(param.sharded): param.name
            for unit in context.units
            for bucket in unit.group.buckets
            for param in bucket.params
        }
        name = next((mine[id(each)] for each in params if id(each) in mine), None)
        if name is not None:
            remedy = (
                "call finalize_backward() of the outermost unit first"
                if finalization.stage is Stage.DUE
                else "wait() first on the handle that finalize_backward(async_op=True) returned"
            )
            raise StateError(
                f"{what}: the gradient of parameter {name} is not in .grad yet, as "
                f"{context.root.label!r} has set_manual_backward_finalization(True); {remedy}"
            )


def _watch_steps() -> None:
    global _watched
    if not _watched:
        _watched = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _unfinished:
        _check(optimizer)


@torch.compiler.disable
def _check(optimizer: Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    refuse_unfinalized(params, f"a step of {type(optimizer).__name__}")


def _not_waited(what: str, context: RunContext) -> StateError:
    return StateError(
        f"{what} of {context.root.label!r} after finalize_backward(async_op=True); wait() first on the "
        "handle that it returned"
    )


# Deferred prefetch: where a unit's backward gathers the unit before it, if it has large gradients.
#
# The usual place is the backward's beginning. But then the memory at its end is two gathered
# units, a unit's gradients, and the input of the last reduction, which nothing needs that long.
# The link carries that reduction first in any case; so the next gather is issued when half of the
# gradients are there, and the reduction's input is freed then: what it took, the gather takes.
# Half a backward overlaps the one, half the other.


def bucket_to_count(unit: ContextUnit) -> Bucket | None:
    """The bucket whose gradients say when half of the backward is over; None where that is not worth it."""
    if unit.backward_prefetch is not None or unit.reduce_unused or not unit.sync:
        return None
    for bucket in unit.group.buckets:
        if bucket.reduced_zero_copy and not bucket.small_grads[0] and bucket.max_inputs == 1:
            return bucket if bucket.compute_params[0].requires_grad else None
    return None


class DeferredPrefetch:
    """Counts the gradients that a deferred gather waits for.

    Attributes:
        unit: the unit whose backward it is put off in.
        awaited: how much of the large gradients must come before it.
    """

    def __init__(self, bucket: Bucket, unit: ContextUnit, context: RunContext) -> None:
        self.bucket = weakref.ref(bucket)  # which holds this: no cycle
        self.unit = unit.ref
        self.context = weakref.ref(context)
        self.awaited = sum(bucket.slot_sizes[: bucket.reduced_zero_copy]) / 2
        bucket.on_large_gradient = self.count

    def count(self, index: int) -> None:
        """A large gradient has come."""
        bucket, context = self.bucket(), self.context()
        assert bucket is not None
        self.awaited -= bucket.slot_sizes[index]
        if self.awaited <= 0 and context is not None:
            context.comm.free_inputs()
            context.issue_deferred()

    def drop(self) -> None:
        """Nobody waits for it any more."""
        bucket = self.bucket()
        if bucket is not None:
            bucket.on_large_gradient = None


class RunContext:
    """Units hold their context; the context refers to them weakly, so that a deleted model is freed at once.

    Attributes:
        schedule: which unit is gathered when; its units are weak references.
        deferred: what counts gradients for the gather that the schedule has put off.
        may_defer: whether one may be, in this backward; None before anything has asked.
        in_backward: whether the end-of-backward callback is queued.
        backward_id: the backward that is or was.
        creates_graph: whether it is a backward with ``create_graph=True``.
        iteration: number of the root's forwards so far.
        running: whether one is under way.
        options: see ``RootOption``.
        on_meta: whether parameters may still be on the meta device.
        inputs_on_meta: whether the forward's inputs are there too: then it is one of shapes and collectives.
        finalization: whether and how the user ends backwards.
    """

    def __init__(self, root: ContextUnit, comm: Comm) -> None:
        self._root = root.ref
        self.comm = comm
        self._units: list[weakref.ref] = []
        self.schedule = GatherSchedule(_Units(), root.prefetch or PrefetchSettings())
        self.deferred: DeferredPrefetch | None = None
        self.may_defer: bool | None = None
        self.in_backward = False
        self._thread = get_ident()
        self._callback: Callable[[], Any] = lambda: None
        self.backward_id = -1
        self.creates_graph = False
        self.iteration = 0
        self.running = False
        self.options: list[RootOption] = []
        self.finalization = Finalization(self)
        self.finalization.manual = root.manual_finalization
        self.on_meta = True  # until a forward has found that none are
        self.inputs_on_meta = False

    @classmethod
    def of_root(cls, root: ContextUnit) -> RunContext:
        """That of ``root``, which is the first to run, and of the units inside it."""
        check_inner_prefetch(root)
        check_inner_finalization(root)
        context = cls(root, root.shared_comm or make_comm(root.device_type))
        seen: set[int] = set()
        for root_module in root.modules:
            for name, module in root_module.named_modules():
                unit = unit_of(module)
                if unit is None or id(unit) in seen:
                    continue
                seen.add(id(unit))
                if unit.context is not None:  # what was issued there is finished there
                    unit.context.release(unit)
                unit.context = context
                unit.input_dtype = input_dtype(unit.policy, is_root=unit is root)
                unit.name(name or class_name(root_module))
                context.add(unit)
        made = (make(context) for make in root_options)
        context.options = [option for option in made if option is not None]
        buckets = [bucket for unit in context.units for bucket in unit.group.buckets]
        limits = (bucket.max_inputs for bucket in buckets)
        limit_inputs(context.comm, limits, at_least=context.comm.max_inputs)
        return context

    def release(self, unit: ContextUnit) -> None:
        """Before ``unit`` goes over to another root."""
        self.comm.finish()
        if unit.group.state is ShardedState.GATHERING:
            unit.group.unshard(self.comm)
        for option in self.options:
            option.leave(unit)

    @property
    def root(self) -> Any:
        """The outermost unit."""
        root = self._root()
        assert root is not None
        return root

    @property
    def units(self) -> list[Any]:
        """All units, outer before inner, in the order of the modules."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    def add(self, unit: ContextUnit) -> None:
        """Makes ``unit`` one of these."""
        self._units.append(unit.ref)

    # -- forward -------------------------------------------------------------------------------------

    def note_meta(self, inputs: Any) -> None:
        """Before a forward with ``inputs``, as long as parameters may be on the meta device."""
        self.on_meta = any(unit.group.on_meta for unit in self.units)
        self.inputs_on_meta = self.on_meta and any(each.is_meta for each in tensors_in(inputs))

    def begin_forward(self) -> Sequence[Any]:
        """The root's forward begins. Returns the units, to be held while its graph is there."""
        root = self.root
        check_registered(root)
        self.finalization.check_waited()
        units = self.units
        rest: Sequence[Any] = units
        for option in tuple(self.options):  # one may have nothing more to do
            rest = option.before_forward(rest)
        self.iteration += 1
        self._thread = get_ident()
        issuing.runs += 1
        if torch.is_grad_enabled():
            issuing.forwards += 1
        if issuing.on_run is not None:
            issuing.on_run()
        self.running = True
        self.schedule.begin_iteration()
        self._prepare(rest)
        for option in self.options:
            option.begin_forward()
        if root.post_optim_event is not None:
            self.comm.post_optim_event = root.post_optim_event
            root.post_optim_event = None
        return units

    def _prepare(self, units: Sequence[Any]) -> None:
        for unit in units:
            group = unit.group
            if group.state is ShardedState.GATHERING and group.retain is not Retain.USER:
                group.reshard(self.comm)  # the last forward did not get there
            for observer in unit.observers:
                observer.prepare(unit, self)
            if group.renewed:  # all at once: they overlap the first units' compute
                group.renew_copies(self.comm, if_changed=unit.keep_between_forwards)

    def issue_gathers(self) -> None:
        """Issues the all-gathers that the schedule asks for."""
        while (ref := self.schedule.next()) is not None:
            unit = ref()  # type: ignore[operator]
            if unit is not None:
                unit.issue_unshard(self)

    def end_forward(self, *, backward_to_come: bool) -> None:
        """At the end of the root's forward all units show their shards; without a backward that is all."""
        units: Sequence[Any] = self.units
        for option in self.options:
            units = option.end_forward(units, backward_to_come=backward_to_come)
        for unit in units:
            unit.to_run.clear()
            if unit.group.retain is not Retain.NO:
                continue
            unit.group.register_sharded()
            if not backward_to_come:
                unit.group.reshard(self.comm)
        if not backward_to_come:
            self.comm.settle_host()
        self.running = False  # last: what interrupts it makes the unit's ``__call__`` do it again

    # -- backward ------------------------------------------------------------------------------------

    def begin_unit_backward(self, unit: ContextUnit, position: int) -> None:
        """``unit`` begins the backward of its forward at ``position``: issues the gathers of that."""
        self._drop_deferred()
        bucket = None
        if self.schedule.settings == _USUAL and self.comm.holds_inputs and self._may_defer():
            bucket = bucket_to_count(unit)
        if bucket is not None:
            self.deferred = DeferredPrefetch(bucket, unit, self)
        self.schedule.begin_backward(unit.ref, position, defer=bucket is not None)
        self.issue_gathers()

    def end_unit_backward(self, unit: ContextUnit) -> None:
        """The backward of ``unit`` is over, its parameters are freed, its reduction is still to be issued."""
        # Where ranks may use different parameters, backwards end in another order on each.
        if not unit.reduce_unused:
            self.schedule.end_backward(unit.ref)
            self.issue_gathers()

    def issue_deferred(self) -> None:
        """Issues the gather that was put off, if one was."""
        self._drop_deferred()
        self.schedule.issue_deferred()
        self.issue_gathers()

    def _drop_deferred(self) -> None:
        if self.deferred is not None:
            self.deferred.drop()
            self.deferred = None

    def _may_defer(self) -> bool:
        """Not where ranks may use different parameters: their gradients don't tell the same."""
        if self.may_defer is None:
            self.may_defer = not any(unit.reduce_unused for unit in self.units)
        return self.may_defer

    def enter_backward(self) -> None:
        """Called by every pre-backward hook; queues the callback once."""
        if not self.in_backward:
            for option in tuple(self.options):
                option.before_backward()
            self.finalization.take_over()
            self.in_backward = True
            self.backward_id = backward_id()
            self.may_defer = None
            self.schedule.begin_backwards()
            callback = self.finish_backward
            self._callback = weakref.ref(callback)
            queue_backward_callback(callback)
            for option in self.options:
                option.begin_backward()

    def reduce(self, unit: ContextUnit) -> None:
        """Issues the reductions of ``unit``, whose backward has ended.

        Where ranks may use different parameters (``set_reduce_scatter_unused_params``), backwards end in
        another order on each: there a unit waits until those after it in the model have been reduced.
        """
        if not unit.reduce_unused:
            unit.reduce(self.comm)
            return
        unit.ended = True
        for each in reversed(self.units):
            if each.reduce_unused and not each.reduced:
                if not each.ended:
                    return
                each.reduce(self.comm)

    @untraced
    def finish_backward(self) -> None:
        """Settles what the backward has left, in the same order on every rank."""
        units = [unit for unit in self.units if not unit.is_untouched]
        for option in self.options:
            option.reduce()
        self._drop_deferred()
        self.schedule.end_backwards()
        for unit in reversed(units):
            unit.reduce(self.comm)
        manual = self.finalization.manual
        if manual:
            self.finalization.put_off()
        else:
            self.comm.finish()
        for unit in units:
            unit.end_backward()
        for option in self.options:
            option.end_backward(keep=self.running)
        self.in_backward = self.creates_graph = False
        if not manual:
            self.gradients_are_complete()
        issuing.unit = ""

    def gradients_are_complete(self) -> None:
        """After reductions: their results are in ``.grad``."""
        for option in tuple(self.options):
            option.after_reductions()

    def set_manual_finalization(self, enabled: bool) -> None:
        """Whether the user ends backwards.

        Raises:
            StateError: one is under way, or not ended.
        """
        self.root.come_to_rest()
        finalization = self.finalization
        if self.in_backward or finalization.stage is not Stage.COMPLETE:
            raise StateError(
                f"set_manual_backward_finalization({enabled}) of {self.root.label!r} within a backward, or "
                "before finalize_backward() has ended the last one; call it before a backward"
            )
        finalization.manual = enabled

    # -- after an exception --------------------------------------------------------------------------

    @property
    def backward_has_failed(self) -> bool:
        """Whether the backward under way has been ended by an exception, of which autograd tells nobody.

        On an accelerator a backward runs on another thread than the one that waits for it, and a third may
        ask. So only the one that the forwards run on can tell by itself that none is under way; for others
        it is over when autograd has dropped the callback that it was to end with.
        """
        if not self.in_backward or in_backward_pass():
            return False
        return get_ident() == self._thread or self._callback() is None

    def leave_broken_backward(self) -> None:
        """After a backward that an exception ended: autograd has dropped the callback with it. A forward that
        it was within goes on."""
        self.finalization.spare_others()
        self.comm.abandon()
        self._drop_deferred()
        self.schedule.end_backwards()
        for unit in self.units:
            unit.end_backward()
            for bucket in unit.group.buckets:
                bucket.grads.forget()
                for param in bucket.compute_params:
                    param.grad = None  # whose hook was interrupted
        for option in self.options:
            option.end_backward(keep=self.running)
        self.in_backward = self.creates_graph = False

    def reset(self) -> None:
        """After an exception anywhere: at rest, nothing in flight, no sum waiting for its reduction."""
        self.finalization.spare_others()
        self.comm.abandon()
        self._drop_deferred()
        self.running = self.in_backward = self.creates_graph = False
        self.schedule.abandon()
        for option in self.options:
            option.end_backward(keep=False)
        for unit in self.units:
            unit.reset()
            unit.group.abandon(self.comm)
            for bucket in unit.group.buckets:
                bucket.grads.forget()
                bucket.grads.drop_waiting()
        self.finalization.drop()
        issuing.unit = ""


_USUAL = PrefetchSettings()


class _Units:
    """What the schedule asks of units that it knows by weak references."""

    def is_gathering(self, unit: Hashable) -> bool:
        found = unit()  # type: ignore[operator]
        return found is not None and found.group.state is ShardedState.GATHERING

    def may_be_next(self, unit: Hashable) -> bool:
        found = unit()  # type: ignore[operator]
        return found is not None and bool(found.group.buckets) and not found.backward_begun

    def is_read_in_backward(self, unit: Hashable) -> bool:
        found = unit()  # type: ignore[operator]
        return found is not None and found.unshard_in_backward

    def named_in_forward(self, unit: Hashable) -> Sequence[Hashable] | None:
        return unit().forward_prefetch  # type: ignore[operator]

    def named_in_backward(self, unit: Hashable) -> Sequence[Hashable] | None:
        found = unit()  # type: ignore[operator]
        return None if found is None else found.backward_prefetch


def check_inner_prefetch(root: ContextUnit) -> None:
    """Raises if a unit inside ``root`` was given prefetch settings, as if it were the outermost one."""
    for module in root.modules:
        for unit in units_of(module, recurse=True):
            if unit.prefetch is not None and unit is not root:
                raise StateError(
                    f"{unit.label!r} was given a schedule of gathers (set_backward_prefetch, "
                    f"set_forward_prefetch or set_limit_all_gathers), but it is inside {root.label!r}; call "
                    "the methods on the outermost unit"
                )
