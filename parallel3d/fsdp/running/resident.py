"""Residents: units whose unsharded parameters are the shards themselves, as on a replicate axis alone.

Nothing of theirs is gathered or freed, so that no unit has anything to do before its forward or backward: the
root shows all of them when its forward begins and hides them when it ends, and again around the backward
(for what is recomputed there). Their gradients arrive at a ``Gate``, one call for several buckets, and are
reduced by few calls, see ``JointReduce``. A unit's own hooks only look whether that is so.

A unit that is called by itself goes the general way, as does one with a setting that asks for more; that is
decided anew whenever the root's forward begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain, compress, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from parallel3d._compat import functorch_is_active, hook_gradient, untraced
from parallel3d._tree import tensors_in
from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.buckets.gate import Arrivals, Gate, Gradients, open_gates
from parallel3d.fsdp.buckets.joint_reduce import JointReduce, plan_reductions
from parallel3d.fsdp.group import GroupState, ParamGroup
from parallel3d.fsdp.running.freshness import WeightsStamp
from parallel3d.fsdp.running.hooks_off import HooksOff
from parallel3d.fsdp.running.swap import Swap
from parallel3d.fsdp.running.unchanged import Snapshot
from parallel3d.fsdp.slots import OwnSetattr

if TYPE_CHECKING:
    from parallel3d.fsdp.comm import Comm
    from parallel3d.fsdp.running.context import RunContext
    from parallel3d.fsdp.state import Unit

__all__ = ["Residents", "hook_outputs", "is_resident"]

_BEGUN = attrgetter("backward_begun", "begun", "arrived", "reduced")
_BUSY = attrgetter("grads.arrived", "grads.input", "grads.whole", "grads.partial", "reduce_unused")


def is_resident(unit: Unit) -> bool:
    """Whether nothing that the user has set asks for more than ``Residents`` do."""
    group = unit.group
    return (
        unit.sync
        and unit.all_reduce
        and unit.order_check is None
        and unit.guard is None
        and not (unit.context is not None and unit.context.finalization.manual)
        and not unit.tracked
        and unit.input_dtype is None
        and unit.policy.output_dtype is None
        and not unit.follows_mode
        and group.buffers is None
        and not group.kept
        and group.state is not GroupState.WHOLE
        and all(map(_is_plain, group.buckets))
    )


def _is_plain(bucket: Bucket) -> bool:
    return (
        (bucket.gate is not None or _can_have_gate(bucket))
        and bucket.comm_hook is None
        and bucket.all_reduce_hook is None
        and not bucket.reduce_unused
        and bucket.grads.whole is None
        and bucket.grads.partial is None
    )


def _has_no_tp(bucket: Bucket) -> bool:
    """Whether the unit's name need not be noted for collectives in its forward."""
    return all(param.tp_size == 1 for param in bucket.params)


def _can_have_gate(bucket: Bucket) -> bool:
    dtypes = {bucket.dtype, bucket.compute_dtype, bucket.reduce_dtype, bucket.grad_dtype}
    return (
        type(bucket) is Bucket
        and not bucket.has_own_unsharded
        and bucket.shard_group is None
        and bucket.second_group is None
        and bucket.tp_group is None
        and len(dtypes | {bucket.sum_dtype}) == 1
        and not bucket.policy.keep_low_precision_grads
        and all(
            param.even
            and (param.on.compute_mesh is None or param.layout.compute == "local")
            and not any(isinstance(holder, OwnSetattr) for holder, _ in param.slots)
            for param in bucket.params
        )
    )


class Residents:
    """Those of one root.

    Attributes:
        groups: theirs.
        others: the other units, weakly.
        shown: whether they are: within the root's forward, and in backward.
        joints: the reductions of their gradients, in the order of the units' backwards.
        changed: those whose weights have changed between the last forward and the backward under way.
    """

    def __init__(self) -> None:
        self.groups: list[ParamGroup] = []
        self.others: list[weakref.ref[Unit]] = []
        self.shown = False
        self.joints: list[JointReduce] = []
        self._units: list[weakref.ref[Unit]] = []
        self._swap = Swap()
        self._hooks_off = HooksOff()
        self._planned: list[tuple[Gate, float | None]] = []
        self._before: Snapshot | None = None
        self._stamp: WeightsStamp | None = None  # of all weights together: one look at most times
        self.changed: list[ParamGroup] = []

    # -- forward -------------------------------------------------------------------------------------

    def are_as_before(self, units: Sequence[Unit]) -> bool:
        """Whether the root's forward that begins finds everything as the last one has left it."""
        return self._before is not None and self._before.is_of(units)

    def find(self, units: Sequence[Unit], context: RunContext) -> None:
        """Which of ``units`` they are now, with what the user has changed."""
        self._hooks_off.end(backward_to_come=False)  # where an exception has left them off
        resident = [unit for unit in units if self._prepare(unit, context)]
        ids = set(map(id, resident))
        self.groups = [unit.group for unit in resident]
        self._units = [unit.ref for unit in resident]
        self.others = [unit.ref for unit in units if id(unit) not in ids]
        gates = [
            (bucket.gate, bucket.divide_factor)
            for group in reversed(self.groups)
            for bucket in reversed(group.buckets)
            if bucket.gate is not None and bucket.gate.arrivals.indices
        ]
        if gates != self._planned:
            self._plan(gates)
        self._swap = Swap(self.groups)
        self._hooks_off.modules = [
            weakref.ref(module)
            for unit in resident
            if not unit.is_root and all(map(_has_no_tp, unit.group.buckets))
            for module in unit.modules
        ]
        # On meta every forward is looked at anew: the next one's inputs may have values.
        fixed = self.groups and not any(group.on_meta for group in self.groups)
        self._before = Snapshot(units, self.groups) if fixed else None
        buckets = [bucket for group in self.groups for bucket in group.buckets]
        for bucket in buckets:
            bucket.versions.stamp.take()
            bucket.versions.set_unsharded()
        self._stamp = WeightsStamp(buckets) if buckets else None
        self._note_changes()

    def _note_changes(self) -> list[ParamGroup]:
        """Those whose weights have changed since the last look; autograd is told of it."""
        if self._stamp is None or not self._stamp.is_old():
            return []
        self._stamp.take()
        return [group for group in self.groups if group.note_changes()]

    def look_again(self) -> None:
        """Something else has changed that makes units residents."""
        self._before = None

    def begin_forward(self) -> None:
        """Shows them."""
        self._note_changes()
        self.show()
        self._hooks_off.begin()

    def end_forward(self, *, backward_to_come: bool) -> None:
        """At rest again."""
        self._hooks_off.end(backward_to_come=backward_to_come)
        self.hide()

    def _prepare(self, unit: Unit, context: RunContext) -> bool:
        group = unit.group
        if unit.context is not context:  # also inside another root, which has run since
            return False
        if not is_resident(unit):
            if group.gated:
                group.hide()
                group.use_gates(None)
            return False
        group.hide()
        if group.state is not GroupState.SHARDED:  # held since an evaluation, say
            group.reshard(context.comm)
        group.adopt()
        group.check_has_values()
        group.count_trainable()
        if not group.gated:
            group.use_gates(unit.ref)
        return True

    def _plan(self, gates: list[tuple[Gate, float | None]]) -> None:
        self._planned = gates
        for gate, _ in gates:
            gate.renew()
        by_bucket = {gate.arrivals.bucket(): gate for gate, _ in gates}
        self.joints = plan_reductions(bucket for bucket in by_bucket if bucket is not None)
        for joint in self.joints:
            for place, bucket in enumerate(joint.buckets):
                by_bucket[bucket].arrivals.joint = weakref.ref(joint), place
            for node in joint.share_nodes():
                sources = [bucket.compute_params for bucket in node]
                open_gates([by_bucket[bucket] for bucket in node], sources, _arrive)
        for group in self.groups:
            group.list_slots()

    def show(self) -> None:
        """Puts their unsharded parameters into the modules."""
        self.shown = True
        self._swap.show()

    def hide(self) -> None:
        """Puts the sharded ones back, but for what ``unshard()`` shows."""
        self.shown = False
        self._swap.hide()

    # -- backward ------------------------------------------------------------------------------------

    def begin_backward(self, units: Sequence[Unit], comm: Comm) -> None:
        """Shows them to what is recomputed."""
        same = self._before is not None and self._before.has_settings_of(units)
        for joint in self.joints:
            joint.begin(comm, accepts_all=same)
        self.changed = self._note_changes()
        if not self.shown:
            self.show()

    def are_untouched(self) -> bool:
        """Whether a backward has brought something to the gates only; False if there are none."""
        if self._before is None:
            return False
        begun = map(_BEGUN, (unit for ref in self._units if (unit := ref()) is not None))
        busy = chain.from_iterable(map(_BUSY, group.buckets) for group in self.groups)
        return not any(chain.from_iterable(chain(begun, busy)))

    def reduce(self) -> None:
        """At the end of a backward: issues what has waited for gradients that did not come."""
        for joint in self.joints:
            joint.launch()

    def end_backward(self, *, keep: bool) -> None:
        """After the reductions. ``keep``: a forward around this backward goes on."""
        for joint in self.joints:
            joint.end()
        self.changed = []
        if not keep:
            self._hooks_off.end(backward_to_come=False)
            self.hide()


@untraced
def _arrive(node: list[Arrivals], grads: Gradients) -> None:
    """The gradients of one backward have arrived, for the buckets that share ``node``."""
    unit = node[0].unit()
    context = None if unit is None else unit.context
    if context is not None and not torch.is_grad_enabled():
        context.enter_backward()
        place = node[0].joint
        joint = None if place is None else place[0]()
        if joint is not None and joint.accepts_all and place is not None:
            indices = [arrivals.indices for arrivals in node]
            if joint.accept_all(place[1], indices, grads):
                joint.pack()
                return
    _arrive_one_by_one(node, grads)


def _arrive_one_by_one(node: list[Arrivals], grads: Gradients) -> None:
    given = iter(grads)
    taken = [_take(arrivals, list(islice(given, len(arrivals.indices)))) for arrivals in node]
    for joint in dict.fromkeys(filter(None, taken)):
        joint.pack()


def _take(arrivals: Arrivals, grads: list[torch.Tensor | None]) -> JointReduce | None:
    """The gradients of one bucket; returns the reduction that has them, if one has."""
    unit, bucket = arrivals.unit(), arrivals.bucket()
    if unit is None or bucket is None or unit.context is None:
        return None
    params, indices = bucket.params, arrivals.indices
    unit.context.enter_backward()
    wanted = [
        grad is not None and params[index].sharded.requires_grad
        for index, grad in zip(indices, grads, strict=True)
    ]
    if not all(wanted):
        indices = list(compress(indices, wanted))
        grads = list(compress(grads, wanted))
        if not indices:
            return None
    given = [grad for grad in grads if grad is not None]
    if arrivals.joint is not None and not torch.is_grad_enabled() and is_resident(unit):
        joint, place = arrivals.joint[0](), arrivals.joint[1]
        fits = joint is not None and joint.comm is not None and joint.divisor == bucket.divisor
        if joint is not None and fits and joint.accept(place, indices, given):
            return joint
    for index, grad in zip(indices, given, strict=True):
        unit.take_gradient(bucket, index, grad)
    return None


def hook_outputs(unit: Unit, output: Any) -> None:
    """Lets the first gradient that reaches one of ``output`` begin the backward."""
    if functorch_is_active():  # hooks are of one level of its transforms; gradients arrive alike
        return
    for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
        # A parameter that is passed on outlives the graph.
        if tensor.requires_grad and not (tensor.is_leaf or getattr(tensor, "_is_param", False)):
            hook_gradient(tensor, unit.begin_backward)
