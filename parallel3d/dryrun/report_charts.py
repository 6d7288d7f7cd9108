"""The charts of a dry run's page, as plotly's JSON: memory over time, a step on its streams."""

from __future__ import annotations

from collections import defaultdict
from html import escape

from parallel3d._report import (
    AMBER,
    BLUE,
    BROWN,
    GREEN,
    GREY,
    PINK,
    RED,
    SKY,
    TEAL,
    VIOLET,
    Figure,
    as_figure,
    chart_layout,
    mark,
)
from parallel3d.dryrun.result import KINDS, DryRun
from parallel3d.dryrun.sampling import Bar, merged, thinned
from parallel3d.dryrun.spans import COMPUTE, STREAMS
from parallel3d.dryrun.timeline import Timeline
from parallel3d.dryrun.wording import in_bytes, in_seconds

__all__ = ["memory_chart", "timeline_chart"]

_MOST_SAMPLES, _MOST_BARS = 1500, 3000
_MEMORY = {
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer state": GREEN,
    "buffers": GREY,
    "unsharded parameters": AMBER,
    "communication": BROWN,
    "activations": VIOLET,
    "inputs": TEAL,
    "temporaries": PINK,
}
_BARS = {
    "matmul": BLUE,
    "attention": VIOLET,
    "elementwise": TEAL,
    COMPUTE: SKY,
    "collective": AMBER,
    "wait": RED,
}
_WORDS = {COMPUTE: "computation, several kinds", "wait": "waiting", "collective": "collectives"}


def memory_chart(run: DryRun, times: Timeline) -> Figure:
    """Memory by kind, stacked, over predicted time; the peak and the steps are marked."""
    samples = thinned(run.memory, _MOST_SAMPLES)
    unit, size = ("GiB", 2**30) if run.peak.bytes >= 2**30 else ("MiB", 2**20)
    at = [round(times.times[sample.operation] * 1e3, 4) for sample in samples]
    traces = []
    for kind in KINDS:
        held = [sample.by_kind.get(kind, 0) for sample in samples]
        if any(held):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": kind,
                    "stackgroup": "memory",
                    "x": at,
                    "y": [round(value / size, 4) for value in held],
                    "line": {"shape": "hv", "width": 0.5, "color": _MEMORY[kind]},
                    "fillcolor": _MEMORY[kind],
                    "hovertemplate": f"%{{y:.2f}} {unit}",
                }
            )
    layout = chart_layout(440, "milliseconds, predicted", unit)
    layout["hovermode"] = "x unified"
    layout["yaxis"]["rangemode"] = "tozero"
    most = run.peak.bytes / size
    capacity = times.cluster.gpu.capacity_gib * 2**30 / size
    if most > capacity / 3:
        _capacity(layout, capacity, unit)
        most = max(most, capacity)
    layout["yaxis"]["range"] = [0, 1.12 * most]
    if samples and times.times:
        peak = times.times[run.peak.operation] * 1e3
        late = peak > times.seconds * 500
        words = f"peak {in_bytes(run.peak.bytes)}"
        mark(layout, peak, words, anchor="right" if late else "left", top=True)
    return as_figure(traces, layout)


def _capacity(layout: Figure, capacity: float, unit: str) -> None:
    line = {"dash": "dash", "width": 2}
    layout["shapes"].append(
        {
            "type": "line",
            "y0": capacity,
            "y1": capacity,
            "x0": 0,
            "x1": 1,
            "xref": "paper",
            "line": line,
        }
    )
    layout["annotations"].append(
        {"x": 0, "y": capacity, "xref": "paper", "text": f"capacity {capacity:.1f} {unit}"}
        | {"showarrow": False, "xanchor": "left", "yanchor": "top", "xshift": 4}
    )


def timeline_chart(run: DryRun, times: Timeline) -> Figure:
    """The shown step: a lane for each stream, waits on the computation's."""
    begin, _ = times.bounds()
    bars = merged(times.of_step(), _MOST_BARS)
    traces = []
    total: dict[str, float] = defaultdict(float)
    for bar in bars:
        total[bar.kind] += bar.busy
    # Every bar is a pixel or more: what there is most of is drawn last, so that it isn't covered.
    for kind in sorted(total, key=lambda kind: total[kind]):
        mine = [bar for bar in bars if bar.kind == kind]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": _WORDS.get(kind, kind),
                "base": [round((bar.start - begin) * 1e3, 5) for bar in mine],
                "x": [round((bar.end - bar.start) * 1e3, 5) for bar in mine],
                "y": [bar.stream for bar in mine],
                "customdata": [_hover(bar) for bar in mine],
                "marker": {"color": _BARS[kind], "line": {"width": 0}},
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )
    used = {bar.stream for bar in bars}
    lanes = [s for s in STREAMS if s in used] + sorted(used - set(STREAMS))
    layout = chart_layout(190 + 44 * max(len(lanes), 1), "milliseconds, predicted", "")
    layout["barmode"] = "overlay"
    layout["dragmode"] = "zoom"
    layout["yaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": lanes}
    layout["yaxis"] |= {"autorange": "reversed", "fixedrange": True}
    for phase in ("forward", "backward", "optimizer"):
        starts = [s.start for s in times.of_step() if s.phase == phase and s.stream == COMPUTE]
        if starts:
            mark(layout, (min(starts) - begin) * 1e3, phase, dash="solid", width=1, anchor="left")
    return as_figure(traces, layout)


def _hover(bar: Bar) -> str:
    """Names are escaped: plotly reads tags in its labels."""
    lasts = f"<br>{in_seconds(bar.end - bar.start)}"
    parts = f" ({bar.count} in {in_seconds(bar.busy)})" if bar.count > 1 else ""
    return f"{escape(bar.phase)}: {escape(bar.what)}{lasts}{parts}"
