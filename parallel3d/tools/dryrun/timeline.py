"""When a dry run's operations would run: computation and collectives on streams, with predicted durations."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache

from parallel3d._util.recorder import Collective
from parallel3d.mesh.axes import is_data_axis
from parallel3d.planner.cluster import AxisLink, Cluster, Gpu, collective_time
from parallel3d.planner.constants import constant
from parallel3d.planner.kernels import attention_rate, best_attention, gemm_time, memory_rate
from parallel3d.tools.dryrun.result import DryRun, Operation

# Spans of a predicted timeline, and the streams they are on.

COMPUTE = "compute"
COPIES = "copies"
STREAMS = (COMPUTE, "tp", COPIES, "gather", "reduce", "all-reduce")
"""In the order in which they are drawn; others follow."""

"""Axes over which the engine gathers parameters and reduces gradients."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that runs on a stream from ``start`` to ``end``, predicted seconds.

    Attributes:
        stream: ``compute``, ``copies`` (into what is sent), or the collectives' (``stream_of``).
        kind: the operation's; ``wait``: the computation stands still until a collective ends.
        name: of the operation; of a wait the collective's.
        module: in which it runs. unit: the engine's of a collective, else the block that the module is of.
        axis: of a collective or wait; ``""`` for none.
        operation: position among the run's. collective: position among its collectives, or None.
    """

    stream: str
    kind: str
    name: str
    module: str
    unit: str
    axis: str
    phase: str
    step: int
    start: float
    end: float
    operation: int
    collective: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


def stream_of(call: Collective) -> str:
    """The engine's collectives have a stream for each operation, those of another axis one for the axis."""
    if call.axis is None:
        return "other"
    if not is_data_axis(call.axis):
        return call.axis
    names = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "all-reduce"}
    return names.get(call.op, "other")


@lru_cache(maxsize=65536)
def unit_of(module: str) -> str:
    """The repeated block that ``module`` is a part of, such as ``layers.3``; else its first name."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return parts[0]


# Predicted seconds of what a dry run has seen: kernels on one GPU, collectives between them.

_ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_USUAL_SEQUENCE, _USUAL_HEAD = 4096, 128  # of an attention that does not say


def cluster_of(run: DryRun, gpu: str = "h100-80gb-sxm") -> Cluster:
    """As many nodes of ``gpu`` as the run's world fills.

    Raises:
        PlanningError: there is no such GPU.
    """
    each = max(run.gpus_per_node, 1)
    return Cluster.of(gpu, nodes=-(-run.world_size // each), gpus_per_node=each)


def kernel_seconds(operation: Operation, gpu: Gpu) -> float:
    """Of a matmul, an attention or anything else that computes, by the planner's model of kernels.

    A matmul whose sizes aren't known takes as long as a square one of as many FLOPs. An attention is taken to
    be fused, its ``flops`` those that are computed (half, where it is causal). Everything else takes as long
    as its bytes at a stream kernel's rate.
    """
    itemsize = _ITEMSIZES.get(operation.dtype, 1 if operation.dtype.startswith("float8") else 4)
    if operation.kind == "matmul" and (operation.sizes or operation.flops):
        side = round((operation.flops / 2) ** (1 / 3)) or 1
        m, n, k = operation.sizes or (side, side, side)
        return gemm_time(m, n, k, gpu, itemsize)
    moved = operation.moved / memory_rate(gpu)
    if operation.kind == "attention":
        _, seq, head = operation.sizes or (0, _USUAL_SEQUENCE, _USUAL_HEAD)
        rate = attention_rate(gpu, best_attention(gpu), max(seq, 1), head, itemsize)
        return max(operation.flops / rate, moved)
    return moved


def link_of(run: DryRun, call: Collective, cluster: Cluster) -> AxisLink:
    """How the ranks of the call's group lie on nodes.

    Those of a group that isn't a mesh axis's are not known: they are taken to be neighbours, the most
    favourable case.
    """
    near = cluster.domain
    ranks = run.axis_ranks.get(call.axis or "", ())
    if len(ranks) != call.group_size:
        return AxisLink(call.group_size, min(call.group_size, near))
    return AxisLink(len(ranks), min(Counter(rank // near for rank in ranks).values()))


def collective_seconds(call: Collective, link: AxisLink, cluster: Cluster) -> float:
    """Seconds from when all ranks have come, by the planner's model of the network.

    It knows all_gather, reduce_scatter and all_reduce. The others by how many bytes they bring over the
    slowest link (n ranks, S bytes, p ranks on a node):

    - broadcast, scatter, gather: as an all-gather of S; reduce: as a reduce-scatter of S. Of a scatter or
      gather a rank other than the root knows only its own part: there it is too little.
    - all_to_all: S (n - 1) / n within a node, as an all-gather; between nodes each rank's own NIC brings
      S (n - p) / n, p times as much as an all-gather's.
    - send, recv: S over one link, between nodes where the group has several.
    - barrier: an all-reduce of one number. Any other: as an all-reduce of S.
    """
    op, size = call.op, float(call.bytes)
    if op in ("all_gather", "reduce_scatter", "all_reduce"):
        return collective_time(op, size, link, cluster)
    if op in ("broadcast", "scatter", "gather", "reduce"):
        kind = "reduce_scatter" if op == "reduce" else "all_gather"
        return collective_time(kind, size, link, cluster)
    if op == "all_to_all":
        if link.nodes > 1:
            size *= link.per_node * (link.size - link.per_node) / (link.size - 1)
        return collective_time("all_gather", size, link, cluster)
    if op in ("send", "recv"):
        pair = AxisLink(2, 1 if link.nodes > 1 else 2)
        return collective_time("all_gather", 2 * size, pair, cluster)
    return collective_time("all_reduce", 8.0 if op == "barrier" else size, link, cluster)


def latency_of(call: Collective, link: AxisLink, cluster: Cluster) -> float:
    """What the same collective takes with next to nothing in it."""
    if call.op == "barrier" or not call.bytes:
        return collective_seconds(call, link, cluster)
    small = Collective(call.order, call.op, call.axis, call.unit, 8, call.group_size, True)
    return min(collective_seconds(small, link, cluster), collective_seconds(call, link, cluster))


# Puts a dry run's operations on streams, one by one.


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
        if call.op == "reduce_scatter" and is_data_axis(call.axis):
            self._reduced[call.unit] = end
        self._span(stream, operation, position, start, end, call)
        if not call.asynchronous and not operation.stream:
            self._hold(position, operation, call, end)
        if call.op == "barrier":
            self._host = max(self._host, end)

    def _after(self, call: Collective) -> float:
        """When that is over whose result the collective reads."""
        if call.op == "all_reduce" and is_data_axis(call.axis):
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


@dataclass(frozen=True)
class Timeline:
    """What runs when. All times are predicted seconds since the program's start.

    Attributes:
        spans: on every stream, in the order in which they were issued; on the computation's also what it
            waits for (``wait``, with the axis).
        cluster: whose speed it is.
        times: of each operation, when the computation comes to it.
        starts: of each step, when its first operation is issued; and when all is over.
        complete: how many of the steps end with the optimizer's.
        host: by step, seconds in which the GPU waits for the host to start kernels.
    """

    spans: tuple[Span, ...]
    cluster: Cluster
    times: tuple[float, ...]
    starts: tuple[float, ...]
    complete: int
    host: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.starts[-1]

    @property
    def step(self) -> int:
        """The step that is shown: the last complete one, without the first one's preparations if there are
        several; 0 if none is complete."""
        return max(self.complete - 1, 0)

    @property
    def step_seconds(self) -> float:
        """Of ``step``."""
        start, end = self.bounds()
        return end - start

    def bounds(self, step: int | None = None) -> tuple[float, float]:
        """When ``step`` begins and ends."""
        at = self.step if step is None else step
        return self.starts[at], self.starts[min(at + 1, len(self.starts) - 1)]

    def of_step(self, step: int | None = None) -> list[Span]:
        """What is issued in ``step``."""
        wanted = self.step if step is None else step
        return [span for span in self.spans if span.step == wanted]

    def step_at(self, seconds: float) -> int:
        """The step that runs at this time."""
        return min(max(bisect_right(self.starts, seconds) - 1, 0), len(self.host) - 1)

    def exposed(self, step: int | None = None) -> dict[str, float]:
        """By axis (``""``: none), seconds that the computation waits for its collectives in ``step``."""
        found: dict[str, float] = defaultdict(float)
        for span in self.of_step(step):
            if span.kind == "wait":
                found[span.axis] += span.seconds
        return dict(found)

    def busy(self, step: int | None = None) -> dict[str, float]:
        """By stream, seconds in which it works in ``step``; the computation's waits are no work."""
        found: dict[str, float] = defaultdict(float)
        for span in self.of_step(step):
            if span.kind != "wait":
                found[span.stream] += span.seconds
        return {COMPUTE: found.pop(COMPUTE, 0.0), **found}


def timeline(run: DryRun, cluster: Cluster | str | None = None) -> Timeline:
    """The predicted timeline of ``run``.

    Operations compute one after another, in the program's order, none before the host has started it. A
    collective begins when it is issued, when its stream is free, and when no other collective of its axis
    runs: NCCL lets those of one communicator run one after another. A sum over ``replicate`` of what a
    reduce-scatter of the same unit brings comes after that. What blocks, and ``wait``, hold the computation.
    Under collectives it is slower by the planner's ``overlap_slowdown``. All other ranks are as fast, and
    none is late. Durations: ``durations``.

    Args:
        cluster: the machines, or the name of their GPU; as many H100s as the world has ranks unless given.

    Raises:
        PlanningError: no such GPU.
    """
    if not isinstance(cluster, Cluster):
        cluster = cluster_of(run) if cluster is None else cluster_of(run, cluster)
    schedule = Schedule(run, cluster)
    for position in range(len(run.operations)):
        schedule.add(position)
    starts, host = schedule.steps()
    complete = min(run.steps, len(host))
    return Timeline(tuple(schedule.spans), cluster, tuple(schedule.times), starts, complete, host)
