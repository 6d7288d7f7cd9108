"""RunContext: what the units under one root share: their order, the communication, the end of a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from threading import get_ident
from typing import TYPE_CHECKING, Any

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
from parallel3d.fsdp.api import input_dtype
from parallel3d.fsdp.comm import Comm, limit_inputs, make_comm
from parallel3d.fsdp.group import GroupState, check_registered
from parallel3d.fsdp.members import class_name, unit_of, units_of
from parallel3d.fsdp.options.checks import begins_to_communicate, compare_gradients, compare_ranks
from parallel3d.fsdp.options.precision import follow_mode
from parallel3d.fsdp.options.replicated import Residents
from parallel3d.fsdp.schedule import check_inner_schedules

if TYPE_CHECKING:
    from parallel3d.fsdp.bucket import Bucket
    from parallel3d.fsdp.unit import Unit


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
        self.context.compare_gradients_once()

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        _watch_steps()
        _unfinished.add(self)

    def _end(self) -> None:
        if self.stage is Stage.REDUCING:
            self.number += 1
        self.stage = Stage.COMPLETE
        _unfinished.discard(self)


def check_inner_finalization(root: Unit) -> None:
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


# HalfWay: where a unit's backward gathers the unit before it, if it has large gradients.
#
# The usual place is the backward's beginning. But then the memory at its end is two gathered
# units, a unit's gradients, and the input of the last reduction, which nothing needs that long.
# The link carries that reduction first in any case; so the next gather is issued when half of the
# gradients are there, and the reduction's input is freed then: what it took, the gather takes.
# Half a backward overlaps the one, half the other.


def bucket_to_count(unit: Unit) -> Bucket | None:
    """The bucket whose gradients say when half of the backward is over; None where that is not worth it."""
    if unit.backward_prefetch is not None or unit.reduce_unused or not unit.sync:
        return None
    for bucket in unit.group.buckets:
        if bucket.reduced_in_place and not bucket.small_grads[0] and bucket.max_inputs == 1:
            return bucket if bucket.compute_params[0].requires_grad else None
    return None


class HalfWay:
    """A gather that was put off.

    Attributes:
        awaited: how much of the large gradients must come before it.
    """

    def __init__(self, bucket: Bucket, unit: Unit, position: int, context: RunContext) -> None:
        self.bucket = weakref.ref(bucket)  # which holds this: no cycle
        self.unit = unit.ref
        self.position = position
        self.context = weakref.ref(context)
        self.awaited = sum(bucket.slot_sizes[: bucket.reduced_in_place]) / 2
        bucket.half_way = self

    def count(self, index: int) -> None:
        """A large gradient has come."""
        bucket = self.bucket()
        assert bucket is not None
        self.awaited -= bucket.slot_sizes[index]
        if self.awaited <= 0:
            context = self.context()
            if context is not None:
                context.comm.free_inputs()
                self.issue()

    def issue(self) -> None:
        """Issues the gather, if that is still to be done."""
        context, unit = self.context(), self.unit()
        self.drop()
        if context is not None and unit is not None:
            context.gather_before(unit, self.position)

    def drop(self) -> None:
        """Nobody waits for it any more."""
        bucket = self.bucket()
        if bucket is not None:
            bucket.half_way = None
        context = self.context()
        if context is not None and context.half_way is self:
            context.half_way = None


class RunContext:
    """Units hold their context; the context refers to them weakly, so that a deleted model is freed at once.

    Attributes:
        order: units in the order of their forwards, this iteration.
        last_order: the same of the iteration before, for forward prefetch.
        in_backward: whether the end-of-backward callback is queued.
        backward_id: the backward that is or was.
        creates_graph: whether it is a backward with ``create_graph=True``.
        iteration: number of the root's forwards so far.
        running: whether one is under way.
        residents: those of the units that the root shows.
        schedule: of gathers ahead of their use, if another than the usual; see ``schedule``.
        half_way: the next gather of the backward, where it was put off.
        may_put_off: whether one may be, in this backward; None before anything has asked.
        to_compare: where the ranks will compare what they have: the first "forward" or "backward" that
            communicates; "" as soon as they have.
        on_meta: whether parameters may still be on the meta device.
        inputs_on_meta: whether the forward's inputs are there too: then it is one of shapes and collectives.
        gradients_compared: whether they have compared which parameters got a gradient.
        finalization: whether and how the user ends backwards.
    """

    def __init__(self, root: Unit, comm: Comm) -> None:
        self._root = root.ref
        self.comm = comm
        self._units: list[weakref.ref[Unit]] = []
        self.order: list[weakref.ref[Unit]] = []
        self.last_order: list[weakref.ref[Unit]] = []
        self.in_backward = False
        self._thread = get_ident()
        self._callback: Callable[[], Any] = lambda: None
        self.backward_id = -1
        self.creates_graph = False
        self.iteration = 0
        self.running = False
        self.schedule = root.schedule
        self.residents = Residents()
        self.half_way: HalfWay | None = None
        self.may_put_off: bool | None = None
        self.to_compare = ""
        self.gradients_compared = False
        self.finalization = Finalization(self)
        self.finalization.manual = root.manual_finalization
        self.on_meta = True  # until a forward has found that none are
        self.inputs_on_meta = False

    @classmethod
    def of_root(cls, root: Unit) -> RunContext:
        """That of ``root``, which is the first to run, and of the units inside it."""
        check_inner_schedules(root)
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
                    unit.context.comm.finish()
                    if unit.group.state is GroupState.GATHERING:
                        unit.group.unshard(unit.context.comm)
                    if unit.group.gated:  # whose root shows and hides it no more
                        unit.group.hide()
                        unit.group.use_gates(None)
                unit.context = context
                unit.input_dtype = input_dtype(unit.policy, is_root=unit is root)
                unit.name(name or class_name(root_module))
                context.add(unit)
        context.to_compare = begins_to_communicate(context.units)
        buckets = [bucket for unit in context.units for bucket in unit.group.buckets]
        limits = (bucket.max_inputs for bucket in buckets)
        limit_inputs(context.comm, limits, at_least=context.comm.max_inputs)
        return context

    @property
    def root(self) -> Unit:
        """The outermost unit."""
        root = self._root()
        assert root is not None
        return root

    @property
    def units(self) -> list[Unit]:
        """All units, outer before inner, in the order of the modules."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    def add(self, unit: Unit) -> None:
        """Makes ``unit`` one of these."""
        self._units.append(unit.ref)

    # -- forward -------------------------------------------------------------------------------------

    def note_meta(self, inputs: Any) -> None:
        """Before a forward with ``inputs``, as long as parameters may be on the meta device."""
        self.on_meta = any(unit.group.on_meta for unit in self.units)
        self.inputs_on_meta = self.on_meta and any(each.is_meta for each in tensors_in(inputs))

    def begin_forward(self) -> Sequence[Unit]:
        """The root's forward begins. Returns the units, to be held while its graph is there."""
        root = self.root
        check_registered(root)
        self.finalization.check_waited()
        if self.iteration == 0:
            for unit in self.units:
                unit.group.take_late_extensions()
        if self.to_compare == "forward":
            compare_ranks(self, forward=True)
        self.iteration += 1
        self._thread = get_ident()
        issuing.runs += 1
        if torch.is_grad_enabled():
            issuing.forwards += 1
        if issuing.on_run is not None:
            issuing.on_run()
        self.running = True
        if self.schedule is not None:
            self.schedule.begin_pass()
        if self.order:
            self.last_order, self.order = self.order, []
        units, residents = self.units, self.residents
        if residents.are_as_before(units):
            self._prepare(_alive(residents.others))
        else:
            self._prepare(units)
            residents.find(units, self)
        residents.begin_forward()
        if root.post_optim_event is not None:
            self.comm.post_optim_event = root.post_optim_event
            root.post_optim_event = None
        return units

    def _prepare(self, units: Sequence[Unit]) -> None:
        for unit in units:
            group = unit.group
            if group.state is GroupState.GATHERING and not group.kept:
                group.reshard(self.comm)  # the last forward did not get there
            if unit.follows_mode:
                follow_mode(unit, self)
            if group.hybrids:  # all at once: they overlap the first units' compute
                group.renew_copies(self.comm, if_changed=unit.keep_between_forwards)

    def prefetch_forward(self, unit: Unit) -> None:
        """Issues the all-gathers of what comes after ``unit``, whose forward begins."""
        if self.schedule is not None:
            self.schedule.begin_forward(unit, self)
            return
        for following in self.next_in_forward(unit):
            following.issue_unshard(self)

    def next_in_forward(self, unit: Unit) -> Iterable[Unit]:
        """The units that the user has named, or the one that came after ``unit`` in the last iteration."""
        if unit.forward_prefetch is not None:
            return _alive(unit.forward_prefetch)
        order, position = self.last_order, unit.position
        if position + 1 < len(order) and order[position] is self.order[position]:
            following = order[position + 1]()
            return () if following is None else (following,)
        return ()

    def end_forward(self, *, backward_to_come: bool) -> None:
        """At the end of the root's forward all units show their shards; without a backward that is all."""
        self.residents.end_forward(backward_to_come=backward_to_come)
        for unit in _alive(self.residents.others):
            unit.to_run.clear()
            if unit.group.held:
                continue
            unit.group.hide()
            if not backward_to_come:
                unit.group.reshard(self.comm)
        if not backward_to_come:
            self.comm.settle_host()
        self.running = False  # last: what interrupts it makes the unit's ``__call__`` do it again

    # -- backward ------------------------------------------------------------------------------------

    def prefetch_backward(self, unit: Unit, position: int) -> None:
        """Issues the all-gathers of what comes after ``unit``, which begins the backward of its forward at
        ``position``."""
        if self.schedule is not None:
            self.schedule.begin_backward(unit, position, self)
            return
        if self.half_way is not None:
            self.half_way.drop()  # the unit it would have gathered begins by itself
        bucket = bucket_to_count(unit) if self._may_put_off() and self.comm.holds_inputs else None
        if bucket is None:
            self.gather_before(unit, position)
        else:
            self.half_way = HalfWay(bucket, unit, position, self)

    def _may_put_off(self) -> bool:
        """Not where ranks may use different parameters: their gradients don't tell the same."""
        if self.may_put_off is None:
            self.may_put_off = not any(unit.reduce_unused for unit in self.units)
        return self.may_put_off

    def gather_before(self, unit: Unit, position: int) -> None:
        """Issues the all-gathers of what comes after ``unit`` in backward."""
        for following in self.next_in_backward(unit, position):
            following.group.issue_unshard(self.comm)

    def next_in_backward(self, unit: Unit, position: int) -> Iterable[Unit]:
        """The units that the user has named, or the one whose forward came before; if backward reads them."""
        if unit.backward_prefetch is not None:
            return [each for each in _alive(unit.backward_prefetch) if each.unshard_in_backward]
        for ref in reversed(self.order[:position]):
            before = ref()
            if before is not None and before.group.buckets and not before.backward_begun:
                return (before,) if before.unshard_in_backward else ()
        return ()

    def enter_backward(self) -> None:
        """Called by every pre-backward hook; queues the callback once."""
        if not self.in_backward:
            if self.to_compare:
                compare_ranks(self, forward=False)
            self.finalization.take_over()
            self.in_backward = True
            self.backward_id = backward_id()
            self.may_put_off = None
            if self.schedule is not None:
                self.schedule.begin_pass()
            callback = self.finish_backward
            self._callback = weakref.ref(callback)
            queue_backward_callback(callback)
            self.residents.begin_backward(self.units, self.comm)

    def reduce(self, unit: Unit) -> None:
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
        residents = self.residents
        if residents.are_untouched():
            units = _alive(residents.others)
        else:
            units = [unit for unit in self.units if not unit.is_untouched]
        residents.reduce()
        if self.half_way is not None:
            self.half_way.drop()
        for unit in reversed(units):
            unit.reduce(self.comm)
        manual = self.finalization.manual
        if manual:
            self.finalization.put_off()
        else:
            self.comm.finish()
        for unit in units:
            unit.end_backward()
        self.residents.end_backward(keep=self.running)
        self.in_backward = self.creates_graph = False
        if not manual:
            self.compare_gradients_once()
        issuing.unit = ""

    def compare_gradients_once(self) -> None:
        """After reductions: the ranks compare which parameters have a gradient, the first time."""
        if not self.gradients_compared and not self.running:
            self.gradients_compared = compare_gradients(self)

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
        self.residents.look_again()

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
        if self.half_way is not None:
            self.half_way.drop()
        for unit in self.units:
            unit.end_backward()
            for bucket in unit.group.buckets:
                bucket.grads.forget()
                for param in bucket.compute_params:
                    param.grad = None  # whose hook was interrupted
        self.residents.end_backward(keep=self.running)
        self.in_backward = self.creates_graph = False

    def reset(self) -> None:
        """After an exception anywhere: at rest, nothing in flight, no sum waiting for its reduction."""
        self.finalization.spare_others()
        self.comm.abandon()
        if self.half_way is not None:
            self.half_way.drop()
        self.running = self.in_backward = self.creates_graph = False
        self.order.clear()
        self.residents.end_backward(keep=False)
        for unit in self.units:
            unit.reset()
            unit.group.abandon(self.comm)
            for bucket in unit.group.buckets:
                bucket.grads.forget()
                bucket.grads.drop_waiting()
        self.finalization.drop()
        issuing.unit = ""


def _alive(refs: Sequence[weakref.ref[Unit]]) -> list[Unit]:
    return [unit for ref in refs if (unit := ref()) is not None]
