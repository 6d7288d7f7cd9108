"""The report of a plan: one HTML file with charts, which loads nothing from the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from parallel3d._play import STEADY, MicroBatch
from parallel3d._play import Span as Played
from parallel3d._util import page
from parallel3d._util.arguments import counted
from parallel3d._util.page import Figure, table
from parallel3d.planner.planning import (
    MeshPlan,
    memory_groups,
    reasons,
    setting,
    short,
    sizes_of,
    time_groups,
)
from parallel3d.planner.prediction import Prediction
from parallel3d.planner.recompute import KINDS

# The timeline: how much of a block's communication its compute hides, as bars on lanes.

LANES = ("compute", "tp", "cp", "ep", "gather", "reduce", "all-reduce", "host")


@dataclass(frozen=True)
class ChartSpan:
    """A bar of the timeline chart: ``seconds`` long from ``start`` on, in row ``lane``.

    Attributes:
        kind: "compute", "tensor parallel", "context parallel", "expert parallel", "slowdown" (of compute
            beside collectives), "host" (the GPU waits for it), "hidden" (a collective beside compute) or
            "exposed" (one waited for).
        what: its description.
        phase: "forward" or "backward".
    """

    lane: str
    start: float
    seconds: float
    kind: str
    what: str
    phase: str


_WHAT = {
    ("gather", "forward"): "parameters of the next block",
    ("gather", "backward"): "parameters of the block before",
    ("reduce", "backward"): "gradients of the block after",
    ("all-reduce", "backward"): "gradients of the block after, between copies",
    ("host", "forward"): "activations of the block before",
    ("host", "backward"): "activations of the block after",
}
_KINDS = {"tp": "tensor parallel", "cp": "context parallel", "ep": "expert parallel"}


def layer_spans(prediction: Prediction) -> list[ChartSpan]:
    """Returns the bars of one middle block, forward and backward, in a step's last micro-batch.

    Tensor parallelism's collectives are spread evenly between equal parts of compute.
    """
    units = [replace(times, count=min(times.count, STEADY)) for _, times in prediction.time.units]
    blocks = [at for at, (unit, _) in enumerate(prediction.time.units) if unit.kind == "block"]
    if not blocks:
        return []
    at = max(blocks, key=lambda at: prediction.time.units[at][0].count)
    block = sum(times.count for times in units[:at]) + units[at].count // 2
    played = MicroBatch(units, prediction.time.rules, records=True).spans
    spans: list[ChartSpan] = []
    for phase in ("forward", "backward"):
        offset = 1.04 * max((span.start + span.seconds for span in spans), default=0.0)
        spans += _phase(played, block, phase, offset)
    return spans


def _phase(played: list[Played], block: int, phase: str, offset: float) -> list[ChartSpan]:
    """Returns the bars of a block's ``phase`` and what runs beside it, from ``offset`` seconds on."""
    own = [s for s in played if (s.unit, s.way) == (block, phase)]
    own = [s for s in own if s.kind == "wait" or s.lane in ("compute", *_KINDS)]
    start, end = min(s.start for s in own), max(s.end for s in own)
    waits = [s for s in played if s.kind == "wait"]
    spans = []

    def add(lane: str, at: float, seconds: float, kind: str, what: str) -> None:
        if seconds > 1e-12:
            spans.append(ChartSpan(lane, at - start + offset, seconds, kind, what, phase))

    for s in own:
        if s.kind == "wait" and s.lane == "compute":
            add(s.lane, s.start, s.end - s.start, "host", "waits for the host")
        if s.kind != "wait":
            kind = _KINDS.get(s.lane, s.lane)
            add(s.lane, s.start, s.seconds, kind, f"{kind} of the block")
            at, slower = s.start + s.seconds, s.end - s.start - s.seconds
            add(s.lane, at, slower, "slowdown", "slower under collectives")
    for s in played:
        if s.kind == "wait" or (s.lane, phase) not in _WHAT:
            continue
        at, until = max(s.start, start), min(s.end, end)
        for wait in (w for w in waits if w.lane == s.lane):
            begin = max(at, wait.start)
            if begin < min(until, wait.end):
                add(s.lane, at, begin - at, "hidden", _WHAT[s.lane, phase])
                at = min(until, wait.end)
                add(s.lane, begin, at - begin, "exposed", _WHAT[s.lane, phase])
        add(s.lane, at, until - at, "hidden", _WHAT[s.lane, phase])
    return spans


# The charts.

_GIB = 2**30
_TIMES = "\N{MULTIPLICATION SIGN}"
_MOST_POINTS = 1500
_MEMORY: dict[str, page.Fill] = {
    "parameters": (page.BLUE, False),
    "gradients": (page.SKY, False),
    "optimizer": (page.GREEN, False),
    "unsharded, buffers": (page.ORANGE, False),
    "activations": (page.PURPLE, False),
    "logits, loss": (page.YELLOW, False),
    "framework": (page.GREY, False),
}
_TIME: dict[str, page.Fill] = {
    "matmul": (page.BLUE, False),
    "attention": (page.SKY, False),
    "elementwise": (page.GREEN, False),
    "recompute": (page.BLUE, True),
    "tensor parallel": (page.ORANGE, False),
    "context parallel": (page.ORANGE, True),
    "expert parallel": (page.SKY, True),
    "pipeline": (page.YELLOW, True),
    "exposed gather, reduce": (page.VERMILION, False),
    "exposed all-reduce": (page.VERMILION, True),
    "exposed offload": (page.GREEN, True),
    "stragglers": (page.GREY, False),
    "slowdown": (page.YELLOW, False),
    "copies": (page.PURPLE, False),
    "optimizer": (page.PURPLE, True),
    "host": (page.INK, True),
}
_OTHER: page.Fill = page.GREY, True
_SPANS: dict[str, tuple[str, page.Fill]] = {
    "compute": ("compute", (page.BLUE, False)),
    "slowdown": ("compute is slower", (page.YELLOW, False)),
    "host": ("waits for the host", (page.GREY, False)),
    "tensor parallel": ("tensor parallel", (page.ORANGE, False)),
    "context parallel": ("context parallel", (page.ORANGE, True)),
    "expert parallel": ("expert parallel", (page.SKY, True)),
    "hidden": ("collective, hidden", (page.GREEN, False)),
    "exposed": ("collective, waited for", (page.VERMILION, False)),
}
"""Kind of span -> name in the legend, fill."""
_BY_TP = (*(page.BLUE, page.ORANGE, page.GREEN, page.PURPLE), *(page.SKY, page.YELLOW, page.GREY))


def pareto_chart(plan: MeshPlan) -> Figure:
    """Draws tokens/s/GPU over GiB for all candidates by ``tp``, with Pareto front and capacity."""
    front = plan.pareto()
    each = [*plan.layouts, *front, *plan.candidates[:_MOST_POINTS]]
    shown = list({id(p): p for p in each}.values())
    capacity = plan.cluster.gpu.capacity_gib
    series = [
        _points([p for p in shown if p.layout.tp == tp], f"tp {tp}", _BY_TP[i % len(_BY_TP)])
        for i, tp in enumerate(sorted({p.layout.tp for p in shown}))
    ]
    beyond = [r.prediction for r in plan.refused if r.prediction is not None]
    close = [p for p in beyond if not shown or p.memory.needed < 1.5 * capacity * _GIB]
    if close:
        series.append(_points(close, "does not fit", page.INK, "cross"))
    if front:
        series.insert(0, _points(front, "Pareto front", page.INK, "line"))
        series.append(_points([plan.best], "best", page.VERMILION, "star"))
    most = max([capacity, *(p.memory.needed / _GIB for p in [*shown, *close])])
    speed = max((p.tokens_per_second_per_gpu for p in [*shown, *close]), default=1.0)
    y = "tokens/s/GPU", 1.08 * speed
    return page.chart(
        "items", series, ("GiB needed", 1.04 * most), y, marks=[_capacity_mark(capacity)]
    )


def _batch(prediction: Prediction) -> str:
    return f"{prediction.micro_batch} {_TIMES} {prediction.accumulation}"


def _points(
    each: Sequence[Prediction], name: str, colour: str, shape: str = "dot"
) -> dict[str, Any]:
    gib = [round(p.memory.needed / _GIB, 3) for p in each]
    speed = [round(p.tokens_per_second_per_gpu, 2) for p in each]
    notes = [
        f"{short(p)}\nmicro-batch {_batch(p)}\ncheckpointing {setting(p)}\n"
        f"{x:.1f} GiB, {p.fits_probability:.0%} to fit\n"
        f"{y:,.0f} tokens/s/GPU, MFU {p.mfu:.1%}"
        for p, x, y in zip(each, gib, speed, strict=True)
    ]
    return {"name": name, "colour": colour, "shape": shape, "x": gib, "y": speed, "notes": notes}


def memory_chart(each: Sequence[Prediction]) -> Figure:
    """Draws a bar of GiB by component for each layout, with upper bounds and the GPU's capacity."""
    bounds = [round(p.memory.upper_needed / _GIB, 3) for p in each]
    bound = {"name": "upper bound", "colour": page.INK, "shape": "tick", "x": bounds}
    bound |= {"row": [*range(len(each))], "notes": [f"upper bound: {at:.2f} GiB" for at in bounds]}
    capacity = each[0].cluster.gpu.capacity_gib if each else 1.0
    marks = [_capacity_mark(capacity)] if each else []
    series, most = _stacked(each, memory_groups, _MEMORY, 1 / _GIB, "{:.2f} GiB")
    end = 1.04 * max([capacity, most, *bounds])
    return page.chart("items", [*series, bound], ("GiB", end), rows=_labels(each), marks=marks)


def time_chart(each: Sequence[Prediction]) -> Figure:
    """Draws a bar of time by component for each layout: seconds a step if all have a global batch, else
    microseconds a token."""
    if all(p.workload.global_batch for p in each):
        unit = "seconds a step"
        series, most = _stacked(each, time_groups, _TIME, 1.0, "{:.3f} s")
    else:
        unit = "microseconds a token and GPU"

        def per_token(p: Prediction) -> dict[str, float]:
            return {name: value / p.tokens_per_gpu for name, value in time_groups(p).items()}

        series, most = _stacked(each, per_token, _TIME, 1e6, "{:.3f} us")
    return page.chart("items", series, (unit, 1.04 * most), rows=_labels(each))


def _stacked(
    each: Sequence[Prediction],
    groups: Callable[[Prediction], Mapping[str, float]],
    fills: Mapping[str, page.Fill],
    scale: float,
    shown: str,
) -> tuple[list[dict[str, Any]], float]:
    """Returns the series of a stacked bar chart, one for each component, and the end of the longest bar."""
    parts, ends, series = [groups(p) for p in each], [0.0] * len(each), []
    for name in dict.fromkeys(name for part in parts for name in part):
        found = []
        for row, part in enumerate(parts):
            value = part.get(name, 0.0) * scale
            if value:
                note = f"{name}: {shown.format(value)}\n{short(each[row])}"
                found.append((row, ends[row], ends[row] + value, note))
                ends[row] += value
        if found:
            series.append(page.bars(name, fills.get(name, _OTHER), found))
    return series, max(ends, default=0.0)


def _labels(each: Sequence[Prediction]) -> list[tuple[str, str]]:
    return [
        (short(p), f"{setting(p).replace('selective ', 'sel. ')}, {p.micro_batch}") for p in each
    ]


def timeline_chart(prediction: Prediction) -> Figure:
    """Draws one block's forward and backward: compute, the collectives beside it, and waits."""
    spans, series = layer_spans(prediction), []
    used = [lane for lane in LANES if any(span.lane == lane for span in spans)]
    for kind, (name, fill) in _SPANS.items():
        found = []
        for s in (span for span in spans if span.kind == kind):
            note = f"{s.phase}: {s.what}\n{s.seconds * 1e3:.3f} ms, {name}"
            ends = s.start * 1e3, (s.start + s.seconds) * 1e3
            found.append((used.index(s.lane), *ends, note))
        if found:
            series.append(page.bars(name, fill, found))
    marks = []
    for phase in ("forward", "backward"):
        start = min((s.start for s in spans if s.phase == phase), default=0.0)
        marks.append(page.mark(start * 1e3, phase, dashed=False))
    end = 1.02e3 * max((s.start + s.seconds for s in spans), default=0.0)
    rows = [(lane,) for lane in used]
    return page.chart("items", series, ("milliseconds", end), rows=rows, row_height=40, marks=marks)


def _capacity_mark(capacity: float) -> dict[str, Any]:
    return page.mark(capacity, f"capacity {capacity:g} GiB")


_BARS, _TIMELINES, _ROWS = 10, 6, 40


def write_report(plan: MeshPlan, path: str | PathLike[str]) -> None:
    """Writes the report of ``plan``, less than 1 MB, to the file ``path``.

    Raises:
        OSError: the file can't be written.
    """
    work, cluster, each = plan.workload, plan.cluster, _shown(plan)
    batch = f", global batch {work.global_batch:,}" if work.global_batch else ""
    sent = f", sent in {work.wire_dtype}" if work.wire_dtype else ""
    setup = (
        f"{plan.model.size}; {counted(cluster.nodes, 'node')} of "
        f"{cluster.gpus_per_node}, {cluster.nic:g} GB/s a GPU between them; sequences of "
        f"{work.seq_len:,}{batch}; {work.precision}, parameters at rest {work.param_dtype}, "
        f"reduced in {work.reduce_dtype}{sent}; {work.optimizer}{'; compiled' if work.compile else ''}"
        f"{f'; {work.lora}' if work.lora else ''}"
    )
    explanation = each[0].explain() if each else ""
    if len(plan.layouts) > 1:
        explanation += "\n\nbeside the second:\n" + plan.explain(*plan.layouts[:2])
    figures = {
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
    parts = {
        "title": escape(f"{plan.model.name} on {cluster.world_size:,} {_TIMES} {cluster.gpu.name}"),
        "setup": escape(setup),
        "cards": _cards(each),
        "layouts": _layouts(plan),
        "refusals": _refusals(plan),
        "recomputation": _recomputation(plan),
        "sensitivity": _sensitivity(plan),
        "explanation": escape(explanation),
        "figures": page.embedded(figures),
    }
    text = page.filled("parallel3d.planner", "report_page.html", parts)
    Path(path).write_text(text, encoding="utf-8")


def _shown(plan: MeshPlan) -> Sequence[Prediction]:
    """Returns the best prediction of each layout; if nothing fits, those nearest to fitting."""
    if plan.candidates:
        return plan.layouts
    nearest = sorted(plan.refused, key=lambda r: r.part)
    return [r.prediction for r in nearest if r.prediction is not None]


def _cards(each: Sequence[Prediction]) -> str:
    if not each:
        return '<p class="bad">No layout is legal.</p>'
    best, memory = each[0], each[0].memory
    cards = {
        f" {_TIMES} ".join(best.layout.axes): short(best),
        "micro-batch, accumulation": f"{best.micro_batch}, {best.accumulation}",
        "checkpointing": setting(best),
        "tokens/s/GPU": f"{best.tokens_per_second_per_gpu:,.0f}",
        "MFU (by 6N)": f"{best.mfu:.1%} ({best.mfu_6n:.1%})",
        "step": f"{best.step_seconds:,.3f} s",
        "GiB needed": f"{memory.needed / _GIB:.1f} of {memory.capacity / _GIB:.1f}",
        "fits": f"{best.fits_probability:.0%}",
    }
    if best.layout.cp > 1:
        cards["attention over cp"] = best.workload.cp_attention
    if best.host_bound is not None:
        cards["waits for the host"] = f"{best.host_bound.part:.0%} of the step: host-bound"
    if memory.host:
        of = f"{memory.host / _GIB:.0f} of {memory.host_capacity / _GIB:.0f}"
        cards["GiB on the host, a GPU"] = of
    each_card = "<div><dt>{}</dt><dd>{}</dd></div>"
    shown = "".join(each_card.format(*map(escape, card)) for card in cards.items())
    verdict = "" if best.fits else '<p class="bad">This does not fit: it is what comes closest.</p>'
    return f'{verdict}<dl class="cards">{shown}</dl>'


def _layouts(plan: MeshPlan) -> str:
    columns = {
        "layout": short,
        "checkpointing": setting,
        "batch": _batch,
        "GiB": lambda p: f"{p.memory.needed / _GIB:.1f}",
        "fits": lambda p: f"{p.fits_probability:.0%}",
        "tokens/s/GPU": lambda p: f"{p.tokens_per_second_per_gpu:,.0f}",
        "MFU": lambda p: f"{p.mfu:.1%}",
        "HFU": lambda p: f"{p.hfu:.1%}",
        "step, s": lambda p: f"{p.step_seconds:,.3f}",
    }
    rows = [
        [str(place), *(cell(p) for cell in columns.values())]
        for place, p in enumerate(plan.layouts[:_ROWS], 1)
    ]
    if not rows:
        return "<p>None fits.</p>"
    left = len(plan.layouts) - len(rows)
    return table(("", *columns), rows, 3, wrap=False) + (f"<p>{left} more.</p>" if left else "")


def _refusals(plan: MeshPlan) -> str:
    if not plan.refused:
        return "<p>None.</p>"
    kinds = [(r.text, str(r.count), r.examples) for r in reasons(plan.refused)]
    each = [(sizes_of(r.layout, f" {_TIMES} "), r.reason) for r in plan.refused]
    every = f"<summary>All {len(each)}</summary>{table(('layout', 'why'), each, 2)}"
    numbers = table(("why (of the nearest to fit)", "how many", "layouts"), kinds, 1)
    return f"{numbers}<details>{every}</details>"


def _recomputation(plan: MeshPlan) -> str:
    if not plan.candidates:
        return "<p>Nothing fits.</p>"
    head = (
        *("activation_checkpointing", "kind", "", "GiB", "GiB on the host"),
        *("computed again, s", "waits for the host, s", "tokens/s/GPU"),
    )
    rows = []
    for each in plan.recomputation():
        kind, memory, terms = KINDS[each.workload.checkpointing], each.memory, each.time.terms
        rows.append(
            (
                "" if kind.argument is None else repr(kind.argument),
                kind.name.replace("_", " "),
                kind.what,
                f"{memory.needed / _GIB:.1f}" + ("" if each.fits else ", does not fit"),
                f"{memory.host / _GIB:.1f}" if memory.host else "",
                f"{terms['recompute'].value:,.3f}",
                f"{terms['exposed offload'].value:,.3f}",
                f"{each.tokens_per_second_per_gpu:,.0f}",
            )
        )
    return table(head, rows, 3, wrap=False)


def _sensitivity(plan: MeshPlan) -> str:
    if not plan.candidates:
        return "<p>Nothing fits.</p>"
    rows = []
    for name, tried in plan.sensitivity().items():
        now = tried[1][1]
        cells = [
            f"{value}: {speed:,.0f}"
            + (f" ({speed / now - 1:+.1%})" if speed != now else "")
            + (f", {probability:.0%} to fit" if fits else ", does not fit")
            for value, speed, fits, probability in tried
        ]
        rows.append((name.replace("_", " "), *cells))
    return table(("", "half", "as it is", "twice"), rows, 1, wrap=False)
