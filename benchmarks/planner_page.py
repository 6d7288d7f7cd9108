"""The tables and the picture of docs/planner.md, from what planner_accuracy.py has written with ``--json``.

python benchmarks/planner_page.py ACCURACY.json RUNS.csv PREDICTIONS.csv
"""

from __future__ import annotations

import csv
import json
import sys
from math import log10
from pathlib import Path
from typing import Any

from planner_accuracy import number, percent, source_of
from svg import Drawing
from tables import replace_between, table

DOCS = Path(__file__).parents[1] / "docs"
COLORS = (
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#17becf",
    "#bcbd22",
)
SIZE, LEFT, TOP = 420, 60, 20


def errors_table(result: dict[str, Any]) -> str:
    """A row for each source."""
    rows = [
        [
            name,
            str(r["speed"]["rows"] or ""),
            percent(r["speed"]["median"]),
            percent(r["speed"]["p90"]),
            percent(r["speed"]["signed"]),
            str(r["memory"]["rows"] or ""),
            percent(r["memory"]["median"]),
            f"{percent(r['fits']['right'])} of {r['fits']['rows']}",
        ]
        for name, r in result["errors"].items()
    ]
    head = [
        "source",
        "speeds",
        "median",
        "90th percentile",
        "signed median",
        "memory",
        "median",
        "fits right",
    ]
    return table(head, rows)


def sweeps_table(result: dict[str, Any]) -> str:
    """A row for each sweep."""
    rows = [[name, str(count), f"{rank:.2f}"] for name, (count, rank) in result["sweeps"].items()]
    return table(["sweep", "rows", "Spearman"], rows)


def left_out_table(result: dict[str, Any]) -> str:
    """A row for each source that was left out."""
    rows = [
        [
            name,
            str(r["rows"]),
            percent(r["median"]),
            percent(r["p90"]),
            ", ".join(f"{k} {v:g}" for k, v in r["constants"].items()),
        ]
        for name, r in result["left_out"].items()
    ]
    return table(["left out", "rows", "median", "90th percentile", "fitted to the others"], rows)


def picture(runs: list[dict[str, str]], found: dict[str, dict[str, str]], path: Path) -> None:
    """Predicted against published tokens/s/GPU, both logarithmic; lines at +-10 % and +-25 %."""
    drawing = Drawing(SIZE + LEFT + 300, SIZE + TOP + 50)
    low, high = log10(300), log10(200_000)

    def at(value: float) -> float:
        return (log10(value) - low) / (high - low) * SIZE

    for factor, color in (
        (1.0, "#888888"),
        (1.1, "#bbbbbb"),
        (1 / 1.1, "#bbbbbb"),
        (1.25, "#e0e0e0"),
        (0.8, "#e0e0e0"),
    ):
        ends = [(LEFT + at(v), TOP + SIZE - at(v * factor)) for v in (400, 150_000)]
        drawing.line(ends, color=color, dash="" if factor == 1 else "4 3")
    for tick in (1_000, 10_000, 100_000):
        drawing.text(LEFT + at(tick), TOP + SIZE + 18, f"{tick:,}", anchor="middle")
        drawing.text(LEFT - 6, TOP + SIZE - at(tick) + 4, f"{tick:,}", anchor="end")
    drawing.text(LEFT + SIZE / 2, TOP + SIZE + 38, "published tokens/s/GPU", anchor="middle")
    drawing.text(LEFT, TOP - 6, "predicted")
    sources = sorted({source_of(r) for r in runs if number(r, "tokens_per_s_per_gpu")})
    for i, source in enumerate(sources):
        color = COLORS[i % len(COLORS)]
        drawing.rect(LEFT + SIZE + 20, TOP + 18 * i, 9, 9, fill=color)
        drawing.text(LEFT + SIZE + 36, TOP + 18 * i + 9, source[:44])
        for row in runs:
            published = number(row, "tokens_per_s_per_gpu")
            if published and source_of(row) == source:
                predicted = number(found[row["id"]], "tokens_per_s_per_gpu") or 1.0
                x, y = LEFT + at(published), TOP + SIZE - at(predicted)
                note = f"{row['id']} {row['model']}: {predicted:,.0f}, published {published:,.0f}"
                drawing.rect(x - 2, y - 2, 4, 4, fill=color, note=note)
    drawing.write(path)


def main(accuracy: str, runs_path: str, predictions: str) -> None:
    """Rewrites both."""
    result = json.loads(Path(accuracy).read_text())
    with Path(runs_path).open(newline="", encoding="utf-8") as file:
        runs = list(csv.DictReader(file))
    with Path(predictions).open(newline="", encoding="utf-8") as file:
        found = {row["id"]: row for row in csv.DictReader(file)}
    picture(runs, found, DOCS / "planner_accuracy.svg")
    page = DOCS / "planner.md"
    text = page.read_text()
    text = replace_between(text, "errors", errors_table(result))
    text = replace_between(text, "sweeps", sweeps_table(result))
    if "left_out" in result:  # planner_accuracy.py --models fits a minute for it
        text = replace_between(text, "left out", left_out_table(result))
    page.write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
