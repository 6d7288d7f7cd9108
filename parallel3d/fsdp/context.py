"""RunContext: what the units under one root share: their order, the communication, the end of a backward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from threading import get_ident
from typing import Any, ClassVar

import torch

from parallel3d._torch.autograd import (
    backward_id,
    have_tensor_hooks,
    in_backward_pass,
    profiler_runs,
    queue_backward_callback,
    untraced,
)
from parallel3d._util import scopes
from parallel3d._util.trace import issuing
from parallel3d._util.trees import tensors_in
from parallel3d.fsdp.api import input_dtype
from parallel3d.fsdp.events import ContextUnit, Option
from parallel3d.fsdp.group import (
    DeferredPrefetch,
    Retain,
    ShardedState,
    UnitsToGather,
    bucket_to_count,
    check_registered,
)
from parallel3d.fsdp.members import check_settings_of_root, class_name, hook_error, unit_of
from parallel3d.fsdp.same_order import SameOrder
from parallel3d.fsdp.schedule import GatherSchedule, PrefetchSettings
from parallel3d.fsdp.streams import make_comm

_LOGGER = logging.getLogger(__name__)
_REDUCES_UNUSED = attrgetter("reduce_unused")


@dataclass(eq=False)
class RootBackward:
    """State of the backward that is under way through the units of one root."""

    # Weakly: the function that autograd calls at the end, and drops after an exception.
    callback: Callable[[], Any]
    # Whether gathers may be deferred until gradients have arrived. Not with settings of the user's, nor if
    # ranks may use different parameters, as they would then defer differently.
    may_defer: bool
    creates_graph: bool = False  # whether it has ``create_graph=True``
    deferred: DeferredPrefetch | None = None
    # Of units with ``reduce_unused``: ids of those whose backward is over, and whose reduction was issued.
    ended: set[int] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)


class RunContext:
    """State shared by all units under one root. Units hold it; it refers to them by weak references, so that
    a deleted model is freed at once.

    Attributes:
        schedule: decides which unit is gathered next; it gets units as weak references.
        backward: the backward under way; None between backwards. backward_id: autograd's number of the last.
        iteration: number of the root's forwards so far.
        running: whether a forward of the root is under way.
        trains: whether the root's present or last forward began with gradients enabled.
        has_scopes: whether forward and backward are recorded for a profiler or log; see ``scopes``.
        root_options: the option classes that a root may have; their methods are called in this order.
        options: the options that this root has.
        on_meta, inputs_on_meta: whether parameters may still be on the meta device, and whether the forward's
            inputs are too: the forward then computes only shapes, and issues collectives.
    """

    root_options: ClassVar[tuple[type[Option], ...]] = ()

    def __init__(self, root: ContextUnit) -> None:
        self._root = root.ref
        self.comm = root.shared_comm or make_comm(root.device_type)
        self._units: list[weakref.ref] = []
        self.schedule = GatherSchedule(UnitsToGather(), root.prefetch or PrefetchSettings())
        self.backward: RootBackward | None = None
        self.backward_id = -1
        self._thread = get_ident()
        self.iteration = 0
        self.running = self.trains = self.has_scopes = False
        self.options: list[Option] = []
        self.same_order: SameOrder | None = None
        self.on_meta = True  # until a forward has found that none are
        self.inputs_on_meta = False

    @classmethod
    def of_root(cls, root: ContextUnit) -> RunContext:
        """Makes the context of ``root``, the first unit to run, and sets it on the units inside, too."""
        check_settings_of_root(root)
        context = cls(root)
        seen: set[int] = set()
        for root_module in root.modules:
            for name, module in root_module.named_modules():
                unit = unit_of(module)
                if unit is None or id(unit) in seen:
                    continue
                seen.add(id(unit))
                if unit.context is not None:  # what was issued there is finished there
                    unit.context.release(unit)
                unit.context, unit.registrar = context, None
                unit.input_dtype = input_dtype(unit.policy, is_root=unit is root)
                unit.label = name or class_name(root_module)
                for bucket in unit.group.buckets:
                    bucket.unit = unit.label
                context._units.append(unit.ref)
        made = (kind.of_root(context) for kind in cls.root_options)
        context.options = [option for option in made if option is not None]
        context.limit_inputs(at_least=context.comm.max_inputs)
        context.same_order = SameOrder.of(context)
        if _LOGGER.isEnabledFor(logging.DEBUG):
            for unit in context.units:
                _LOGGER.debug("unit %s: %s", unit.label, "; ".join(map(str, unit.group.buckets)))
        return context

    def limit_inputs(self, *, at_least: int = 1) -> None:
        """Sets ``comm.max_inputs``, the number of reduce-scatters in flight, to the largest that any bucket
        allows: buckets share the limit. ``at_least``: the number that other roots with the same comm need."""
        buckets = chain.from_iterable(unit.group.buckets for unit in self.units)
        self.comm.max_inputs = max((at_least, *(b.settings.max_inputs for b in buckets)))

    def release(self, unit: ContextUnit) -> None:
        """Completes the collectives issued for ``unit`` here, before another root takes it over."""
        self.comm.finish()
        if unit.group.state is ShardedState.GATHERING:
            unit.group.unshard(self.comm)

    @property
    def root(self) -> ContextUnit:
        root = self._root()
        assert root is not None
        return root

    @property
    def units(self) -> list[ContextUnit]:
        """All units, outer before inner, in the order of the modules."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    # -- forward -------------------------------------------------------------------------------------

    def note_meta(self, inputs: Any) -> None:
        self.on_meta = any(unit.group.on_meta for unit in self.units)
        self.inputs_on_meta = self.on_meta and any(each.is_meta for each in tensors_in(inputs))

    def begin_forward(self) -> None:
        # Asked here, so that a step without them runs no function of theirs.
        if (profiler_runs() or scopes.LOGGER.isEnabledFor(logging.DEBUG)) is not self.has_scopes:
            self.has_scopes = not self.has_scopes
            scopes.put_around(self, on=self.has_scopes)
        self.prepare_forward()

    def prepare_forward(self) -> None:
        root = self.root
        check_registered(root)
        for option in tuple(self.options):  # one may have nothing more to do
            option.before_root_forward(self)
        if self.same_order is not None:
            self.same_order.begin_forward()
        self.iteration += 1
        self._thread = get_ident()
        issuing.runs += 1
        self.trains = torch.is_grad_enabled()
        if self.trains:
            issuing.forwards += 1
        if issuing.on_run is not None:
            issuing.on_run()
        self.running = True
        self.schedule.begin_iteration()
        for unit in self.units:
            group = unit.group
            if group.state is ShardedState.GATHERING and group.retain is not Retain.USER:
                group.reshard(self.comm)  # the last forward did not get there
            for option in unit.options:
                option.prepare(unit, self)
            if group.renewed:  # all at once: they overlap the first units' compute
                group.renew_copies(self.comm, if_changed=unit.keep_between_forwards)
        if root.post_optim_event is not None:
            self.comm.post_optim_event = root.post_optim_event
            root.post_optim_event = None

    def issue_gathers(self, compute: Any = None) -> None:
        """Issues the all-gathers that the schedule asks for. ``compute``: the current stream if known."""
        while (ref := self.schedule.next()) is not None:
            unit = ref()  # type: ignore[operator]
            if unit is not None:
                unit.issue_unshard(self, compute)

    def end_forward(self, *, backward_to_come: bool) -> None:
        """Ends the root's forward: registers sharded parameters; reshards, unless a backward is to come."""
        if self.same_order is not None:
            self.same_order.end_forward(backward_to_come=backward_to_come)
        for unit in self.units:
            if unit.forward is not None:
                unit.forget_modules_to_run()
            if unit.group.retain is not Retain.NO:
                continue
            unit.group.register_sharded()
            if not backward_to_come:
                unit.leave_evaluation(self)
        if not backward_to_come:
            self.comm.settle_host()
        self.running = False  # last: what interrupts it makes the unit's ``__call__`` do it again

    # -- backward ------------------------------------------------------------------------------------

    def enter_backward(self) -> RootBackward:
        """Returns the backward under way; the first call begins it. All hooks in backward call it."""
        if self.backward is None:
            units = self.units
            sharded = [bucket.versions.sharded for unit in units for bucket in unit.group.buckets]
            if have_tensor_hooks(chain.from_iterable(sharded)):
                raise hook_error(units)
            issuing.backwards += 1
            for option in tuple(self.options):
                option.before_root_backward(self)
            if self.same_order is not None:
                self.same_order.begin_backward()
            # By this root, or by another one that shares the comm.
            if self.comm.left_by is not None:
                self.comm.finish()
            callback = self.finish_backward
            self._begin_backward(callback)
            self.backward_id = backward_id()
            self.schedule.begin_backwards()
            queue_backward_callback(callback)
            for option in self.options:
                option.begin_root_backward(self)
        assert self.backward is not None
        return self.backward

    def _begin_backward(self, callback: Callable[[], Any]) -> RootBackward:
        usual = self.schedule.settings == PrefetchSettings()
        may_defer = usual and not any(map(_REDUCES_UNUSED, self.units))
        self.backward = RootBackward(weakref.ref(callback), may_defer)
        return self.backward

    @contextmanager
    def reducing(self) -> Iterator[RootBackward]:
        """Context manager for ``finalize_backward``: lets reductions be issued outside of a backward."""
        before = self.backward
        order = self.same_order if before is None else None
        if order is not None:
            order.begin_backward("finalization")
        try:
            yield before or self._begin_backward(self.finish_backward)
            if order is not None:
                order.end_backward()
        finally:
            self.backward = before

    def begin_unit_backward(self, unit: ContextUnit, position: int, compute: Any) -> None:
        """Issues the prefetches due when ``unit`` begins its backward, or defers them (``DeferredPrefetch``).
        ``position``: the index of the forward in the order of forwards."""
        self._drop_deferred()
        bucket, backward = None, self.backward
        assert backward is not None
        if self.comm.holding and backward.may_defer:
            bucket = bucket_to_count(unit)
        if bucket is not None:
            backward.deferred = DeferredPrefetch(bucket, unit, self)
        self.schedule.begin_backward(unit.ref, position, defer=bucket is not None)
        self.issue_gathers(compute)

    def end_unit_backward(self, unit: ContextUnit) -> None:
        """Issues the prefetches and the reduction that are due when the backward of ``unit`` has ended."""
        if not unit.reduce_unused:
            self.schedule.end_backward(unit.ref)
            self.issue_gathers()
        self.reduce(unit)

    def reduce(self, unit: ContextUnit) -> None:
        """Issues the reductions of ``unit``, whose backward has ended.

        With ``set_reduce_scatter_unused_params`` ranks may end units' backwards in different orders. The
        reduction of a unit is then issued after those of all units that come after it in the model.
        """
        backward = self.backward
        assert backward is not None
        if not unit.reduce_unused:
            unit.reduce(self.comm, backward.reduced)
            return
        backward.ended.add(id(unit))
        for each in reversed(self.units):
            if each.reduce_unused and id(each) not in backward.reduced:
                if id(each) not in backward.ended:
                    return
                each.reduce(self.comm, backward.reduced)

    def issue_deferred(self) -> None:
        self._drop_deferred()
        self.schedule.issue_deferred()
        self.issue_gathers()

    def _drop_deferred(self) -> None:
        if self.backward is not None and self.backward.deferred is not None:
            self.backward.deferred.drop()
            self.backward.deferred = None

    @untraced
    def finish_backward(self) -> None:
        """Ends the root's backward: issues the remaining reductions, in one order on all ranks, and waits."""
        # By hand it is called after a backward that has reached no unit, too.
        reduced = (self.backward or self._begin_backward(self.finish_backward)).reduced
        # Another root's backward, which is under way too, ends the units that are its own by now.
        units = [unit for unit in self.units if unit.context is self]
        self._drop_deferred()
        self.schedule.end_backwards()
        for unit in reversed(units):
            unit.reduce(self.comm, reduced)
        for option in self.options:
            option.issue_reductions(self)
        if self.same_order is not None:
            self.same_order.end_backward()
        completes = True
        for option in self.options:
            completes = not option.leaves_in_flight(self) and completes
        if completes:
            self.comm.finish()
        for unit in units:
            unit.end_backward()
        for option in self.options:
            option.end_root_backward(self)
        self.backward = None
        if completes:
            self.gradients_are_complete()
        issuing.unit = ""

    def gradients_are_complete(self) -> None:
        """Calls the options' ``after_reductions``: a backward's gradients are in ``.grad`` on all ranks."""
        if self.same_order is not None:
            self.same_order.settle()
        for option in tuple(self.options):
            option.after_reductions(self)

    # -- after an exception --------------------------------------------------------------------------

    @property
    def backward_has_failed(self) -> bool:
        """Whether ``backward`` was ended by an exception, after which autograd calls no hook.

        On an accelerator backward runs on a thread of its own, and other threads may ask. On the thread that
        runs the forwards it has failed if none is running; on others, if autograd has dropped its callback.
        """
        if self.backward is None or in_backward_pass():
            return False
        return get_ident() == self._thread or self.backward.callback() is None

    def abandon(self, *, backward_only: bool) -> None:
        """Drops the forward and backward under way after an exception.

        Args:
            backward_only: True: only a backward has failed. A forward around it goes on, and accumulated sums
                are kept. False: all units are resharded and accumulated sums are dropped, too.
        """
        if self.comm.left_by is not None and self.comm.left_by() is not self:
            self.comm.finish()  # of another root
        self.comm.abandon()
        self._drop_deferred()
        if backward_only:
            self.schedule.end_backwards()
        else:
            self.schedule.abandon()
            self.running = False
        for unit in self.units:
            if backward_only:
                unit.end_backward()
            else:
                unit.abandon(self.comm)
            for bucket in unit.group.buckets:
                bucket.grads.forget()
                if not backward_only:
                    bucket.grads.sums.drop()
                for param in bucket.precision.compute_params:
                    param.grad = None  # whose hook was interrupted
        for option in self.options:
            option.end_root_backward(self)
        self.backward = None
        if self.same_order is not None:
            self.same_order.abandon()
        if not backward_only:
            for option in self.options:
                option.abandon_root(self)
            issuing.unit = ""
