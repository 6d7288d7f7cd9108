"""Where nothing is sharded: units' parameters are registered, and their gradients reduced, together.

``RegisteredByRoot`` spares the hooks of units that have nothing to gather and to free.

``MergedBuckets`` reduces gradients of several units by one all-reduce, as a call costs the same however
little it sends. Neighbours' gradients are packed into one buffer, in the order in which backward comes to the
units: up to 1 MiB first, so that communication begins early, then up to 25 MiB. Which buckets are merged
follows from the units and their settings alone, and is the same on every rank. It is decided when a backward
begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.distributed import ProcessGroup

from parallel3d._torch.autograd import functorch_is_active, hook_gradient, untraced
from parallel3d._util.trace import issuing
from parallel3d._util.trees import tensors_in
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.context import RunContext
from parallel3d.fsdp.events import ContextUnit, Option
from parallel3d.fsdp.group import ParamGroup, Registered, Retain, ShardedState
from parallel3d.fsdp.layout import coalesced
from parallel3d.fsdp.reduction import DEFAULT_REDUCER, BucketSettings, Comm, Reduction, stages_of
from parallel3d.fsdp.same_order import SameOrder
from parallel3d.fsdp.unit import Unit

_REQUIRES_GRAD = attrgetter("requires_grad")


class MergedBucket:
    """Several buckets whose gradients one all-reduce sums. ``Comm.reduce`` takes it like a ``Bucket``.

    Attributes:
        waiting: {bucket whose gradients have all arrived: (unit, index of the bucket in the unit)}.
        launched: whether this backward's all-reduce was issued.
        is_split: whether the buckets are reduced one by one in this backward.
        in_flight: see ``BucketGradients``.
    """

    scatter_group: ProcessGroup | None = None
    tp_group: ProcessGroup | None = None
    settings = BucketSettings()
    pin = False

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        first = buckets[0]
        self._buckets = [weakref.ref(bucket) for bucket in buckets]
        self.unit, self.layout = first.unit, first.layout
        self.dtype, self.storage_device = first.precision.reduce_dtype, first.device
        self.over_replicate, self.reducer = list(first.over_replicate), first.reducer
        self.sizes = [bucket.layout.numel for bucket in buckets]
        self.numel = sum(self.sizes)
        self.comm: Comm | None = None
        self.same_order: SameOrder | None = None
        self.end()

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which their backwards end."""
        return [bucket for ref in self._buckets if (bucket := ref()) is not None]

    @property
    def grads(self) -> MergedBucket:
        """The object with the methods of ``Bucket.grads``: itself. (An attribute would be a cycle.)"""
        return self

    @property
    def used(self) -> list[list[int]]:
        return [sorted(bucket.grads.to_reduce()) for bucket in self.buckets]

    def span(self) -> tuple[int, int]:
        """Returns (start, end) of the elements of the buffer that are reduced."""
        return 0, self.numel

    def begin(self, context: RunContext) -> None:
        self.comm, self.same_order = context.comm, context.same_order
        for bucket in self.buckets:
            bucket.grads.merged = self

    def end(self) -> None:
        """Resets the state of one backward, when that is over or has failed."""
        self.comm = self.same_order = None
        self.flat: torch.Tensor | None = None
        self.waiting: dict[Bucket, tuple[Unit, int]] = {}
        self.launched = self.is_split = False
        self.in_flight: weakref.ref | None = None
        self._memory: dict[Bucket, torch.Tensor] = {}
        self._used: dict[Bucket, list[int]] = {}  # which parameters have a gradient
        for bucket in self.buckets:
            bucket.grads.merged = None

    def memory(self, bucket: Bucket) -> torch.Tensor | None:
        """Returns the part of the common buffer for the gradients of ``bucket``; None on a second call."""
        if self.flat is None:
            self.flat = torch.empty(self.numel, dtype=self.dtype, device=self.storage_device)
            self._memory = dict(zip(self.buckets, self.flat.split(self.sizes), strict=True))
        return self._memory.pop(bucket, None)

    def take(self, unit: Unit, index: int) -> bool:
        """Called when the gradients of bucket ``index`` of ``unit`` have arrived. Returns True if the bucket
        is reduced with the others, when the last one has arrived; False: the caller must reduce it alone."""
        bucket = unit.group.buckets[index]
        grads = bucket.grads
        fits = unit.all_reduce and grads.in_flight is None and grads.sums.scattered is None
        if not fits or self.launched or self.is_split:
            self.split()
            return False
        self.waiting[bucket] = unit, index
        if grads.input is not None:
            grads.input.pack()  # it frees the gradients
        if len(self.waiting) == len(self._buckets):
            assert self.comm is not None
            if self.same_order is not None:
                self.same_order.reduces_jointly(self)
            self.launched = True
            self.comm.reduce(self, all_reduce=True)
        return True

    def split(self) -> None:
        """Switches to one reduction per bucket in this backward, unless the all-reduce was issued."""
        if not self.launched and self.comm is not None:
            self.is_split = True
            waiting, self.waiting = self.waiting, {}
            for unit, index in waiting.values():
                unit.reduce_bucket(index, self.comm)

    def drain(self, bucket: Bucket) -> None:
        """Completes the all-reduce; called before ``bucket`` is reduced a second time in a backward."""
        if self.comm is not None:
            self.comm.drain(self)

    def start(self, *, all_reduce: bool) -> Reduction:
        before, scale, final_scale = next(iter(self.waiting)).grads.factors()
        itself = weakref.ref(self)
        for bucket in self.waiting:
            grads = bucket.grads
            inputs, self._used[bucket], _ = grads.collect(all_reduce=all_reduce)
            inputs.finish(before)  # in its part of ``flat``
            grads.forget()
            grads.in_flight = itself
        assert self.flat is not None
        job = Reduction(self, [self.flat], [], scale, final_scale=final_scale)
        job.stages = stages_of(job, self.over_replicate, ())
        return job

    def finish(self, job: Reduction) -> None:
        self.in_flight = None
        for bucket, piece in zip(self.buckets, job.take().split(self.sizes), strict=True):
            bucket.grads.put(piece, self._used[bucket])
        self._used = {}


def _can_be_merged(bucket: Bucket) -> bool:
    """Whether ``bucket`` needs at most an all-reduce over replicate, without options on its reduction."""
    return (
        type(bucket) is Bucket
        and bucket.shard_group is None
        and bucket.tp_group is None
        and bucket.settings.reducer is DEFAULT_REDUCER
        and not (bucket.settings.on_result or bucket.to_rest)
        and not bucket.settings.reduce_unused
        and bucket.settings.on_reduced is None
    )


class MergedBuckets(Option):
    """The option of a root that reduces small neighbouring buckets together.

    Attributes:
        merged: the ``MergedBucket`` objects of the last backward.
    """

    def __init__(self) -> None:
        self.merged: list[MergedBucket] = []
        self._kinds: list[tuple] = []

    @classmethod
    def of_root(cls, context: RunContext) -> MergedBuckets | None:
        buckets = (bucket for unit in context.units for bucket in unit.group.buckets)
        return cls() if any(map(_can_be_merged, buckets)) else None

    def begin_root_backward(self, context: RunContext) -> None:
        """Merges the buckets that can get gradients in this backward, with the present settings."""
        buckets = [
            bucket
            for unit in reversed(context.units)
            if unit.context is context and unit.sync and unit.all_reduce
            if all(map(_can_be_merged, unit.group.buckets))
            for bucket in reversed(unit.group.buckets)
            if bucket.grads.sums.scattered is None
            and any(map(_REQUIRES_GRAD, bucket.precision.compute_params))
        ]
        if context.root.manual_finalization:
            buckets = []
        kinds = [
            (
                (b.precision.reduce_dtype, b.precision.wire_dtype),
                b.device,
                b.divisor,
                tuple(b.replicate_groups),
                b.layout.numel,
                weakref.ref(b),
            )
            for b in buckets
        ]
        if kinds != self._kinds:
            self._kinds = kinds
            sizes = [b.layout.numel * b.precision.reduce_dtype.itemsize for b in buckets]
            groups = coalesced(sizes, [kind[:4] for kind in kinds])
            self.merged = [MergedBucket([buckets[i] for i in group]) for group in groups]
        for each in self.merged:
            each.begin(context)

    def issue_reductions(self, context: RunContext) -> None:
        """Reduces those buckets one by one whose ``MergedBucket`` still waits for others' gradients."""
        for each in self.merged:
            each.split()

    def end_root_backward(self, context: RunContext) -> None:
        for each in self.merged:
            each.end()


class RegisteredByRoot(Option):
    """Registers the unsharded parameters of units that gather, cast and free nothing, once for a whole
    forward or backward of the root, so that these units' hooks have nothing to do.

    Which units these are is decided when the root's forward begins. A unit that is called by itself, or has
    other options, runs its own hooks as usual.

    Attributes:
        units: weak references to the units.
        changed: groups whose weights have changed between the last forward and the present backward.
    """

    def __init__(self) -> None:
        self.units: list[weakref.ref[Unit]] = []
        self.changed: list[ParamGroup] = []

    @classmethod
    def of_root(cls, context: RunContext) -> RegisteredByRoot | None:
        root = context.root
        return cls() if any(_has_nothing_to_do(unit, root) for unit in context.units) else None

    def _alive(self) -> list[Unit]:
        units = [ref() for ref in self.units]
        return [unit for unit in units if unit is not None and unit.registrar is self]

    def before_root_forward(self, context: RunContext) -> None:
        self.units = []
        trains = torch.is_grad_enabled()
        for unit in context.units:
            group = unit.group
            if unit.registrar is self:
                unit.registrar = None
                group.register_sharded()
            if unit.context is not context or not _has_nothing_to_do(unit, context.root):
                continue
            if group.registered is not Registered.SHARDED:
                group.register_sharded()
            if group.state is not ShardedState.SHARDED:  # held since an evaluation, say
                group.reshard(context.comm)
            group.adopt()
            if group.on_meta:
                group.check_has_values()
            if trains:  # else a backward may still come, of what was trained before
                group.count_trainable()
            group.note_changes()
            group.register_unsharded()
            unit.registrar = self
            self.units.append(unit.ref)

    def begin_root_backward(self, context: RunContext) -> None:
        """Registers the unsharded parameters again, for recomputations (activation checkpointing)."""
        units = self._alive()
        self.changed = [unit.group for unit in units if unit.group.note_changes()]
        for unit in units:
            unit.group.register_unsharded()

    def end_root_backward(self, context: RunContext) -> None:
        self.changed = []
        for unit in self._alive():
            if context.running:  # a forward around the backward goes on
                unit.group.register_unsharded()
            elif unit.group.retain is not Retain.USER:
                unit.group.register_sharded()

    def has_registered(self, unit: Unit) -> bool:
        context = unit.context
        assert context is not None
        if unit.group.registered is not Registered.UNSHARDED or unit.forward is not None:
            return False
        if context.backward is None:
            return context.running
        return not context.backward_has_failed

    def before_unit(self, unit: Unit) -> None:
        if self.changed and unit.group in self.changed:
            raise unit.weights_changed()

    def after_unit(self, unit: Unit, output: Any) -> None:
        """Hooks the tensors in ``output``: the first gradient that reaches one begins the root's backward."""
        assert unit.context is not None
        # Hooks are of one level of torch.func's transforms; gradients arrive alike.
        if not torch.is_grad_enabled() or unit.context.backward or functorch_is_active():
            return
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:  # a leaf outlives the graph
                hook_gradient(tensor, partial(_begin_backward, unit))


def _has_nothing_to_do(unit: ContextUnit, root: ContextUnit) -> bool:
    group = unit.group
    return (
        bool(group.buckets)
        and group.direct == group.buckets
        and not (unit is root or unit.options or unit.tracked or group.beside)
        and unit.input_dtype is None
        and unit.policy.output_dtype is None
        and not (unit.reduce_unused or root.manual_finalization)
        and group.retain is not Retain.USER
        and group.registered is not Registered.OTHER
    )


@untraced
def _begin_backward(unit: Unit, _: torch.Tensor) -> None:
    """Hook on outputs: begins the root's backward. The autograd graph holds it, and it holds the unit."""
    assert unit.context is not None
    unit.context.enter_backward()
    issuing.unit = unit.label
