"""How the engine lays out a unit's parameters: slots, buckets, which of them travel in place.

The same arithmetic as ``fsdp/param.py``, ``fsdp/buckets/in_place.py`` and ``make_buckets.py``, from shapes
and without torch; ``tests/planner/test_state_exact.py`` compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from parallel3d.fsdp.placing.exact import ceil_div, is_exact
from parallel3d.planner.model_spec import Parameter, Unit

__all__ = ["ACCELERATOR_BYTES", "BucketLayout", "Grad", "UnitLayout", "rank_rows", "unit_layout"]

# Unsharded bytes from which a parameter travels in place: those of ``fsdp/buckets/in_place.py``.
ACCELERATOR_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Grad:
    """What a parameter's gradient is to its bucket.

    Attributes:
        numel: elements as autograd brings it. padded: elements of its copy with padding; 0: none is made.
        kept: whether it waits as it is: in place, or to be packed with others.
        in_place: whether it is reduced from where it is.
    """

    numel: int
    padded: int
    kept: bool
    in_place: bool


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """A bucket. Elements; n is the number of shards.

    Attributes:
        parts: n. numel: S, of a shard, padding included. packed: those of S that don't travel in place.
        trainable: whether it has gradients. resident: whether its shards can be its unsharded parameters, as
            far as its layout says.
        counts: whether its gradients can tell when half of a backward is over.
        chunks: whether one kernel packs its small gradients.
        grads: in the order of the bucket.
    """

    parts: int
    numel: int
    packed: int
    trainable: bool
    resident: bool
    counts: bool
    chunks: bool
    grads: tuple[Grad, ...]


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """A unit.

    Attributes:
        arrivals: (index of the bucket, of its gradient), in the order of a backward.
    """

    kind: str
    count: int
    buckets: tuple[BucketLayout, ...]
    arrivals: tuple[tuple[int, int], ...]

    @property
    def trainable(self) -> bool:
        """Whether any of it is trained."""
        return any(bucket.trainable for bucket in self.buckets)


@dataclass(frozen=True, slots=True)
class _Slot:
    parts: int
    numel: int
    compute: int
    region: int
    even: bool
    dim: int | None
    chunks: bool
    partial: bool
    cut: bool

    @property
    def possible(self) -> bool:
        """Whether it can travel in place."""
        return (
            self.parts > 1 and self.dim == 0 and self.even and self.numel > 0 and not self.partial
        )

    def small(self, itemsize: int, large: int) -> bool:
        """Whether it is packed all the same."""
        return self.parts * self.numel * itemsize < large


@lru_cache(maxsize=65536)
def unit_layout(
    unit: Unit, shard: int, tp: int, itemsize: int, sequence_parallel: bool, large: int
) -> UnitLayout:
    """Of ``unit`` on the first rank of ``shard`` x ``tp``, which has the most.

    Args:
        itemsize: bytes of a parameter at rest.
        large: unsharded bytes from which a parameter travels in place.
    """
    members: dict[tuple[bool, int], list[int]] = {}
    slots = [_slot(p, shard, tp, sequence_parallel) for p in unit.parameters]
    for index, (parameter, slot) in enumerate(zip(unit.parameters, slots, strict=True)):
        members.setdefault((parameter.trainable, slot.parts), []).append(index)
    place: dict[int, tuple[int, int]] = {}
    buckets = []
    for number, ((trainable, _), indices) in enumerate(members.items()):
        indices.sort(key=lambda i: _place(slots[i], itemsize, large))
        buckets.append(_bucket([slots[i] for i in indices], trainable, itemsize, large))
        place.update({index: (number, at) for at, index in enumerate(indices)})
    arrivals = [place[i] for i in reversed(range(len(slots))) if unit.parameters[i].trainable]
    return UnitLayout(unit.kind, unit.count, tuple(buckets), tuple(arrivals))


def _bucket(slots: list[_Slot], trainable: bool, itemsize: int, large: int) -> BucketLayout:
    parts = slots[0].parts
    small = [s.small(itemsize, large) for s in slots]
    # A lone one is no member more.
    in_place = [
        s.possible and (len(slots) == 1 or not little)
        for s, little in zip(slots, small, strict=True)
    ]
    grads = tuple(
        Grad(s.compute, 0 if s.even else s.region, there or little, there)
        for s, there, little in zip(slots, in_place, small, strict=True)
    )
    packed = [s for s, there in zip(slots, in_place, strict=True) if not there]
    return BucketLayout(
        parts=parts,
        numel=sum(s.numel for s in slots),
        packed=sum(s.numel for s in packed),
        trainable=trainable,
        resident=parts == 1 and all(s.even and not s.partial for s in slots),
        counts=any(there and not little for there, little in zip(in_place, small, strict=True)),
        chunks=all(s.chunks for s in packed),
        grads=grads,
    )


def _place(slot: _Slot, itemsize: int, large: int) -> tuple[bool, bool, bool]:
    """The order of a bucket: see ``put_first``."""
    in_place = slot.possible and not slot.small(itemsize, large)
    return slot.partial, not in_place, slot.cut == in_place


def _slot(parameter: Parameter, shard: int, tp: int, sequence_parallel: bool) -> _Slot:
    shape, cut = list(parameter.shape), parameter.tp_dim if tp > 1 else None
    uneven, grouped = False, False
    if cut is not None:
        rows, grouped, uneven = _rows(parameter, shape[cut], tp)
        if grouped:
            cut = None
        else:
            uneven = uneven or shape[cut] % tp != 0
            largest = [*shape[:cut], rows, *shape[cut + 1 :]]
    if cut is None:
        largest = shape
    packing = cut is not None and _is_packed(parameter, tp)
    dim = next(
        (
            d
            for d, size in enumerate(shape)
            if (d != cut or (not packing and is_exact(size, (), (tp,), shard)))
        ),
        None,
    )
    parts = 1 if dim is None else shard
    padded = list(largest)
    if dim is not None:
        padded[dim] = ceil_div(largest[dim], parts) * parts
    fills = not uneven
    whole = cut is None and tp > 1
    by_kind = {"never": False, "always": True, "sequence": sequence_parallel}
    region = prod(padded)
    return _Slot(
        parts=parts,
        numel=region // parts,
        compute=prod(largest),
        region=region,
        even=fills and padded == largest,
        dim=dim,
        chunks=(dim == 0 or (parts == 1 and len(shape) > 0)) and fills and region > 0,
        partial=grouped or (whole and by_kind[parameter.tp_partial]),
        cut=cut is not None,
    )


def _is_packed(parameter: Parameter, tp: int) -> bool:
    """Whether tp cuts it between heads, where chunks would cut heads; see ``tp/heads/align.py``."""
    if parameter.heads is None:
        return False
    heads, kv_heads = parameter.heads
    if heads < tp:
        return False
    return bool(kv_heads % tp) if kv_heads >= tp else bool(heads % tp)


def rank_rows(parameter: Parameter, tp: int) -> int:
    """Rows along ``tp_dim`` that the first of ``tp`` ranks has at rest, before they are sharded."""
    size = parameter.shape[parameter.tp_dim or 0]
    return size if tp == 1 else _rows(parameter, size, tp)[0]


def _rows(parameter: Parameter, size: int, tp: int) -> tuple[int, bool, bool]:
    """(rows of the first rank, whether all ranks hold all of them, whether ranks hold more and less)."""
    if parameter.heads is None:
        return ceil_div(size, tp), False, False
    heads, kv_heads = parameter.heads
    if kv_heads < tp <= heads and parameter.kv:
        return size, True, False
    if not _is_packed(parameter, tp):
        return ceil_div(size, tp), False, False
    units = kv_heads if kv_heads >= tp else heads
    return ceil_div(units, tp) * (size // units), False, True
