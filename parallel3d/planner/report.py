"""The report of a plan: one HTML file with charts that needs no network. Needs plotly (``report`` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from parallel3d._report import embedded, filled, table
from parallel3d.planner.groups import reasons, setting, short
from parallel3d.planner.mesh_plan import MeshPlan
from parallel3d.planner.prediction import Prediction
from parallel3d.planner.report_charts import memory_chart, pareto_chart, time_chart, timeline_chart

__all__ = ["report_html", "write_report"]

_GIB = 2**30
_BARS, _TIMELINES, _ROWS = 10, 6, 40


def write_report(plan: MeshPlan, path: str | PathLike[str]) -> None:
    """Writes the page.

    Raises:
        PlanningError: plotly isn't installed.
        OSError: the file can't be written.
    """
    Path(path).write_text(report_html(plan), encoding="utf-8")


def report_html(plan: MeshPlan) -> str:
    """The page, with plotly's JavaScript in it: about 5 MB.

    Raises:
        PlanningError: plotly isn't installed.
    """
    parts = {**_words(plan), "figures": embedded(_figures(plan))}
    return filled("parallel3d.planner", "report_page.html", parts)


def _shown(plan: MeshPlan) -> Sequence[Prediction]:
    """The fastest of each layout; where nothing fits, those that come closest."""
    if plan.candidates:
        return plan.layouts
    tried = [r.prediction for r in plan.refused if r.prediction is not None]
    return sorted(tried, key=lambda p: p.memory.needed)


def _figures(plan: MeshPlan) -> dict[str, Any]:
    each = _shown(plan)
    return {
        "pareto": pareto_chart(plan),
        "memory": memory_chart(each[:_BARS]),
        "time": time_chart(each[:_BARS]),
        "timelines": [
            {
                "name": f"{short(p)}, {setting(p)}, micro-batch {p.micro_batch}",
                "figure": timeline_chart(p),
            }
            for p in each[:_TIMELINES]
        ],
    }


def _words(plan: MeshPlan) -> dict[str, str]:
    """HTML of everything that isn't a chart."""
    work, cluster = plan.workload, plan.cluster
    batch = f", global batch {work.global_batch:,}" if work.global_batch else ""
    title = (
        f"{plan.model.name} on {cluster.world_size:,} \N{MULTIPLICATION SIGN} {cluster.gpu.name}"
    )
    setup = (
        f"{plan.model.numel / 1e9:,.2f} B parameters; {cluster.nodes:,} nodes of {cluster.gpus_per_node}, "
        f"{cluster.nic:g} GB/s a GPU between them; sequences of {work.seq_len:,}{batch}; {work.precision}, "
        f"parameters at rest {work.param_dtype}, reduced in {work.reduce_dtype}; {work.optimizer}"
        f"{'; compiled' if work.compile else ''}"
    )
    return {
        "title": escape(title),
        "setup": escape(setup),
        "cards": _cards(plan),
        "layouts": _layouts(plan),
        "refusals": _refusals(plan),
        "sensitivity": _sensitivity(plan),
        "explanation": escape(_explanation(plan)),
    }


def _cards(plan: MeshPlan) -> str:
    each = _shown(plan)
    if not each:
        return '<p class="bad">No layout is legal.</p>'
    best = each[0]
    memory = best.memory
    cards = [
        ("replicate \N{MULTIPLICATION SIGN} shard \N{MULTIPLICATION SIGN} tp", short(best)),
        ("micro-batch, accumulation", f"{best.micro_batch}, {best.accumulation}"),
        ("checkpointing", setting(best)),
        ("tokens/s/GPU", f"{best.tokens_per_second_per_gpu:,.0f}"),
        ("MFU (by 6N)", f"{best.mfu:.1%} ({best.mfu_6n:.1%})"),
        ("step", f"{best.step_seconds:,.3f} s"),
        ("GiB needed", f"{memory.needed / _GIB:.1f} of {memory.capacity / _GIB:.1f}"),
    ]
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in cards
    )
    verdict = "" if best.fits else '<p class="bad">This does not fit: it is what comes closest.</p>'
    return f'{verdict}<dl class="cards">{shown}</dl>'


def _layouts(plan: MeshPlan) -> str:
    rows = [
        (
            *(
                str(place),
                short(p),
                setting(p),
                f"{p.micro_batch} \N{MULTIPLICATION SIGN} {p.accumulation}",
            ),
            *(f"{p.memory.needed / _GIB:.1f}", f"{p.tokens_per_second_per_gpu:,.0f}"),
            *(f"{p.mfu:.1%}", f"{p.hfu:.1%}", f"{p.step_seconds:,.3f}"),
        )
        for place, p in enumerate(plan.layouts[:_ROWS], 1)
    ]
    if not rows:
        return "<p>None fits.</p>"
    left = len(plan.layouts) - len(rows)
    columns = (
        "",
        "layout",
        "checkpointing",
        "batch",
        "GiB",
        "tokens/s/GPU",
        "MFU",
        "HFU",
        "step, s",
    )
    return table(columns, rows, 3, wrap=False) + (f"<p>{left} more.</p>" if left else "")


def _refusals(plan: MeshPlan) -> str:
    if not plan.refused:
        return "<p>None.</p>"
    kinds = [(r.text, str(r.count), r.examples) for r in reasons(plan.refused)]
    each = [
        (" \N{MULTIPLICATION SIGN} ".join(map(str, r.layout.sizes)), r.reason) for r in plan.refused
    ]
    return (
        table(("why (the mildest)", "how many", "layouts"), kinds, 1)
        + f"<details><summary>All {len(each)}</summary>{table(('layout', 'why'), each, 2)}</details>"
    )


def _sensitivity(plan: MeshPlan) -> str:
    if not plan.candidates:
        return "<p>Nothing fits.</p>"
    rows = []
    for name, tried in plan.sensitivity().items():
        now = tried[1][1]
        cells = [
            f"{value}: {speed:,.0f}"
            + (f" ({speed / now - 1:+.1%})" if speed != now else "")
            + ("" if fits else ", does not fit")
            for value, speed, fits in tried
        ]
        rows.append((name.replace("_", " "), *cells))
    return table(("", "half", "as it is", "twice"), rows, 1, wrap=False)


def _explanation(plan: MeshPlan) -> str:
    each = _shown(plan)
    if not each:
        return ""
    text = each[0].explain()
    if len(plan.layouts) > 1:
        text += "\n\nbeside the second:\n" + plan.explain(plan.layouts[0], plan.layouts[1])
    return text
