"""The tables and the picture of docs/planner.md, from what planner_accuracy.py has written with ``--json``.

python benchmarks/planner_page.py ACCURACY.json RUNS.csv PREDICTIONS.csv
python benchmarks/planner_page.py LONG.json          # of planner_accuracy.py --long: that table alone
"""

from __future__ import annotations

import csv
import json
import sys
from math import log10
from pathlib import Path
from typing import Any

from planner_accuracy import number, percent
from planner_fit import source_of
from svg import Drawing
from tables import replace_between, table

DOCS = Path(__file__).parents[1] / "docs"
COLORS = (  # Okabe and Ito's, which people who are colour-blind tell apart
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#f0e442"),
    *("#cc79a7", "#56b4e9", "#222222", "#999999"),
)
SIZE, LEFT, TOP = 440, 76, 26


def headline_table(result: dict[str, Any]) -> str:
    """What holds for runs that nothing was fitted to, and for all of them."""
    left = result["left_out"]
    every, newer, inside = left["errors"]["all"], left["newer"], result["errors"]["all"]
    rows = []
    for what, key, part in (
        ("tokens/s, median error", "speed", "median"),
        ("tokens/s, 90th percentile", "speed", "p90"),
        ("tokens/s in their interval", "speed", "covered"),
        ("memory, median error", "memory", "median"),
        ("verdicts on fits", "fits", "right"),
    ):
        values = every[key][f"{part}_by_source"], every[key][part], newer[key][f"{part}_by_source"]
        rows.append([what, *map(percent, (*values, inside[key][part]))])
    ranks = f"{left['median_sweep']:.2f}", f"{result['median_sweep']:.2f}"
    rows.append(["Spearman, median sweep", "", ranks[0], "", ranks[1]])
    after = left["calibrated"]
    rows.append(
        [
            "after `calibrate` on one run, the others: median error",
            "",
            percent(after["median"]),
            "",
            "",
        ]
    )
    head = ["", "a source left out, sources weigh the same", "the same, rows weigh the same"]
    return table([*head, "sources of 2025 and 2026, left out", "in-sample, rows"], rows)


def errors_table(result: dict[str, Any]) -> str:
    """A row for each source, left out."""
    rows = []
    for name, r in result["left_out"]["errors"].items():
        inside = result["errors"][name]["speed"]
        rows.append(
            [
                name,
                str(r["speed"]["rows"] or ""),
                percent(r["speed"]["median"]),
                percent(r["speed"]["p90"]),
                percent(r["speed"]["signed"]),
                percent(r["speed"]["covered"]),
                percent(inside["median"]),
                str(r["memory"]["rows"] or ""),
                percent(r["memory"]["median"]),
                f"{percent(r['fits']['right'])} of {r['fits']['rows']}",
            ]
        )
    head = ["source, left out", "speeds", "median", "90th percentile", "signed median"]
    head += [
        "in interval",
        "in-sample median",
        "memory",
        "median",
        "fits right",
    ]
    return table(head, rows)


def sweeps_table(result: dict[str, Any]) -> str:
    """A row for each sweep, left out."""
    sweeps = result["left_out"]["sweeps"]
    rows = [[name, str(count), f"{rank:.2f}"] for name, (count, rank) in sweeps.items()]
    return table(["sweep", "rows", "Spearman"], rows)


def constants_table(result: dict[str, Any]) -> str:
    """What each fitted constant is, and was without each source."""
    without = result["left_out"]["constants"]
    names = list(next(iter(without.values())))
    rows = [
        [name, *(f"{end(each[name] for each in without.values()):.3g}" for end in (min, max))]
        for name in names
    ]
    return table(["constant", "least, one source left out", "most"], rows)


def long_table(result: dict[str, Any]) -> str:
    """A row for each long-context run: published -> predicted."""
    rows = []
    for row in result["long"]:
        cells = [f"[{row['run']}]({row['url']})", row["layout"], row["kind"]]
        for name, style in (("tokens_per_s_per_gpu", ",.0f"), ("memory_gib", ".1f")):
            published, predicted, error = row[name]
            said = "" if published is None else f"{published:{style}} → {predicted:{style}}"
            cells += [said, "" if error is None else f"{100 * error:+.1f} %"]
        wanted, found = ("yes" if fits == "1" else "no" for fits in row["fits"])
        rows.append([*cells, wanted if wanted == found else f"{wanted}, predicted {found}"])
    head = ["run", "replicate x shard x cp x tp", "kind", "tokens/s/GPU", "", "GiB", "", "fits"]
    return table(head, rows)


def picture(runs: list[dict[str, str]], found: dict[str, dict[str, str]], path: Path) -> None:
    """Predicted against published tokens/s/GPU, both logarithmic; lines at +-10 % and +-25 %."""
    drawing = Drawing(SIZE + LEFT + 300, SIZE + TOP + 50)
    low, high = log10(200), log10(250_000)

    def at(value: float) -> float:
        return (log10(value) - low) / (high - low) * SIZE

    for factor, color in (
        (1.0, "#888888"),
        (1.1, "#bbbbbb"),
        (1 / 1.1, "#bbbbbb"),
        (1.25, "#bbbbbb"),
        (0.8, "#bbbbbb"),
    ):
        ends = [(LEFT + at(v), TOP + SIZE - at(v * factor)) for v in (300, 160_000)]
        drawing.line(
            ends, color=color, dash={1.0: "", 1.1: "6 3", 1 / 1.1: "6 3"}.get(factor, "2 3")
        )
    for tick in (1_000, 10_000, 100_000):
        across, down = LEFT + at(tick), TOP + SIZE - at(tick)
        drawing.line([(across, TOP), (across, TOP + SIZE)], color="#e0e0e0")
        drawing.line([(LEFT, down), (LEFT + SIZE, down)], color="#e0e0e0")
        drawing.text(LEFT + at(tick), TOP + SIZE + 18, f"{tick:,}", anchor="middle")
        drawing.text(LEFT - 6, TOP + SIZE - at(tick) + 4, f"{tick:,}", anchor="end")
    drawing.text(LEFT + SIZE / 2, TOP + SIZE + 38, "published tokens/s/GPU", anchor="middle")
    drawing.text(LEFT, TOP - 10, "predicted tokens/s/GPU; dashed 10 %, dotted 25 % off")
    sources = sorted({source_of(r) for r in runs if number(r, "tokens_per_s_per_gpu")})
    for i, source in enumerate(sources):
        color = COLORS[i % len(COLORS)]
        drawing.rect(LEFT + SIZE + 20, TOP + 18 * i, 9, 9, fill=color)
        drawing.text(
            LEFT + SIZE + 36, TOP + 18 * i + 9, source if len(source) <= 38 else source[:37] + "…"
        )
        for row in runs:
            published = number(row, "tokens_per_s_per_gpu")
            if published and source_of(row) == source:
                predicted = number(found[row["id"]], "tokens_per_s_per_gpu") or 1.0
                x, y = LEFT + at(published), TOP + SIZE - at(predicted)
                note = f"{row['id']} {row['model']}: {predicted:,.0f}, published {published:,.0f}"
                drawing.rect(x - 2, y - 2, 4, 4, fill=color, note=note)
    drawing.write(path)


def write_long(accuracy: str) -> None:
    """Rewrites the table of long-context runs."""
    page = DOCS / "planner.md"
    rows = long_table(json.loads(Path(accuracy).read_text()))
    page.write_text(replace_between(page.read_text(), "long", rows))


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
    if "left_out" in result:  # planner_accuracy.py --models fits two minutes for it
        text = replace_between(text, "headline", headline_table(result))
        text = replace_between(text, "errors", errors_table(result))
        text = replace_between(text, "sweeps", sweeps_table(result))
        text = replace_between(text, "constants", constants_table(result))
        page.write_text(text)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write_long(sys.argv[1])
    elif len(sys.argv) == 4:
        main(*sys.argv[1:])
    else:
        sys.exit(__doc__)
