"""A dry run's predicted timeline as Chrome trace events, for Perfetto and chrome://tracing."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from parallel3d.tools.dryrun.result import KINDS, DryRun, MemorySample
from parallel3d.tools.dryrun.timeline import COMPUTE, STREAMS, Span, Timeline, timeline, unit_of

# Fewer samples of memory and fewer spans, that look the same: a page and a trace have to stay small.


def thinned(samples: Sequence[MemorySample], most: int) -> list[MemorySample]:
    """At most about ``most`` of them, in order: of each stretch of equally many the highest and the lowest,
    so that no peak is lost; the first and the last."""
    if len(samples) <= most:
        return list(samples)
    stretch = -(-2 * len(samples) // most)
    kept = {0, len(samples) - 1}
    for start in range(0, len(samples), stretch):
        each = range(start, min(start + stretch, len(samples)))
        kept.add(max(each, key=lambda i: samples[i].total))
        kept.add(min(each, key=lambda i: samples[i].total))
    return [samples[i] for i in sorted(kept)]


@dataclass
class Bar:
    """Spans of one stream that follow each other, drawn as one.

    Attributes:
        kind: ``matmul``, ``attention``, ``elementwise``, ``compute`` (several of them), ``wait``,
            ``collective``.
        what: their commonest name, and of what. phase: the first's.
        count: how many.
        busy: seconds of ``end - start`` in which they run.
    """

    stream: str
    kind: str
    what: str
    phase: str
    start: float
    end: float
    count: int
    busy: float


def merged(spans: Sequence[Span], most: int) -> list[Bar]:
    """At most about ``most`` bars: as they are if they are few; else those of one kind in one block joined;
    else all of a block, with short waits; else all of a phase, over ever longer gaps and waits."""
    length = max((s.end for s in spans), default=0.0) - min((s.start for s in spans), default=0.0)
    groups = [[span] for span in spans]
    if len(groups) > most:
        groups = _grouped(spans, lambda s: (_kind(s), s.unit, s.phase), length / 2000)
    if len(groups) > most:
        groups = _grouped(
            spans, lambda s: (_rough(s, length / 500), s.unit, s.phase), length / 2000
        )
    gap = length / 2000
    while len(groups) > most and gap < length:
        short = 4 * gap
        groups = _grouped(spans, lambda s, short=short: (_rough(s, short), s.phase), gap)  # type: ignore[misc]
        gap *= 4
    return [_bar(group) for group in groups]


def _kind(span: Span) -> str:
    if span.stream != COMPUTE:
        return "collective"
    return span.kind


def _rough(span: Span, short: float) -> str:
    """Waits that are short are a part of the computation."""
    if span.kind == "wait" and span.seconds < short:
        return COMPUTE
    return span.kind if span.kind == "wait" or span.stream != COMPUTE else COMPUTE


def _grouped(
    spans: Sequence[Span], way: Callable[[Span], Hashable], gap: float
) -> list[list[Span]]:
    """Those that follow each other on a stream and are alike, without long gaps between them."""
    found: list[list[Span]] = []
    last: dict[str, tuple[Hashable, list[Span]]] = {}
    for span in spans:
        key = way(span)
        before = last.get(span.stream)
        if before is not None and before[0] == key and span.start - before[1][-1].end <= gap:
            before[1].append(span)
            continue
        group = [span]
        last[span.stream] = key, group
        found.append(group)
    return found


def _bar(group: list[Span]) -> Bar:
    first = group[0]
    kinds = Counter(_kind(span) for span in group)
    kind = first.kind if len(kinds) == 1 and first.stream == COMPUTE else _kind(first)
    if len(kinds) > 1:
        kind = COMPUTE
    names = Counter(span.name for span in group)
    name = " and ".join(each for each, _ in names.most_common(2))
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    units = dict.fromkeys(
        span.unit if span.collective is not None else span.module for span in group
    )
    where = next(iter(units)) if len(units) == 1 else first.unit
    if len({span.unit for span in group}) > 1:
        where = f"{first.unit} to {group[-1].unit}"
    prefix = "wait for " if kind == "wait" else ""
    return Bar(
        first.stream,
        kind,
        f"{prefix}{name}{more}" + (f", {where}" if where else ""),
        first.phase,
        first.start,
        group[-1].end,
        len(group),
        sum(span.seconds for span in group),
    )


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
