"""A dry run's predicted timeline as Chrome trace events, for Perfetto and chrome://tracing."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

from parallel3d.tools.dryrun.result import KINDS, DryRun, MemorySample
from parallel3d.tools.dryrun.timeline import (
    COMPUTE,
    STREAMS,
    Timeline,
    TimelineSpan,
    calls_of,
    timeline,
    unit_of,
)
from parallel3d.tools.dryrun.wording import first_few

# Fewer memory samples and fewer spans that look the same, so that pages and traces stay small.


def thinned(samples: Sequence[MemorySample], most: int) -> list[MemorySample]:
    """Returns about ``most`` samples: the first, the last, and each range's highest and lowest."""
    if len(samples) <= most:
        return list(samples)
    length = -(-2 * len(samples) // most)
    kept = {0, len(samples) - 1}
    for start in range(0, len(samples), length):
        indices = range(start, min(start + length, len(samples)))
        kept.add(max(indices, key=lambda i: samples[i].total))
        kept.add(min(indices, key=lambda i: samples[i].total))
    return [samples[i] for i in sorted(kept)]


@dataclass
class Bar:
    """Consecutive spans of one stream that are drawn as one bar.

    Attributes:
        kind: ``matmul``, ``attention``, ``elementwise``, ``compute`` (several of them), ``wait`` or
            ``collective``.
        what: their commonest names, and the units or modules that they are of.
        phase: the phase of the first span.
        count: number of spans.
        busy: seconds between ``start`` and ``end`` in which one of the spans runs.
    """

    stream: str
    kind: str
    what: str
    phase: str
    start: float
    end: float
    count: int
    busy: float


def merged(spans: Sequence[TimelineSpan], most: int) -> list[Bar]:
    """Returns about ``most`` bars for the spans, joining neighbours where there are too many.

    First neighbours of one kind in one unit are joined; then all of a unit, with short waits; then all of a
    phase, over ever longer gaps and waits.
    """
    length = max((s.end for s in spans), default=0.0) - min((s.start for s in spans), default=0.0)
    gap = length / 2000
    levels = [(0, gap), (1, gap), *((2, gap * 4**n) for n in range(6))]
    groups = [[span] for span in spans]
    for level, gap in levels:
        if len(groups) <= most:
            break
        groups = _joined(spans, level, gap)
    return [_bar(group) for group in groups]


def _kind(span: TimelineSpan) -> str:
    return span.kind if span.stream == COMPUTE else "collective"


def _joined(spans: Sequence[TimelineSpan], level: int, gap: float) -> list[list[TimelineSpan]]:
    """Returns groups of consecutive spans of a stream that are at most ``gap`` seconds apart and alike: at
    level 0 of one kind and unit, at level 1 of one unit, at level 2 of one phase."""
    groups: list[list[TimelineSpan]] = []
    last: dict[
        str, tuple[Hashable, list[TimelineSpan]]
    ] = {}  # stream -> its last group and its key
    for span in spans:
        is_long_wait = span.kind == "wait" and span.seconds >= 4 * gap
        alike = _kind(span) if level == 0 else is_long_wait
        key = alike, span.unit if level < 2 else "", span.phase
        previous, group = last.get(span.stream, (None, []))
        if previous != key or span.start - group[-1].end > gap:
            group = []
            groups.append(group)
            last[span.stream] = key, group
        group.append(span)
    return groups


def _bar(group: list[TimelineSpan]) -> Bar:
    first, last = group[0], group[-1]
    kinds = {_kind(span) for span in group}
    kind = kinds.pop() if len(kinds) == 1 else COMPUTE
    names = Counter(span.name for span in group)
    name = first_few([each for each, _ in names.most_common()], 2, " and ")
    places = {span.unit if span.collective is not None else span.module for span in group}
    where = places.pop() if len(places) == 1 else first.unit
    if len({span.unit for span in group}) > 1:
        where = f"{first.unit} to {last.unit}"
    what = ("wait for " if kind == "wait" else "") + name + (f", {where}" if where else "")
    busy = sum(span.seconds for span in group)
    return Bar(first.stream, kind, what, first.phase, first.start, last.end, len(group), busy)


_MODULES, _HOST = "modules", "host: collectives issued"
_MOST_SAMPLES = 20_000
Event = dict[str, Any]


def write_trace(run: DryRun, path: str | PathLike[str], predicted: Timeline | None = None) -> None:
    """Writes the trace of ``run`` as JSON, compressed if ``path`` ends with ``.gz``, for Perfetto.

    Args:
        run: the dry run.
        path: the file; it is replaced.
        predicted: the times to show; by default ``timeline(run)``.

    Raises:
        OSError: the file can't be written.
    """
    text = json.dumps(trace_events(run, predicted), separators=(",", ":"), allow_nan=False)
    data = text.encode()
    Path(path).write_bytes(gzip.compress(data) if str(path).endswith(".gz") else data)


def trace_events(run: DryRun, predicted: Timeline | None = None) -> dict[str, Any]:
    """Returns the trace in the JSON Object Format of the Chromium project's "Trace Event Format".

    The process is the rank. Threads are its streams, one for modules (a slice for each block and phase), and
    one for the host. An arrow leads from a collective's issue on the host through its slice to where the
    compute stream waits for it. Counters show memory by kind and in total. Times are in microseconds.
    """
    times = predicted or timeline(run)
    used = {span.stream for span in times.spans}
    streams = [name for name in STREAMS if name in used or name == COMPUTE]
    order = [_MODULES, *streams, *sorted(used - set(streams)), _HOST]
    threads = {name: number for number, name in enumerate(order, 1)}
    events = [
        *_names(run, times, threads),
        *_slices(run, times, threads),
        *_modules(times, threads),
        *_arrows(run, times, threads),
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
    events = [{"pid": run.rank, **event} for event in events]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _names(run: DryRun, times: Timeline, threads: dict[str, int]) -> Iterator[Event]:
    where = f"rank {run.rank} of {run.world_size} (dry run, {times.cluster.gpu.name})"
    yield {"ph": "M", "tid": 0, "name": "process_name", "args": {"name": where}}
    for name, tid in threads.items():
        yield {"ph": "M", "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _slice(
    tid: int, category: str, name: str, start: float, end: float, args: dict[str, Any]
) -> Event:
    """Returns a slice whose ends are rounded to whole nanoseconds, so that neighbours don't overlap."""
    first, last = _nanoseconds(start), _nanoseconds(end)
    event = {"ph": "X", "tid": tid, "cat": category, "name": name}
    return {**event, "ts": first / 1e3, "dur": (last - first) / 1e3, "args": args}


def _slices(run: DryRun, times: Timeline, threads: dict[str, int]) -> Iterator[Event]:
    for span in times.spans:
        args: dict[str, Any] = {"module": span.module, "phase": span.phase, "step": span.step}
        name = span.name
        operation = run.operations[span.operation]
        if span.collective is not None:
            call = run.collectives[span.collective]
            args |= {"unit": call.unit, "axis": call.axis, "bytes": call.bytes}
            args |= {"ranks": call.group_size, "number": span.collective}
            name = f"{'wait for ' if span.kind == 'wait' else ''}{name} {call.unit}".rstrip()
        elif operation.sizes:
            args |= {"m, n, k": str(operation.sizes), "flops": operation.flops}
        yield _slice(threads[span.stream], span.kind, name, span.start, span.end, args)


def _modules(times: Timeline, threads: dict[str, int]) -> Iterator[Event]:
    """Yields a slice for consecutive computation of one block, phase and step."""
    compute = (span for span in times.spans if span.stream == COMPUTE)
    places = groupby(compute, lambda span: (unit_of(span.module), span.phase, span.step))
    for (unit, phase, step), group in places:
        spans = list(group)
        name, args = f"{unit or 'outside modules'} {phase}", {"step": step}
        yield _slice(threads[_MODULES], "module", name, spans[0].start, spans[-1].end, args)


def _arrows(run: DryRun, times: Timeline, threads: dict[str, int]) -> Iterator[Event]:
    """Yields the arrow of each asynchronous collective that is waited for: from its issue through its slice
    to the wait."""
    calls = {call.issued: call for call in calls_of(run, times)}
    compute = [span for span in times.spans if span.stream == COMPUTE]
    free = 0  # nanoseconds until which the host thread has a slice
    for span in times.spans:
        if span.stream == COMPUTE or span.collective is None:
            continue
        call = calls[span.operation]
        at = max(_nanoseconds(min(times.times[span.operation], span.start)), free)
        free = at + 1000
        about = {"cat": "collective", "name": call.op}
        host = {"tid": threads[_HOST], "ts": at / 1e3}
        args = {"module": span.module, "unit": call.unit, "number": span.collective}
        yield {**about, **host, "ph": "X", "dur": 1.0, "args": args}
        arrow = {**about, "id": span.collective}
        yield {**arrow, **host, "ph": "s"}
        there = {"tid": threads[span.stream], "ts": _nanoseconds(span.start) / 1e3}
        waited = len(run.operations) if call.waited is None else call.waited
        after = bisect_left(compute, waited, key=lambda each: each.operation)
        if after < len(compute):
            yield {**arrow, **there, "ph": "t"}
            there = {"tid": threads[COMPUTE], "ts": _nanoseconds(compute[after].start) / 1e3}
        yield {**arrow, **there, "ph": "f", "bp": "e"}


def _memory(run: DryRun, times: Timeline) -> Iterator[Event]:
    kinds = [kind for kind in KINDS if any(kind in sample.by_kind for sample in run.memory)]
    for sample in thinned(run.memory, _MOST_SAMPLES):
        at = times.times[sample.operation] if times.times else 0.0
        about = {"ph": "C", "tid": 0, "ts": _nanoseconds(at) / 1e3}
        by_kind = {kind: sample.by_kind.get(kind, 0) for kind in kinds}
        yield {**about, "name": "memory by kind, bytes", "args": by_kind}
        yield {**about, "name": "memory, bytes", "args": {"all": sample.total}}
