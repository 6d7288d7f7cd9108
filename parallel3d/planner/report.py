"""The report of a plan: one HTML file with charts that needs no network. Needs plotly (``report`` extra)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from parallel3d._util import page
from parallel3d._util.arguments import counted
from parallel3d._util.page import Figure, as_figure, chart_layout, mark, table
from parallel3d.planner.constants import constant
from parallel3d.planner.model_spec import Unit
from parallel3d.planner.planning import (
    MeshPlan,
    memory_groups,
    reasons,
    setting,
    short,
    time_groups,
)
from parallel3d.planner.prediction import Prediction

# The timeline: how much of a block's communication its compute hides, as bars on lanes.

LANES = ("compute", "tp", "gather", "reduce", "all-reduce")


@dataclass(frozen=True)
class Span:
    """A bar: ``seconds`` from ``start`` on ``lane``.

    Attributes:
        kind: "compute", "tensor parallel", "slowdown", "hidden" or "exposed".
        what: its description.
        phase: "forward" or "backward".
    """

    lane: str
    start: float
    seconds: float
    kind: str
    what: str
    phase: str


def layer_spans(prediction: Prediction) -> list[Span]:
    """One block between two others, forward and then backward, in the last micro-batch of a step.

    Durations are the prediction's. The order on a lane is a sketch: tensor parallelism's collectives are
    spread evenly between equal parts of compute, and the engine's collectives follow each other, as the
    model of time adds them up.
    """
    blocks = [each for each in prediction.time.units if each[0].kind == "block"]
    if not blocks:
        return []
    unit, times = max(blocks, key=lambda each: each[0].count)
    around = prediction.workload.sequence_parallel
    pieces = _pieces(unit, times.forward, times.tp_forward, around)
    beside = [("gather", "parameters of the next block", times.gather)]
    forward = _phase(0.0, "forward", pieces, beside)
    end = max((span.start + span.seconds for span in forward), default=0.0)
    pieces = _pieces(unit, times.backward, times.tp_backward, around)
    beside = [
        ("gather", "parameters of the block before", times.gather_again),
        ("reduce", "gradients of the block after", times.reduce),
        ("all-reduce", "gradients of the block after, between copies", times.all_reduce),
    ]
    return forward + _phase(end * 1.04, "backward", pieces, beside)


def _pieces(unit: Unit, whole: float, tp: float, around: bool) -> list[tuple[str, float]]:
    """(kind, seconds) of compute and tensor parallelism's collectives in turn.

    Args:
        whole: seconds, with ``tp`` of them in collectives.
        around: whether a collective is before and after each part (sequence parallel), else only after.
    """
    if not tp:
        return [("compute", whole)]
    parts = max(len(unit.tp_inputs), len(unit.tp_outputs), 1)
    before = tp / parts / 2 if around else 0.0
    compute, after = (whole - tp) / parts, tp / parts - before
    one = [("tensor parallel", before), ("compute", compute), ("tensor parallel", after)]
    return one * parts


def _phase(
    start: float, phase: str, pieces: list[tuple[str, float]], beside: list[tuple[str, str, float]]
) -> list[Span]:
    """Compute from ``start`` on with the collectives ``beside`` it, in the arithmetic of ``Exposed.wait``."""
    compute = sum(seconds for _, seconds in pieces)
    together = sum(seconds for _, _, seconds in beside)
    slower = constant("overlap_slowdown").value * min(together, compute)
    spans, at = [], start
    for kind, seconds in [*pieces, ("slowdown", slower)]:
        lane = "tp" if kind == "tensor parallel" else "compute"
        what = "slower under collectives" if kind == "slowdown" else f"{kind} of the block"
        spans.append(Span(lane, at, seconds, kind, what, phase))
        at += seconds
    end, at = at, start
    for lane, what, seconds in beside:
        hidden = min(max(end - at, 0.0), seconds)
        spans.append(Span(lane, at, hidden, "hidden", what, phase))
        spans.append(Span(lane, at + hidden, seconds - hidden, "exposed", what, phase))
        at += seconds
    return [span for span in spans if span.seconds > 0]


# The charts as plotly's JSON. Colours of text and grids are the page's, for light and dark.

_GIB = 2**30
_TIMES = "\N{MULTIPLICATION SIGN}"
_MOST_POINTS = 1500
_COLOURS = {
    # memory
    "parameters": page.BLUE,
    "gradients": page.SKY,
    "optimizer": page.GREEN,
    "unsharded, buffers": page.AMBER,
    "activations": page.VIOLET,
    "logits, loss": page.PINK,
    "framework": page.GREY,
    # time
    "matmul": page.BLUE,
    "attention": page.SKY,
    "elementwise": page.TEAL,
    "recompute": page.GREY,
    "tensor parallel": page.AMBER,
    "exposed gather, reduce": page.RED,
    "exposed all-reduce": page.PINK,
    "slowdown": page.BROWN,
    "copies, launch": page.VIOLET,
    # timeline
    "compute": page.BLUE,
    "hidden": page.TEAL,
    "exposed": page.RED,
}
_BY_TP = (
    page.BLUE,
    page.AMBER,
    page.GREEN,
    page.PINK,
    page.VIOLET,
    page.TEAL,
    page.BROWN,
    page.SKY,
)


def pareto_chart(plan: MeshPlan) -> Figure:
    """Memory against tokens/s/GPU of every candidate, by ``tp``, with the front and the GPU's capacity."""
    front = plan.pareto()
    each = [*plan.layouts, *front, *plan.candidates[:_MOST_POINTS]]
    shown = list({id(p): p for p in each}.values())
    capacity = plan.cluster.gpu.capacity_gib
    traces = [
        _points([p for p in shown if p.layout.tp == tp], f"tp {tp}", _BY_TP[i % len(_BY_TP)])
        for i, tp in enumerate(sorted({p.layout.tp for p in shown}))
    ]
    beyond = [r.prediction for r in plan.refused if r.prediction is not None]
    close = [p for p in beyond if not shown or p.memory.needed < 1.5 * capacity * _GIB]
    if close:
        traces.append(_points(close, "does not fit", page.GREY, symbol="x"))
    if front:
        line = _points(front, "Pareto front", page.GREY)
        del line["hovertemplate"]
        shape = {"color": page.GREY, "width": 2, "shape": "hv"}
        traces.insert(0, line | {"mode": "lines", "line": shape, "hoverinfo": "skip"})
        traces.append(_points(front[-1:], "fastest", page.RED, symbol="star", size=16))
    most = max([capacity, *(p.memory.needed / _GIB for p in [*shown, *close])])
    layout = chart_layout(440, "GiB needed", "tokens/s/GPU")
    layout["xaxis"]["range"] = [0, 1.04 * most]
    layout["yaxis"]["rangemode"] = "tozero"
    _mark_capacity(layout, capacity, most)
    return as_figure(traces, layout)


def _batch(prediction: Prediction) -> str:
    return f"{prediction.micro_batch} {_TIMES} {prediction.accumulation}"


def _points(
    each: Sequence[Prediction], name: str, colour: str, symbol: str = "circle", size: int = 8
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [round(p.memory.needed / _GIB, 3) for p in each],
        "y": [round(p.tokens_per_second_per_gpu, 2) for p in each],
        "customdata": [[short(p), _batch(p), setting(p), f"{p.mfu:.1%}"] for p in each],
        "hovertemplate": "<b>%{customdata[0]}</b><br>micro-batch %{customdata[1]}<br>checkpointing "
        "%{customdata[2]}<br>%{x:.1f} GiB<br>%{y:,.0f} tokens/s/GPU, MFU %{customdata[3]}<extra></extra>",
        "marker": {"color": colour, "symbol": symbol, "size": size, "opacity": 0.85},
    }


def memory_chart(each: Sequence[Prediction]) -> Figure:
    """GiB by component, a bar a layout, with the capacity and upper bounds."""
    figure = _stacked(each, memory_groups, 1 / _GIB, "GiB", "%{x:.2f} GiB")
    beside = [(p.memory.upper + p.memory.needed - p.memory.reserved) / _GIB for p in each]
    bound = {
        "type": "scatter",
        "mode": "markers",
        "name": "upper bound",
        "x": [round(value, 3) for value in beside],
        "y": _labels(each),
        "marker": {"symbol": "line-ns", "size": 14, "line": {"width": 2, "color": page.RED}},
        "hovertemplate": "upper bound: %{x:.2f} GiB<extra>%{y}</extra>",
    }
    if each:
        capacity = each[0].cluster.gpu.capacity_gib
        _mark_capacity(figure["layout"], capacity, max([capacity, *beside]))
    return as_figure([*figure["data"], bound], figure["layout"])


def time_chart(each: Sequence[Prediction]) -> Figure:
    """By component, a bar a layout: seconds a step if all have the same batch, else microseconds a token."""
    if all(p.workload.global_batch for p in each):
        return _stacked(each, time_groups, 1.0, "seconds a step", "%{x:.3f} s")

    def per_token(p: Prediction) -> dict[str, float]:
        return {name: value / p.tokens_per_gpu for name, value in time_groups(p).items()}

    return _stacked(each, per_token, 1e6, "microseconds a token and GPU", "%{x:.3f} us")


def _stacked(
    each: Sequence[Prediction],
    groups: Callable[[Prediction], Mapping[str, float]],
    scale: float,
    unit: str,
    shown: str,
) -> Figure:
    parts, labels, traces = [groups(p) for p in each], _labels(each), []
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [round(part.get(name, 0.0) * scale, 6) for part in parts]
        if any(values):
            colour = {"color": _COLOURS.get(name, page.GREY)}
            hover = f"{name}: {shown}<extra>%{{y}}</extra>"
            traces.append(_bars(name, values, labels, colour, hover))
    layout = chart_layout(170 + 34 * len(each), unit, "")
    layout["barmode"] = "stack"
    layout["yaxis"] |= {"autorange": "reversed", "type": "category"}
    layout["meta"]["labels"] = labels
    return as_figure(traces, layout)


def _bars(
    name: str, x: list[float], y: list[str], marker: dict[str, Any], hover: str
) -> dict[str, Any]:
    bars = {"type": "bar", "orientation": "h", "name": name, "x": x, "y": y}
    return {**bars, "marker": marker, "hovertemplate": hover}


def _labels(each: Sequence[Prediction]) -> list[str]:
    """Short labels, all different."""
    labels: list[str] = []
    for p in each:
        label = f"{short(p)} <i>{setting(p).replace('selective ', 'sel. ')}, {p.micro_batch}</i>"
        while label in labels:
            label += " "
        labels.append(label)
    return labels


def timeline_chart(prediction: Prediction) -> Figure:
    """A block forward and backward: what runs beside its compute, and what is waited for."""
    spans = layer_spans(prediction)
    names = {
        "compute": "compute",
        "slowdown": "compute is slower",
        "tensor parallel": "tensor parallel",
        "hidden": "collective, hidden",
        "exposed": "collective, waited for",
    }
    traces: list[dict[str, Any]] = []
    line = {"width": 1, "color": "rgba(128,128,128,0.5)"}
    hover = "%{customdata[0]}: %{customdata[1]}<br>%{customdata[2]} ms"
    for kind, name in names.items():
        bars = [span for span in spans if span.kind == kind]
        if bars:
            seconds, lanes = [round(s.seconds * 1e3, 6) for s in bars], [s.lane for s in bars]
            marker = {"color": _COLOURS[kind], "line": line}
            trace = _bars(name, seconds, lanes, marker, f"{hover}<extra>{name}</extra>")
            trace["base"] = [round(s.start * 1e3, 6) for s in bars]
            trace["customdata"] = [[s.phase, s.what, f"{s.seconds * 1e3:.3f}"] for s in bars]
            traces.append(trace)
    used = [lane for lane in LANES if any(span.lane == lane for span in spans)]
    layout = chart_layout(170 + 40 * len(used), "milliseconds", "")
    layout["barmode"] = "overlay"
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    layout["yaxis"] |= {"categoryorder": "array", "categoryarray": used}
    for phase in ("forward", "backward"):
        start = min((s.start for s in spans if s.phase == phase), default=0.0)
        mark(layout, start * 1e3, phase, dash="solid", width=1, anchor="left")
    return as_figure(traces, layout)


def _mark_capacity(layout: dict[str, Any], capacity: float, most: float) -> None:
    """Marks the capacity in a chart that ends at ``most``, with its text on the side that has room."""
    anchor = "right" if capacity > most / 2 else "left"
    mark(layout, capacity, f"capacity {capacity:g} GiB", anchor=anchor)


_BARS, _TIMELINES, _ROWS = 10, 6, 40


def write_report(plan: MeshPlan, path: str | PathLike[str]) -> None:
    """Writes the page, with plotly's JavaScript in it: about 5 MB.

    Raises:
        PlanningError: plotly isn't installed.
        OSError: the file can't be written.
    """
    work, cluster, each = plan.workload, plan.cluster, _shown(plan)
    batch = f", global batch {work.global_batch:,}" if work.global_batch else ""
    setup = (
        f"{plan.model.numel / 1e9:,.2f} B parameters; {counted(cluster.nodes, 'node')} of "
        f"{cluster.gpus_per_node}, {cluster.nic:g} GB/s a GPU between them; sequences of "
        f"{work.seq_len:,}{batch}; {work.precision}, parameters at rest {work.param_dtype}, "
        f"reduced in {work.reduce_dtype}; {work.optimizer}{'; compiled' if work.compile else ''}"
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
        "sensitivity": _sensitivity(plan),
        "explanation": escape(explanation),
        "figures": page.embedded(figures),
    }
    text = page.filled("parallel3d.planner", "report_page.html", parts)
    Path(path).write_text(text, encoding="utf-8")


def _shown(plan: MeshPlan) -> Sequence[Prediction]:
    """The fastest of each layout; if nothing fits, those that need least memory first."""
    if plan.candidates:
        return plan.layouts
    tried = [r.prediction for r in plan.refused if r.prediction is not None]
    return sorted(tried, key=lambda p: p.memory.needed)


def _cards(each: Sequence[Prediction]) -> str:
    if not each:
        return '<p class="bad">No layout is legal.</p>'
    best, memory = each[0], each[0].memory
    cards = {
        f"replicate {_TIMES} shard {_TIMES} tp": short(best),
        "micro-batch, accumulation": f"{best.micro_batch}, {best.accumulation}",
        "checkpointing": setting(best),
        "tokens/s/GPU": f"{best.tokens_per_second_per_gpu:,.0f}",
        "MFU (by 6N)": f"{best.mfu:.1%} ({best.mfu_6n:.1%})",
        "step": f"{best.step_seconds:,.3f} s",
        "GiB needed": f"{memory.needed / _GIB:.1f} of {memory.capacity / _GIB:.1f}",
    }
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
    each = [(f" {_TIMES} ".join(map(str, r.layout.sizes)), r.reason) for r in plan.refused]
    every = f"<summary>All {len(each)}</summary>{table(('layout', 'why'), each, 2)}"
    numbers = table(("why (of the nearest to fit)", "how many", "layouts"), kinds, 1)
    return f"{numbers}<details>{every}</details>"


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
