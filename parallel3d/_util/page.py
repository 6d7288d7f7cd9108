"""HTML pages with charts that need no network: the parts that reports share. Scripts draw them as SVG."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

ORANGE, SKY, GREEN, YELLOW = "orange", "sky", "green", "yellow"
BLUE, VERMILION, PURPLE, GREY, INK = "blue", "vermilion", "purple", "grey", "ink"
"""Colours of ``page.css``. The first seven are Okabe and Ito's; ink is the text's, for marks."""

Fill = tuple[str, bool]
"""Colour, and whether it is hatched."""
Figure = dict[str, Any]


def filled(package: str, page: str, parts: Mapping[str, str]) -> str:
    """Returns ``page``, a template of ``package``, with each ``@@name@@`` replaced by ``parts[name]``.

    ``@@style@@`` and ``@@charts@@`` are replaced without being given.
    """
    shared = files("parallel3d._util")
    all_parts = {
        "style": shared.joinpath("page.css").read_text(encoding="utf-8"),
        "charts": shared.joinpath("page.js").read_text(encoding="utf-8"),
        **parts,
    }
    text = files(package).joinpath(page).read_text(encoding="utf-8")
    return re.sub(r"@@(\w+)@@", lambda match: all_parts[match[1]], text)


def embedded(data: Any) -> str:
    """Returns ``data`` as JSON, escaped for a script element."""
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


def chart(
    kind: str,
    series: list[dict[str, Any]],
    x: tuple[str, float],
    y: tuple[str, float] = ("", 0.0),
    *,
    rows: Sequence[Sequence[str]] = (),
    row_height: int = 34,
    marks: Sequence[dict[str, Any]] = (),
    **more: Any,
) -> Figure:
    """Returns the description of a chart, which ``page.js`` draws.

    Args:
        kind: "items" (points and bars) or "area" (stacked over ``at``).
        series: made by ``bars`` or ``points``; for an area each has name, colour, hatched and ``y``.
        x, y: titles of the axes, and where they end; they begin at 0.
        rows: labels of rows, in place of the y axis; narrow pages show only the first part of each.
        row_height: pixels.
        marks: made by ``mark``.
    """
    return {
        "kind": kind,
        "series": series,
        "x": {"title": x[0], "max": x[1] or 1.0},
        "y": {"title": y[0], "max": y[1] or 1.0},
        "rows": [list(row) for row in rows] or None,
        "rowHeight": row_height,
        "height": 380,
        "marks": list(marks),
        **more,
    }


def bars(name: str, fill: Fill, each: Iterable[tuple[int, float, float, str]]) -> dict[str, Any]:
    """Returns a series of bars for ``chart``: ``each`` is (row, from, to, text under the pointer)."""
    row, begin, end, notes = ([*column] for column in zip(*each, strict=True))
    ends = {"from": [round(at, 5) for at in begin], "to": [round(at, 5) for at in end]}
    return {"name": name, "colour": fill[0], "hatched": fill[1], "row": row, **ends, "notes": notes}


def mark(at: float, text: str, *, axis: str = "x", dashed: bool = True) -> dict[str, Any]:
    """Returns a line across a chart at the value ``at`` of ``axis``, labelled ``text`` at its end."""
    return {"at": at, "text": text, "axis": axis, "dashed": dashed}
