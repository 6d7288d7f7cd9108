"""What the engine holds during a backward, event by event: unsharded parameters, gradients, buffers. Bytes.

The planner runs the engine's own arithmetic: ``fsdp/layout.py`` says how parameters lie in buckets,
``fsdp/schedule.py``, fed with the events of a step, which unit is gathered when.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from parallel3d.ep.division import shard_dim
from parallel3d.fsdp.layout import (
    PartialGrad,
    Segment,
    are_zero_copy,
    bucket_order,
    ceil_div,
    is_exact,
    padded_shape,
)
from parallel3d.fsdp.schedule import GatherSchedule, PrefetchSettings
from parallel3d.planner.model_spec import Parameter, UnitSpec

# The buckets of a unit, from the shapes of its parameters.


@dataclass(frozen=True, slots=True)
class Grad:
    """The gradient of one parameter in its bucket.

    Attributes:
        numel: elements of the gradient that autograd produces.
        padded: elements of its padded copy; 0: no copy is made.
        waits: whether autograd's tensor is held until the reduction, because it is zero-copy, or small and
            packed with others.
        zero_copy: whether it is reduced from where autograd has put it.
    """

    numel: int
    padded: int
    waits: bool
    zero_copy: bool


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """A bucket. Sizes are numbers of elements.

    Attributes:
        num_shards: n, ranks that it is sharded over.
        numel: S, elements of a rank's shard, padding included.
        packed: those of S that are not zero-copy.
        trainable: whether its parameters have gradients.
        has_large: whether it has large zero-copy gradients. Deferred gathers are issued when half of their
            elements have arrived.
        packs_as_chunks: whether one kernel packs its small gradients.
        grads: its gradients, in the order of the bucket.
    """

    num_shards: int
    numel: int
    packed: int
    trainable: bool
    has_large: bool
    packs_as_chunks: bool
    grads: tuple[Grad, ...]


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The buckets of ``count`` equal units.

    Attributes:
        arrivals: (index of the bucket, of the gradient in it), in the order in which backward brings them.
        experts: the unit of experts in each of these; None: its parameters are among the unit's own.
    """

    kind: str
    count: int
    buckets: tuple[BucketLayout, ...]
    arrivals: tuple[tuple[int, int], ...]
    experts: UnitLayout | None = None

    @property
    def unsharded_numel(self) -> int:
        """Elements of the unsharded parameters of one unit, padding included."""
        own = sum(bucket.num_shards * bucket.numel for bucket in self.buckets)
        return own + (self.experts.unsharded_numel if self.experts is not None else 0)


def each_unit(layouts: Iterable[UnitLayout]) -> list[UnitLayout]:
    """Every single unit, in the order of the forward: experts after the block that they are in."""
    both = ((each, each.experts) for each in layouts for _ in range(each.count))
    return [unit for pair in both for unit in pair if unit is not None]


@lru_cache(maxsize=65536)
def unit_layout(
    unit: UnitSpec,
    shard: int,
    tp: int,
    itemsize: int,
    sequence_parallel: bool,
    zero_copy_bytes: int,
    ep: int = 1,
) -> UnitLayout:
    """Returns the buckets of ``unit`` on the first rank of ``shard`` x ``tp``, which has the most elements.

    Args:
        itemsize: bytes of an element at rest.
        zero_copy_bytes: unsharded bytes from which a parameter is zero-copy.
        ep: the ranks of shard x tp that share the experts. If they are several, these are a unit of their
            own, sharded over the others.
    """
    dense, experts = unit, None
    if ep > 1 and any(p.experts for p in unit.parameters):
        dense = replace(unit, parameters=tuple(p for p in unit.parameters if not p.experts))
        own = tuple(replace(p, tp_dim=0, tp_partial="never") for p in unit.parameters if p.experts)
        efsdp = shard * tp // ep
        segments = [_segment(p, efsdp, ep, False, shard_dim(p.shape, ep, efsdp)) for p in own]
        inner = replace(unit, kind="experts", parameters=own)
        experts = _laid_out(inner, segments, itemsize, zero_copy_bytes)
    segments = [_segment(p, shard, tp, sequence_parallel) for p in dense.parameters]
    return replace(_laid_out(dense, segments, itemsize, zero_copy_bytes), experts=experts)


def _laid_out(
    unit: UnitSpec, layouts: list[tuple[Segment, int]], itemsize: int, zero_copy_bytes: int
) -> UnitLayout:
    members: dict[tuple[bool, int, int], list[int]] = {}
    for index, (parameter, (segment, _)) in enumerate(zip(unit.parameters, layouts, strict=True)):
        key = parameter.trainable, segment.num_shards, parameter.itemsize
        members.setdefault(key, []).append(index)
    place: dict[int, tuple[int, int]] = {}
    buckets = []
    for number, ((trainable, *_), indices) in enumerate(members.items()):
        order = bucket_order([layouts[i][0] for i in indices], itemsize, zero_copy_bytes)
        indices = [indices[i] for i in order]
        buckets.append(_bucket([layouts[i] for i in indices], trainable, itemsize, zero_copy_bytes))
        place.update({index: (number, at) for at, index in enumerate(indices)})
    arrivals = [place[i] for i in reversed(range(len(layouts))) if unit.parameters[i].trainable]
    return UnitLayout(unit.kind, unit.count, tuple(buckets), tuple(arrivals))


def _bucket(
    layouts: list[tuple[Segment, int]], trainable: bool, itemsize: int, zero_copy_bytes: int
) -> BucketLayout:
    segments = [segment for segment, _ in layouts]
    zero_copy = are_zero_copy(segments, itemsize, zero_copy_bytes)
    small = [segment.is_small(itemsize, zero_copy_bytes) for segment in segments]
    packed = [s for s, is_zero_copy in zip(segments, zero_copy, strict=True) if not is_zero_copy]
    num_shards = segments[0].num_shards
    return BucketLayout(
        num_shards=num_shards,
        numel=sum(s.numel for s in segments),
        packed=sum(s.numel for s in packed),
        trainable=trainable,
        has_large=zero_copy[0] and not small[0],
        packs_as_chunks=all(s.packs_as_chunks for s in packed),
        grads=tuple(
            Grad(numel, 0 if s.even else s.num_shards * s.numel, zero or little, zero)
            for (s, numel), zero, little in zip(layouts, zero_copy, small, strict=True)
        ),
    )


def _segment(
    parameter: Parameter, shard: int, tp: int, sequence_parallel: bool, dim: int | None = None
) -> tuple[Segment, int]:
    """The segment of ``parameter``, and the elements of the first rank's unsharded parameter.

    Args:
        dim: over which it is sharded; None: the first that can be.
    """
    shape = parameter.shape
    how, largest = tp_cut(parameter, tp)
    cut, packing = None if how == "whole" else parameter.tp_dim, how == "heads"
    can_be_cut = [
        d != cut or (not packing and is_exact(size, (), (tp,), shard))
        for d, size in enumerate(shape)
    ]
    if dim is None and True in can_be_cut:
        dim = can_be_cut.index(True)
    num_shards = 1 if dim is None else shard
    padded = padded_shape(largest, dim, num_shards)
    fills = cut is None or not (packing or shape[cut] % tp)
    kinds = {"never": False, "always": True, "sequence": sequence_parallel}
    grouped = cut is None and parameter.tp_dim is not None
    partial = cut is None and tp > 1 and (grouped or kinds[parameter.tp_partial])
    segment = Segment(
        ndim=len(shape),
        dim=dim,
        num_shards=num_shards,
        numel=prod(padded) // num_shards,
        even=fills and padded == largest,
        fills=fills,
        partial=PartialGrad.ALWAYS if partial else PartialGrad.NEVER,
        is_cut=(cut is not None,),
    )
    return segment, prod(largest)


def tp_cut(parameter: Parameter, tp: int) -> tuple[str, list[int]]:
    """How ``tp`` ranks share a parameter at rest, before it is sharded.

    Returns:
        "chunks", "heads" (cut between heads, if chunks would cut within heads; see ``tp/auto/heads.py``) or
        "whole", and the shape of the first rank's part. Keys and values of fewer heads than ranks are whole.
    """
    shape, dim, heads = list(parameter.shape), parameter.tp_dim, parameter.heads
    if tp == 1 or dim is None:
        return "whole", shape
    how, units = "chunks", shape[dim]
    if heads is not None and heads[0] >= tp:
        if parameter.kv and heads[1] < tp:
            return "whole", shape
        whole = heads[1] if heads[1] >= tp else heads[0]
        if whole % tp:
            how, units = "heads", whole
    shape[dim] = ceil_div(units, tp) * (shape[dim] // units)
    return how, shape


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of an element: of a parameter at rest, while computing, while being reduced."""

    rest: int
    compute: int
    reduce: int


def input_bytes(bucket: BucketLayout, widths: Widths) -> int:
    """Bytes of the buffer that gradients of ``bucket`` are packed into; 0 where that becomes ``.grad``, as
    nothing is sharded or cast."""
    if widths.rest == widths.reduce and bucket.num_shards == 1:
        return 0
    return bucket.num_shards * bucket.packed * widths.reduce


@lru_cache(maxsize=4096)
def run_backward(
    layouts: tuple[UnitLayout, ...], widths: Widths, reshard_after_forward: bool, streams: bool
) -> tuple[int, int, int]:
    """Plays one backward through the engine's schedule.

    Args:
        layouts: layouts of the units, in the order of the forward.
        streams: whether reductions run on streams (an accelerator), which keep the input of the all-reduce.

    Returns:
        Bytes of unsharded parameters, and of buffers of gathers and unreduced gradients, at the moment at
        which their sum is largest; and bytes of unsharded parameters before the backward begins.
    """
    timeline = _Timeline(widths, streams)
    every = [layout for layout in each_unit(layouts) if layout.buckets]
    trained = (index for index, layout in enumerate(every) if layout.arrivals)
    first_trained = next(trained, len(every))
    units = [
        _Unit(
            layout,
            [
                _Bucket(bucket, [0] * len(bucket.grads), input_bytes(bucket, widths))
                for bucket in layout.buckets
            ],
            # The inputs of these have no gradient: their backward is over when the whole one is.
            ends_last=layout.kind in ("embedding", "root") or index <= first_trained,
            in_backward=index >= first_trained or layout.kind == "root",
        )
        for index, layout in enumerate(every)
    ]
    order = sorted(units, key=lambda unit: unit.layout.kind != "root")
    kept = ("tail", "root", *(() if reshard_after_forward else ("block", "experts")))
    for unit in order:
        if unit.layout.kind in kept:
            unit.gathered = True
            timeline.unsharded += timeline.unsharded_bytes(unit)
    at_loss = timeline.unsharded
    timeline.note()
    timeline.run(order)
    return *timeline.most[1:], at_loss


@dataclass(eq=False)
class _Bucket:
    """A bucket during the backward.

    Attributes:
        waiting: for each gradient its bytes if it waits for the reduction, else 0.
        input_bytes: see ``input_bytes``.
        has_input: whether the buffer of packed gradients is allocated.
    """

    layout: BucketLayout
    waiting: list[int]
    input_bytes: int
    has_input: bool = False


@dataclass(eq=False)
class _Unit:
    """A unit during the backward.

    Attributes:
        ends_last: whether its backward is over only when the whole one is.
        in_backward: whether it has a backward.
        gathering: for each all-gather under way the bytes of its buffers, and those of unsharded parameters
            that are still to be allocated.
    """

    layout: UnitLayout
    buckets: list[_Bucket]
    ends_last: bool
    in_backward: bool
    gathered: bool = False
    begun: bool = False
    gathering: list[tuple[int, int]] | None = None

    @property
    def gathers_in_backward(self) -> bool:
        return self.layout.kind != "embedding"


class _Timeline:
    """Runs the events of a backward and notes the bytes that are held after each.

    Attributes:
        most: (sum, unsharded, buffers) at the largest sum so far.
        inputs: bytes of the inputs of the last reduce-scatter, which are held until the next one.
        holds_inputs: whether the engine assumes that these inputs are still held, and so defers gathers.
        deferring: the bucket whose large gradients deferred gathers wait for.
        awaited: number of elements of these gradients that must still arrive.
    """

    def __init__(self, widths: Widths, streams: bool) -> None:
        self.widths, self.streams = widths, streams
        self.cast = widths.compute != widths.rest
        self.unsharded = self.buffers = self.inputs = 0
        self.most = (0, 0, 0)
        self.holds_inputs = False
        self.deferring: _Bucket | None = None
        self.awaited = 0.0
        self.schedule = GatherSchedule(self, PrefetchSettings())

    def note(self, extra: int = 0) -> None:
        """Notes what is held, with ``extra`` bytes of buffers that are freed at once."""
        total = self.unsharded + self.buffers + extra
        if total > self.most[0]:
            self.most = (total, self.unsharded, self.buffers + extra)

    def unsharded_bytes(self, unit: _Unit) -> int:
        """Bytes of the unsharded parameters of ``unit``, but for those that are the shards themselves."""
        buckets = [b for b in unit.layout.buckets if b.num_shards > 1 or self.cast]
        return sum(b.num_shards * b.numel for b in buckets) * self.widths.compute

    def run(self, order: list[_Unit]) -> None:
        """Runs the backward of ``order``, the order of the forward, roots first."""
        for unit in order:
            self.schedule.begin_forward(unit)
        self.schedule.begin_backwards()
        roots = [unit for unit in order if unit.layout.kind == "root"]
        last = []
        for root in roots:
            root.begun = True
        for place in reversed(range(len(roots), len(order))):
            unit = order[place]
            if not unit.in_backward:
                continue
            if unit.layout.kind == "experts":  # the block that they are in begins before them
                self.begin(order[place - 1], place - 1)
            if not unit.begun:
                self.begin(unit, place)
            self.arrive(unit)
            if unit.ends_last:
                last.append(unit)
            else:
                self.end(unit)
            self.note()
        # What a root has alone is used first, and so comes last.
        for unit in roots:
            self.arrive(unit)
            self.note()
        self.deferring = None
        for unit in [*last, *reversed(roots)]:
            self.reduce(unit)
        self.note()

    # -- all-gathers -------------------------------------------------------------------------------

    def begin(self, unit: _Unit, place: int) -> None:
        unit.begun = True
        if unit.gathers_in_backward:
            self.issue(unit)
            self.finish(unit)
        large = next((bucket for bucket in unit.buckets if bucket.layout.has_large), None)
        defer = self.holds_inputs and large is not None and large.layout.trainable
        self.deferring = large if defer else None
        if large is not None:
            self.awaited = (large.layout.numel - large.layout.packed) / 2
        self.schedule.begin_backward(unit, place, defer=defer)
        self.issue_gathers()

    def issue_gathers(self) -> None:
        while (unit := self.schedule.next()) is not None:
            self.issue(unit)  # type: ignore[arg-type]

    def issue_deferred(self) -> None:
        self.deferring = None
        self.schedule.issue_deferred()
        self.issue_gathers()

    def issue(self, unit: _Unit) -> None:
        """Issues the all-gathers of ``unit``: one for all its sharded buckets."""
        if unit.gathered or unit.gathering is not None:
            return
        unit.gathering = []
        sharded = [bucket for bucket in unit.layout.buckets if bucket.num_shards > 1]
        for bucket in unit.layout.buckets:
            if bucket.num_shards == 1:  # the cast copy is made when it is used
                unit.gathering.append((0, bucket.numel * self.widths.compute * self.cast))
            elif bucket is sharded[0]:
                unit.gathering.append(self.issue_together(sharded))

    def issue_together(self, buckets: list[BucketLayout]) -> tuple[int, int]:
        """Issues one all-gather; returns an entry of ``gathering``."""
        compute, cast, alone = self.widths.compute, self.cast, len(buckets) == 1
        later = held = copied = 0
        for bucket in buckets:
            has_zero_copy = bucket.packed < bucket.numel
            unsharded = bucket.num_shards * bucket.numel * compute
            if has_zero_copy:
                self.unsharded += unsharded
            else:
                later += unsharded
            if cast and (alone or has_zero_copy):
                held += bucket.numel * compute
            elif cast:
                copied += bucket.numel * compute
        packed = sum(bucket.packed for bucket in buckets)
        held += packed * (buckets[0].num_shards + (not alone)) * compute
        self.buffers += held
        self.note(copied)
        return held, later

    def finish(self, unit: _Unit) -> None:
        for held, later in unit.gathering or ():
            self.unsharded += later
            self.note()
            self.buffers -= held
        unit.gathering, unit.gathered = None, True

    # What ``GatherSchedule`` asks of units.

    def is_gathering(self, unit: Any) -> bool:
        return unit.gathering is not None

    def may_be_next(self, unit: Any) -> bool:
        return not unit.begun

    def is_read_in_backward(self, unit: Any) -> bool:
        return unit.gathers_in_backward

    def named_in_forward(self, unit: Any) -> None:
        return None

    named_in_backward = named_in_forward

    # -- gradients ---------------------------------------------------------------------------------

    def arrive(self, unit: _Unit) -> None:
        """The gradients of ``unit`` arrive, one after the other."""
        compute, reduce = self.widths.compute, self.widths.reduce
        for number, index in unit.layout.arrivals:
            bucket = unit.buckets[number]
            layout, grad = bucket.layout, bucket.layout.grads[index]
            size = grad.numel * compute
            self.buffers += size
            self.note()
            if grad.zero_copy and compute > reduce:
                self.note(grad.numel * reduce)
                self.buffers -= size - grad.numel * reduce
                size = grad.numel * reduce
            if grad.waits:
                bucket.waiting[index] = size
                if grad.zero_copy and bucket is self.deferring:
                    self.count(grad.numel / layout.num_shards)
                continue
            if not bucket.has_input:
                bucket.has_input = True
                self.buffers += bucket.input_bytes
            self.note(grad.padded * compute)
            self.buffers -= size

    def count(self, elements: float) -> None:
        """A gradient has arrived that deferred gathers wait for."""
        self.awaited -= elements
        if self.awaited <= 0:
            self.free_inputs()
            self.holds_inputs = self.holds_inputs and not self.streams
            self.issue_deferred()

    # -- reductions --------------------------------------------------------------------------------

    def end(self, unit: _Unit) -> None:
        if self.deferring in unit.buckets:
            self.issue_deferred()
        self.unsharded -= self.unsharded_bytes(unit)
        unit.gathered = False
        self.reduce(unit)

    def free_inputs(self) -> None:
        self.buffers -= self.inputs
        self.inputs = 0

    def reduce(self, unit: _Unit) -> None:
        for bucket in unit.buckets:
            layout = bucket.layout
            if not layout.trainable:
                continue
            self.free_inputs()
            inputs = self.cast_zero_copy(bucket)
            if layout.packed:
                inputs += bucket.input_bytes
                self.pack(bucket)
            self.note()
            if layout.num_shards > 1:
                self.inputs, self.holds_inputs = inputs, True
            else:  # it is the result
                self.buffers -= inputs
                self.holds_inputs = self.streams

    def cast_zero_copy(self, bucket: _Bucket) -> int:
        """Casts the zero-copy gradients to the reduce dtype; returns their bytes."""
        inputs = 0
        for index, grad in enumerate(bucket.layout.grads):
            if grad.zero_copy:
                size = grad.numel * self.widths.reduce
                if bucket.waiting[index] != size:
                    self.note(size)
                    self.buffers += size - bucket.waiting[index]
                bucket.waiting[index] = 0
                inputs += size
        return inputs

    def pack(self, bucket: _Bucket) -> None:
        """Packs the gradients that wait, by one kernel if that is possible, else one after the other."""
        layout, waiting = bucket.layout, bucket.waiting
        together = False
        if not bucket.has_input:
            self.buffers += bucket.input_bytes
            self.note()
            together = layout.packs_as_chunks and all(grad.waits for grad in layout.grads)
        for index, grad in enumerate(layout.grads):
            if waiting[index] and not together:
                self.note(grad.padded * self.widths.compute)
            self.buffers -= waiting[index]
            waiting[index] = 0
        bucket.has_input = False
