"""The report of a dry run: one HTML page with charts, which loads nothing from the network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from os import PathLike
from pathlib import Path

from parallel3d._util import page
from parallel3d._util.page import Figure, bars, chart, embedded, filled, mark, table
from parallel3d.tools.dryrun.compare import Divergence, compare
from parallel3d.tools.dryrun.result import KINDS, DryRun, ParameterPlacement, Peak
from parallel3d.tools.dryrun.timeline import (
    COMPUTE,
    STREAMS,
    TimedCollective,
    Timeline,
    calls_of,
    timeline,
)
from parallel3d.tools.dryrun.trace import Bar, merged, thinned
from parallel3d.tools.dryrun.warnings import all_warnings
from parallel3d.tools.dryrun.wording import (
    AXIS_COLUMNS,
    axis_of,
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

# The charts.

_MOST_SAMPLES, _MOST_BARS = 1500, 3000
_MEMORY: dict[str, page.Fill] = {
    "parameters": (page.BLUE, False),
    "gradients": (page.SKY, False),
    "optimizer state": (page.GREEN, False),
    "buffers": (page.GREY, False),
    "unsharded parameters": (page.ORANGE, False),
    "communication": (page.VERMILION, False),
    "activations": (page.PURPLE, False),
    "inputs": (page.GREY, True),
    "temporaries": (page.YELLOW, False),
}
_BARS: dict[str, tuple[str, page.Fill]] = {
    "matmul": ("matmul", (page.BLUE, False)),
    "attention": ("attention", (page.SKY, False)),
    "elementwise": ("elementwise", (page.GREEN, False)),
    "host_copy": ("copies to and from the CPU", (page.GREEN, True)),
    COMPUTE: ("computation, several kinds", (page.GREY, False)),
    "collective": ("collectives", (page.ORANGE, False)),
    "wait": ("waiting", (page.VERMILION, False)),
}
"""Kind of bar -> name in the legend, fill."""


def _memory_chart(run: DryRun, times: Timeline) -> Figure:
    """Draws memory by kind, stacked, over predicted time, with the peak and the GPU's capacity."""
    samples = thinned(run.memory, _MOST_SAMPLES)
    unit, size = ("GiB", 2**30) if run.peak.bytes >= 2**30 else ("MiB", 2**20)
    at = [round(times.times[sample.operation] * 1e3, 4) for sample in samples]
    series = [
        {
            "name": kind,
            "colour": _MEMORY[kind][0],
            "hatched": _MEMORY[kind][1],
            "y": [round(sample.by_kind.get(kind, 0) / size, 4) for sample in samples],
        }
        for kind in KINDS
        if any(sample.by_kind.get(kind) for sample in samples)
    ]
    marks = []
    if samples and times.times:
        peak = times.times[run.peak.operation] * 1e3
        marks.append(mark(peak, f"peak {in_bytes(run.peak.bytes)}", dashed=False))
    most, capacity = run.peak.bytes / size, times.cluster.gpu.capacity_gib * 2**30 / size
    if most > capacity / 3:
        marks.append(mark(capacity, f"capacity {capacity:.1f} {unit}", axis="y"))
        most = max(most, capacity)
    x = "milliseconds, predicted", max(at, default=0.0)
    return chart("area", series, x, (unit, 1.12 * most), marks=marks, at=at, zooms=True)


def _timeline_chart(times: Timeline) -> Figure:
    """Draws the step that ``times`` shows, with a row for each stream."""
    begin, end = times.bounds()
    spans = times.of_step()
    used = {span.stream for span in spans}
    rows = [s for s in STREAMS if s in used] + sorted(used - set(STREAMS))
    by_kind = grouped(merged(spans, _MOST_BARS), lambda bar: bar.kind)
    # A bar is at least a pixel wide: the kind with most time is drawn last, so that it isn't covered.
    ordered = sorted(by_kind.items(), key=lambda item: sum(bar.busy for bar in item[1]))

    def drawn(bar: Bar) -> tuple[int, float, float, str]:
        parts = f" ({bar.count} in {in_seconds(bar.busy)})" if bar.count > 1 else ""
        note = f"{bar.phase}: {bar.what}\n{in_seconds(bar.end - bar.start)}{parts}"
        return rows.index(bar.stream), (bar.start - begin) * 1e3, (bar.end - begin) * 1e3, note

    series = [bars(*_BARS[kind], map(drawn, found)) for kind, found in ordered]
    marks = []
    for phase in ("forward", "backward", "optimizer"):
        starts = [span.start for span in spans if span.phase == phase and span.stream == COMPUTE]
        if starts:
            marks.append(mark((min(starts) - begin) * 1e3, phase, dashed=False))
    x = "milliseconds, predicted", (end - begin) * 1e3
    labels = [(row,) for row in rows]
    return chart("items", series, x, rows=labels, row_height=44, marks=marks, zooms=True)


# The tables, as HTML; all names are escaped.

_MOST_ROWS = 1000
_NONE = "<p>None.</p>"
_FIRST_STEP = (
    " It is the first step, in which the engine does not know the order of units yet and prefetches "
    "nothing in forward; record two to see the others."
)


def _calls_table(run: DryRun, calls: Sequence[TimedCollective]) -> str:
    """Returns a table of the run's collectives, with a filter; equal ones share a row."""

    def cells(call: TimedCollective) -> tuple[str, ...]:
        what = axis_of(call, run), call.op, call.where or "-", call.phase, call.dtype
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
    """Returns a table of the parameters, equal ones of all blocks in one row, and below it one of all
    parameters, with a filter."""
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
    """Returns tables of the memory at ``peak`` by kind, and of the largest tensors."""
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
    head = f"<h3>The {counted(len(peak.largest), 'largest tensor')} at the peak</h3>"
    return html + (head + table(columns, tensors, 5, wrap=False) if groups else "")


def _filtered(
    name: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], words: int
) -> str:
    """Returns a scrollable table with an input field; rows that lack any of its words are hidden."""
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
    """Writes the report of ``run``, less than 1 MB, to the file ``path``.

    Args:
        run: the dry run.
        path: the HTML file; it is replaced.
        predicted: the predicted times; by default ``timeline(run)``.
        divergence: the result of ``compare`` with another rank.
        other: that rank's dry run, to compare with; the page says so too if both communicate alike.

    Raises:
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
    axes = [cells for cells, _ in axis_rows(run, times, calls)]
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
        "collectives": _calls_table(run, calls),
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
