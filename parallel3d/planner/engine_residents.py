"""Units whose shards are their unsharded parameters, and whose gradients come together.

See ``fsdp/running/resident.py`` and ``fsdp/buckets/joint_reduce.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel3d.planner.engine_layout import UnitLayout

__all__ = ["Widths", "is_resident", "node_gradients"]

# Of shards that wait for each other's gradients: those of ``fsdp/buckets/joint_reduce.py``.
FIRST_BYTES = 2**20
MOST_BYTES = 25 * 2**20
NODE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of an element: of a parameter at rest, while computing, while being reduced."""

    rest: int
    compute: int
    reduce: int

    @property
    def same(self) -> bool:
        """Whether nothing is cast."""
        return self.rest == self.compute == self.reduce


def is_resident(unit: UnitLayout, widths: Widths) -> bool:
    """Whether nothing of it is gathered, cast or padded."""
    return widths.same and all(bucket.resident for bucket in unit.buckets)


def node_gradients(order: Sequence[UnitLayout], widths: Widths) -> dict[int, int]:
    """By the index of the unit whose gradients come last among those that come together: their bytes."""
    found: dict[int, int] = {}
    joint = node = plans = grads = 0
    last: int | None = None
    for index in reversed(range(len(order))):
        if not is_resident(order[index], widths):
            continue
        for bucket in reversed(order[index].buckets):
            if not bucket.trainable:
                continue
            size = bucket.numel * widths.rest
            limit = FIRST_BYTES if plans == 1 else MOST_BYTES
            if last is None or joint + size > limit:
                plans += 1
                joint, new = 0, True
            else:
                new = node + size > NODE_BYTES
            if new and last is not None:
                found[last] = max(found.get(last, 0), grads)
            if new:
                node = grads = 0
            joint += size
            node += size
            grads += sum(g.numel for g in bucket.grads) * widths.compute
            last = index
    if last is not None:
        found[last] = max(found.get(last, 0), grads)
    return found
