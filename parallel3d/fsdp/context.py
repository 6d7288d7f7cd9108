"""RunContext: what the units under one root share: their order, the communication, the end of a backward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class RootBackward:
    """A backward under way through the units of one root.

    Attributes:
        callback: weak reference to the function that autograd calls at the end. Autograd drops the function
            if an exception ends the backward.
        creates_graph: whether it has ``create_graph=True``.
        may_defer: whether gathers may be deferred until gradients have arrived. False if ranks may use
            different parameters, as they would then defer differently.
        deferred: counts gradients for the gather that the schedule has put off.
        ended, reduced: ids of the units whose backward is over, and whose reduction was issued.
    """

    callback: Callable[[], Any]
    may_defer: bool
    creates_graph: bool = False
    deferred: DeferredPrefetch | None = None
    ended: set[int] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)


class RunContext:
    """The state that the units under one root share.

    Units hold their context; the context refers to them weakly, so that a deleted model is freed at once.

    Attributes:
        schedule: which unit is gathered when; its units are weak references.
        backward: the backward under way; None between backwards.
        backward_id: autograd's number of the last one.
        iteration: number of the root's forwards so far.
        running: whether a forward of the root is under way.
        trains: whether that forward, or else the last one, began with gradients enabled.
        has_scopes: whether its phases are in scopes of a profile or log, see ``scopes``.
        root_options: the kinds of options that a root may have, in the order in which they are told.
        options: those that this one has.
        on_meta: whether parameters may still be on the meta device.
        inputs_on_meta: whether the forward's inputs are on meta too: the forward then computes only shapes
            and issues collectives.
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
        """Makes the context of ``root``, which is the first unit to run, and of the units inside it."""
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
                unit.name(name or class_name(root_module))
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
        """Sets ``comm.max_inputs`` to the largest limit of the buckets, which share it: one with a smaller
        limit must not wait for the inputs of the others. ``at_least``: that of other roots on the comm."""
        limits = [
            bucket.settings.max_inputs for unit in self.units for bucket in unit.group.buckets
        ]
        self.comm.max_inputs = max((*limits, at_least))

    def release(self, unit: ContextUnit) -> None:
        """Completes what was issued here for ``unit``, before it becomes a unit of another root."""
        self.comm.finish()
        if unit.group.state is ShardedState.GATHERING:
            unit.group.unshard(self.comm)

    @property
    def root(self) -> ContextUnit:
        """The outermost unit."""
        root = self._root()
        assert root is not None
        return root

    @property
    def units(self) -> list[ContextUnit]:
        """All units, outer before inner, in the order of the modules."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    # -- forward -------------------------------------------------------------------------------------

    def note_meta(self, inputs: Any) -> None:
        """Notes before a forward with ``inputs`` whether parameters, and inputs, are on the meta device."""
        self.on_meta = any(unit.group.on_meta for unit in self.units)
        self.inputs_on_meta = self.on_meta and any(each.is_meta for each in tensors_in(inputs))

    def begin_forward(self) -> None:
        """Begins the root's forward."""
        # Asked here, so that a step without them runs no function of theirs.
        if (profiler_runs() or scopes.LOGGER.isEnabledFor(logging.DEBUG)) is not self.has_scopes:
            self.has_scopes = not self.has_scopes
            scopes.put_around(self, on=self.has_scopes)
        self.prepare_forward()

    def prepare_forward(self) -> None:
        """Prepares the units for a forward."""
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
            self._prepare(unit)
        if root.post_optim_event is not None:
            self.comm.post_optim_event = root.post_optim_event
            root.post_optim_event = None

    def _prepare(self, unit: ContextUnit) -> None:
        group = unit.group
        if group.state is ShardedState.GATHERING and group.retain is not Retain.USER:
            group.reshard(self.comm)  # the last forward did not get there
        for option in unit.options:
            option.prepare(unit, self)
        if group.renewed:  # all at once: they overlap the first units' compute
            group.renew_copies(self.comm, if_changed=unit.keep_between_forwards)

    def issue_gathers(self, compute: Any = None) -> None:
        """Issues the all-gathers that the schedule asks for; ``compute``: see ``Comm.issue_gather``."""
        while (ref := self.schedule.next()) is not None:
            unit = ref()  # type: ignore[operator]
            if unit is not None:
                unit.issue_unshard(self, compute)

    def end_forward(self, *, backward_to_come: bool) -> None:
        """Ends the root's forward: all units register their sharded parameters, and reshard if no backward
        follows."""
        if self.same_order is not None:
            self.same_order.end_forward(backward_to_come=backward_to_come)
        for unit in self.units:
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
        """Called by every hook that a backward reaches; the first call begins the backward."""
        if self.backward is None:
            buckets = (bucket for unit in self.units for bucket in unit.group.buckets)
            if any(have_tensor_hooks(bucket.grads.sharded) for bucket in buckets):
                raise hook_error(self.units)
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
        may_defer = not any(unit.reduce_unused for unit in self.units)
        self.backward = RootBackward(weakref.ref(callback), may_defer)
        return self.backward

    @contextmanager
    def reducing(self) -> Iterator[RootBackward]:
        """A context in which reductions may be issued outside of a backward, as if in one."""
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
        """Issues the all-gathers that are due when ``unit`` begins the backward of forward ``position``;
        ``compute``: the comm's ``current_stream()``."""
        self._drop_deferred()
        bucket, backward = None, self.backward
        assert backward is not None
        if (
            self.schedule.settings == PrefetchSettings()
            and self.comm.holding
            and backward.may_defer
        ):
            bucket = bucket_to_count(unit)
        if bucket is not None:
            backward.deferred = DeferredPrefetch(bucket, unit, self)
        self.schedule.begin_backward(unit.ref, position, defer=bucket is not None)
        self.issue_gathers(compute)

    def end_unit_backward(self, unit: ContextUnit) -> None:
        """Issues the all-gathers and the reduction that are due when a unit's backward is over.

        Where ranks may use different parameters (``set_reduce_scatter_unused_params``), backwards end in
        another order on each: there a unit's reduction waits until those after it in the model have been
        issued.
        """
        if not unit.reduce_unused:
            self.schedule.end_backward(unit.ref)
            self.issue_gathers()
        self.reduce(unit)

    def reduce(self, unit: ContextUnit) -> None:
        """Issues the reductions of ``unit``, whose backward has ended; see ``end_unit_backward``."""
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
        """Issues the all-gather that was deferred, if one was."""
        self._drop_deferred()
        self.schedule.issue_deferred()
        self.issue_gathers()

    def _drop_deferred(self) -> None:
        if self.backward is not None and self.backward.deferred is not None:
            self.backward.deferred.drop()
            self.backward.deferred = None

    @untraced
    def finish_backward(self) -> None:
        """Ends the backward: reduces what is still to be reduced, in the same order on every rank."""
        # By hand it is called after a backward that has reached no unit, too.
        reduced = (self.backward or self._begin_backward(self.finish_backward)).reduced
        units = self.units
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
        """Tells options that the gradients of a backward are in ``.grad``, and the same ones on all ranks."""
        if self.same_order is not None:
            self.same_order.settle()
        for option in tuple(self.options):
            option.after_reductions(self)

    # -- after an exception --------------------------------------------------------------------------

    @property
    def backward_has_failed(self) -> bool:
        """Whether an exception has ended the backward noted as under way. Autograd calls no hook then.

        On an accelerator a backward runs on another thread than the one that waits for it, and a third thread
        may ask. Only the thread that runs the forwards knows by itself that no backward is under way; on
        others the backward is over when autograd has dropped its callback.
        """
        if self.backward is None or in_backward_pass():
            return False
        return get_ident() == self._thread or self.backward.callback() is None

    def abandon(self, *, backward_only: bool) -> None:
        """Drops all work in flight after an exception.

        Args:
            backward_only: the exception has ended only a backward, whose callback autograd has dropped. A
                forward around that backward goes on, and gradients accumulated in earlier backwards are kept
                until they are reduced. With False all units are at rest afterwards, and these are dropped.
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
                    bucket.grads.drop_waiting()
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
