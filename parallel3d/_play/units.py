"""A micro-batch of the engine's units, played: what each computes, and when its collectives run beside it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from parallel3d._play.player import Player
from parallel3d.fsdp.schedule import GatherSchedule, PrefetchSettings

COMPUTE = "compute"


@dataclass(frozen=True)
class UnitTimes:
    """How many seconds each phase of a unit takes, for ``count`` equal units.

    Attributes:
        forward, backward: computation, and the communication of tensor and context parallelism.
        gather, reduce, all_reduce: the engine's collectives.
        gather_again: the all-gather in backward; 0 if the unit is not resharded after forward.
        tp_forward, tp_backward: tensor parallelism's part of the first two.
        cp_forward, cp_backward: context parallelism's: what attention waits for.
        ep_forward, ep_backward: expert parallelism's: the all-to-alls around the experts.
        offload: copying a unit's activations to the host; copying them back takes as long.
        parts: number of parts of the computation that end with a collective of tensor parallelism, and
            whether each begins with one too (sequence parallel).
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
    cp_forward: float = 0.0
    cp_backward: float = 0.0
    ep_forward: float = 0.0
    ep_backward: float = 0.0
    offload: float = 0.0
    parts: tuple[int, bool] = (1, False)

    def pieces(self, way: str) -> list[tuple[str, float]]:
        """(``COMPUTE``, "tp", "cp" or "ep"; seconds) in turn; ``way``: "forward" or "backward"."""
        whole, tp, cp, ep = (getattr(self, f"{kind}{way}") for kind in ("", "tp_", "cp_", "ep_"))
        parts, around = self.parts if tp else (2 if cp and ep else 1, False)
        before = tp / parts / 2 if around else 0.0
        each = (whole - tp - cp - ep) / parts
        middle = [[(COMPUTE, each)] for _ in range(parts)]
        for kind, seconds, at in (("cp", cp, 0), ("ep", ep, -1)):  # around attention, experts
            if seconds:
                around_it = [(COMPUTE, each / 3), (kind, seconds / 2)]
                middle[at] = around_it * 2 + [(COMPUTE, each / 3)]
        ends = [("tp", before)], [("tp", tp / parts - before)]
        return [piece for own in middle for piece in ends[0] + own + ends[1] if piece[1]]


class PlayRules(NamedTuple):
    """How a stack's engine communicates.

    Attributes:
        slowdown: the fraction of its time that computation takes longer while collectives run.
        freed: the fraction of a unit's backward after which the reduction of the unit before must have ended,
            and the next gather begins; 0: the gather begins with the backward, the reduction must have ended
            with it.
        apart: whether all-reduces are on other links than the collectives over ``shard``.
        later: whether a unit's all-reduce is issued when the backward of the next unit ends.
        waits: whether backward waits for reductions at all before its end.
    """

    slowdown: float
    freed: float = 0.0
    apart: bool = False
    later: bool = False
    waits: bool = True


class Exposed(NamedTuple):
    """Seconds by which communication lengthens a micro-batch.

    Attributes:
        gather, reduce, all_reduce, offload: seconds in which the computation waits for them.
        slowdown: seconds by which computation is longer because collectives run beside it.
    """

    gather: float = 0.0
    reduce: float = 0.0
    all_reduce: float = 0.0
    offload: float = 0.0
    slowdown: float = 0.0


class Span(NamedTuple):
    """What runs on a lane: ``COMPUTE``, "tp", "cp", "ep", "gather", "reduce", "all-reduce" or "host".

    Attributes:
        kind: ``COMPUTE``; "wait", where the computation waits for the lane; or the lane itself.
        unit: its index among all units.
        seconds: without slowdown.
    """

    lane: str
    kind: str
    unit: int
    way: str
    start: float
    end: float
    seconds: float


STEADY = 4
"""Number of equal units of which one in the middle usually ends as the one before did."""
_EQUAL = 1e-10


def exposed_of(units: Sequence[UnitTimes], rules: PlayRules, *, all_reduce: bool) -> Exposed:
    """Returns the seconds of one forward and backward in which computation waits.

    Args:
        all_reduce: whether HSDP's all-reduce runs in this micro-batch.
    """
    if not all_reduce:
        units = [replace(unit, all_reduce=0.0) for unit in units]
    few = STEADY
    while not (played := MicroBatch(units, rules, few)).is_steady:
        few *= 2
    return played.lost


_Ended = tuple[dict[str, float], dict[Hashable, float]]


class MicroBatch:
    """Plays one forward and backward of ``units``, which are in the order of the forward.

    Args:
        few: largest number of equal units that are played; one in the middle stands for the others.

    Attributes:
        lost: the seconds in which computation waited.
        is_steady: whether the units in the middle ended as the ones before them, so that they may stand for
            the units that were not played.
        spans: the spans that ran, if ``records``.
    """

    def __init__(
        self,
        units: Sequence[UnitTimes],
        rules: PlayRules,
        few: int = 2**31,
        *,
        records: bool = False,
    ) -> None:
        self.rules, self.records, self.is_steady = rules, records, True
        self.spans: list[Span] = []
        self._player = Player(self.rules.slowdown)
        self._schedule = GatherSchedule(self, PrefetchSettings())
        self._every: list[UnitTimes] = []
        self._pieces: list[dict[str, list[tuple[str, float]]]] = []
        self._more: dict[tuple[str, int], int] = {}  # of a unit that stands for so many others
        for unit in units:
            first, count = len(self._every), min(unit.count, few)
            if unit.count > few:
                others = unit.count - few
                self._more |= {
                    ("forward", first + few - 2): others,
                    ("backward", first + 1): others,
                }
            self._every += [unit] * count
            self._pieces += [{way: unit.pieces(way) for way in ("forward", "backward")}] * count
        moved = [at for at, unit in enumerate(self._every) if unit.offload]
        self._moved_before = dict(zip(moved[1:], moved, strict=False))
        self._gathering: dict[int, float] = {}  # index of a unit -> when its gather ends
        self._begun: set[int] = set()
        self._lost = dict.fromkeys(Exposed._fields, 0.0)
        self._all_reduces = ("all-reduce", "replicate" if self.rules.apart else "shard")
        self._schedule.last_order = list(range(len(self._every)))
        self._forward()
        self._backward()
        self.lost = Exposed(**self._lost)

    # What ``GatherSchedule`` asks of units.

    def is_gathering(self, unit: Any) -> bool:
        return unit in self._gathering

    def may_be_next(self, unit: Any) -> bool:
        return unit not in self._begun

    def is_read_in_backward(self, unit: Any) -> bool:
        return self._every[unit].gather_again > 0

    def named_in_forward(self, unit: Any) -> None:
        return None

    named_in_backward = named_in_forward

    # The two passes.

    def _forward(self) -> None:
        before: _Ended | None = None
        out, moved = 0.0, set(self._moved_before.values())
        for at, unit in enumerate(self._every):
            self._gather(at, "forward")
            self._wait("gather", at, "forward", self._gathering.pop(at))
            self._schedule.begin_forward(at)
            self._issue("forward")
            self._compute(at, "forward", self._pieces[at]["forward"])
            self._wait("offload", at, "forward", out)
            if at in moved:
                out = self._beside("host", at, "forward", unit.offload, ("host",))
            before = self._multiply("forward", at, at + 1, before)
        self._schedule.begin_backwards()

    def _backward(self) -> None:
        before: _Ended | None = None
        copied: dict[int, float] = {}
        reduced, summed, pending = 0.0, 0.0, (0.0, 0.0, 0)
        for at in reversed(range(len(self._every))):
            unit = self._every[at]
            if unit.gather_again:
                self._gather(at, "backward")
                self._wait("gather", at, "backward", self._gathering.pop(at))
            self._begun.add(at)
            self._wait("offload", at, "backward", copied.get(at, 0.0))
            back = self._moved_before.get(at)
            if back is not None:
                seconds = self._every[back].offload
                copied[back] = self._beside("host", back, "backward", seconds, ("host",))
            defers = self.rules.freed > 0 and reduced > 0
            self._schedule.begin_backward(at, at, defer=defers)
            self._issue("backward")
            pieces = self._pieces[at]["backward"]
            if defers:
                first, pieces = _parted(pieces, self.rules.freed)
                self._compute(at, "backward", first)
                self._wait("reduce", at, "backward", reduced)
                self._schedule.issue_deferred()
                self._issue("backward")
            self._compute(at, "backward", pieces)
            if self.rules.waits:
                self._wait("reduce", at, "backward", reduced)
            if unit.reduce:
                reduced = self._beside("reduce", at, "backward", unit.reduce, ("reduce", "shard"))
            if unit.all_reduce and not self.rules.later:
                summed = self._sum(at, unit.all_reduce, reduced)
            elif self.rules.later:
                if pending[0]:
                    summed = self._sum(pending[2], *pending[:2])
                pending = unit.all_reduce, reduced, at
            before = self._multiply("backward", at, at - 1, before)
        self._wait("reduce", 0, "backward", reduced)
        if pending[0]:
            summed = self._sum(pending[2], *pending[:2])
        self._wait("all_reduce", 0, "backward", summed)

    def _sum(self, at: int, seconds: float, reduced: float) -> float:
        return self._beside("all-reduce", at, "backward", seconds, self._all_reduces, reduced)

    # Single operations.

    def _issue(self, way: str) -> None:
        while (wanted := self._schedule.next()) is not None:
            self._gather(wanted, way)  # type: ignore[arg-type]

    def _gather(self, at: int, way: str) -> None:
        if at not in self._gathering:
            unit = self._every[at]
            seconds = unit.gather if way == "forward" else unit.gather_again
            self._gathering[at] = self._beside("gather", at, way, seconds, ("gather", "shard"))

    def _compute(self, at: int, way: str, pieces: list[tuple[str, float]]) -> None:
        for kind, seconds in pieces:
            if kind == COMPUTE:
                start, end = self._player.compute(seconds)
                self._lost["slowdown"] += end - start - seconds
                if self.records:
                    self.spans.append(Span(kind, kind, at, way, start, end, seconds))
            else:  # on the computation's own way
                self._player.wait(self._beside(kind, at, way, seconds, (kind,)))

    def _beside(
        self,
        lane: str,
        at: int,
        way: str,
        seconds: float,
        turns: tuple[str, ...],
        after: float = 0.0,
    ) -> float:
        """Issues a collective or a copy; returns when it ends."""
        player = self._player
        if not seconds:
            return max(player.now, after)
        start, end = player.beside(seconds, turns, after, is_collective=lane != "host")
        if self.records:
            self.spans.append(Span(lane, lane, at, way, start, end, seconds))
        return end

    def _wait(self, what: str, at: int, way: str, end: float) -> None:
        waited = self._player.wait(end)
        if waited is not None:
            start, end = waited
            self._lost[what] += end - start
            if self.records:
                lane = {"all_reduce": "all-reduce", "offload": "host"}.get(what, what)
                self.spans.append(Span(lane, "wait", at, way, start, end, end - start))

    def _multiply(self, way: str, at: int, following: int, before: _Ended | None) -> _Ended | None:
        """If the unit that has just ended stands for others, adds the seconds that these wait.

        Args:
            following: index of the unit that comes after it.
            before: the seconds waited, and how far collectives were ahead, when the unit before it ended.

        Returns:
            The same two values for this unit, if the following one stands for others.
        """
        player, others = self._player, self._more.get((way, at), 0)
        if not others and (way, following) not in self._more:
            return None
        ahead = {key: max(end - player.now, 0.0) for key, end in player.free.items()}
        lost = dict(self._lost)
        if others and before is not None:
            for name, seconds in before[0].items():
                self._lost[name] += others * (lost[name] - seconds)
            for key, seconds in ahead.items():
                growth = seconds - before[1].get(key, 0.0)
                # All-reduces on links of their own may fall behind, by as much in each.
                falls_behind = growth > _EQUAL and self.rules.apart and key in self._all_reduces
                self.is_steady &= falls_behind or abs(growth) < _EQUAL
                if falls_behind:
                    player.free[key] += others * growth
                    player.running = max(player.running, player.free[key])
        return lost, ahead


def _parted(
    pieces: list[tuple[str, float]], part: float
) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """``pieces`` up to ``part`` of their seconds, and the rest."""
    left = part * sum(seconds for _, seconds in pieces)
    first, rest = [], []
    for kind, seconds in pieces:
        now = min(seconds, left)
        left -= now
        first += [(kind, now)] if now else []
        rest += [(kind, seconds - now)] if seconds > now else []
    return first, rest
