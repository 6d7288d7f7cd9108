"""The report of a dry run: one HTML file with charts that needs no network. Needs plotly (``report`` "
"extra).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import TypeVar

from parallel3d._util.page import (
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
    embedded,
    filled,
    mark,
    table,
)
from parallel3d.tools.dryrun.calls import Call, calls_of
from parallel3d.tools.dryrun.compare import Divergence, compare
from parallel3d.tools.dryrun.result import KINDS, DryRun, DryRunWarning, ParameterPlacement, Peak
from parallel3d.tools.dryrun.timeline import COMPUTE, STREAMS, Timeline, timeline
from parallel3d.tools.dryrun.trace import Bar, merged, thinned
from parallel3d.tools.dryrun.warnings import all_warnings
from parallel3d.tools.dryrun.wording import (
    Figures,
    counted,
    figures_of,
    in_bytes,
    in_seconds,
    pattern_of,
    peaks_of,
)

# The charts of a dry run's page, as plotly's JSON: memory over time, a step on its streams.

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


# The tables of a dry run's page, as HTML; all names are escaped.

_MOST_ROWS = 3000
_T = TypeVar("_T")


def axes_table(run: DryRun, times: Timeline, calls: Sequence[Call]) -> str:
    """By axis and operation, in the shown step."""
    mine = [call for call in calls if call.step == times.step]
    groups = _grouped(mine, lambda c: (c.collective.axis, c.collective.op, c.collective.group_size))
    rows = [
        (
            each[0].collective.axis or "none",
            each[0].collective.op,
            str(each[0].collective.group_size),
            f"{len(each):,}",
            in_bytes(sum(c.collective.bytes for c in each)),
            in_seconds(sum(c.seconds for c in each)),
            in_seconds(exposed := sum(c.exposed for c in each)),
            f"{exposed / times.step_seconds:.1%}" if times.step_seconds else "",
        )
        for each in groups
    ]
    if not rows:
        return "<p>None.</p>"
    columns = ("axis", "operation", "ranks", "calls", "bytes", "takes", "waited for", "of the step")
    return table(columns, rows, 2, wrap=False)


def calls_table(calls: Sequence[Call]) -> str:
    """Of the whole run, equal ones together, in the order of the first; with a filter."""
    groups = _grouped(
        calls,
        lambda c: (
            *(c.collective.axis, c.collective.op, c.collective.unit or c.module, c.phase),
            *(c.collective.bytes, c.collective.group_size, c.collective.asynchronous, c.dtype),
        ),
    )
    rows = [
        (
            f"{each[0].collective.order}",
            each[0].collective.axis or "none",
            each[0].collective.op,
            each[0].collective.unit or each[0].module or "-",
            each[0].phase,
            each[0].dtype,
            "" if each[0].collective.asynchronous else "blocks",
            str(each[0].collective.group_size),
            f"{len(each):,}",
            f"{each[0].collective.bytes:,}",
            in_bytes(sum(c.collective.bytes for c in each)),
            in_seconds(each[0].seconds),
            in_seconds(sum(c.exposed for c in each)),
        )
        for each in groups
    ]
    columns = (
        *("first", "axis", "operation", "unit or module", "phase", "dtype", ""),
        *("ranks", "calls", "bytes each", "bytes in all", "each takes", "waited for"),
    )
    return _filtered("collectives", columns, rows, 7)


def parameters_tables(run: DryRun) -> str:
    """Equal parameters of all blocks together; below it each one, with a filter."""
    if not run.parameters:
        return "<p>None.</p>"
    groups = _grouped(
        run.parameters,
        lambda p: (
            *(pattern_of(p.name), p.shape, p.local_shape, p.dtype),
            *(tuple(p.placements.items()), p.requires_grad),
        ),
    )
    rows = [
        (
            *_parameter(each[0], pattern=True),
            f"{len(each):,}",
            in_bytes(sum(p.bytes for p in each)),
        )
        for each in groups
    ]
    columns = ("parameter", "shape", "on this rank", "placements", "dtype", "")
    grouped = table((*columns, "of them", "bytes here"), rows, 6, wrap=False)
    each = [(*_parameter(p), f"{p.bytes:,}") for p in run.parameters]
    single = _filtered("parameters", (*columns, "bytes here"), each, 6)
    return f"{grouped}<details><summary>Each of the {len(each):,}</summary>{single}</details>"


def _parameter(parameter: ParameterPlacement, pattern: bool = False) -> tuple[str, ...]:
    placements = ", ".join(f"{axis} {how}" for axis, how in parameter.placements.items())
    return (
        pattern_of(parameter.name) if pattern else parameter.name,
        _sizes(parameter.shape),
        _sizes(parameter.local_shape),
        placements or "plain tensor",
        parameter.dtype,
        "" if parameter.requires_grad else "frozen",
    )


def peak_tables(peak: Peak) -> str:
    """What is alive at ``peak``: by kind, and the largest tensors."""
    kinds = [
        (kind, in_bytes(size), f"{size / peak.bytes:.1%}" if peak.bytes else "")
        for kind, size in sorted(peak.by_kind.items(), key=lambda item: -item[1])
    ]
    alike = _grouped(
        peak.largest, lambda t: (t.kind, pattern_of(t.module), t.made_by, t.shape, t.dtype)
    )
    tensors = [
        (
            *(t.kind, pattern_of(t.module) if len(each) > 1 else t.module or "-", t.made_by),
            *(_sizes(t.shape), t.dtype, f"{len(each):,}", in_bytes(t.bytes)),
        )
        for each in alike
        for t in each[:1]
    ]
    parts = table(("kind", "bytes", "of the peak"), kinds, 1, wrap=False)
    if tensors:
        columns = (
            "kind",
            "module or parameter",
            "made by",
            "shape",
            "dtype",
            "of them",
            "bytes each",
        )
        title = f"The {len(peak.largest)} largest tensors at the peak"
        parts += f"<h3>{title}</h3>{table(columns, tensors, 5, wrap=False)}"
    return parts


def reads_table(run: DryRun) -> str:
    """Where the program asked for values that nobody has computed."""
    if not run.unknown:
        return "<p>None.</p>"
    rows = [(read.where, read.what, f"{read.count:,}") for read in run.unknown[:_MOST_ROWS]]
    return table(("where", "what", "how often"), rows, 2)


def _filtered(
    name: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], words: int
) -> str:
    """A table of many rows in a box of its own, with a field that leaves those with all its words."""
    if not rows:
        return "<p>None.</p>"
    shown = table(columns, rows[:_MOST_ROWS], words, wrap=False)
    left = len(rows) - _MOST_ROWS
    more = f"<p>{left:,} more rows are only in the JSON.</p>" if left > 0 else ""
    label = f"filter the {name}: words that a row must have"
    field = (
        f'<input type="search" data-filters="{escape(name)}" placeholder="filter, such as: shard backward" '
        f'aria-label="{escape(label)}"> <span class="soft" id="{escape(name)}-count"></span>'
    )
    return f'{field}<div class="many" id="{escape(name)}">{shown}</div>{more}'


def _grouped(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    found: dict[Hashable, list[_T]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return list(found.values())


def _sizes(shape: Sequence[int]) -> str:
    return " \N{MULTIPLICATION SIGN} ".join(map(str, shape)) or "a number"


def write_report(
    run: DryRun,
    path: str | PathLike[str],
    predicted: Timeline | None = None,
    divergence: Divergence | None = None,
    other: DryRun | None = None,
) -> None:
    """Writes the page.

    Args:
        predicted: ``timeline(run)``, or one with other machines.
        divergence: what ``compare`` with another rank has found.
        other: that rank's dry run: it is compared with, and the page says so too if nothing is found.

    Raises:
        PlanningError: plotly isn't installed.
        DryRunError: ``other`` is of another world.
        OSError: the file can't be written.
    """
    Path(path).write_text(report_html(run, predicted, divergence, other), encoding="utf-8")


def report_html(
    run: DryRun,
    predicted: Timeline | None = None,
    divergence: Divergence | None = None,
    other: DryRun | None = None,
) -> str:
    """The page, with plotly's JavaScript in it: 5 MB and more; see ``write_report``."""
    times = predicted or timeline(run)
    calls = calls_of(run, times)
    if other is not None and divergence is None:
        divergence = compare(run, other)
    warnings = all_warnings(run, times, divergence)
    charts = {"memory": memory_chart(run, times), "timeline": timeline_chart(run, times)}
    parts = {
        **_head(run, times),
        "count": str(len(warnings)),
        "cards": _cards(figures_of(run, times)),
        "warnings": _warnings(warnings),
        "comparison": _comparison(run, other, divergence),
        "peaks": _peaks(run),
        "timeline": escape(_timeline(times)),
        "axes": axes_table(run, times, calls),
        "collectives": calls_table(calls),
        "parameters": parameters_tables(run),
        "reads": reads_table(run),
        "schedule": escape(_streams(times, calls)),
        "figures": embedded(charts),
    }
    return filled("parallel3d.tools.dryrun", "report_page.html", parts)


def _head(run: DryRun, times: Timeline) -> dict[str, str]:
    mesh = ", ".join(f"{axis} {size}" for axis, size in run.mesh.items()) or "no mesh"
    title = f"Dry run: rank {run.rank} of {run.world_size:,} ({mesh})"
    gpu = times.cluster.gpu
    setup = (
        f"The program as one rank would run it, without its hardware: "
        f"{counted(run.steps, 'optimizer step')}, {counted(len(run.operations), 'operation')}, "
        f"{counted(len(run.collectives), 'collective')}, recorded in {in_seconds(run.seconds)}. Times are "
        f"predicted for {gpu.name}, {times.cluster.gpus_per_node} on a node, {times.cluster.nic:g} GB/s a "
        "GPU between nodes; bytes are exact."
    )
    return {"title": escape(title), "setup": escape(setup)}


def _cards(figures: Figures) -> str:
    each = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in figures.shown()
    )
    return f'<dl class="cards">{each}</dl>'


def _warnings(warnings: Sequence[DryRunWarning]) -> str:
    if not warnings:
        return "<p>None.</p>"
    each = "".join(f"<li><b>{escape(w.kind)}</b>: {escape(w.text)}</li>" for w in warnings)
    return f'<ul class="warnings">{each}</ul>'


def _comparison(run: DryRun, other: DryRun | None, found: Divergence | None) -> str:
    if other is None and found is None:
        return ""
    rank = other.rank if other is not None else found.ranks[1] if found is not None else ""
    head = f"<h2>Compared with rank {rank}</h2>"
    if found is None:
        count = counted(len(run.collectives), "collective")
        return f"{head}<p>The {count} of both ranks match: operation, axis, unit, size, order.</p>"
    return f'{head}<p class="bad">They part.</p><pre class="wraps">{escape(str(found))}</pre>'


def _peaks(run: DryRun) -> str:
    """The peak and the training's, each in words with its tables."""
    return "".join(
        f"<p>{escape(_peak(run, peak, when))}</p>{peak_tables(peak)}"
        for peak, when in peaks_of(run)
    )


def _peak(run: DryRun, peak: Peak, when: str) -> str:
    largest = sorted(peak.by_kind.items(), key=lambda item: -item[1])[:2]
    most = " and ".join(f"{kind} ({in_bytes(size)})" for kind, size in largest)
    where = f"in {peak.name or 'the beginning'} of {peak.module or 'no module'}, {peak.phase}"
    step = run.operations[peak.operation].step if run.operations else 0
    return (
        f"The peak{when} is {in_bytes(peak.bytes)}, {where}, step {step} (operation {peak.operation:,} of "
        f"{len(run.operations):,}); most of it is {most or 'nothing'}. Tensors only: the allocator's gaps, "
        "workspaces and the context come on top."
    )


def _timeline(times: Timeline) -> str:
    note = (
        " It is the first step, in which the engine does not know the order of units yet and gathers nothing "
        "ahead in forward; record two to see the others."
        if times.step == 0
        else ""
    )
    return (
        f"Step {times.step}, {in_seconds(times.step_seconds)}. Durations are the planner's, for the local "
        "shapes; collectives of one axis follow each other. Red: the computation waits. Drag to zoom, double "
        f"click to see all.{note}"
    )


def _streams(times: Timeline, calls: Sequence[Call]) -> str:
    busy = ", ".join(f"{name} {in_seconds(seconds)}" for name, seconds in times.busy().items())
    waits = ", ".join(
        f"{axis or 'no axis'} {in_seconds(seconds)}" for axis, seconds in times.exposed().items()
    )
    late = in_seconds(times.host[times.step])
    return f"Busy: {busy}. Waited for: {waits or 'nothing'}; for the host {late}."
