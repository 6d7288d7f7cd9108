"""When a dry run's operations would run: computation and collectives on streams, with predicted durations."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

from parallel3d.dryrun.durations import cluster_of
from parallel3d.dryrun.result import DryRun
from parallel3d.dryrun.schedule import Schedule
from parallel3d.dryrun.spans import COMPUTE, Span
from parallel3d.planner.cluster import Cluster

__all__ = ["Timeline", "timeline"]


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
