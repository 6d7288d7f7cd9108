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
from typing import Any

import torch
from torch.distributed import ProcessGroup

from parallel3d._torch.autograd import functorch_is_active, untraced
from parallel3d._util.trace import issuing
from parallel3d._util.trees import tensors_in
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.comm import Comm
from parallel3d.fsdp.context import RunContext
from parallel3d.fsdp.events import ContextUnit, Option
from parallel3d.fsdp.group import ParamGroup, Retain
from parallel3d.fsdp.layout import coalesced
from parallel3d.fsdp.reduction import DEFAULT_REDUCER, BucketSettings, Reduction, stages_of
from parallel3d.fsdp.same_order import SameOrder
from parallel3d.fsdp.unit import Unit


class MergedBucket:
    """Buckets whose gradients share one all-reduce. ``Comm.reduce`` takes it in the place of a ``Bucket``.

    Attributes:
        waiting: the buckets whose gradients are complete -> (unit, index of the bucket in the unit).
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
        self.over_replicate = list(first.over_replicate)
        self.sizes = [bucket.layout.numel for bucket in buckets]
        self.numel = sum(self.sizes)
        self.comm: Comm | None = None
        self.same_order: SameOrder | None = None
        self.end()

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order of their backwards."""
        return [bucket for ref in self._buckets if (bucket := ref()) is not None]

    @property
    def grads(self) -> MergedBucket:
        """What a comm starts and finishes. A property, as an attribute would be a reference cycle."""
        return self

    @property
    def used(self) -> list[list[int]]:
        """For each bucket the indices of the parameters that have a gradient."""
        return [sorted(bucket.grads.to_reduce()) for bucket in self.buckets]

    def span(self) -> tuple[int, int]:
        """Where in the buffer what is reduced begins and ends."""
        return 0, self.numel

    def begin(self, context: RunContext) -> None:
        """Called when a backward begins."""
        self.comm, self.same_order = context.comm, context.same_order
        for bucket in self.buckets:
            bucket.grads.merged = self

    def end(self) -> None:
        """Called when the backward is over, or broken off."""
        self.comm = self.same_order = None
        self.flat: torch.Tensor | None = None
        self.waiting: dict[Bucket, tuple[Unit, int]] = {}
        self.launched = self.is_split = False
        self.in_flight: weakref.ref | None = None
        self._memory: dict[Bucket, torch.Tensor] = {}
        self._jobs: list[Reduction] = []
        for bucket in self.buckets:
            bucket.grads.merged = None

    def memory(self, bucket: Bucket) -> torch.Tensor | None:
        """Returns the part of the buffer for the gradients of ``bucket``; None if that was given before."""
        if self.flat is None:
            self.flat = torch.empty(self.numel, dtype=self.dtype, device=self.storage_device)
            self._memory = dict(zip(self.buckets, self.flat.split(self.sizes), strict=True))
        return self._memory.pop(bucket, None)

    def take(self, unit: Unit, index: int) -> bool:
        """Takes over the reduction of bucket ``index`` of ``unit``, whose gradients are complete; the last
        bucket starts the all-reduce. Returns False if the caller must reduce the bucket by itself."""
        bucket = unit.group.buckets[index]
        grads = bucket.grads
        fits = unit.all_reduce and grads.in_flight is None and grads.partial_reduce_output is None
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
        """Reduces the buckets one by one in this backward, unless the all-reduce was issued."""
        if not self.launched and self.comm is not None:
            self.is_split = True
            waiting, self.waiting = self.waiting, {}
            for unit, index in waiting.values():
                unit.reduce_bucket(index, self.comm)

    def drain(self, bucket: Bucket) -> None:
        """Completes the all-reduce, before one of the buckets is reduced again."""
        if self.comm is not None:
            self.comm.drain(self)

    def start(self, *, all_reduce: bool) -> Reduction:
        """Returns the reduction of what the buckets have."""
        self._jobs = [bucket.grads.start(all_reduce=all_reduce) for bucket in self.waiting]
        assert self.flat is not None
        first, itself = self._jobs[0], weakref.ref(self)
        job = Reduction(self, [self.flat], [], first.scale, final_scale=first.final_scale)
        job.stages = stages_of(job, self.over_replicate, (), ())
        for bucket in self.waiting:
            bucket.grads.in_flight = itself
        return job

    def finish(self, job: Reduction) -> None:
        """Puts the result into ``.grad``."""
        self.in_flight = None
        flat, jobs = job.take(), {each.bucket: each for each in self._jobs}
        for bucket, piece in zip(self.buckets, flat.split(self.sizes), strict=True):
            jobs[bucket].tensor = piece
            bucket.grads.finish(jobs[bucket])
        self._jobs = []


def _can_be_merged(bucket: Bucket) -> bool:
    """Whether ``bucket`` is of the plain kind and only summed over replicate."""
    return (
        type(bucket) is Bucket
        and bucket.shard_group is None
        and bucket.tp_group is None
        and bool(bucket.replicate_groups)
        and bucket.settings.reducer is DEFAULT_REDUCER
        and not (bucket.settings.on_result or bucket.to_rest)
        and not bucket.settings.reduce_unused
        and bucket.settings.on_reduced is None
    )


class MergedBuckets(Option):
    """Merges the buckets of one root.

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
        """Merges the buckets that a backward with the present settings can bring gradients of."""
        buckets = [
            bucket
            for unit in reversed(context.units)
            if unit.context is context and unit.sync and unit.all_reduce
            if all(map(_can_be_merged, unit.group.buckets))
            for bucket in reversed(unit.group.buckets)
            if bucket.grads.partial_reduce_output is None
            and any(param.requires_grad for param in bucket.precision.compute_params)
        ]
        if context.root.manual_finalization:
            buckets = []
        kinds = [
            (
                b.precision.reduce_dtype,
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
            sizes = [
                bucket.layout.numel * bucket.precision.reduce_dtype.itemsize for bucket in buckets
            ]
            groups = coalesced(sizes, [kind[:4] for kind in kinds])
            self.merged = [MergedBucket([buckets[i] for i in group]) for group in groups]
        for each in self.merged:
            each.begin(context)

    def issue_reductions(self, context: RunContext) -> None:
        """Reduces what waits for gradients that have not arrived."""
        for each in self.merged:
            each.split()

    def end_root_backward(self, context: RunContext) -> None:
        for each in self.merged:
            each.end()


class RegisteredByRoot(Option):
    """Registers the parameters of units that gather, cast and free nothing, for the whole of a root's passes.

    Their hooks have nothing else to do. A unit that is called by itself, or has a setting that asks for more,
    is run as any other unit is; which they are is decided when the root's forward begins.

    Attributes:
        units: the units, weakly.
        changed: the groups whose weights have changed between the last forward and the backward under way.
    """

    def __init__(self) -> None:
        self.units: list[weakref.ref[Unit]] = []
        self.changed: list[ParamGroup] = []

    @classmethod
    def of_root(cls, context: RunContext) -> RegisteredByRoot | None:
        return cls() if any(map(_has_nothing_to_do, context.units)) else None

    def _alive(self) -> list[Unit]:
        units = (ref() for ref in self.units)
        return [unit for unit in units if unit is not None and unit.registrar is self]

    def before_root_forward(self, context: RunContext) -> None:
        self.units = []
        for unit in context.units:
            group = unit.group
            if unit.registrar is self:
                unit.registrar = None
                group.register_sharded()
            if unit.context is not context or not _has_nothing_to_do(unit):
                continue
            group.register_sharded()
            if not group.is_sharded:  # held since an evaluation, say
                group.reshard(context.comm)
            group.adopt()
            if group.on_meta:
                group.check_has_values()
            if (
                torch.is_grad_enabled()
            ):  # else a backward may still come, of what was trained before
                group.count_trainable()
            group.note_changes()
            group.register_unsharded()
            unit.registrar = self
            self.units.append(unit.ref)

    def begin_root_backward(self, context: RunContext) -> None:
        """Registers them for what is recomputed."""
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
        """See ``Registrar``."""
        context = unit.context
        assert context is not None
        return (
            unit.group.is_registered
            and (context.running or context.backward is not None)
            and not unit.forward
            and not context.backward_has_failed
        )

    def before_unit(self, unit: Unit) -> None:
        """See ``Registrar``."""
        if self.changed and unit.group in self.changed:
            raise unit.weights_changed()

    def after_unit(self, unit: Unit, output: Any) -> None:
        """Lets the first gradient that reaches one of ``output`` begin the backward."""
        assert unit.context is not None
        # Hooks are of one level of torch.func's transforms; gradients arrive alike.
        if not torch.is_grad_enabled() or unit.context.backward or functorch_is_active():
            return
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:  # a leaf outlives the graph
                tensor.register_hook(partial(_begin_backward, unit))


def _has_nothing_to_do(unit: ContextUnit) -> bool:
    group = unit.group
    return (
        bool(group.buckets)
        and len(group.direct) == len(group.buckets)
        and not (unit.is_root or unit.options or unit.tracked or group.beside)
        and unit.input_dtype is None
        and unit.policy.output_dtype is None
        and not (unit.reduce_unused or unit.context.root.manual_finalization)
        and group.retain is not Retain.USER
        and not group.is_in_other_form
    )


@untraced
def _begin_backward(unit: Unit, _: torch.Tensor) -> None:
    """Hook on outputs, whose first gradient begins the backward. Graphs hold it, and it holds the unit."""
    assert unit.context is not None
    unit.context.enter_backward()
    issuing.unit = unit.label
