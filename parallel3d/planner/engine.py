"""What the engine holds during a backward, event by event: unsharded parameters, gradients, buffers. Bytes.

The planner runs the engine's own arithmetic: ``fsdp/layout.py`` says how parameters lie in buckets,
``fsdp/schedule.py``, fed with the events of a step, which unit is gathered when.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

from parallel3d.fsdp.layout import (
    NODE_BYTES,
    PartialGrad,
    Segment,
    are_zero_copy,
    bucket_order,
    ceil_div,
    coalesced,
    is_exact,
    padded_shape,
)
from parallel3d.fsdp.schedule import GatherSchedule, PrefetchSettings
from parallel3d.planner.model_spec import Parameter, Unit

# The buckets of a unit, from the shapes of its parameters.


@dataclass(frozen=True, slots=True)
class Grad:
    """The gradient of one parameter in its bucket.

    Attributes:
        numel: elements as autograd brings it.
        padded: elements of its copy with padding; 0: no copy is made.
        waits: whether it stays as it is until the reduction: zero-copy, or small, to be packed with others.
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
        replicated: whether its shards can be its unsharded parameters, as far as its layout says.
        has_large: whether it has large zero-copy gradients, of which the arrival of half issues deferred
            gathers.
        packs_as_chunks: whether one kernel packs its small gradients.
        grads: its gradients, in the order of the bucket.
    """

    num_shards: int
    numel: int
    packed: int
    trainable: bool
    replicated: bool
    has_large: bool
    packs_as_chunks: bool
    grads: tuple[Grad, ...]


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The buckets of ``count`` equal units.

    Attributes:
        arrivals: (index of the bucket, of the gradient in it), in the order in which backward brings them.
    """

    kind: str
    count: int
    buckets: tuple[BucketLayout, ...]
    arrivals: tuple[tuple[int, int], ...]

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters is trained."""
        return any(bucket.trainable for bucket in self.buckets)

    @property
    def unsharded_numel(self) -> int:
        """Elements of the unsharded parameters of one unit, padding included."""
        return sum(bucket.num_shards * bucket.numel for bucket in self.buckets)


@lru_cache(maxsize=65536)
def unit_layout(
    unit: Unit, shard: int, tp: int, itemsize: int, sequence_parallel: bool, zero_copy_bytes: int
) -> UnitLayout:
    """The buckets of ``unit`` on the first rank of ``shard`` x ``tp``, which has the most.

    Args:
        itemsize: bytes of an element at rest.
        zero_copy_bytes: unsharded bytes from which a parameter is zero-copy.
    """
    layouts = [_segment(p, shard, tp, sequence_parallel) for p in unit.parameters]
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
        replicated=num_shards == 1 and all(s.even and not s.partial for s in segments),
        has_large=zero_copy[0] and not small[0],
        packs_as_chunks=all(s.packs_as_chunks for s in packed),
        grads=tuple(
            Grad(numel, 0 if s.even else s.num_shards * s.numel, zero or little, zero)
            for (s, numel), zero, little in zip(layouts, zero_copy, small, strict=True)
        ),
    )


def _segment(
    parameter: Parameter, shard: int, tp: int, sequence_parallel: bool
) -> tuple[Segment, int]:
    """The segment of ``parameter``, and the elements of the first rank's unsharded parameter."""
    shape = parameter.shape
    cut = parameter.tp_dim if tp > 1 and not _is_grouped(parameter, tp) else None
    packing = cut is not None and _is_packed(parameter, tp)
    largest = list(shape)
    if cut is not None:
        largest[cut] = rank_rows(parameter, tp)
    dim = next(
        (
            d
            for d, size in enumerate(shape)
            if d != cut or (not packing and is_exact(size, (), (tp,), shard))
        ),
        None,
    )
    num_shards = 1 if dim is None else shard
    padded = padded_shape(largest, dim, num_shards)
    fills = cut is None or not (packing or shape[cut] % tp)
    partial = (
        cut is None
        and {
            "never": False,
            "always": tp > 1,
            "sequence": tp > 1 and sequence_parallel,
        }[parameter.tp_partial]
    )
    segment = Segment(
        ndim=len(shape),
        dim=dim,
        num_shards=num_shards,
        numel=prod(padded) // num_shards,
        even=fills and padded == largest,
        fills=fills,
        partial=PartialGrad.ALWAYS if partial or _is_grouped(parameter, tp) else PartialGrad.NEVER,
        is_cut=(cut is not None,),
    )
    return segment, prod(largest)


def _is_grouped(parameter: Parameter, tp: int) -> bool:
    """Whether it makes keys or values of fewer heads than ranks: all tp ranks hold it whole."""
    if parameter.heads is None or parameter.tp_dim is None or not parameter.kv or tp == 1:
        return False
    heads, kv_heads = parameter.heads
    return kv_heads < tp <= heads


def _is_packed(parameter: Parameter, tp: int) -> bool:
    """Whether tp cuts it between heads, where chunks would cut heads; see ``tp/auto/heads.py``."""
    if parameter.heads is None:
        return False
    heads, kv_heads = parameter.heads
    if heads < tp:
        return False
    return bool(kv_heads % tp) if kv_heads >= tp else bool(heads % tp)


def rank_rows(parameter: Parameter, tp: int) -> int:
    """Rows along ``tp_dim`` that the first of ``tp`` ranks has at rest, before they are sharded."""
    size = parameter.shape[parameter.tp_dim or 0]
    if tp == 1 or _is_grouped(parameter, tp):
        return size
    if parameter.heads is None or not _is_packed(parameter, tp):
        return ceil_div(size, tp)
    heads, kv_heads = parameter.heads
    units = kv_heads if kv_heads >= tp else heads
    return ceil_div(units, tp) * (size // units)


# Replicated units: their shards are their unsharded parameters, and gradients of several arrive together. See
# ``fsdp/options/replicated.py``.


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of an element: of a parameter at rest, while computing, while being reduced."""

    rest: int
    compute: int
    reduce: int


def is_replicated(unit: UnitLayout, widths: Widths) -> bool:
    """Whether nothing of ``unit`` is gathered, cast or padded."""
    same = widths.rest == widths.compute == widths.reduce
    return same and all(bucket.replicated for bucket in unit.buckets)


def node_gradients(order: Sequence[UnitLayout], widths: Widths) -> dict[int, int]:
    """Bytes of gradients that arrive together, by index of the unit in whose backward they do."""
    buckets = [
        (index, bucket)
        for index in reversed(range(len(order)))
        if is_replicated(order[index], widths)
        for bucket in reversed(order[index].buckets)
        if bucket.trainable
    ]
    sizes = [bucket.numel * widths.rest for _, bucket in buckets]
    found: dict[int, int] = {}
    for together in coalesced(sizes):
        for node in coalesced([sizes[i] for i in together], first=NODE_BYTES, most=NODE_BYTES):
            members = [buckets[together[i]] for i in node]
            grads = sum(grad.numel for _, bucket in members for grad in bucket.grads)
            last, _ = members[-1]
            found[last] = max(found.get(last, 0), grads * widths.compute)
    return found


@dataclass(frozen=True)
class Backward:
    """The moment at which most is held, beside what has been reduced.

    Attributes:
        unsharded: unsharded parameters. buffers: of gathers, and gradients that aren't reduced yet.
        at_loss: unsharded parameters before it begins.
    """

    unsharded: int
    buffers: int
    at_loss: int


def run_backward(
    units: Sequence[UnitLayout],
    widths: Widths,
    *,
    reshard_after_forward: bool,
    streams: bool = True,
) -> Backward:
    """Of ``units``, in the order of the forward.

    Args:
        streams: whether reductions run on streams (an accelerator), which keep what a sum over replicate
            reads as an input.
    """
    timeline = _Timeline(widths, streams)
    known = [unit for unit in units if unit.buckets]
    each = list(_expanded(known, widths))
    first_trained = next((i for i, (unit, _) in enumerate(each) if unit.trainable), len(each))
    group: list[_Unit] = []
    for index, (unit, left_out) in enumerate(each):
        # One whose inputs have no gradient is over when the backward is.
        late = unit.kind in ("embedding", "root") or index <= first_trained
        reached = index >= first_trained or unit.kind == "root"
        group.append(_Unit(unit, widths, late, reached, left_out))
    roots = [each for each in group if each.layout.kind == "root"]
    order = roots + [each for each in group if each.layout.kind != "root"]
    for one in order:
        kept = one.layout.kind in ("tail", "root")
        if kept or (one.layout.kind == "block" and not reshard_after_forward):
            one.gathered = True
            timeline.unsharded += one.whole * (1 + one.left_out)
    at_loss = timeline.unsharded
    timeline.note()
    timeline.run(order, freed_between=not reshard_after_forward)
    return Backward(timeline.best[1], timeline.best[2], at_loss)


def _expanded(units: Sequence[UnitLayout], widths: Widths) -> Iterator[tuple[UnitLayout, int]]:
    """(unit, how many equal ones after it are left out): of many equal ones the first and last two."""
    for unit in units:
        if unit.count <= 5 or is_replicated(unit, widths):
            yield from ((unit, 0) for _ in range(unit.count))
        else:
            yield from ((unit, 0), (unit, 0), (unit, unit.count - 5), (unit, 0), (unit, 0))


@dataclass(eq=False)
class _Unit:
    """A unit and where it is.

    Attributes:
        late: whether its backward is over only when the whole one is.
        reached: whether the backward comes to it.
        left_out: how many equal units it stands for beside itself.
        whole: bytes of its unsharded parameters.
        gathering: of each gather under way, what it holds beside the unsharded parameters, and how much of
            these is still to be allocated.
        kept: gradients that wait as they are: by bucket, of each its bytes, or 0 (padded copies included).
        written: by bucket, whether the buffer of packed gradients is there.
    """

    layout: UnitLayout
    widths: Widths
    late: bool
    reached: bool
    left_out: int = 0
    whole: int = 0
    gathered: bool = False
    begun: bool = False
    resident: bool = False
    gathering: list[tuple[int, int]] | None = None
    kept: list[list[int]] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        buckets, widths = self.layout.buckets, self.widths
        self.whole = sum(
            b.num_shards * b.numel * widths.compute
            for b in buckets
            if b.num_shards > 1 or widths.compute != widths.rest
        )
        self.resident = is_replicated(self.layout, widths)
        self.kept = [[0] * len(b.grads) for b in buckets]
        self.written = [False] * len(buckets)

    @property
    def gathers_in_backward(self) -> bool:
        return self.layout.kind != "embedding" and not self.resident


class _Timeline:
    def __init__(self, widths: Widths, streams: bool) -> None:
        self.widths, self.streams = widths, streams
        self.unsharded = self.buffers = 0
        self.best = (0, 0, 0)
        self.held = 0  # the inputs of the last reduce-scatter
        self.holds = False  # whether the engine believes so
        self.half: tuple[_Unit, int, float] | None = None  # the unit, its bucket, elements to come
        self.order: list[_Unit] = []
        self.schedule = GatherSchedule(self, PrefetchSettings())  # its units: places in ``order``

    def note(self) -> None:
        total = self.unsharded + self.buffers
        if total > self.best[0]:
            self.best = (total, self.unsharded, self.buffers)

    def run(self, order: list[_Unit], *, freed_between: bool) -> None:
        self.order = order
        for place in range(len(order)):
            self.schedule.begin_forward(place)
        self.schedule.begin_backwards()
        nodes = node_gradients([unit.layout for unit in order], self.widths)
        late: list[_Unit] = []
        for unit in order:
            if unit.layout.kind == "root":
                unit.begun = True
                late.append(unit)
        for unit in reversed(order):
            if unit.layout.kind == "root" or not unit.reached:
                continue
            if not unit.resident:
                self.begin(unit)
                self.arrive(unit)
                if unit.late:
                    late.append(unit)
                else:
                    self.end(unit)
            self.fire(nodes.get(order.index(unit), 0))
            if unit.left_out and freed_between:
                self.unsharded -= unit.whole * unit.left_out
        for unit in order:  # what a root has alone is used first, and so comes last
            if unit.layout.kind == "root":
                if not unit.resident:
                    self.arrive(unit)
                self.fire(nodes.get(order.index(unit), 0))
        self.half = None
        late.sort(key=order.index, reverse=True)
        for unit in late:
            if not unit.resident:
                self.reduce(unit)
        self.note()

    def fire(self, size: int) -> None:
        """The gradients of several resident units come at once."""
        self.buffers += size
        self.note()
        self.buffers -= size

    # -- gathers -----------------------------------------------------------------------------------

    def begin(self, unit: _Unit) -> None:
        unit.begun = True
        if unit.gathers_in_backward:
            self.issue(unit)
            self.finish(unit)
        counting = next((i for i, b in enumerate(unit.layout.buckets) if b.has_large), None)
        if counting is not None and not unit.layout.buckets[counting].trainable:
            counting = None
        defer = self.holds and counting is not None
        self.half = None
        if defer and counting is not None:
            self.half = unit, counting, _zero_copy(unit.layout.buckets[counting]) / 2
        place = self.order.index(unit)
        self.schedule.begin_backward(place, place, defer=defer)
        self.issue_gathers()

    def issue_gathers(self) -> None:
        while (place := self.schedule.next()) is not None:
            self.issue(self.order[place])  # type: ignore[call-overload]

    def issue_deferred(self) -> None:
        self.half = None
        self.schedule.issue_deferred()
        self.issue_gathers()

    # -- what the schedule asks, of units by their place in the order ----------------------------------

    def is_gathering(self, unit: Any) -> bool:
        return self.order[unit].gathering is not None

    def may_be_next(self, unit: Any) -> bool:
        return not self.order[unit].begun

    def is_read_in_backward(self, unit: Any) -> bool:
        return self.order[unit].gathers_in_backward

    def named_in_forward(self, unit: Any) -> None:
        return None

    def named_in_backward(self, unit: Any) -> None:
        return None

    def issue(self, unit: _Unit) -> None:
        if unit.gathered or unit.gathering is not None:
            return
        unit.gathering = []
        joined = [b for b in unit.layout.buckets if b.num_shards > 1]
        for bucket in unit.layout.buckets:
            if bucket.num_shards == 1:  # the cast copy comes when it is used
                cast = self.widths.compute != self.widths.rest
                later = bucket.numel * self.widths.compute if cast else 0
                unit.gathering.append((0, later))
            elif bucket is joined[0]:
                unit.gathering.append(self.issue_together(joined))

    def issue_together(self, joined: list[BucketLayout]) -> tuple[int, int]:
        w = self.widths
        later = beside = passing = 0
        alone, cast = len(joined) == 1, w.compute != w.rest
        for bucket in joined:
            whole = bucket.num_shards * bucket.numel * w.compute
            there = bucket.packed < bucket.numel
            if there:
                self.unsharded += whole
            else:
                later += whole
            copy = bucket.numel * w.compute if cast else 0
            if alone or there:
                beside += copy
            else:
                passing += copy
        packed = sum(bucket.packed for bucket in joined)
        beside += packed * (joined[0].num_shards + (not alone)) * w.compute
        self.buffers += beside + passing
        self.note()
        self.buffers -= passing
        return beside, later

    def finish(self, unit: _Unit) -> None:
        for beside, later in unit.gathering or ():
            self.unsharded += later
            self.note()
            self.buffers -= beside
        unit.gathering, unit.gathered = None, True

    # -- gradients ---------------------------------------------------------------------------------

    def arrive(self, unit: _Unit) -> None:
        w = self.widths
        for number, index in unit.layout.arrivals:
            bucket = unit.layout.buckets[number]
            grad = bucket.grads[index]
            size = grad.numel * w.compute
            self.buffers += size
            self.note()
            if grad.zero_copy and w.compute > w.reduce:
                smaller = grad.numel * w.reduce
                self.buffers += smaller
                self.note()
                self.buffers -= size
                size = smaller
            if grad.waits:
                unit.kept[number][index] = size
                if grad.zero_copy:
                    self.count(unit, number, grad.numel / bucket.num_shards)
                continue
            if not unit.written[number]:
                unit.written[number] = True
                self.buffers += bucket.num_shards * bucket.packed * w.reduce
            padded = grad.padded * w.compute
            self.buffers += padded
            self.note()
            self.buffers -= padded + size

    def count(self, unit: _Unit, number: int, elements: float) -> None:
        if self.half is None or self.half[0] is not unit or self.half[1] != number:
            return
        awaited = self.half[2] - elements
        self.half = unit, number, awaited
        if awaited <= 0:
            self.free_inputs()
            if self.streams:
                self.holds = False
            self.issue_deferred()

    # -- reductions --------------------------------------------------------------------------------

    def end(self, unit: _Unit) -> None:
        if self.half is not None and self.half[0] is unit:
            self.issue_deferred()
        self.unsharded -= unit.whole
        unit.gathered = False
        self.reduce(unit)

    def free_inputs(self) -> None:
        self.buffers -= self.held
        self.held = 0

    def reduce(self, unit: _Unit) -> None:
        for number, bucket in enumerate(unit.layout.buckets):
            if bucket.trainable:
                self.reduce_bucket(unit, number, bucket)

    def reduce_bucket(self, unit: _Unit, number: int, bucket: BucketLayout) -> None:
        w = self.widths
        self.free_inputs()
        self.holds = False
        inputs = self.cast_in_place(unit, number, bucket)
        if bucket.packed:
            inputs += bucket.num_shards * bucket.packed * w.reduce
            self.pack(unit, number, bucket)
        self.note()
        if bucket.num_shards > 1:
            self.held, self.holds = inputs, True
        else:  # it is the result
            self.buffers -= inputs
            self.holds = self.streams

    def cast_in_place(self, unit: _Unit, number: int, bucket: BucketLayout) -> int:
        kept, inputs = unit.kept[number], 0
        for index, grad in enumerate(bucket.grads):
            if not grad.zero_copy:
                continue
            size = grad.numel * self.widths.reduce
            if kept[index] != size:
                self.buffers += size
                self.note()
                self.buffers -= kept[index]
            kept[index] = 0
            inputs += size
        return inputs

    def pack(self, unit: _Unit, number: int, bucket: BucketLayout) -> None:
        w, kept = self.widths, unit.kept[number]
        fresh = not unit.written[number]
        unit.written[number] = False
        if fresh:
            self.buffers += bucket.num_shards * bucket.packed * w.reduce
            self.note()
        if fresh and bucket.packs_as_chunks and all(g.waits for g in bucket.grads):
            self.buffers -= sum(kept)
            kept[:] = [0] * len(kept)
            return
        for index, grad in enumerate(bucket.grads):
            if kept[index]:
                padded = grad.padded * w.compute
                self.buffers += padded
                self.note()
                self.buffers -= padded + kept[index]
                kept[index] = 0


def _zero_copy(bucket: BucketLayout) -> int:
    """Elements of the shards that travel in place."""
    return bucket.numel - bucket.packed
