"""What pages with charts are made of: one HTML file that needs no network. Charts need plotly."""

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
    """The ``page`` of ``package`` with ``parts`` in place of ``@@name@@``; all have plotly, a style, charts.

    Raises:
        PlanningError: plotly isn't installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise PlanningError(
            "the report needs plotly, which isn't installed: pip install 'parallel3d[report]'"
        ) from None
    ours = files("parallel3d._util")
    given = {
        "style": ours.joinpath("page.css").read_text(encoding="utf-8"),
        "charts": ours.joinpath("page.js").read_text(encoding="utf-8"),
        "plotly": get_plotlyjs(),
        **parts,
    }
    text = files(package).joinpath(page).read_text(encoding="utf-8")
    return re.sub(r"@@(\w+)@@", lambda found: given[found[1]], text)


def embedded(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends one."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def table(
    columns: Iterable[str], rows: Iterable[Iterable[str]], words: int, *, wrap: bool = True
) -> str:
    """The first ``words`` columns are to the left; without ``wrap`` a row is a line. All is escaped."""

    def cells(tag: str, row: Iterable[str]) -> str:
        return "".join(
            f"<{tag}>{escape(cell)}</{tag}>"
            if i < words
            else f'<{tag} class="n">{escape(cell)}</{tag}>'
            for i, cell in enumerate(row)
        )

    kind = "wide" if wrap else "wide lines"
    head, body = cells("th", columns), "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="{kind}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def chart_layout(height: int, x: str, y: str) -> dict[str, Any]:
    """``meta`` is for the page's script: entries of the legend, labels that may be shortened."""
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
    x: float,
    text: str,
    dash: str = "dash",
    width: int = 2,
    anchor: str = "right",
    *,
    top: bool = False,
) -> None:
    """A vertical line with a word at its foot, or at its ``top``."""
    line = {"dash": dash, "width": width}
    layout["shapes"].append(
        {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}
    )
    layout["annotations"].append(
        {"x": x, "y": int(top), "yref": "paper", "text": text, "showarrow": False}
        | {"xanchor": anchor, "yanchor": "top" if top else "bottom"}
        | {"xshift": -4 if anchor == "right" else 4}
    )
