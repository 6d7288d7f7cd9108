"""HTML pages with charts that need no network: the parts that reports share. Charts need plotly."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any

from parallel3d.errors import PlanningError

BLUE, SKY, TEAL, GREEN, AMBER = "#4269d0", "#8ab0f0", "#5bb8a4", "#3ca951", "#efb118"
RED, PINK, VIOLET, BROWN, GREY = "#f0614d", "#ff8ab7", "#a463f2", "#9c6b4e", "#9498a0"

Figure = dict[str, Any]


def filled(package: str, page: str, parts: Mapping[str, str]) -> str:
    """Returns the file ``page`` of ``package`` with each ``@@name@@`` replaced by the part of that name.

    Every page has the parts plotly, style and charts.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise PlanningError(
            "the report needs plotly, which isn't installed: pip install 'parallel3d[report]'"
        ) from None
    shared = files("parallel3d._util")
    all_parts = {
        "style": shared.joinpath("page.css").read_text(encoding="utf-8"),
        "charts": shared.joinpath("page.js").read_text(encoding="utf-8"),
        "plotly": get_plotlyjs(),
        **parts,
    }
    text = files(package).joinpath(page).read_text(encoding="utf-8")
    return re.sub(r"@@(\w+)@@", lambda match: all_parts[match[1]], text)


def embedded(data: Any) -> str:
    """Returns JSON that can be the content of a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def table(
    columns: Iterable[str], rows: Iterable[Iterable[str]], words: int, *, wrap: bool = True
) -> str:
    """Returns an HTML table with escaped cells.

    Args:
        words: number of columns with text, aligned left; the others are numbers.
        wrap: whether cells may have several lines.
    """

    numeric = ' class="n"'

    def cells(tag: str, row: Iterable[str]) -> str:
        return "".join(
            f"<{tag}{'' if i < words else numeric}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    kind = "wide" if wrap else "wide lines"
    head, body = cells("th", columns), "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="{kind}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def chart_layout(height: int, x: str, y: str) -> dict[str, Any]:
    """Returns plotly's layout of a chart with these titles of its axes. The page's script reads ``meta``."""
    return {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 28, "b": 8},
        "xaxis": {"title": {"text": x}, "automargin": True, "fixedrange": False},
        "yaxis": {"title": {"text": y}, "automargin": True},
        "legend": {
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.04,
            "x": 0,
            "traceorder": "normal",
        },
        "hoverlabel": {"align": "left"},
        "bargap": 0.3,
        "shapes": [],
        "annotations": [],
        "meta": {},
    }


def as_figure(traces: list[dict[str, Any]], layout: dict[str, Any]) -> Figure:
    layout["meta"]["entries"] = len(traces)
    return {"data": traces, "layout": layout}


def mark(
    layout: dict[str, Any],
    at: float,
    text: str,
    dash: str = "dash",
    width: int = 2,
    anchor: str = "right",
    *,
    top: bool = False,
    axis: str = "x",
) -> None:
    """Draws a line at ``at`` on ``axis`` across the chart.

    The text is at the foot of a vertical line, or at its ``top``; of a horizontal one at its left end.
    """
    across = "y" if axis == "x" else "x"
    shape = {"type": "line", "line": {"dash": dash, "width": width}}
    ends = {f"{axis}0": at, f"{axis}1": at, f"{across}0": 0, f"{across}1": 1}
    layout["shapes"].append({**shape, **ends, f"{across}ref": "paper"})
    if axis == "y":
        anchor, top = "left", True
    note = {axis: at, across: int(top and axis == "x"), f"{across}ref": "paper", "text": text}
    place = {"xanchor": anchor, "yanchor": "top" if top else "bottom"}
    shift = {"xshift": -4 if anchor == "right" else 4}
    layout["annotations"].append({**note, "showarrow": False, **place, **shift})
