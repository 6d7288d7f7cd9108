"""What of the engine's communication compute doesn't hide, unit by unit.

While unit i computes, the gather of the next unit runs; in backward also the reduction of the one before, and
HSDP's all-reduce. What is longer is exposed; compute under communication is slower (``overlap_slowdown``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel3d.planner.constants import constant

__all__ = ["Exposed", "UnitTimes", "fsdp_exposed", "once_exposed"]


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of one of ``count`` equal units.

    Attributes:
        forward, backward: with tensor parallelism's communication.
        gather, reduce, all_reduce: of one unit.
        gather_again: in backward; 0 if the unit was kept.
        tp_forward, tp_backward: tensor parallelism's part of the first two, for the timeline.
    """

    count: int
    forward: float
    backward: float
    gather: float = 0.0
    gather_again: float = 0.0
    reduce: float = 0.0
    all_reduce: float = 0.0
    tp_forward: float = 0.0
    tp_backward: float = 0.0


@dataclass
class Exposed:
    """Seconds of a micro-batch that nothing hides.

    Attributes:
        gather, reduce, all_reduce: waited for.
        slowdown: compute is longer by this much. hidden: communication beside compute.
    """

    gather: float = 0.0
    reduce: float = 0.0
    all_reduce: float = 0.0
    slowdown: float = 0.0
    hidden: float = 0.0

    @property
    def total(self) -> float:
        return self.gather + self.reduce + self.all_reduce + self.slowdown

    def wait(self, times: int, compute: float, gather: float, reduce: float, extra: float) -> None:
        """``times`` times: compute with these three beside it."""
        together = gather + reduce + extra
        if not together:
            return
        slowed = compute + constant("overlap_slowdown").value * min(together, compute)
        left = max(0.0, together - slowed)
        self.slowdown += times * (slowed - compute)
        self.hidden += times * (together - left)
        self.gather += times * left * gather / together
        self.reduce += times * left * reduce / together
        self.all_reduce += times * left * extra / together


def fsdp_exposed(units: Sequence[UnitTimes], *, all_reduce: bool) -> Exposed:
    """Of one forward and backward; ``all_reduce``: whether this is the micro-batch with HSDP's."""
    found = Exposed()
    if not units:
        return found
    found.gather += units[0].gather  # nothing runs before it
    for i, unit in enumerate(units):
        after = units[i + 1].gather if i + 1 < len(units) else 0.0
        found.wait(unit.count - 1, unit.forward, unit.gather, 0.0, 0.0)
        found.wait(1, unit.forward, after, 0.0, 0.0)
    for i in range(len(units) - 1, -1, -1):
        unit = units[i]
        before = units[i - 1].gather_again if i else 0.0
        later = units[i + 1] if i + 1 < len(units) else None
        extra = unit.all_reduce if all_reduce else 0.0
        found.wait(unit.count - 1, unit.backward, unit.gather_again, unit.reduce, extra)
        reduce = later.reduce if later else 0.0
        late = later.all_reduce if later and all_reduce else 0.0
        found.wait(1, unit.backward, before, reduce, late)
    found.reduce += units[0].reduce  # after the last backward
    if all_reduce:
        found.all_reduce += units[0].all_reduce
    return found


def once_exposed(units: Sequence[UnitTimes], *, reduce: float, gather: float) -> Exposed:
    """Of one step where parameters are whole: gradients are reduced (``reduce`` seconds in all) in the last
    backward, updated parameters gathered (ZeRO-1) in the next forward. One bucket of many is last."""
    found = Exposed()
    count = max(sum(unit.count for unit in units), 1)
    forward = sum(unit.count * unit.forward for unit in units)
    backward = sum(unit.count * unit.backward for unit in units)
    found.wait(1, backward, 0.0, reduce * (1 - 1 / count), 0.0)
    found.wait(1, forward, gather * (1 - 1 / count), 0.0, 0.0)
    found.reduce += reduce / count
    found.gather += gather / count
    return found
