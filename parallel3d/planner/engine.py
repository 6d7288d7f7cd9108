"""What the engine holds during a backward, event by event: bytes of unsharded parameters, gradients, buffers.

The planner runs the engine's own code: ``fsdp/layout.py`` lays parameters out in buckets, and
``fsdp/schedule.py``, given the events of a step, says when each unit is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress, zip_longest
from math import prod
from typing import Any, NamedTuple

from parallel3d._play import InModelOrder
from parallel3d.ep.division import shard_dim
from parallel3d.fsdp.layout import (
    BufferPool,
    PartialGrad,
    Segment,
    are_zero_copy,
    bucket_order,
    ceil_div,
    default_dim,
    in_ring,
    is_exact,
    padded_shape,
)
from parallel3d.fsdp.schedule import GatherSchedule, PrefetchSettings
from parallel3d.mesh import MeshLayout
from parallel3d.planner.model_spec import Parameter, UnitSpec

# The buckets of a unit, from the shapes of its parameters.


@dataclass(frozen=True, slots=True)
class Grad:
    """The gradient of one parameter in its bucket.

    Attributes:
        numel: elements of the gradient that autograd produces.
        padded: elements of the padded copy that is made of it; 0: it needs no padding and no copy.
        waits: whether autograd's tensor is held until the reduction: zero-copy gradients, and small ones that
            are packed together.
        zero_copy: whether it is reduced from autograd's own tensor, without being packed.
    """

    numel: int
    padded: int
    waits: bool
    zero_copy: bool


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The sizes of one bucket, in elements unless said otherwise.

    Attributes:
        num_shards: number of ranks that it is sharded over.
        numel: elements of one rank's shard, padding included.
        packed: elements of the shard that are copied into a buffer to be sent; zero-copy ones are not.
        trainable: whether its parameters have gradients.
        itemsize, own: bytes of an element of the shards that are gathered; of the plain model's parameters.
        has_large: whether it has large zero-copy gradients. Deferred all-gathers are issued when half of
            these gradients' elements have arrived.
        packs_as_chunks: whether its small gradients can be packed by one kernel.
        grads: its gradients, in the order in which they lie in the bucket.
    """

    num_shards: int
    numel: int
    packed: int
    trainable: bool
    itemsize: int
    own: int
    has_large: bool
    packs_as_chunks: bool
    grads: tuple[Grad, ...]


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The buckets of ``count`` equal units.

    Attributes:
        arrivals: (index of a bucket, of a gradient in it), in the order in which backward produces them.
        experts: the layout of the experts in each of these units, if ep divides them: they are then a unit of
            their own. Else None.
    """

    kind: str
    count: int
    buckets: tuple[BucketLayout, ...]
    arrivals: tuple[tuple[int, int], ...]
    experts: UnitLayout | None = None

    @property
    def unsharded_numel(self) -> int:
        """Elements of one unit's unsharded parameters, experts and padding included."""
        own = sum(bucket.num_shards * bucket.numel for bucket in self.buckets)
        return own + (self.experts.unsharded_numel if self.experts is not None else 0)


def each_unit(layouts: Iterable[UnitLayout]) -> list[UnitLayout]:
    """Returns each unit by itself, in the order of the forward: experts after their block."""
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
        zero_copy_bytes: unsharded bytes from which a parameter is zero-copy: not packed for a collective.
        ep: number of ranks that divide the experts. Above 1, experts are a unit of their own, sharded over
            the remaining ranks of shard x tp.
    """
    dense, experts = unit, None
    if ep > 1 and any(p.experts for p in unit.parameters):
        dense = replace(unit, parameters=tuple(p for p in unit.parameters if not p.experts))
        own = tuple(p for p in unit.parameters if p.experts)
        segments = [_expert_segment(p, shard * tp // ep, ep) for p in own]
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
    for number, ((trainable, _, own), indices) in enumerate(members.items()):
        rest = itemsize if trainable else min(own, itemsize)
        order = bucket_order([layouts[i][0] for i in indices], rest, zero_copy_bytes)
        indices = [indices[i] for i in order]
        held = [layouts[i] for i in indices]
        buckets.append(_bucket(held, trainable, rest, own, zero_copy_bytes))
        place.update({index: (number, at) for at, index in enumerate(indices)})
    arrivals = [place[i] for i in reversed(range(len(layouts))) if unit.parameters[i].trainable]
    return UnitLayout(unit.kind, unit.count, tuple(buckets), tuple(arrivals))


def _bucket(
    layouts: list[tuple[Segment, int]],
    trainable: bool,
    itemsize: int,
    own: int,
    zero_copy_bytes: int,
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
        itemsize=itemsize,
        own=own,
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
    """Returns the segment of ``parameter`` in its bucket, sharded over ``dim`` (None: the dim that the engine
    chooses), and the elements of its unsharded part on the first rank of tp."""
    shape = parameter.shape
    how, largest = tp_cut(parameter, tp)
    cut, packing = None if how == "whole" else parameter.tp_dim, how == "heads"
    can_be_cut = [
        d != cut or (not packing and is_exact(size, (), (tp,), shard))
        for d, size in enumerate(shape)
    ]
    if dim is None:
        works = [d for d, possible in enumerate(can_be_cut) if possible]
        dim = default_dim(largest, works, () if cut is None else (cut,), shard)
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


def _expert_segment(parameter: Parameter, efsdp: int, ep: int) -> tuple[Segment, int]:
    """As ``_segment``, for stacked experts that ep divides."""
    own = replace(parameter, tp_dim=0, tp_partial="never")
    return _segment(own, efsdp, ep, False, shard_dim(parameter.shape, ep, efsdp))


@lru_cache(maxsize=65536)
def segment_of(parameter: Parameter, ranks: int, layout: MeshLayout, axis: str) -> Segment:
    """Returns the segment of ``parameter`` on ``axis``: "shard", or "efsdp" for experts that ep divides."""
    if axis == "efsdp":
        return _expert_segment(parameter, ranks, layout.ep)[0]
    return _segment(parameter, ranks, layout.tp, False)[0]


def partial_numel(unit: UnitSpec, layout: MeshLayout, sequence_parallel: bool) -> int:
    """Elements of the gradients of ``unit`` that the engine sums over ``tp``."""
    sizes = layout.shard * layout.cp, layout.tp, sequence_parallel
    every = (_segment(p, *sizes) for p in unit.parameters if p.trainable)
    return sum(numel for segment, numel in every if segment.partial)


def tp_cut(parameter: Parameter, tp: int) -> tuple[str, list[int]]:
    """Returns how ``tp`` ranks divide a parameter at rest, and the unsharded shape of the first rank's part.

    Returns:
        "chunks" (as ``torch.chunk``), "heads" (between heads, where chunks would cut one; see
        ``tp/auto/heads.py``) or "whole" (not divided, as keys and values with fewer heads than ranks), and
        the shape.
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


def local_parts(unit: UnitSpec, layout: MeshLayout) -> dict[str, list[tuple[Parameter, list[int]]]]:
    """Returns axis -> the parameters of a unit that it shards, each with its shape on the rank of tp (or of
    ep) that has most.

    Experts are sharded over "efsdp" if ep divides them, all others over "shard".
    """
    found: dict[str, list[tuple[Parameter, list[int]]]] = {"shard": [], "efsdp": []}
    for p in unit.parameters:
        if p.experts and layout.ep > 1:
            found["efsdp"].append((p, [ceil_div(p.shape[0], layout.ep), *p.shape[1:]]))
        else:
            found["shard"].append((p, tp_cut(p, layout.tp)[1]))
    return found


def local_numels(unit: UnitSpec, layout: MeshLayout) -> dict[str, tuple[int, int]]:
    """Returns axis -> (elements of all of ``local_parts``, elements of the trainable ones)."""
    return {
        axis: (
            sum(prod(shape) for _, shape in parts),
            sum(prod(shape) for p, shape in parts if p.trainable),
        )
        for axis, parts in local_parts(unit, layout).items()
    }


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of an element at rest, in computation, in reduction, and as sent (``wire_dtype``; 0: none)."""

    rest: int
    compute: int
    reduce: int
    wire: int = 0

    @property
    def sent(self) -> int:
        """Bytes of an element of a reduce-scatter's input."""
        return self.wire or self.reduce

    def packed(self, num_shards: int) -> int:
        """Bytes of an element of the buffer that gradients are packed into."""
        return self.sent if num_shards > 1 and self.sent == self.compute else self.reduce


def input_bytes(bucket: BucketLayout, widths: Widths) -> int:
    """Returns the bytes of the buffer that the gradients of ``bucket`` are packed into; 0 where nothing is
    sharded, because the buffer then becomes the result."""
    if bucket.num_shards == 1:
        return 0
    return bucket.num_shards * bucket.packed * widths.packed(bucket.num_shards)


def casts_bytes(bucket: BucketLayout, widths: Widths) -> int:
    """Returns the bytes of the bucket's zero-copy gradients in the dtype in which they are sent."""
    return sum(grad.numel for grad in bucket.grads if grad.zero_copy) * widths.sent


class Played(NamedTuple):
    """The bytes that a backward holds.

    Attributes:
        unsharded, buffers: bytes of unsharded parameters, and of buffers (of all-gathers and of gradients
            before their reduction), at the moment when their sum is largest.
        at_loss: bytes of unsharded parameters before the backward begins.
        fixed: bytes of unsharded parameters and of buffers that static memory allocates for the model's life.
    """

    unsharded: int
    buffers: int
    at_loss: int
    fixed: tuple[int, int] = (0, 0)


SLOTS = 2
"""How many units share memory in turn with static memory: one computes while the next is gathered."""


def fixed_bytes(
    layouts: Sequence[UnitLayout], widths: Widths, reshard_after_forward: bool
) -> tuple[int, int]:
    """Returns the bytes that static memory allocates once: (unsharded parameters, all-gather buffers)."""
    compute = widths.compute
    unsharded = buffers = 0
    shares = ("embedding", *(("block", "experts") if reshard_after_forward else ()))
    for kinds in (("root",), ("embedding", "block", "tail"), ("experts",)):
        level = [unit for unit in each_unit(layouts) if unit.kind in kinds and unit.buckets]
        own = [
            [
                b.num_shards * b.numel * compute * (b.num_shards > 1 or b.itemsize != compute)
                for b in unit.buckets
            ]
            for unit in level
        ]
        may = [sizes for unit, sizes in zip(level, own, strict=True) if unit.kind in shares]
        shared = [*compress(may, in_ring([*map(sum, may)], SLOTS))]
        for slot in range(SLOTS):
            held = max(map(len, shared[slot::SLOTS]), default=0)
            unsharded += sum(map(max, [*zip_longest(*shared, fillvalue=0)][:held]))
        unsharded += sum(map(sum, own)) - sum(map(sum, shared))
        for per_rank in (False, True):  # what an all-gather writes, and the cast that it reads
            scratch = [
                [
                    (b.num_shards > 1)
                    * (b.numel * (b.itemsize != compute) if per_rank else b.num_shards * b.packed)
                    for b in unit.buckets
                ]
                for unit in level
            ]
            buffers += compute * sum(map(max, zip_longest(*scratch, fillvalue=0)))
    return unsharded, buffers


@lru_cache(maxsize=4096)
def run_backward(
    layouts: tuple[UnitLayout, ...],
    widths: Widths,
    reshard_after_forward: bool,
    streams: bool,
    static: bool = False,
) -> Played:
    """Runs the events of one backward through the engine's schedule; returns the bytes that it holds.

    Args:
        layouts: layouts of the units, in the order of the forward.
        streams: whether collectives run on streams of their own (an accelerator), so that the inputs of an
            all-reduce are held while it runs.
        static: whether the engine allocates its buffers once (``parallelize(memory="static")``).
    """
    pool = BufferPool() if static else None
    timeline = _Timeline(widths, streams, pool)
    sharded = (b for unit in each_unit(layouts) for b in unit.buckets if b.trainable)
    timeline.largest_casts = max((casts_bytes(b, widths) for b in sharded), default=0)
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
    if pool is None:
        return Played(*timeline.most[1:], at_loss)
    unsharded, gathers = fixed_bytes(layouts, widths, reshard_after_forward)
    lent = sum(size for _, size in pool.buffers)
    fixed = unsharded, gathers + lent
    return Played(unsharded, fixed[1] + timeline.most[2], unsharded, fixed)


@dataclass(eq=False)
class _Bucket:
    """The state of a bucket during the backward.

    Attributes:
        waiting: for each gradient the bytes of autograd's tensor, if it is held until the reduction; else 0.
        input_bytes: see ``input_bytes``.
        has_input: whether the buffer that gradients are packed into is allocated.
        lent: indices of the buffers of static memory that its inputs occupy. casts_are_lent: whether one of
            them holds the casts of its zero-copy gradients.
    """

    layout: BucketLayout
    waiting: list[int]
    input_bytes: int
    has_input: bool = False
    lent: list[int] = field(default_factory=list)
    casts_are_lent: bool = False


@dataclass(eq=False)
class _Unit:
    """The state of a unit during the backward.

    Attributes:
        ends_last: whether its backward ends only with the whole backward: its inputs have no gradient.
        in_backward: whether it takes part in backward: not if it and everything before it is frozen.
        gathering: for each running all-gather (bytes of its buffers, bytes of unsharded parameters that are
            allocated when it ends).
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


class _Timeline(InModelOrder):
    """Runs the events of a backward and records the bytes that are held after each.

    Attributes:
        most: (sum, unsharded, buffers) at the largest sum so far.
        inputs: bytes of the inputs of the last reduce-scatter, which are held until the next one.
        holds_inputs: whether the engine assumes that these inputs are still held; it then defers all-gathers.
        deferring: the bucket for whose large gradients deferred all-gathers wait.
        awaited: how many elements of these gradients must still arrive.
        pool: static memory: the buffers that inputs of reduce-scatters are lent from. With it, only bytes
            beside the fixed buffers are counted. lends: whether inputs are lent, which they are not with a
            ``wire_dtype``.
        largest_casts: bytes of the largest cast of a bucket's zero-copy gradients.
    """

    def __init__(self, widths: Widths, streams: bool, pool: BufferPool | None = None) -> None:
        self.widths, self.streams, self.pool = widths, streams, pool
        self.lends = pool is not None and not widths.wire
        self.largest_casts = 0
        self.lent: list[int] = []  # to the inputs of the last reduce-scatter
        self.unsharded = self.buffers = self.inputs = 0
        self.most = (0, 0, 0)
        self.holds_inputs = False
        self.deferring: _Bucket | None = None
        self.awaited = 0.0
        self.schedule = GatherSchedule(self, PrefetchSettings())

    def note(self, extra: int = 0) -> None:
        """Updates ``most`` with the bytes held now and ``extra`` bytes of buffers that are freed at once."""
        total = self.unsharded + self.buffers + extra
        if total > self.most[0]:
            self.most = (total, self.unsharded, self.buffers + extra)

    def lend_casts(self, bucket: _Bucket) -> None:
        """Lends ``bucket`` a buffer for casts of its zero-copy gradients to the dtype that is sent."""
        assert self.pool is not None
        if not bucket.casts_are_lent:
            bucket.casts_are_lent = True
            size = casts_bytes(bucket.layout, self.widths)
            bucket.lent.append(self.pool.lend("cast", size, self.largest_casts))

    def casts(self, bucket: BucketLayout) -> bool:
        """Whether the bucket's dtype in computation is another than at rest."""
        return self.widths.compute != bucket.itemsize

    def unsharded_bytes(self, unit: _Unit) -> int:
        """Bytes that unsharding ``unit`` allocates: none for a bucket that is neither sharded nor cast."""
        if self.pool is not None:
            return 0
        buckets = [b for b in unit.layout.buckets if b.num_shards > 1 or self.casts(b)]
        return sum(b.num_shards * b.numel for b in buckets) * self.widths.compute

    def run(self, order: list[_Unit]) -> None:
        """Runs the backward of the units in ``order``: the order of the forward, roots first."""
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
        if self.pool is not None:
            return
        sharded = [bucket for bucket in unit.layout.buckets if bucket.num_shards > 1]
        for bucket in unit.layout.buckets:
            if bucket.num_shards == 1:  # the cast copy is made when it is used
                size = bucket.numel * self.widths.compute
                unit.gathering.append((0, size * self.casts(bucket)))
            elif bucket is sharded[0]:
                unit.gathering.append(self.issue_together(sharded))

    def issue_together(self, buckets: list[BucketLayout]) -> tuple[int, int]:
        """Issues one all-gather of several buckets; returns an entry of ``_Unit.gathering``."""
        compute, alone = self.widths.compute, len(buckets) == 1
        later = held = copied = 0
        for bucket in buckets:
            has_zero_copy = bucket.packed < bucket.numel
            unsharded = bucket.num_shards * bucket.numel * compute
            if has_zero_copy:
                self.unsharded += unsharded
            else:
                later += unsharded
            if self.casts(bucket) and (alone or has_zero_copy):
                held += bucket.numel * compute
            elif self.casts(bucket):
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

    def is_gathering(self, unit: Any) -> bool:
        return unit.gathering is not None

    def may_be_next(self, unit: Any) -> bool:
        return not unit.begun

    def is_read_in_backward(self, unit: Any) -> bool:
        return unit.gathers_in_backward

    # -- gradients ---------------------------------------------------------------------------------

    def arrive(self, unit: _Unit) -> None:
        """Lets the gradients of ``unit`` arrive one after the other, as autograd produces them."""
        compute, reduce = self.widths.compute, self.widths.reduce
        for number, index in unit.layout.arrivals:
            bucket = unit.buckets[number]
            layout, grad = bucket.layout, bucket.layout.grads[index]
            size = grad.numel * compute
            self.buffers += size
            self.note()
            if grad.zero_copy and compute > reduce:
                cast = grad.numel * reduce
                if self.lends:
                    self.lend_casts(bucket)
                    cast = 0
                self.note(cast)
                self.buffers -= size - cast
                size = cast
            if grad.waits:
                bucket.waiting[index] = size
                if grad.zero_copy and bucket is self.deferring:
                    self.count(grad.numel / layout.num_shards)
                continue
            if not bucket.has_input:
                self.make_input(bucket)
            self.note(grad.padded * compute)
            self.buffers -= size

    def make_input(self, bucket: _Bucket) -> None:
        """Allocates, or takes from the pool, the buffer that gradients of ``bucket`` are packed into."""
        bucket.has_input = True
        if not self.is_lent(bucket):
            self.buffers += bucket.input_bytes
        elif self.pool is not None and bucket.input_bytes:
            bucket.lent.append(self.pool.lend("packed", bucket.input_bytes))

    def is_lent(self, bucket: _Bucket) -> bool:
        return self.lends and bucket.layout.num_shards > 1

    def count(self, elements: float) -> None:
        """Counts ``elements`` of the gradients that deferred all-gathers wait for, then issues these."""
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
        if self.pool is not None:
            self.pool.give_back(self.lent)
            self.lent = []

    def reduce(self, unit: _Unit) -> None:
        for bucket in unit.buckets:
            layout = bucket.layout
            if not layout.trainable:
                continue
            self.free_inputs()
            inputs = self.cast_zero_copy(bucket)
            if layout.packed:
                self.pack(bucket)
                inputs += self.cast_packed(bucket)
            received = max(layout.num_shards, 2) * layout.numel * self.widths.wire
            self.lent, bucket.lent, bucket.casts_are_lent = bucket.lent, [], False
            self.note(received)
            if layout.num_shards > 1:
                if not self.streams:  # summed when it is waited for
                    self.buffers += received
                    inputs += received
                self.inputs, self.holds_inputs = inputs, True
            else:  # it is the result
                self.buffers -= inputs
                self.holds_inputs = self.streams

    def cast_zero_copy(self, bucket: _Bucket) -> int:
        """Casts the zero-copy gradients to the dtype that is sent; returns the bytes of the results."""
        inputs = 0
        for index, grad in enumerate(bucket.layout.grads):
            if grad.zero_copy:
                size = grad.numel * self.widths.sent
                if self.lends and self.widths.compute != self.widths.reduce:
                    self.lend_casts(bucket)
                    size = 0
                if bucket.waiting[index] != size:
                    self.note(size)
                    self.buffers += size - bucket.waiting[index]
                bucket.waiting[index] = 0
                inputs += size
        return inputs

    def cast_packed(self, bucket: _Bucket) -> int:
        """Casts the packed gradients to the dtype that is sent; returns the bytes of the result."""
        layout, size = bucket.layout, bucket.input_bytes
        if self.is_lent(bucket):
            return 0
        if layout.num_shards > 1 and self.widths.packed(layout.num_shards) != self.widths.sent:
            size = layout.num_shards * layout.packed * self.widths.sent
            self.note(size)
            self.buffers += size - bucket.input_bytes
        return size

    def pack(self, bucket: _Bucket) -> None:
        """Packs the gradients that wait: with one kernel if possible, else one after the other."""
        layout, waiting = bucket.layout, bucket.waiting
        together = False
        if not bucket.has_input:
            self.make_input(bucket)
            self.note()
            together = layout.packs_as_chunks and all(grad.waits for grad in layout.grads)
        for index, grad in enumerate(layout.grads):
            if waiting[index] and not together:
                self.note(grad.padded * self.widths.compute)
            self.buffers -= waiting[index]
            waiting[index] = 0
        bucket.has_input = False
