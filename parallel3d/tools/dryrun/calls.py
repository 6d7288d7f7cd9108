"""Every collective of a dry run, and what is known of it: where it was issued, what it costs, who waits."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d._util.recorder import Collective
from parallel3d.mesh.axes import is_data_axis
from parallel3d.tools.dryrun.result import DryRun
from parallel3d.tools.dryrun.timeline import COMPUTE, Timeline, latency_of, link_of

_KERNELS = ("matmul", "attention", "elementwise")


@dataclass(frozen=True)
class Call:
    """A collective and its times, in predicted seconds.

    Attributes:
        issued: position among the operations. waited: of the first wait; None if nothing waits.
        module, phase, step: where it was issued. dtype: of what it brings, "" if not known.
        seconds: that it takes. latency: of these, what it takes with nothing in it.
        exposed: that the computation waits for it.
        beside: that the computation works between issue and wait.
    """

    collective: Collective
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
        """Whether parameters or gradients travel on its axis."""
        return is_data_axis(self.collective.axis)

    @property
    def waits_at_once(self) -> bool:
        """Whether it blocks its caller."""
        return not self.collective.asynchronous


def calls_of(run: DryRun, timeline: Timeline) -> tuple[Call, ...]:
    """In the order of the program."""
    issued: dict[int, int] = {}
    waited: dict[int, int] = {}
    for position, operation in enumerate(run.operations):
        if operation.collective is not None:
            where = issued if operation.kind == "collective" else waited
            where.setdefault(operation.collective, position)
    lasts: dict[int, float] = {}
    exposed: dict[int, float] = {}
    computed = [0.0] * (len(run.operations) + 1)  # seconds of kernels before each operation
    for span in timeline.spans:
        if span.kind in _KERNELS and span.stream == COMPUTE:
            computed[span.operation + 1] = span.seconds
        elif span.collective is not None:
            into = exposed if span.kind == "wait" else lasts
            into[span.collective] = into.get(span.collective, 0.0) + span.seconds
    for position in range(len(run.operations)):
        computed[position + 1] += computed[position]
    found = []
    for index, position in issued.items():
        call, operation = run.collectives[index], run.operations[position]
        wait = waited.get(index)
        link = link_of(run, call, timeline.cluster)
        found.append(
            Call(
                call,
                position,
                wait,
                operation.module,
                operation.phase,
                operation.step,
                operation.dtype,
                lasts.get(index, 0.0),
                latency_of(call, link, timeline.cluster),
                exposed.get(index, 0.0),
                computed[wait] - computed[position] if wait is not None else 0.0,
            )
        )
    return tuple(found)
