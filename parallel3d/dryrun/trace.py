"""A dry run's predicted timeline as Chrome trace events, for Perfetto and chrome://tracing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from parallel3d.dryrun.result import KINDS, DryRun
from parallel3d.dryrun.sampling import thinned
from parallel3d.dryrun.spans import COMPUTE, STREAMS, Span, unit_of
from parallel3d.dryrun.timeline import Timeline, timeline

__all__ = ["trace_events", "write_trace"]

_MODULES, _HOST = "modules", "host: collectives issued"
_MOST_SAMPLES = 20_000
Event = dict[str, Any]


def write_trace(run: DryRun, path: str | PathLike[str], predicted: Timeline | None = None) -> None:
    """Writes the trace as JSON; where ``path`` ends with ``.gz`` compressed, as Perfetto opens it too.

    Raises:
        OSError: the file can't be written.
    """
    text = json.dumps(trace_events(run, predicted), separators=(",", ":"), allow_nan=False)
    if str(path).endswith(".gz"):
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def trace_events(run: DryRun, predicted: Timeline | None = None) -> dict[str, Any]:
    """The trace in the JSON Object Format of "Trace Event Format" (the Chromium project's document).

    The process is the rank. A thread for each stream; one for modules, a slice for each stretch that is of
    one block; one for the host, where an arrow begins that leads by the collective's slice to where the
    computation waits for it. Counters: memory by kind, and the sum. Times in microseconds.
    """
    times = predicted or timeline(run)
    events = [
        *_names(run, times),
        *_slices(run, times),
        *_modules(run, times),
        *_arrows(run, times),
        *_memory(run, times),
    ]
    about = {
        "rank": run.rank,
        "world_size": run.world_size,
        "mesh": run.mesh,
        "gpu": times.cluster.gpu.name,
        "step_seconds": times.step_seconds,
        "durations": "predicted by parallel3d's planner; a dry run measures none",
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _threads(times: Timeline) -> dict[str, int]:
    used = {span.stream for span in times.spans}
    streams = [name for name in STREAMS if name in used or name == COMPUTE]
    order = [_MODULES, *streams, *sorted(used - set(streams)), _HOST]
    return {name: number for number, name in enumerate(order, 1)}


def _names(run: DryRun, times: Timeline) -> Iterator[Event]:
    where = f"rank {run.rank} of {run.world_size} (dry run, {times.cluster.gpu.name})"
    yield {"ph": "M", "pid": run.rank, "tid": 0, "name": "process_name", "args": {"name": where}}
    for name, number in _threads(times).items():
        about = {"ph": "M", "pid": run.rank, "tid": number}
        yield {**about, "name": "thread_name", "args": {"name": name}}
        yield {**about, "name": "thread_sort_index", "args": {"sort_index": number}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _slice(span: Span, pid: int, tid: int, name: str, args: dict[str, Any]) -> Event:
    """Start and end are whole nanoseconds, so that neighbours don't overlap by rounding."""
    start, end = _nanoseconds(span.start), _nanoseconds(span.end)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "cat": span.kind,
        "name": name,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": args,
    }


def _slices(run: DryRun, times: Timeline) -> Iterator[Event]:
    threads = _threads(times)
    for span in times.spans:
        args: dict[str, Any] = {"module": span.module, "phase": span.phase, "step": span.step}
        name = span.name
        operation = run.operations[span.operation]
        if span.collective is not None:
            call = run.collectives[span.collective]
            args |= {"unit": call.unit, "axis": call.axis, "bytes": call.bytes}
            args |= {"ranks": call.group_size, "number": span.collective}
            name = f"wait for {name}" if span.kind == "wait" else name
            name = f"{name} {call.unit}".rstrip()
        elif operation.sizes:
            args |= {"m, n, k": str(operation.sizes), "flops": operation.flops}
        yield _slice(span, run.rank, threads[span.stream], name, args)


def _modules(run: DryRun, times: Timeline) -> Iterator[Event]:
    """Stretches of the computation that are of one block, phase and step."""
    number = _threads(times)[_MODULES]
    first = last = None
    for span in times.spans:
        if span.stream != COMPUTE:
            continue
        if first is not None and last is not None and _place(first) != _place(span):
            yield _stretch(first, last, run.rank, number)
            first = None
        first, last = first or span, span
    if first is not None and last is not None:
        yield _stretch(first, last, run.rank, number)


def _place(span: Span) -> tuple[str, str, int]:
    return unit_of(span.module), span.phase, span.step


def _stretch(first: Span, last: Span, pid: int, tid: int) -> Event:
    unit, phase, step = _place(first)
    start, end = _nanoseconds(first.start), _nanoseconds(last.end)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "cat": "module",
        "name": f"{unit or 'outside modules'} {phase}",
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": {"step": step},
    }


def _arrows(run: DryRun, times: Timeline) -> Iterator[Event]:
    """For each asynchronous collective that is waited for: issued -> runs -> waited for."""
    threads = _threads(times)
    waits = {
        operation.collective: position
        for position, operation in reversed(list(enumerate(run.operations)))
        if operation.kind == "wait"
    }
    compute = {span.operation: span for span in times.spans if span.stream == COMPUTE}
    after: Span | None = None
    ends: dict[int, Span] = {}  # position -> what the computation does from there on
    for position in range(len(run.operations) - 1, -1, -1):
        after = compute.get(position, after)
        if after is not None:
            ends[position] = after
    free = 0  # until when the host thread has a slice, nanoseconds
    for span in times.spans:
        if span.stream == COMPUTE or span.collective is None:
            continue
        call = run.collectives[span.collective]
        about = {"pid": run.rank, "cat": "collective", "name": call.op}
        at = max(_nanoseconds(min(times.times[span.operation], span.start)), free)
        free = at + 1000
        host = {"tid": threads[_HOST], "ts": at / 1e3}
        where = {"module": span.module, "unit": call.unit, "number": span.collective}
        yield {**about, **host, "ph": "X", "dur": 1.0, "args": where}
        arrow = {**about, "id": span.collective}
        yield {**arrow, **host, "ph": "s"}
        in_it = {"tid": threads[span.stream], "ts": _nanoseconds(span.start) / 1e3}
        target = ends.get(waits.get(span.collective, len(run.operations)))
        if target is None:
            yield {**arrow, **in_it, "ph": "f", "bp": "e"}
            continue
        yield {**arrow, **in_it, "ph": "t"}
        end = {"tid": threads[COMPUTE], "ts": _nanoseconds(target.start) / 1e3}
        yield {**arrow, **end, "ph": "f", "bp": "e"}


def _memory(run: DryRun, times: Timeline) -> Iterator[Event]:
    kinds = [kind for kind in KINDS if any(kind in sample.by_kind for sample in run.memory)]
    for sample in thinned(run.memory, _MOST_SAMPLES):
        at = times.times[sample.operation] if times.times else 0.0
        about = {"ph": "C", "pid": run.rank, "tid": 0, "ts": _nanoseconds(at) / 1e3}
        by_kind = {kind: sample.by_kind.get(kind, 0) for kind in kinds}
        yield {**about, "name": "memory by kind, bytes", "args": by_kind}
        yield {**about, "name": "memory, bytes", "args": {"all": sample.total}}
