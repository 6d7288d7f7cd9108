"""Residents: units whose unsharded parameters are the shards themselves, as on a replicate axis alone.

Nothing of theirs is gathered or freed, so that no unit has anything to do before its forward or backward: the
root shows all of them when its forward begins and hides them when it ends, and again around the backward
(for what is recomputed there). Their gradients arrive at a ``Gate``, one call for several buckets, and are
reduced by few calls, see ``JointReduce``. A unit's own hooks only look whether that is so.

A unit that is called by itself goes the general way, as does one with a setting that asks for more; that is
decided anew whenever the root's forward begins.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch

from parallel3d._compat import functorch_is_active, hook_gradient
from parallel3d._tree import tensors_in
from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.buckets.gate import Arrivals, Gate, Gradients, open_gates
from parallel3d.fsdp.buckets.joint_reduce import JointReduce, plan_reductions
from parallel3d.fsdp.group import GroupState, ParamGroup
from parallel3d.fsdp.slots import OwnSetattr

if TYPE_CHECKING:
    from parallel3d.fsdp.comm import Comm
    from parallel3d.fsdp.state import Unit

__all__ = ["Residents", "hook_outputs", "is_resident"]


def is_resident(unit: Unit) -> bool:
    """Whether nothing that the user has set asks for more than ``Residents`` do."""
    group = unit.group
    return (
        unit.sync
        and unit.all_reduce
        and unit.order_check is None
        and unit.guard is None
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
        shown: whether they are: within the root's forward, and in backward.
        joints: the reductions of their gradients, in the order of the units' backwards.
    """

    def __init__(self) -> None:
        self.groups: list[ParamGroup] = []
        self.shown = False
        self.joints: list[JointReduce] = []
        self._planned: list[tuple[Gate, float | None]] = []

    # -- forward -------------------------------------------------------------------------------------

    def begin_forward(self, units: Sequence[Unit], comm: Comm) -> None:
        """The root's forward begins: finds them, and shows them with what the user has changed."""
        self.groups = [unit.group for unit in units if self._prepare(unit, comm)]
        gates = [
            (bucket.gate, bucket.divide_factor)
            for group in reversed(self.groups)
            for bucket in reversed(group.buckets)
            if bucket.gate is not None and bucket.gate.arrivals.indices
        ]
        if gates != self._planned:
            self._plan(gates)
        for joint in self.joints:
            joint.pool.release()
        self.show()

    def _prepare(self, unit: Unit, comm: Comm) -> bool:
        group = unit.group
        if not is_resident(unit):
            if group.gated:
                group.hide()
                group.use_gates(None)
            return False
        group.hide()
        if group.state is not GroupState.SHARDED:  # held since an evaluation, say
            group.reshard(comm)
        group.adopt()
        group.count_trainable()
        if not group.gated:
            group.use_gates(functools.partial(_take, unit.ref))
        return True

    def _plan(self, gates: list[tuple[Gate, float | None]]) -> None:
        self._planned = gates
        by_bucket = {gate.arrivals.bucket(): gate for gate, _ in gates}
        self.joints = plan_reductions(bucket for bucket in by_bucket if bucket is not None)
        for joint in self.joints:
            for place, bucket in enumerate(joint.buckets):
                by_bucket[bucket].arrivals.joint = weakref.ref(joint), place
            for node in joint.share_nodes():
                open_gates([by_bucket[b] for b in node], [b.compute_params for b in node])
        for group in self.groups:
            group.list_slots()

    def show(self) -> None:
        """Puts their unsharded parameters into the modules."""
        self.shown = True
        for group in self.groups:
            group.show()

    def hide(self) -> None:
        """Puts the sharded ones back, but for what ``unshard()`` shows."""
        self.shown = False
        for group in self.groups:
            if not group.kept:
                group.hide()

    # -- backward ------------------------------------------------------------------------------------

    def reduce(self, comm: Comm) -> None:
        """At the end of a backward: issues what has waited for gradients that did not come."""
        for joint in self.joints:
            joint.launch(comm)

    def end_backward(self, *, keep: bool) -> None:
        """After the reductions. ``keep``: a forward around this backward goes on."""
        for joint in self.joints:
            joint.forget()
        if not keep:
            self.hide()


def _take(ref: weakref.ref[Unit], arrivals: Arrivals, grads: Gradients) -> JointReduce | None:
    """The gradients of one backward have arrived; returns the reduction that has them, if one has."""
    unit, bucket = ref(), arrivals.bucket()
    if unit is None or bucket is None or unit.context is None:
        return None
    context, params, indices = unit.context, bucket.params, arrivals.indices
    context.enter_backward()
    wanted = [
        grad is not None and params[index].sharded.requires_grad
        for index, grad in zip(indices, grads, strict=True)
    ]
    if not all(wanted):
        indices = list(compress(indices, wanted))
        grads = tuple(compress(grads, wanted))
        if not indices:
            return None
    if arrivals.joint is not None and not torch.is_grad_enabled() and is_resident(unit):
        joint, place = arrivals.joint[0](), arrivals.joint[1]
        if joint is not None and joint.accept(place, indices, grads, context.comm):  # type: ignore[arg-type]
            return joint
    for index, grad in zip(indices, grads, strict=True):
        assert grad is not None
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
