"""The report of a dry run: one HTML file with charts that needs no network. Needs plotly (``report`` "
"extra)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from os import PathLike
from pathlib import Path

from parallel3d._report import embedded, filled
from parallel3d.dryrun.calls import Call, calls_of
from parallel3d.dryrun.compare import Divergence, compare
from parallel3d.dryrun.figures import Figures, figures_of, peaks_of
from parallel3d.dryrun.report_charts import memory_chart, timeline_chart
from parallel3d.dryrun.report_tables import (
    axes_table,
    calls_table,
    parameters_tables,
    peak_tables,
    reads_table,
)
from parallel3d.dryrun.result import DryRun, DryRunWarning, Peak
from parallel3d.dryrun.timeline import Timeline, timeline
from parallel3d.dryrun.warnings import all_warnings
from parallel3d.dryrun.wording import counted, in_bytes, in_seconds

__all__ = ["report_html", "write_report"]


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
    return filled("parallel3d.dryrun", "report_page.html", parts)


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
