"""RunContext: what the units under one root share: their order, the communication, the end of a backward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from threading import get_ident
from typing import Any, ClassVar

import torch
from torch import nn

from parallel3d._torch.autograd import (
    backward_id,
    have_tensor_hooks,
    in_backward_pass,
    profiler_runs,
    queue_backward_callback,
    untraced,
)
from parallel3d._torch.fully_shard import FULLY_SHARD_KEYS
from parallel3d._util import scopes
from parallel3d._util.reachable import PLAIN_TYPES, tensors_with_graph
from parallel3d._util.trace import issuing
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.errors import StateError
from parallel3d.fsdp.api import input_dtype
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.comm import make_comm
from parallel3d.fsdp.events import ContextUnit, Option
from parallel3d.fsdp.group import Retain, ShardedState
from parallel3d.fsdp.members import (
    UNIT_ATTRIBUTE,
    check_loose,
    class_name,
    hook_error,
    unit_of,
    units_modules,
    units_of,
)
from parallel3d.fsdp.same_order import SameOrder
from parallel3d.fsdp.schedule import GatherSchedule, PrefetchSettings
from parallel3d.fsdp.watch import check_inputs, explain
from parallel3d.guards.nan_losses import nan_losses

_LOGGER = logging.getLogger(__name__)

# Every call of autograd's engine. Hooks on tensors see a backward only when it comes to them. That
# sharded Parameters were given as its ``inputs``, which no graph leads to, and what its error was,
# is known where the engine is called alone.


def run_backward(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``watch`` puts around the engine."""
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


# What is registered in a root's modules: compared with what was there in the last forward, by
# identity and within C; only if that differs are the modules walked, see ``members.check_loose``.
# This rests on no event, so that none can be missed.

REGISTERED_ATTRIBUTE = "_parallel3d_registered"  # of a root's first module: a ``_Registered``
_CONTAINERS = attrgetter("_modules", "_parameters")
_IS_TRAINABLE = attrgetter("requires_grad")


class _Registered:
    """The modules and parameters that were registered in the modules of one root at its last forward.

    It is an attribute of the root's first module, and refers to what is below that module alone.
    """

    def __init__(self, root: ContextUnit, modules: Sequence[nn.Module]) -> None:
        loose = list(check_loose(root, modules))
        tops = set(map(id, modules))
        inside = {id(each): each for module in modules for each in module.modules()}
        self._below = [
            module
            for key, module in inside.items()
            if key not in tops and all(isinstance(each, dict) for each in _CONTAINERS(module))
        ]
        self._found = list(self._read(modules))
        # Nobody ignored them; they were frozen.
        self._frozen = [param for param in loose if not param.requires_grad]

    def _read(self, modules: Iterable[nn.Module]) -> Iterable[Any]:
        containers = chain.from_iterable(map(_CONTAINERS, chain(modules, self._below)))
        return chain.from_iterable(map(dict.values, containers))

    def is_of(self, modules: Sequence[nn.Module]) -> bool:
        """Whether ``modules`` still have the same ones, and what was frozen still is."""
        now = list(self._read(modules))
        return (
            len(now) == len(self._found)
            and all(map(is_, now, self._found))
            and not any(map(_IS_TRAINABLE, self._frozen))
        )


def check_registered(root: ContextUnit) -> None:
    """Takes over what was registered in the modules of ``root`` since its last forward.

    Raises:
        Parallel3dError: a trainable parameter in its modules is of no unit, and was not ignored.
    """
    modules = root.modules
    registered = vars(modules[0]).get(REGISTERED_ATTRIBUTE)
    if registered is None or not registered.is_of(modules):
        vars(modules[0]).pop(REGISTERED_ATTRIBUTE, None)
        for unit in root.context.units:  # also those that this forward does not come to
            if not unit.group.is_registered and not unit.group.is_in_other_form:
                unit.group.adopt_replaced()
        vars(modules[0])[REGISTERED_ATTRIBUTE] = _Registered(root, modules)


# The tensors that a forward of a unit leaves on its modules' attributes.

_OURS = UNIT_ATTRIBUTE, REGISTERED_ATTRIBUTE
_STANDARD = frozenset((*vars(nn.Module()), *FULLY_SHARD_KEYS, *_OURS))


class Attributes:
    """The attributes of a unit's modules, without those that ``nn.Module`` has by itself.

    They are read after each forward, so what is to be read is listed once.
    """

    def __init__(self, tops: Iterable[weakref.ref[nn.Module]]) -> None:
        self._tops = list(tops)  # weakly: they have the unit, which has this
        self._modules: list[weakref.ref[nn.Module]] = []
        self._names: list[list[str]] = []
        self._sizes: list[int] = []

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that were computed with autograd's record: on attributes, and in what lies there."""
        dicts = [vars(module) for ref in self._modules if (module := ref()) is not None]
        if not dicts or _sizes_of(dicts) != self._sizes:
            dicts = self._list()
        try:
            values = self._read(dicts)
        except KeyError:  # one was deleted, and another added
            dicts = self._list()
            values = self._read(dicts)
        for attributes in dicts:
            if buffers := attributes["_buffers"]:
                values += [b for b in buffers.values() if b is not None and b.requires_grad]
        return tensors_with_graph(values) if values else iter(())

    def _list(self) -> list[dict[str, Any]]:
        modules = list(units_modules([m for ref in self._tops if (m := ref()) is not None]))
        self._modules = [weakref.ref(module) for module in modules]
        dicts = [vars(module) for module in modules]
        self._sizes = _sizes_of(dicts)
        self._names = [[n for n in attributes if n not in _STANDARD] for attributes in dicts]
        return dicts

    def _read(self, dicts: list[dict[str, Any]]) -> list[Any]:
        return [
            value
            for attributes, names in zip(dicts, self._names, strict=True)
            for name in names
            if type(value := attributes[name]) not in PLAIN_TYPES
        ]


def _sizes_of(dicts: list[dict[str, Any]]) -> list[int]:
    """Numbers that differ where a module or an attribute was added."""
    return [*map(len, dicts), *(len(attributes["_modules"]) for attributes in dicts)]


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
        if (
            bucket.reduced_zero_copy
            and not bucket.layout.small_grads[0]
            and bucket.settings.max_inputs == 1
        ):
            return bucket if bucket.precision.compute_params[0].requires_grad else None
    return None


class DeferredPrefetch:
    """Counts the gradients that a deferred all-gather waits for.

    Attributes:
        unit: the unit whose gradients they are.
        awaited: how many elements of large gradients must still arrive before the all-gather is issued.
    """

    def __init__(self, bucket: Bucket, unit: ContextUnit, context: RunContext) -> None:
        self.bucket = weakref.ref(bucket)  # which holds this: no cycle
        self.unit = unit.ref
        self.context = weakref.ref(context)
        self.awaited = sum(bucket.layout.segment_sizes[: bucket.reduced_zero_copy]) / 2
        bucket.grads.on_large = self.count

    def count(self, index: int) -> None:
        """Called when the gradient of the zero-copy parameter ``index`` has arrived."""
        bucket, context = self.bucket(), self.context()
        assert bucket is not None
        self.awaited -= bucket.layout.segment_sizes[index]
        if self.awaited <= 0 and context is not None:
            context.comm.free_inputs()
            context.issue_deferred()

    def drop(self) -> None:
        """Stops counting."""
        bucket = self.bucket()
        if bucket is not None:
            bucket.grads.on_large = None


@dataclass(eq=False)
class RootBackward:
    """A backward under way through the units of one root.

    Attributes:
        callback: what autograd calls at the end, weakly: it drops it where an exception ends the backward.
        creates_graph: whether it has ``create_graph=True``.
        may_defer: whether gathers may be deferred. Not where ranks may use different parameters: their
            gradients don't tell the same.
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
        running: whether one is under way.
        trains: whether it, or the last, began with gradients enabled.
        has_scopes: whether its phases are in scopes of a profile or log, see ``scopes``.
        root_options: the kinds of options that a root may have, in the order in which they are told.
        options: those that this one has.
        on_meta: whether parameters may still be on the meta device.
        inputs_on_meta: whether the forward's inputs are there too: then it is one of shapes and collectives.
    """

    root_options: ClassVar[tuple[type[Option], ...]] = ()

    def __init__(self, root: ContextUnit) -> None:
        self._root = root.ref
        self.comm = root.shared_comm or make_comm(root.device_type)
        self._units: list[weakref.ref] = []
        self.schedule = GatherSchedule(_Units(), root.prefetch or PrefetchSettings())
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
        if self.schedule.settings == _USUAL and self.comm.holding and backward.may_defer:
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
        """Whether the backward under way has been ended by an exception, of which autograd tells nobody.

        On an accelerator a backward runs on another thread than the one that waits for it, and a third may
        ask. So only the one that the forwards run on can tell by itself that none is under way; for others
        it is over when autograd has dropped the callback that it was to end with.
        """
        if self.backward is None or in_backward_pass():
            return False
        return get_ident() == self._thread or self.backward.callback() is None

    def abandon(self, *, backward_only: bool) -> None:
        """After an exception: nothing is in flight any more.

        Args:
            backward_only: it has ended a backward, of which autograd has dropped the callback; a forward
                around it goes on, and sums of earlier backwards still wait for their reduction. False: all
                is at rest afterwards, and no sum waits.
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


_USUAL = PrefetchSettings()


class _Units:
    """Answers the schedule's questions about units, which it knows by weak references."""

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


def check_settings_of_root(root: ContextUnit) -> None:
    """Raises StateError if a unit inside ``root`` has settings that only the outermost one may have."""
    for module in root.modules:
        for unit in units_of(module, recurse=True):
            if unit is root:
                continue
            if unit.prefetch is not None:
                raise StateError(
                    f"{unit.label!r} was given a schedule of gathers (set_backward_prefetch, "
                    f"set_forward_prefetch or set_limit_all_gathers), but it is inside {root.label!r}; call "
                    "the methods on the outermost unit"
                )
            if unit.manual_finalization:
                raise StateError(
                    f"set_manual_backward_finalization(True) was called on {unit.label!r}, which is inside "
                    f"{root.label!r}; call it on the outermost unit"
                )


def cast_inputs(unit: Any, module: nn.Module, inputs: tuple[tuple, dict]) -> tuple[tuple, dict]:
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
