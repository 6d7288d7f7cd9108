"""The report's charts as plotly's JSON. Colours of text and grids are the page's, for light and dark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from parallel3d.planner.groups import memory_groups, setting, short, time_groups
from parallel3d.planner.mesh_plan import MeshPlan
from parallel3d.planner.prediction import Prediction
from parallel3d.planner.report_timeline import LANES, layer_spans

__all__ = ["memory_chart", "pareto_chart", "time_chart", "timeline_chart"]

_GIB = 2**30
_MOST_POINTS = 1500
_COLOURS = {
    # memory
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer": GREEN,
    "unsharded, buffers": AMBER,
    "activations": VIOLET,
    "logits, loss": PINK,
    "framework": GREY,
    # time
    "matmul": BLUE,
    "attention": SKY,
    "elementwise": TEAL,
    "recompute": GREY,
    "tensor parallel": AMBER,
    "exposed gather, reduce": RED,
    "exposed all-reduce": PINK,
    "slowdown": BROWN,
    "copies, launch": VIOLET,
    # timeline
    "compute": BLUE,
    "hidden": TEAL,
    "exposed": RED,
}
_BY_TP = (BLUE, AMBER, GREEN, PINK, VIOLET, TEAL, BROWN, SKY)


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
        traces.append(_points(close, "does not fit", GREY, symbol="x"))
    if front:
        line = _points(front, "Pareto front", GREY)
        traces.insert(
            0,
            {
                **line,
                "mode": "lines",
                "line": {"color": GREY, "width": 2, "shape": "hv"},
                "hoverinfo": "skip",
            },
        )
        traces[0].pop("hovertemplate")
        traces.append(_points(front[-1:], "fastest", RED, symbol="star", size=16))
    most = max([capacity, *(p.memory.needed / _GIB for p in [*shown, *close])])
    layout = chart_layout(440, "GiB needed", "tokens/s/GPU")
    layout["xaxis"]["range"] = [0, 1.04 * most]
    layout["yaxis"]["rangemode"] = "tozero"
    _mark_capacity(layout, capacity, most)
    return as_figure(traces, layout)


def _points(
    each: Sequence[Prediction], name: str, colour: str, symbol: str = "circle", size: int = 8
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [round(p.memory.needed / _GIB, 3) for p in each],
        "y": [round(p.tokens_per_second_per_gpu, 2) for p in each],
        "customdata": [
            [
                short(p),
                f"{p.micro_batch} \N{MULTIPLICATION SIGN} {p.accumulation}",
                setting(p),
                f"{p.mfu:.1%}",
            ]
            for p in each
        ],
        "hovertemplate": "<b>%{customdata[0]}</b><br>micro-batch %{customdata[1]}<br>checkpointing "
        "%{customdata[2]}<br>%{x:.1f} GiB<br>%{y:,.0f} tokens/s/GPU, MFU %{customdata[3]}<extra></extra>",
        "marker": {"color": colour, "symbol": symbol, "size": size, "opacity": 0.85},
    }


def memory_chart(each: Sequence[Prediction]) -> Figure:
    """GiB by component, a bar a layout, with the capacity and upper bounds."""
    figure = _stacked(each, memory_groups, 1 / _GIB, "GiB", "%{x:.2f} GiB")
    beside = [(p.memory.upper + p.memory.needed - p.memory.reserved) / _GIB for p in each]
    figure["data"].append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "upper bound",
            "x": [round(value, 3) for value in beside],
            "y": _labels(each),
            "marker": {"symbol": "line-ns", "size": 14, "line": {"width": 2, "color": RED}},
            "hovertemplate": "upper bound: %{x:.2f} GiB<extra>%{y}</extra>",
        }
    )
    if each:
        capacity = each[0].cluster.gpu.capacity_gib
        _mark_capacity(figure["layout"], capacity, max([capacity, *beside]))
    return as_figure(figure["data"], figure["layout"])


def time_chart(each: Sequence[Prediction]) -> Figure:
    """By component, a bar a layout: seconds a step if all have the same batch, else microseconds a token."""
    if all(p.workload.global_batch for p in each):
        return _stacked(each, time_groups, 1.0, "seconds a step", "%{x:.3f} s")

    def per_token(p: Prediction) -> dict[str, float]:
        tokens = p.micro_batch * p.accumulation * p.workload.seq_len / p.layout.tp
        return {name: value / tokens for name, value in time_groups(p).items()}

    return _stacked(each, per_token, 1e6, "microseconds a token and GPU", "%{x:.3f} us")


def _stacked(
    each: Sequence[Prediction],
    groups: Callable[[Prediction], Mapping[str, float]],
    scale: float,
    unit: str,
    shown: str,
) -> Figure:
    parts = [groups(p) for p in each]
    traces = []
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [round(part.get(name, 0.0) * scale, 6) for part in parts]
        if any(values):
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": name,
                    "x": values,
                    "y": _labels(each),
                    "marker": {"color": _COLOURS.get(name, GREY)},
                    "hovertemplate": f"{name}: {shown}<extra>%{{y}}</extra>",
                }
            )
    layout = chart_layout(170 + 34 * len(each), unit, "")
    layout["barmode"] = "stack"
    layout["yaxis"] |= {"autorange": "reversed", "type": "category"}
    layout["meta"]["labels"] = _labels(each)
    return as_figure(traces, layout)


def _labels(each: Sequence[Prediction]) -> list[str]:
    """Short, and each once."""
    found: dict[str, None] = {}
    for p in each:
        label = f"{short(p)} <i>{setting(p).replace('selective ', 'sel. ')}, {p.micro_batch}</i>"
        while label in found:
            label += " "
        found[label] = None
    return list(found)


def timeline_chart(prediction: Prediction) -> Figure:
    """A block forward and backward: what runs beside its compute, and what is waited for."""
    spans = layer_spans(prediction)
    names = {
        "hidden": "collective, hidden",
        "exposed": "collective, waited for",
        "slowdown": "compute is slower",
    }
    traces: list[dict[str, Any]] = []
    for kind in ("compute", "slowdown", "tensor parallel", "hidden", "exposed"):
        mine = [span for span in spans if span.kind == kind]
        if mine:
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": names.get(kind, kind),
                    "base": [round(s.start * 1e3, 6) for s in mine],
                    "x": [round(s.seconds * 1e3, 6) for s in mine],
                    "y": [s.lane for s in mine],
                    "customdata": [[s.phase, s.what, f"{s.seconds * 1e3:.3f}"] for s in mine],
                    "marker": {
                        "color": _COLOURS[kind],
                        "line": {"width": 1, "color": "rgba(128,128,128,0.5)"},
                    },
                    "hovertemplate": "%{customdata[0]}: %{customdata[1]}<br>%{customdata[2]} ms"
                    f"<extra>{names.get(kind, kind)}</extra>",
                }
            )
    used = [lane for lane in LANES if any(span.lane == lane for span in spans)]
    layout = chart_layout(170 + 40 * len(used), "milliseconds", "")
    layout["barmode"] = "overlay"
    layout["yaxis"] |= {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": used,
        "autorange": "reversed",
    }
    layout["annotations"] = []
    for phase in ("forward", "backward"):
        start = min((s.start for s in spans if s.phase == phase), default=0.0)
        mark(layout, start * 1e3, phase, dash="solid", width=1, anchor="left")
    return as_figure(traces, layout)


def _mark_capacity(layout: dict[str, Any], capacity: float, most: float) -> None:
    """With its words on the side that has room, in a chart that ends at ``most``."""
    anchor = "right" if capacity > most / 2 else "left"
    mark(layout, capacity, f"capacity {capacity:g} GiB", anchor=anchor)
