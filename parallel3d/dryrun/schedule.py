"""Puts a dry run's operations on streams, one by one."""

from __future__ import annotations

from array import array
from collections import defaultdict

from parallel3d._recorder import Collective
from parallel3d.dryrun.durations import collective_seconds, kernel_seconds, link_of
from parallel3d.dryrun.result import DryRun, Operation
from parallel3d.dryrun.spans import COMPUTE, COPIES, DATA_AXES, Span, stream_of, unit_of
from parallel3d.planner.cluster import Cluster
from parallel3d.planner.constants import constant

__all__ = ["Schedule"]


class Schedule:
    """The clocks of host, computation and collectives; ``add`` puts the operation at a position.

    Attributes:
        spans: what runs, in the order in which it was issued.
        times: of each operation, when the computation comes to it.
    """

    def __init__(self, run: DryRun, cluster: Cluster) -> None:
        self._run = run
        self._cluster = cluster
        self.spans: list[Span] = []
        self.times = array("d")
        self._launch = constant("launch").value
        self._slowdown = constant("overlap_slowdown").value
        self._host = self._compute = 0.0  # until when they are busy
        self._streams: dict[str, float] = defaultdict(float)
        self._axes: dict[object, float] = defaultdict(float)
        self._ends: dict[int, float] = {}  # of collectives
        self._aside: dict[int, float] = {}  # position -> end, of what runs beside the computation
        self._names: dict[int, str] = {}  # of streams
        self._reduced: dict[str, float] = {}  # unit -> when its last reduce-scatter ends
        self._running = 0.0  # until when any collective runs
        self._starts: list[float] = []
        self._late: list[float] = []  # by step, seconds that the GPU waited for the host

    def add(self, position: int) -> None:
        operation = self._run.operations[position]
        while len(self._starts) <= operation.step:
            self._starts.append(max(self._compute, self._host))
            self._late.append(0.0)
        self.times.append(self._compute)
        if operation.kind == "wait":
            self._wait(position, operation)
            return
        self._host += self._launch
        if operation.kind == "collective":
            self._issue(position, operation)
        else:
            self._calculate(position, operation)

    def steps(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(when each step begins and when all is over, seconds that the GPU waited for the host in each)."""
        end = max([self._compute, *self._streams.values()])
        return (*(self._starts or [0.0]), end), tuple(self._late or [0.0])

    def _calculate(self, position: int, operation: Operation) -> None:
        if operation.stream:
            self._copy(position, operation)
            return
        start = max(self._compute, self._host)
        self._late[operation.step] += start - self._compute
        seconds = kernel_seconds(operation, self._cluster.gpu)
        beside = min(max(self._running - start, 0.0), seconds)
        self._compute = start + seconds + self._slowdown * beside
        self.times[position] = start
        self._span(COMPUTE, operation, position, start, self._compute)

    def _copy(self, position: int, operation: Operation) -> None:
        """What runs beside the computation."""
        start = max(self._compute, self._host, self._before(operation))
        end = start + kernel_seconds(operation, self._cluster.gpu)
        self._aside[position] = end
        stream = self._names.get(operation.stream, COPIES)
        self._streams[stream] = max(self._streams[stream], end)
        self._span(stream, operation, position, start, end)

    def _before(self, operation: Operation) -> float:
        """When all is over, on other streams, that the operation comes after."""
        return max((self._aside.get(position, 0.0) for position in operation.after), default=0.0)

    def _issue(self, position: int, operation: Operation) -> None:
        if operation.collective is None:
            return
        call = self._run.collectives[operation.collective]
        stream, axis = stream_of(call), call.axis or (call.group_size, "")
        start = max(
            max(self._compute, self._host),
            self._streams[stream],
            self._axes[axis],
            self._after(call),
            self._before(operation),
        )
        link = link_of(self._run, call, self._cluster)
        end = start + collective_seconds(call, link, self._cluster)
        self._streams[stream] = self._axes[axis] = self._ends[operation.collective] = end
        self._aside[position] = end
        if operation.stream:
            self._names[operation.stream] = stream
        self._running = max(self._running, end)
        if call.op == "reduce_scatter" and call.axis in DATA_AXES:
            self._reduced[call.unit] = end
        self._span(stream, operation, position, start, end, call)
        if not call.asynchronous and not operation.stream:
            self._hold(position, operation, call, end)
        if call.op == "barrier":
            self._host = max(self._host, end)

    def _after(self, call: Collective) -> float:
        """When that is over whose result the collective reads."""
        if call.op == "all_reduce" and call.axis in DATA_AXES:
            return self._reduced.get(call.unit, 0.0)
        return 0.0

    def _wait(self, position: int, operation: Operation) -> None:
        if operation.collective is None:
            return
        call = self._run.collectives[operation.collective]
        end = max(self._ends.get(operation.collective, 0.0), self._before(operation))
        self._hold(position, operation, call, end)

    def _hold(self, position: int, operation: Operation, call: Collective, end: float) -> None:
        """The computation goes on when the collective has ended."""
        start = max(self._compute, min(self._host, end))
        if end > start:
            self._late[operation.step] += start - self._compute
            self._span(COMPUTE, operation, position, start, end, call, "wait")
            self._compute = end

    def _span(
        self,
        stream: str,
        operation: Operation,
        position: int,
        start: float,
        end: float,
        call: Collective | None = None,
        kind: str = "",
    ) -> None:
        self.spans.append(
            Span(
                stream,
                kind or (operation.kind if call is None else call.op),
                operation.name if call is None else call.op,
                operation.module,
                unit_of(operation.module) if call is None else call.unit,
                "" if call is None else call.axis or "",
                operation.phase,
                operation.step,
                start,
                end,
                position,
                operation.collective,
            )
        )
