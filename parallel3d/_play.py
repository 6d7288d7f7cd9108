"""Players of operations as spans of time on streams, and of a micro-batch of the engine's units. Seconds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from parallel3d.fsdp.schedule import GatherSchedule, PrefetchSettings


class Player:
    """Simulates the compute stream of one GPU, and collectives and copies beside it. Each method plays one
    operation, in the order in which the host issues them; times are in seconds.

    Kernels run in order, each after the host has launched it. A collective or copy begins when it has been
    issued and its resources are free: its stream, its communicator or network card. Kernels are slower while
    collectives run, and stop where the compute stream waits for one.

    Args:
        slowdown: the fraction by which kernels take longer while collectives run.
        launch: seconds in which the host launches an operation.

    Attributes:
        now: time at which the compute stream has finished what was played so far.
        launched: time at which the host has launched the last operation.
        free: resource, such as a stream -> time from which it is free.
        running: time at which the last collective that slows kernels ends.
        host: seconds in which the compute stream waited for the host.
    """

    def __init__(self, slowdown: float, launch: float = 0.0) -> None:
        self.slowdown, self.launch = slowdown, launch
        self.now = self.launched = self.running = self.host = 0.0
        self.free: dict[Hashable, float] = {}

    @property
    def end(self) -> float:
        """The time at which everything played so far has ended."""
        return max([self.now, *self.free.values()])

    def compute(self, seconds: float) -> tuple[float, float]:
        """Plays a kernel that alone takes ``seconds``; returns (begin, end)."""
        self.launched += self.launch
        start = max(self.now, self.launched)
        self.host += start - self.now
        beside = min(max(self.running - start, 0.0) / (1 + self.slowdown), seconds)
        self.now = start + seconds + self.slowdown * beside
        return start, self.now

    def beside(
        self,
        seconds: float,
        turns: Iterable[Hashable],
        after: float = 0.0,
        *,
        slows: bool = True,
    ) -> tuple[float, float]:
        """Plays a collective or a copy of ``seconds``, beside the compute stream; returns (begin, end).

        Args:
            turns: the resources that it occupies, such as its stream and its communicator.
            after: earliest time at which it may begin.
            slows: whether kernels are slower meanwhile; False for copies to the host.
        """
        self.launched += self.launch
        start = max(self.now, self.launched, after)
        for each in turns:
            start = max(start, self.free.get(each, 0.0))
        end = start + seconds
        for each in turns:
            self.free[each] = end
        if slows:
            self.running = max(self.running, end)
        return start, end

    def wait(self, end: float) -> tuple[float, float] | None:
        """Makes the compute stream wait until time ``end``.

        Returns:
            (begin, end) of the wait; None if it doesn't wait.
        """
        start = max(self.now, min(self.launched, end))
        if end <= start:
            return None
        self.host += start - self.now
        self.now = end
        return start, end


COMPUTE = "compute"


@dataclass(frozen=True)
class UnitTimes:
    """Seconds that each phase of a unit takes; it describes ``count`` equal units.

    Attributes:
        forward, backward: kernels, and the communication of tensor, context and expert parallelism.
        gather, reduce, all_reduce: the engine's collectives.
        gather_again: the all-gather in backward; 0 if the unit is not resharded after forward.
        tp_forward, tp_backward: the part of ``forward`` and ``backward`` that is tensor parallelism's
            communication.
        cp_forward, cp_backward: context parallelism's part: what attention waits for.
        ep_forward, ep_backward: expert parallelism's part: the all-to-alls around the experts.
        offload: copying a unit's activations to the host; copying them back takes as long.
        host_forward, host_backward: time in which the host issues a unit's operations. It does not wait for
            kernels, except with experts, whose number of rows it reads.
        packing: seconds, the last ones of ``backward``, in which gradients are copied to be reduced.
        freed: the fraction of backward after which the reduction of the unit before must have ended, and the
            next gather begins; 0: the gather begins with the backward, the reduction must have ended with it.
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
    packing: float = 0.0
    freed: float = 0.0
    parts: tuple[int, bool] = (1, False)
    host_forward: float = 0.0
    host_backward: float = 0.0

    def pieces(self, way: str) -> list[tuple[str, float]]:
        """Returns the (kind, seconds) of a unit's ``way`` ("forward" or "backward") in order; the kind is
        ``COMPUTE``, "tp", "cp" or "ep"."""
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
    """How the engine overlaps communication with computation.

    Attributes:
        slowdown: the fraction by which kernels take longer while collectives run.
        apart: whether all-reduces use other links than the collectives over ``shard``.
        later: whether a unit's all-reduce is issued when the backward of the next unit ends, before the
            gradients of that unit are packed.
        waits: whether backward waits for reductions before its end at all.
    """

    slowdown: float
    apart: bool = False
    later: bool = False
    waits: bool = True


class Exposed(NamedTuple):
    """Seconds by which communication and the host lengthen a micro-batch.

    Attributes:
        gather, reduce, all_reduce, offload: seconds in which the compute stream waits for them.
        host_forward, host_backward, host_optimizer: seconds in which it waits for the host.
        slowdown: seconds by which kernels take longer because collectives run beside them.
    """

    gather: float = 0.0
    reduce: float = 0.0
    all_reduce: float = 0.0
    offload: float = 0.0
    slowdown: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0
    host_optimizer: float = 0.0


class Span(NamedTuple):
    """A span of time on a lane: ``COMPUTE``, "tp", "cp", "ep", "gather", "reduce", "all-reduce" or "host".

    Attributes:
        kind: ``COMPUTE``; "wait", where the compute stream waits for the lane; or the lane itself.
        unit: index of the unit. way: "forward", "backward" or "optimizer".
        seconds: duration without slowdown.
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


def exposed_of(
    units: Sequence[UnitTimes],
    rules: PlayRules,
    *,
    all_reduce: bool,
    optimizer: tuple[float, float] = (0.0, 0.0),
) -> Exposed:
    """Plays one forward and backward of ``units``; returns the seconds in which the compute stream waits.

    Args:
        all_reduce: whether HSDP's all-reduce runs in this micro-batch.
        optimizer: seconds of the optimizer step that follows, (on the GPU, on the host).
    """
    if not all_reduce:
        units = [replace(unit, all_reduce=0.0) for unit in units]
    few = STEADY
    while not (played := MicroBatch(units, rules, few, optimizer=optimizer)).is_steady:
        few *= 2
    return played.lost


_LANES = {"all_reduce": "all-reduce", "offload": "host"}
_LANES |= dict.fromkeys(("host_forward", "host_backward", "host_optimizer"), COMPUTE)
_Ended = tuple[dict[str, float], dict[Hashable, float]]


class InModelOrder:
    """Answers to ``GatherSchedule`` where units run in the model's order, without named prefetches."""

    def has_room(self, unit: Any) -> bool:
        return True  # no gather finds its memory in use

    def named_in_forward(self, unit: Any) -> None:
        return None

    named_in_backward = named_in_forward


class MicroBatch(InModelOrder):
    """Plays one forward and backward of ``units``, given in the order of the forward.

    Args:
        few: of more equal units only so many are played, and one in the middle stands for the rest.
        optimizer: as for ``exposed_of``.

    Attributes:
        lost: the seconds in which the compute stream waited.
        is_steady: whether the units in the middle waited as long as those before them, so that one of them
            may stand for the units that were not played.
        spans: the spans played, if ``records``.
    """

    def __init__(
        self,
        units: Sequence[UnitTimes],
        rules: PlayRules,
        few: int = 2**31,
        *,
        optimizer: tuple[float, float] = (0.0, 0.0),
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
        self._away = [at for at, unit in enumerate(self._every) if unit.offload][:-1]
        self._copied: dict[int, float] = {}  # index of a unit -> when what it keeps is back
        self._gathering: dict[int, float] = {}  # index of a unit -> when its gather ends
        self._begun: set[int] = set()
        self._lost = dict.fromkeys(Exposed._fields, 0.0)
        self._issued = 0.0  # when the host has issued the operations up to now
        self._all_reduces = ("all-reduce", "replicate" if self.rules.apart else "shard")
        self._schedule.last_order = list(range(len(self._every)))
        self._forward()
        self._backward()
        if any(optimizer):
            self._player.compute(optimizer[0])
            self._wait_for_host(optimizer[1], 0, "optimizer")
        self.lost = Exposed(**self._lost)

    def is_gathering(self, unit: Any) -> bool:
        return unit in self._gathering

    def may_be_next(self, unit: Any) -> bool:
        return unit not in self._begun

    def is_read_in_backward(self, unit: Any) -> bool:
        return self._every[unit].gather_again > 0 or unit in self._away

    # The two passes.

    def _forward(self) -> None:
        before: _Ended | None = None
        out = 0.0
        for at, unit in enumerate(self._every):
            self._gather(at, "forward")
            self._wait("gather", at, "forward", self._gathering.pop(at))
            self._schedule.begin_forward(at)
            self._issue("forward")
            leaves, out = out, 0.0
            if at in self._away:  # what it keeps is copied as it is made
                out = self._beside("host", at, "forward", unit.offload, ("host",))
            self._compute(at, "forward", self._pieces[at]["forward"])
            self._wait_for_host(unit.host_forward, at, "forward", ends=unit.ep_forward > 0)
            self._wait("offload", at, "forward", leaves)
            before = self._multiply("forward", at, at + 1, before)
        self._schedule.begin_backwards()

    def _backward(self) -> None:
        before: _Ended | None = None
        reduced, summed, pending = 0.0, 0.0, (0.0, 0.0, 0)
        for at in reversed(range(len(self._every))):
            unit = self._every[at]
            if self.is_read_in_backward(at):
                self._gather(at, "backward")
                self._wait("gather", at, "backward", self._gathering.pop(at))
            self._begun.add(at)
            self._wait("offload", at, "backward", self._copied.get(at, 0.0))
            defers = unit.freed > 0 and reduced > 0
            self._schedule.begin_backward(at, at, defer=defers)
            self._issue("backward")
            pieces = self._pieces[at]["backward"]
            if defers:
                first, pieces = _parted(pieces, unit.freed)
                self._compute(at, "backward", first)
                self._wait("reduce", at, "backward", reduced)
                self._schedule.issue_deferred()
                self._issue("backward")
            last: list[tuple[str, float]] = []
            if pending[0]:
                whole = sum(seconds for _, seconds in pieces)
                pieces, last = _parted(pieces, 1 - unit.packing / whole if whole else 1.0)
            self._compute(at, "backward", pieces)
            if pending[0]:
                summed = self._sum(pending[2], *pending[:2])
            self._compute(at, "backward", last)
            self._wait_for_host(unit.host_backward, at, "backward", ends=unit.ep_backward > 0)
            if self.rules.waits:
                self._wait("reduce", at, "backward", reduced)
            if unit.reduce:
                reduced = self._beside("reduce", at, "backward", unit.reduce, ("reduce", "shard"))
            if self.rules.later:
                pending = unit.all_reduce, reduced, at
            elif unit.all_reduce:
                summed = self._sum(at, unit.all_reduce, reduced)
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
            if way == "backward" and at in self._away:
                self._copied[at] = self._beside("host", at, way, unit.offload, ("host",))

    def _compute(self, at: int, way: str, pieces: list[tuple[str, float]]) -> None:
        for kind, seconds in pieces:
            if kind == COMPUTE:
                start, end = self._player.compute(seconds)
                self._lost["slowdown"] += end - start - seconds
                if self.records:
                    self.spans.append(Span(kind, kind, at, way, start, end, seconds))
            elif self.records:  # on the computation's own way
                self._player.wait(self._beside(kind, at, way, seconds, (kind,)))
            else:  # the same: nothing else has that lane
                self._player.now += seconds

    def _beside(
        self,
        lane: str,
        at: int,
        way: str,
        seconds: float,
        turns: tuple[str, ...],
        after: float = 0.0,
    ) -> float:
        """Plays a collective or copy on ``lane`` for unit ``at``; returns when it ends."""
        player = self._player
        if not seconds:
            return max(player.now, after)
        start, end = player.beside(seconds, turns, after, slows=lane != "host")
        if self.records:
            self.spans.append(Span(lane, lane, at, way, start, end, seconds))
        return end

    def _wait_for_host(self, seconds: float, at: int, way: str, *, ends: bool = False) -> None:
        """Adds ``seconds`` in which the host issues the operations of unit ``at``; the unit can't end before.
        ``ends``: the host then waits for the unit, and so has no lead any more."""
        self._issued += seconds
        self._wait(f"host_{way}", at, way, self._issued)
        if ends:
            self._issued = self._player.now

    def _wait(self, what: str, at: int, way: str, end: float) -> None:
        if (waited := self._player.wait(end)) is not None:
            start, end = waited
            self._lost[what] += end - start
            if self.records:
                lane = _LANES.get(what, what)
                self.spans.append(Span(lane, "wait", at, way, start, end, end - start))

    def _multiply(self, way: str, at: int, following: int, before: _Ended | None) -> _Ended | None:
        """If unit ``at``, which has just ended, stands for others, adds the seconds that these would wait.

        Returns (seconds waited so far, how far each resource is ahead of the compute stream) if it or the
        unit ``following`` stands for others, else None; ``before``: what the call for the last unit has
        returned.
        """
        player, others = self._player, self._more.get((way, at), 0)
        if not others and (way, following) not in self._more:
            return None
        ahead = {key: max(end - player.now, 0.0) for key, end in player.free.items()}
        ahead["issued"] = behind = self._issued - player.now
        lost = dict(self._lost)
        if others and before is not None:
            for name, seconds in before[0].items():
                self._lost[name] += others * (lost[name] - seconds)
            # The computation catches up with the host, or falls behind it, by as much in each.
            growth = behind - before[1]["issued"]
            self._issued += others * growth
            self.is_steady &= self._issued <= player.now and (growth < _EQUAL or behind < -_EQUAL)
            for key in player.free:
                seconds = ahead[key]
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
    """Splits ``pieces`` after the fraction ``part`` of their seconds."""
    left = part * sum(seconds for _, seconds in pieces)
    first, rest = [], []
    for kind, seconds in pieces:
        now = min(seconds, left)
        left -= now
        first += [(kind, now)] if now else []
        rest += [(kind, seconds - now)] if seconds > now else []
    return first, rest
