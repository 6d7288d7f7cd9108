"""Fewer samples of memory and fewer spans, that look the same: a page and a trace have to stay small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from parallel3d.dryrun.result import MemorySample
from parallel3d.dryrun.spans import COMPUTE, Span

__all__ = ["Bar", "merged", "thinned"]


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
