"""Predicts when the operations of a dry run would run on a GPU: computation and collectives, on their
streams."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from parallel3d._play import Player
from parallel3d._util.recorder import Collective
from parallel3d.mesh.axes import is_data_axis
from parallel3d.planner.cluster import AxisLink, Cluster, collective_time
from parallel3d.planner.constants import constant
from parallel3d.planner.kernels import (
    attention_rate,
    backward_rate,
    best_attention,
    gemm_time,
    memory_rate,
)
from parallel3d.planner.stacks import OURS, stack_of
from parallel3d.planner.step_time import host_rate
from parallel3d.tools.dryrun.result import DryRun, Operation

COMPUTE = "compute"
COPIES = "copies"
STREAMS = (COMPUTE, "tp", "cp", COPIES, "gather", "reduce", "all-reduce")
"""The streams in the order in which they are drawn; others follow."""


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """What runs on one stream from ``start`` to ``end``, in predicted seconds from the program's start.

    Attributes:
        stream: ``compute``, ``copies`` (into communication buffers), or that of a collective (``stream_of``).
        kind: the operation's kind; ``wait`` where the compute stream waits for a collective.
        name: name of the operation; for a wait that of the collective.
        module: the module in which it runs.
        unit: the engine's unit of a collective, otherwise the block that the module belongs to.
        axis: mesh axis of a collective or of a wait for one; ``""`` for none.
        operation: index in ``DryRun.operations``.
        collective: index in ``DryRun.collectives``, or None.
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


_OWN_STREAM = {
    **dict.fromkeys(("reduce_scatter", "all_to_all"), "reduce"),
    "all_gather": "gather",
    "all_reduce": "all-reduce",
}


def stream_of(call: Collective) -> str:
    """Returns the name of the stream that a collective is drawn on: one for each operation over shard, else
    one for each axis."""
    if call.axis is None:
        return "other"
    if call.axis == "replicate":
        return "all-reduce"
    return _OWN_STREAM.get(call.op, "other") if is_data_axis(call.axis) else call.axis


@lru_cache(maxsize=65536)
def unit_of(module: str) -> str:
    """Returns the repeated block that ``module`` belongs to, such as ``layers.3``, or its first name."""
    parts = module.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdecimal()), 0)
    return ".".join(parts[: index + 1])


# Predicted durations: kernels on one GPU, collectives between GPUs.

_ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_USUAL_SEQUENCE, _USUAL_HEAD = 4096, 128  # for an attention without sizes


def cluster_of(run: DryRun, gpu: str = "h100-80gb-sxm") -> Cluster:
    """Returns a cluster of ``gpu`` with as many nodes as the run's world fills."""
    per_node = max(run.gpus_per_node, 1)
    return Cluster.of(gpu, nodes=-(-run.world_size // per_node), gpus_per_node=per_node)


def kernel_seconds(operation: Operation, cluster: Cluster) -> float:
    """Returns the seconds of one operation by the planner's model of a GPU.

    A matmul without sizes counts as a square one with as many FLOPs. An attention counts as fused, with
    ``flops`` already halved if it is causal. Everything else takes as long as moving its bytes.
    """
    if operation.kind == "host_copy":
        return operation.moved / host_rate(cluster)
    gpu = cluster.gpu
    itemsize = _ITEMSIZES.get(operation.dtype, 1 if operation.dtype.startswith("float8") else 4)
    if operation.kind == "matmul" and (operation.sizes or operation.flops):
        side = round((operation.flops / 2) ** (1 / 3)) or 1
        m, n, k = operation.sizes or (side, side, side)
        return gemm_time(m, n, k, gpu, itemsize)
    moved = operation.moved / memory_rate(gpu)
    if operation.kind == "attention":
        _, seq, head = operation.sizes or (0, _USUAL_SEQUENCE, _USUAL_HEAD)
        rate = attention_rate(gpu, best_attention(gpu), max(seq, 1), head, itemsize)
        if "backward" in operation.name:  # its products are among the FLOPs
            rate *= backward_rate(gpu)
        return max(operation.flops / rate, moved)
    return moved


def link_of(run: DryRun, call: Collective, cluster: Cluster) -> AxisLink:
    """Returns how the call's group is distributed over nodes; ranks of no axis count as consecutive."""
    near = cluster.domain
    ranks = run.axis_ranks.get(call.axis or "", ())
    if len(ranks) != call.group_size:
        return AxisLink(call.group_size, min(call.group_size, near))
    return AxisLink(len(ranks), min(Counter(rank // near for rank in ranks).values()))


_PLANNED_AS = {
    **dict.fromkeys(("broadcast", "scatter", "gather"), "all_gather"),
    "reduce": "reduce_scatter",
    "recv": "send",
    **{op: op for op in ("all_gather", "reduce_scatter", "all_to_all", "send")},
}
"""Operation -> the one of the planner's that takes as long; all_reduce for others."""


def collective_seconds(call: Collective, link: AxisLink, cluster: Cluster) -> float:
    """Returns the seconds of a collective once all ranks have issued it, by the planner's model.

    Others than the model's count as one that moves as many bytes: broadcast, scatter and gather as an
    all-gather (too short on ranks but the root, which know only their own part), reduce as a reduce-scatter,
    recv as a send, a barrier as an all-reduce of one number, any other as an all-reduce.
    """
    size = 8.0 if call.op == "barrier" else float(call.bytes)
    return collective_time(_PLANNED_AS.get(call.op, "all_reduce"), size, link, cluster)


def latency_of(call: Collective, link: AxisLink, cluster: Cluster) -> float:
    """Returns the seconds that the same collective would take with almost no data."""
    seconds = collective_seconds(call, link, cluster)
    if call.op == "barrier" or not call.bytes:
        return seconds
    return min(collective_seconds(replace(call, bytes=8), link, cluster), seconds)


class _Playing:
    """Computes a ``Timeline``: adds a run's operations one by one to ``spans``, ``times`` and ``starts``."""

    def __init__(self, run: DryRun, cluster: Cluster) -> None:
        self._run, self._cluster = run, cluster
        self.player = Player(constant("overlap_slowdown").value, constant("launch").value)
        self.spans: list[TimelineSpan] = []
        self.times = array("d")
        self.starts: list[float] = []
        self.waited: list[float] = []  # for the host, before each step
        self._tp_wait = stack_of(OURS).value("tp_wait")
        self._ends: dict[int, float] = {}  # index of a collective -> its end
        self._beside: dict[int, float] = {}  # index of an operation beside the computation -> end
        self._names: dict[int, str] = {}  # number of a stream -> its name
        self._reduced: dict[str, float] = {}  # unit -> end of its last reduce-scatter

    def add(self, position: int, operation: Operation) -> None:
        player = self.player
        while len(self.starts) <= operation.step:
            self.starts.append(max(player.now, player.launched))
            self.waited.append(player.host)
        self.times.append(player.now)
        before = max((self._beside.get(each, 0.0) for each in operation.after), default=0.0)
        if operation.kind == "wait":
            index = operation.collective
            ended = 0.0 if index is None else self._ends.get(index, 0.0)
            self._wait(position, operation, max(ended, before))
        elif operation.kind == "collective":
            if operation.collective is not None:
                self._issue(position, operation, operation.collective, before)
            else:
                player.launched += player.launch
        elif operation.stream:  # a copy beside the computation
            seconds = kernel_seconds(operation, self._cluster)
            turns = (operation.stream,)
            slows = operation.kind != "host_copy"
            start, end = player.beside(seconds, turns, before, slows=slows)
            self._beside[position] = end
            stream = self._names.get(operation.stream, COPIES)
            self._span(stream, position, operation, start, end)
        else:
            start, end = player.compute(kernel_seconds(operation, self._cluster))
            self.times[position] = start
            self._span(COMPUTE, position, operation, start, end)

    def _issue(self, position: int, operation: Operation, index: int, before: float) -> None:
        call = self._run.collectives[index]
        stream, reduces = stream_of(call), is_data_axis(call.axis)
        link = link_of(self._run, call, self._cluster)
        axis: Hashable = call.axis or (call.group_size, "")
        if reduces and link.nodes > 1:
            axis = "network"  # of which each rank has one card
        if reduces and call.op == "all_reduce":
            before = max(before, self._reduced.get(call.unit, 0.0))
        seconds = collective_seconds(call, link, self._cluster)
        if call.axis == "tp":  # whose ranks come one after the other
            seconds *= self._tp_wait
        turns: list[Hashable] = [("stream", stream), ("axis", axis)]
        if operation.stream:
            self._names[operation.stream] = stream
            turns.append(operation.stream)
        start, end = self.player.beside(seconds, turns, before)
        self._ends[index] = self._beside[position] = end
        if reduces and call.op in ("reduce_scatter", "all_to_all"):
            self._reduced[call.unit] = end
        self._span(stream, position, operation, start, end)
        if not call.asynchronous and not operation.stream:
            self._wait(position, operation, end)
        if call.op == "barrier":
            self.player.launched = max(self.player.launched, end)

    def _wait(self, position: int, operation: Operation, end: float) -> None:
        """Lets the compute stream wait until ``end``, and adds the wait's span."""
        waited = self.player.wait(end)
        if waited is not None:
            self._span(COMPUTE, position, operation, *waited)

    def _span(
        self, stream: str, position: int, operation: Operation, start: float, end: float
    ) -> None:
        module, index = operation.module, operation.collective
        what = operation.kind, operation.name, module, unit_of(module), ""
        if index is not None:  # on the computation's stream it is the wait for the collective
            call = self._run.collectives[index]
            kind = "wait" if stream == COMPUTE else call.op
            what = kind, call.op, module, call.unit, call.axis or ""
        when = operation.phase, operation.step, start, end
        self.spans.append(TimelineSpan(stream, *what, *when, position, index))


@dataclass(frozen=True)
class Timeline:
    """When each operation runs, in predicted seconds since the program's start.

    Attributes:
        spans: what runs on every stream, in the order of issue; on the compute stream waits too (kind
            ``wait``).
        cluster: the machines that the times are predicted for.
        times: by operation, the second at which the compute stream reaches it.
        starts: the second at which each step's first operation is issued; last, that at which everything has
            ended.
        complete: number of steps that end with an optimizer's step.
        host: by step, the seconds in which the GPU waits for the host to launch kernels.
    """

    spans: tuple[TimelineSpan, ...]
    cluster: Cluster
    times: tuple[float, ...]
    starts: tuple[float, ...]
    complete: int
    host: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Duration of the whole run."""
        return self.starts[-1]

    @property
    def step(self) -> int:
        """The step to show: the last complete one, as the first one has preparations; else 0."""
        return max(self.complete - 1, 0)

    @property
    def step_seconds(self) -> float:
        """Duration of ``step``."""
        start, end = self.bounds()
        return end - start

    def bounds(self, step: int | None = None) -> tuple[float, float]:
        """Returns the seconds at which ``step`` begins and ends."""
        at = self.step if step is None else step
        return self.starts[at], self.starts[min(at + 1, len(self.starts) - 1)]

    def of_step(self, step: int | None = None) -> list[TimelineSpan]:
        """Returns the spans that are issued in ``step``."""
        at = self.step if step is None else step
        return [span for span in self.spans if span.step == at]

    def step_at(self, seconds: float) -> int:
        """Returns the step that runs at this time."""
        return min(max(bisect_right(self.starts, seconds) - 1, 0), len(self.host) - 1)

    def exposed(self, step: int | None = None) -> dict[str, float]:
        """Returns axis (``""``: none) -> seconds of ``step`` in which the compute stream waits for it."""
        found: dict[str, float] = defaultdict(float)
        for span in self.of_step(step):
            if span.kind == "wait":
                found[span.axis] += span.seconds
        return dict(found)

    def busy(self, step: int | None = None) -> dict[str, float]:
        """Returns stream -> seconds of ``step`` in which it works; waits don't count."""
        found = {COMPUTE: 0.0}
        for span in self.of_step(step):
            if span.kind != "wait":
                found[span.stream] = found.get(span.stream, 0.0) + span.seconds
        return found


def timeline(run: DryRun, cluster: Cluster | str | None = None) -> Timeline:
    """Predicts when each operation of ``run`` would run.

    Computation runs in the program's order, and no operation before the host has launched it. A collective
    begins when it is issued, its stream is free and no other collective of its axis runs, as NCCL runs those
    of one communicator one after another; collectives of parameters and gradients between nodes, of whatever
    axis, take turns on the network card. An all-reduce over ``replicate`` starts after the reduce-scatter of
    the same unit. Blocking collectives and waits hold the computation, and under collectives it is slower by
    the planner's ``overlap_slowdown``. All other ranks are as fast, and none is late.

    Args:
        cluster: the machines, or the name of their GPU; by default as many H100s as there are ranks.

    Raises:
        PlanningError: there is no such GPU.
    """
    if not isinstance(cluster, Cluster):
        cluster = cluster_of(run, cluster or "h100-80gb-sxm")
    playing = _Playing(run, cluster)
    for position, operation in enumerate(run.operations):
        playing.add(position, operation)
    starts = (*(playing.starts or [0.0]), playing.player.end)
    host = tuple(b - a for a, b in pairwise([*playing.waited, playing.player.host])) or (0.0,)
    complete = min(run.steps, len(host))
    return Timeline(tuple(playing.spans), cluster, tuple(playing.times), starts, complete, host)


@dataclass(frozen=True)
class TimedCollective(Collective):
    """A collective with predicted seconds; ``asynchronous``: it doesn't block the compute stream.

    Attributes:
        issued: index of its issue in ``DryRun.operations``.
        waited: index of the first wait for it; None if nothing waits for it.
        module, phase, step: where it was issued.
        dtype: dtype of its input; "" if not known.
        seconds: its duration.
        latency: the part of ``seconds`` that it would take with almost no data.
        exposed: seconds in which the compute stream waits for it.
        beside: seconds of computation between issue and wait.
    """

    issued: int
    waited: int | None
    module: str
    phase: str
    step: int
    dtype: str
    seconds: float
    latency: float
    exposed: float
    beside: float

    @property
    def on_data_axis(self) -> bool:
        """Whether parameters are gathered, or gradients reduced, over its axis."""
        return is_data_axis(self.axis)

    @property
    def where(self) -> str:
        """The engine's unit that it is for, else the module that issued it."""
        return self.unit or self.module


def calls_of(run: DryRun, timeline: Timeline) -> tuple[TimedCollective, ...]:
    """Returns the collectives of ``run`` with their times, in the order of the program."""
    positions: dict[str, dict[int, int]] = {"collective": {}, "wait": {}}
    for position, operation in enumerate(run.operations):
        if operation.collective is not None:
            positions[operation.kind].setdefault(operation.collective, position)
    seconds, exposed = [0.0] * len(run.collectives), [0.0] * len(run.collectives)
    kernels = [0.0] * len(run.operations)
    for span in timeline.spans:
        if span.collective is not None:
            (exposed if span.kind == "wait" else seconds)[span.collective] += span.seconds
        elif span.stream == COMPUTE:
            kernels[span.operation] = span.seconds
    computed = list(accumulate(kernels, initial=0.0))  # seconds of kernels before each operation
    calls = []
    for index, position in positions["collective"].items():
        collective, operation = run.collectives[index], run.operations[position]
        if operation.stream:  # beside the computation, whether or not it has a work
            collective = replace(collective, asynchronous=True)
        wait, cluster = positions["wait"].get(index), timeline.cluster
        call = TimedCollective(
            **vars(collective),
            issued=position,
            waited=wait,
            module=operation.module,
            phase=operation.phase,
            step=operation.step,
            dtype=operation.dtype,
            seconds=seconds[index],
            latency=latency_of(collective, link_of(run, collective, cluster), cluster),
            exposed=exposed[index],
            beside=0.0 if wait is None else computed[wait] - computed[position],
        )
        calls.append(call)
    return tuple(calls)
