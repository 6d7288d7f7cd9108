"""The report of a dry run: one HTML page with charts that needs no network. Needs plotly."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from os import PathLike
from pathlib import Path

from parallel3d._util import page
from parallel3d._util.page import Figure, as_figure, chart_layout, embedded, filled, mark, table
from parallel3d.tools.dryrun.compare import Divergence, compare
from parallel3d.tools.dryrun.result import KINDS, DryRun, ParameterPlacement, Peak
from parallel3d.tools.dryrun.timeline import COMPUTE, STREAMS, Call, Timeline, calls_of, timeline
from parallel3d.tools.dryrun.trace import Bar, merged, thinned
from parallel3d.tools.dryrun.warnings import all_warnings
from parallel3d.tools.dryrun.wording import (
    AXIS_COLUMNS,
    axis_rows,
    by_size,
    counted,
    figures_of,
    grouped,
    in_bytes,
    in_seconds,
    pattern_of,
    peaks_of,
    placements_of,
    total_bytes,
)

# The charts, as plotly's JSON.

_MOST_SAMPLES, _MOST_BARS = 1500, 3000
_MEMORY = {
    "parameters": page.BLUE,
    "gradients": page.SKY,
    "optimizer state": page.GREEN,
    "buffers": page.GREY,
    "unsharded parameters": page.AMBER,
    "communication": page.BROWN,
    "activations": page.VIOLET,
    "inputs": page.TEAL,
    "temporaries": page.PINK,
}
_BARS = {
    "matmul": ("matmul", page.BLUE),
    "attention": ("attention", page.VIOLET),
    "elementwise": ("elementwise", page.TEAL),
    COMPUTE: ("computation, several kinds", page.SKY),
    "collective": ("collectives", page.AMBER),
    "wait": ("waiting", page.RED),
}
"""Kind of bar -> name in the legend, colour."""


def _memory_chart(run: DryRun, times: Timeline) -> Figure:
    """Memory by kind, stacked, over predicted time; the peak and the GPU's capacity are marked."""
    samples = thinned(run.memory, _MOST_SAMPLES)
    unit, size = ("GiB", 2**30) if run.peak.bytes >= 2**30 else ("MiB", 2**20)
    at = [round(times.times[sample.operation] * 1e3, 4) for sample in samples]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": kind,
            "stackgroup": "memory",
            "x": at,
            "y": [round(sample.by_kind.get(kind, 0) / size, 4) for sample in samples],
            "line": {"shape": "hv", "width": 0.5, "color": _MEMORY[kind]},
            "fillcolor": _MEMORY[kind],
            "hovertemplate": f"%{{y:.2f}} {unit}",
        }
        for kind in KINDS
        if any(kind in sample.by_kind for sample in samples)
    ]
    layout = chart_layout(440, "milliseconds, predicted", unit)
    layout["hovermode"] = "x unified"
    layout["yaxis"]["rangemode"] = "tozero"
    most = run.peak.bytes / size
    capacity = times.cluster.gpu.capacity_gib * 2**30 / size
    if most > capacity / 3:
        mark(layout, capacity, f"capacity {capacity:.1f} {unit}", axis="y")
        most = max(most, capacity)
    layout["yaxis"]["range"] = [0, 1.12 * most]
    if samples and times.times:
        peak = times.times[run.peak.operation] * 1e3
        anchor = "right" if peak > times.seconds * 500 else "left"
        mark(layout, peak, f"peak {in_bytes(run.peak.bytes)}", anchor=anchor, top=True)
    return as_figure(traces, layout)


def _timeline_chart(times: Timeline) -> Figure:
    """The shown step, with a row for each stream."""
    begin, _ = times.bounds()
    spans = times.of_step()
    by_kind = grouped(merged(spans, _MOST_BARS), lambda bar: bar.kind)
    # A bar is at least a pixel wide: the kind with most time is drawn last, so that it isn't covered.
    ordered = sorted(by_kind.items(), key=lambda item: sum(bar.busy for bar in item[1]))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": _BARS[kind][0],
            "base": [round((bar.start - begin) * 1e3, 5) for bar in bars],
            "x": [round((bar.end - bar.start) * 1e3, 5) for bar in bars],
            "y": [bar.stream for bar in bars],
            "customdata": [_hover(bar) for bar in bars],
            "marker": {"color": _BARS[kind][1], "line": {"width": 0}},
            "hovertemplate": "%{customdata}<extra></extra>",
        }
        for kind, bars in ordered
    ]
    used = {span.stream for span in spans}
    rows = [s for s in STREAMS if s in used] + sorted(used - set(STREAMS))
    layout = chart_layout(190 + 44 * max(len(rows), 1), "milliseconds, predicted", "")
    layout |= {"barmode": "overlay", "dragmode": "zoom"}
    layout["yaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": rows}
    layout["yaxis"] |= {"autorange": "reversed", "fixedrange": True}
    for phase in ("forward", "backward", "optimizer"):
        starts = [span.start for span in spans if span.phase == phase and span.stream == COMPUTE]
        if starts:
            mark(layout, (min(starts) - begin) * 1e3, phase, dash="solid", width=1, anchor="left")
    return as_figure(traces, layout)


def _hover(bar: Bar) -> str:
    """Names are escaped, as plotly interprets tags in its labels."""
    parts = f" ({bar.count} in {in_seconds(bar.busy)})" if bar.count > 1 else ""
    lasts = f"<br>{in_seconds(bar.end - bar.start)}{parts}"
    return f"{escape(bar.phase)}: {escape(bar.what)}{lasts}"


# The tables, as HTML; all names are escaped.

_MOST_ROWS = 3000
_NONE = "<p>None.</p>"
_FIRST_STEP = (
    " It is the first step, in which the engine does not know the order of units yet and prefetches "
    "nothing in forward; record two to see the others."
)


def _calls_table(calls: Sequence[Call]) -> str:
    """The collectives of the whole run, equal ones together, in the order of the first; with a filter."""

    def cells(call: Call) -> tuple[str, ...]:
        what = call.axis or "none", call.op, call.where or "-", call.phase, call.dtype
        return *what, "" if call.asynchronous else "blocks", str(call.group_size), f"{call.bytes:,}"

    rows = []
    for common, group in grouped(calls, cells).items():
        amount = f"{len(group):,}", total_bytes(group)
        spent = in_seconds(group[0].seconds), in_seconds(sum(call.exposed for call in group))
        rows.append((f"{group[0].order}", *common, *amount, *spent))
    columns = (
        *("first", "axis", "operation", "unit or module", "phase", "dtype", ""),
        *("ranks", "bytes each", "calls", "bytes in all", "each takes", "waited for"),
    )
    return _filtered("collectives", columns, rows, 7)


def _parameters_tables(run: DryRun) -> str:
    """Equal parameters of all blocks together; below them every parameter, with a filter."""
    if not run.parameters:
        return _NONE
    groups = grouped(run.parameters, lambda p: _cells(p, pattern_of(p.name)))
    rows = [(*cells, f"{len(ps):,}", total_bytes(ps)) for cells, ps in groups.items()]
    columns = ("parameter", "shape", "on this rank", "placements", "dtype", "")
    together = table((*columns, "of them", "bytes here"), rows, 6, wrap=False)
    single = [(*_cells(p, p.name), f"{p.bytes:,}") for p in run.parameters]
    every = _filtered("parameters", (*columns, "bytes here"), single, 6)
    return f"{together}<details><summary>Each of the {len(single):,}</summary>{every}</details>"


def _cells(parameter: ParameterPlacement, name: str) -> tuple[str, ...]:
    shape, local_shape = _sizes(parameter.shape), _sizes(parameter.local_shape)
    frozen = "" if parameter.requires_grad else "frozen"
    return name, shape, local_shape, placements_of(parameter), parameter.dtype, frozen


def _peak_tables(peak: Peak) -> str:
    """The memory at ``peak`` by kind, and the largest tensors."""
    kinds = [(kind, in_bytes(size), f"{size / peak.bytes:.1%}") for kind, size in by_size(peak)]
    groups = grouped(
        peak.largest, lambda t: (t.kind, pattern_of(t.module), t.made_by, _sizes(t.shape), t.dtype)
    )
    html = table(("kind", "bytes", "of the peak"), kinds, 1, wrap=False)
    tensors = []
    for (kind, pattern, *rest), group in groups.items():
        module = pattern if len(group) > 1 else group[0].module or "-"
        tensors.append((kind, module, *rest, f"{len(group):,}", in_bytes(group[0].bytes)))
    columns = ("kind", "module or parameter", "made by", "shape", "dtype", "of them", "bytes each")
    head = f"<h3>The {len(peak.largest)} largest tensors at the peak</h3>"
    return html + (head + table(columns, tensors, 5, wrap=False) if groups else "")


def _filtered(
    name: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], words: int
) -> str:
    """A scrollable table with a field that hides the rows without all its words."""
    if not rows:
        return _NONE
    shown = table(columns, rows[:_MOST_ROWS], words, wrap=False)
    left = len(rows) - _MOST_ROWS
    more = f"<p>{left:,} more rows are only in the JSON.</p>" if left > 0 else ""
    field = (
        f'<input type="search" data-filters="{name}" placeholder="filter, such as: shard backward" '
        f'aria-label="filter the {name}: words that a row must have"> '
        f'<span class="soft" id="{name}-count"></span>'
    )
    return f'{field}<div class="many" id="{name}">{shown}</div>{more}'


def _sizes(shape: Sequence[int]) -> str:
    return " \N{MULTIPLICATION SIGN} ".join(map(str, shape)) or "a number"


def write_report(
    run: DryRun,
    path: str | PathLike[str],
    predicted: Timeline | None = None,
    divergence: Divergence | None = None,
    other: DryRun | None = None,
) -> None:
    """Writes the page, with plotly's JavaScript in it: 5 MB and more.

    Args:
        run: the dry run.
        path: the HTML file; it is replaced.
        predicted: ``timeline(run)``, or one for another cluster.
        divergence: the result of ``compare`` with another rank.
        other: that rank's dry run, to compare with; the page says so too if both communicate alike.

    Raises:
        PlanningError: plotly isn't installed.
        DryRunError: ``other`` is a dry run of another world.
        OSError: the file can't be written.
    """
    times = predicted or timeline(run)
    calls, cluster = calls_of(run, times), times.cluster
    if other is not None and divergence is None:
        divergence = compare(run, other)
    warnings = all_warnings(run, times, divergence)
    items = "".join(f"<li><b>{escape(w.kind)}</b>: {escape(w.text)}</li>" for w in warnings)
    mesh = ", ".join(f"{axis} {size}" for axis, size in run.mesh.items()) or "no mesh"
    axes = [cells for cells, _ in axis_rows(times, calls)]
    reads = [(read.where, read.what, f"{read.count:,}") for read in run.unknown[:_MOST_ROWS]]
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in figures_of(run, times)
    )
    parts = {
        "title": escape(f"Dry run: rank {run.rank} of {run.world_size:,} ({mesh})"),
        "setup": escape(
            f"{counted(run.steps, 'optimizer step')}, {counted(len(run.operations), 'operation')}, "
            f"{counted(len(run.collectives), 'collective')}, recorded in {in_seconds(run.seconds)}."
        ),
        "machines": escape(
            f"{cluster.gpu.name}, {cluster.gpus_per_node} on a node, {cluster.nic:g} GB/s a GPU"
        ),
        "count": str(len(warnings)),
        "cards": f'<dl class="cards">{cards}</dl>',
        "warnings": f'<ul class="warnings">{items}</ul>' if warnings else _NONE,
        "comparison": _comparison(run, other, divergence),
        "peaks": "".join(
            f"<p>{escape(_peak(run, peak, when))}</p>{_peak_tables(peak)}"
            for peak, when in peaks_of(run)
        ),
        "step": f"{times.step}, {in_seconds(times.step_seconds)}",
        "note": "" if times.step else _FIRST_STEP,
        "axes": table(AXIS_COLUMNS, axes, 2, wrap=False) if axes else _NONE,
        "collectives": _calls_table(calls),
        "parameters": _parameters_tables(run),
        "reads": table(("where", "what", "how often"), reads, 2) if reads else _NONE,
        "busy": _seconds_of(times.busy()),
        "waited": _seconds_of(times.exposed()),
        "late": in_seconds(times.host[times.step]),
        "figures": embedded(
            {"memory": _memory_chart(run, times), "timeline": _timeline_chart(times)}
        ),
    }
    html = filled("parallel3d.tools.dryrun", "report_page.html", parts)
    Path(path).write_text(html, encoding="utf-8")


def _comparison(run: DryRun, other: DryRun | None, divergence: Divergence | None) -> str:
    if divergence is not None:
        head = f"<h2>Compared with rank {divergence.ranks[1]}</h2>"
        text = escape(str(divergence))
        return f'{head}<p class="bad">They diverge.</p><pre class="wraps">{text}</pre>'
    if other is None:
        return ""
    count = counted(len(run.collectives), "collective")
    return (
        f"<h2>Compared with rank {other.rank}</h2>"
        f"<p>The {count} of both ranks match: operation, axis, unit, size, order.</p>"
    )


def _peak(run: DryRun, peak: Peak, when: str) -> str:
    most = " and ".join(f"{kind} ({in_bytes(size)})" for kind, size in by_size(peak)[:2])
    where = f"in {peak.name or 'the beginning'} of {peak.module or 'no module'}, {peak.phase}"
    step = run.operations[peak.operation].step if run.operations else 0
    return (
        f"The peak{when} is {in_bytes(peak.bytes)}, {where}, step {step} (operation {peak.operation:,} of "
        f"{len(run.operations):,}); most of it is {most or 'nothing'}."
    )


def _seconds_of(each: dict[str, float]) -> str:
    listed = (f"{name or 'no axis'} {in_seconds(seconds)}" for name, seconds in each.items())
    return escape(", ".join(listed) or "nothing")
