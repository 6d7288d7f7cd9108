"""Warnings on the program: values that it reads, kernels that the host is too slow for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel3d.dryrun.calls import Call
from parallel3d.dryrun.result import DryRun, DryRunWarning
from parallel3d.dryrun.timeline import Timeline
from parallel3d.dryrun.wording import in_seconds, some

__all__ = ["program_warnings"]

_MUCH = 0.2


def program_warnings(
    run: DryRun, times: Timeline, calls: Sequence[Call]
) -> Iterator[DryRunWarning]:
    """On values that are read each step, a host that is too slow, barriers."""
    yield from _reads(run)
    yield from _host(run, times)
    yield from _barriers(run, times, calls)


def _reads(run: DryRun) -> Iterator[DryRunWarning]:
    often = [read for read in run.unknown if run.steps and read.count >= run.steps]
    if not often:
        return
    total = sum(read.count for read in often) / run.steps
    named = some(f"{read.what} in {read.where}" for read in sorted(often, key=lambda r: -r.count))
    yield DryRunWarning(
        "values read every step",
        f"the host asks for {total:.3g} values of tensors a step, and for each waits until all is done that "
        f"the GPU has been given: {named}. Read them only where they are logged, or log the step before's.",
    )


def _host(run: DryRun, times: Timeline) -> Iterator[DryRunWarning]:
    late, step = times.host[times.step], times.step_seconds
    if late < _MUCH * step or not step:
        return
    kernels = sum(1 for s in times.of_step() if s.collective is None)
    yield DryRunWarning(
        "host too slow",
        f"the GPU waits {in_seconds(late)} of a step of {in_seconds(step)} ({late / step:.0%}) for the host, "
        f"which starts {kernels:,} kernels. Compile the blocks (parallelize(..., compile=True)), or give "
        "each kernel more: a larger micro-batch, less tp.",
    )


def _barriers(run: DryRun, times: Timeline, calls: Sequence[Call]) -> Iterator[DryRunWarning]:
    each = [
        call
        for call in calls
        if call.collective.op == "barrier"
        and call.step == times.step
        and call.phase in ("forward", "backward")
    ]
    if each:
        yield DryRunWarning(
            "barrier in a step",
            f"{len(each)} barriers a step in {some(c.module or c.phase for c in each)}: all ranks wait for "
            "the slowest. Collectives keep ranks together already; leave it out.",
        )
