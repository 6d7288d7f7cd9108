"""How far the planner's predictions are from published runs.

    python benchmarks/planner_accuracy.py RUNS.csv PREDICTIONS.csv [--models MODELS.csv] [--json PATH]
    python benchmarks/planner_accuracy.py LONG.csv PREDICTIONS.csv --long [--json PATH]

Scores a file that ``parallel3d predict --runs`` has written: error of tokens/s/GPU and of memory (median,
90th percentile of the absolute relative error), fits or not, and Spearman's rank correlation in each sweep
(rows of one source and model, at least 8 with a speed, the fastest 1.25 times as fast as the slowest).
With ``--models`` also leave-one-source-out: the constants that have no published value (``FREE``) are fitted
to all other sources, and score on the one that was left out. With ``--long`` each row beside its prediction:
the long-context runs, which are too few and too different for medians to say much.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import print_table

from parallel3d.planner import constants, kernels
from parallel3d.planner.runs import Models, predict_run, read_models

FREE = {
    "gemm_sustained": (0.80, 0.84, 0.88, 0.92, 0.96, 1.0),
    "attention_flash1": (0.15, 0.20, 0.25, 0.30),
    "attention_triton": (0.27, 0.33, 0.40),
    "naive_forward": (19.0, 29.0, 39.0),
    "naive_backward": (18.0, 28.0, 38.0),
}
Row = Mapping[str, str]


def source_of(row: Row) -> str:
    """Short: the repository or page, without commit and file."""
    name = row["source"].partition("@")[0].partition(":_posts")[0]
    by_gpu = "llm-foundry" in name or "NeMo" in name
    return f"{name} {row['gpu']}" if by_gpu else name


def quantile(values: Sequence[float], part: float) -> float:
    """Of the sorted values the one at ``part``."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of ranks; ties share theirs."""
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [(order.index(v) + len(order) - 1 - order[::-1].index(v)) / 2 for v in values]


def number(row: Row, name: str) -> float | None:
    """A cell, None if it is blank."""
    text = (row.get(name) or "").strip()
    return float(text) if text else None


def errors(runs: Sequence[Row], found: Mapping[str, Row], name: str) -> list[float]:
    """Relative errors of ``name`` where it was published: predicted / published - 1."""
    result = []
    for row in runs:
        published = number(row, name)
        if published is not None:
            predicted = number(found[row["id"]], name)
            assert predicted is not None, f"{row['id']} has no {name}"
            result.append(predicted / published - 1)
    return result


def summary(runs: Sequence[Row], found: Mapping[str, Row]) -> dict[str, Any]:
    """Of some rows."""
    speed = errors(runs, found, "tokens_per_s_per_gpu")
    memory = errors(runs, found, "memory_gib")
    right = [found[row["id"]]["fits"] == row["fits"] for row in runs if row["fits"]]
    result: dict[str, Any] = {"rows": len(runs)}
    for name, values in (("speed", speed), ("memory", memory)):
        sizes = [abs(v) for v in values]
        result[name] = {
            "rows": len(values),
            "median": statistics.median(sizes) if sizes else None,
            "p90": quantile(sizes, 0.9) if sizes else None,
            "signed": statistics.median(values) if values else None,
        }
    result["fits"] = {"rows": len(right), "right": sum(right) / len(right) if right else None}
    return result


def sweeps(runs: Sequence[Row], found: Mapping[str, Row]) -> dict[str, tuple[int, float]]:
    """Source and model -> (rows, Spearman)."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in runs:
        if number(row, "tokens_per_s_per_gpu"):
            groups.setdefault((row["source"], row["model"]), []).append(row)
    result = {}
    for (source, model), rows in groups.items():
        published = [number(r, "tokens_per_s_per_gpu") or 0.0 for r in rows]
        if len(rows) < 8 or max(published) < 1.25 * min(published):
            continue
        predicted = [number(found[r["id"]], "tokens_per_s_per_gpu") or 0.0 for r in rows]
        name = f"{source.partition('@')[0]} {source[-60:]} {model}"
        result[name] = len(rows), spearman(published, predicted)
    return result


def left_out(runs: Sequence[Row], models: Models) -> dict[str, dict[str, Any]]:
    """Source -> (the constants fitted without it, its median and 90th percentile error)."""
    sources = sorted({source_of(r) for r in runs if number(r, "tokens_per_s_per_gpu")})
    result = {}
    kept = dict(constants.CONSTANTS)
    for source in sources:
        others = [r for r in runs if source_of(r) != source]
        fitted = fit(others, models)
        mine = [abs(e) for e in speed_errors([r for r in runs if source_of(r) == source], models)]
        result[source] = {
            "constants": fitted,
            "rows": len(mine),
            "median": statistics.median(mine),
            "p90": quantile(mine, 0.9),
        }
        constants.CONSTANTS.update(kept)
        forget()
    return result


def fit(runs: Sequence[Row], models: Models) -> dict[str, float]:
    """Coordinate search over ``FREE``: the least mean of the sources' median errors; leaves them set."""
    groups: dict[str, list[Row]] = {}
    for row in runs:
        groups.setdefault(source_of(row), []).append(row)

    def loss() -> float:
        forget()
        each = [speed_errors(rows, models) for rows in groups.values()]
        return statistics.mean(statistics.median(map(abs, e)) for e in each if e)

    best = loss()
    for _ in range(2):
        for name, grid in FREE.items():
            kept = constants.CONSTANTS[name]
            for value in grid:
                constants.CONSTANTS[name] = replace(constants.CONSTANTS[name], value=value)
                found = loss()
                if found < best - 1e-9:
                    best, kept = found, constants.CONSTANTS[name]
            constants.CONSTANTS[name] = kept
    forget()
    return {name: constants.CONSTANTS[name].value for name in FREE}


def forget() -> None:
    """What was computed with other constants."""
    kernels.kernels_of.cache_clear()
    kernels.gemm_time.cache_clear()


def speed_errors(runs: Sequence[Row], models: Models) -> list[float]:
    """Predicts anew."""
    result = []
    for row in runs:
        published = number(row, "tokens_per_s_per_gpu")
        if published:
            predicted = predict_run(row, models).tokens_per_second_per_gpu
            result.append(predicted / published - 1)
    return result


def each_run(runs: Sequence[Row], found: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Of every row what was published and predicted, and the relative error; None: nothing was printed."""
    result = []
    for row in runs:
        mine = found[row["id"]]
        each: dict[str, Any] = {
            "id": row["id"],
            "url": row["url"],
            "run": f"{row['model']}, {int(row['seq_len']):,} tokens, {row['gpu_count']} x {row['gpu']}",
            "layout": " x ".join(row[axis] or "1" for axis in ("replicate", "shard", "cp", "tp")),
            "kind": row["cp_attention"] if row["cp"] != "1" else "",
            "fits": [row["fits"], mine["fits"]],
        }
        for name in ("tokens_per_s_per_gpu", "memory_gib"):
            published, predicted = number(row, name), number(mine, name)
            assert predicted is not None, f"{row['id']} has no {name}"
            error = None if published is None else predicted / published - 1
            each[name] = [published, predicted, error]
        result.append(each)
    return result


def report_long(runs: Sequence[Row], found: Mapping[str, Row]) -> dict[str, Any]:
    """Prints a row for each run, and a summary by source; returns their numbers."""
    rows = each_run(runs, found)
    head = [
        "run",
        "layout",
        "kind",
        "tokens/s/GPU",
        "predicted",
        "",
        "GiB",
        "predicted",
        "",
        "fits",
    ]
    shown = []
    for row in rows:
        cells = [row["run"], row["layout"], row["kind"]]
        for name, style in (("tokens_per_s_per_gpu", ",.0f"), ("memory_gib", ".1f")):
            published, predicted, error = row[name]
            cells += ["" if published is None else f"{published:{style}}", f"{predicted:{style}}"]
            cells.append("" if error is None else f"{error:+.1%}")
        shown.append([*cells, "right" if row["fits"][0] == row["fits"][1] else "wrong"])
    print_table("published long-context runs", head, shown)
    groups: dict[str, list[Row]] = {}
    for run in runs:
        groups.setdefault(source_of(run), []).append(run)
    summaries = {name: summary(each, found) for name, each in groups.items()}
    print_table(
        "errors by source",
        ["source", "speeds", "median", "signed", "memory", "median", "fits", "right"],
        [_summary_row(name, s) for name, s in {"all": summary(runs, found), **summaries}.items()],
    )
    return {"long": rows, "errors": {"all": summary(runs, found), **summaries}}


def _summary_row(name: str, s: Mapping[str, Any]) -> list[Any]:
    speed, memory, fits = s["speed"], s["memory"], s["fits"]
    return [
        name,
        *(speed["rows"], percent(speed["median"]), percent(speed["signed"])),
        *(memory["rows"], percent(memory["median"]), fits["rows"], percent(fits["right"])),
    ]


def percent(value: float | None) -> str:
    """Of a part of one."""
    return "" if value is None else f"{100 * value:.1f} %"


def report(runs: Sequence[Row], found: Mapping[str, Row]) -> dict[str, Any]:
    """Prints the tables; returns their numbers."""
    groups: dict[str, list[Row]] = {}
    for row in runs:
        groups.setdefault(source_of(row), []).append(row)
    result = {
        "all": summary(runs, found),
        **{name: summary(r, found) for name, r in groups.items()},
    }
    rows = [
        [
            name,
            r["speed"]["rows"],
            percent(r["speed"]["median"]),
            percent(r["speed"]["p90"]),
            percent(r["speed"]["signed"]),
            r["memory"]["rows"],
            percent(r["memory"]["median"]),
            r["fits"]["rows"],
            percent(r["fits"]["right"]),
        ]
        for name, r in result.items()
    ]
    head = ["source", "speeds", "median", "p90", "signed", "memory", "median", "fits", "right"]
    print_table("errors of predictions", head, rows)
    ranks = sweeps(runs, found)
    print_table(
        "rank correlation", ["sweep", "rows", "Spearman"], [[n, *v] for n, v in ranks.items()]
    )
    return {"errors": result, "sweeps": ranks}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("predictions", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--long", action="store_true", help="Each run beside its prediction.")
    given = parser.parse_args()
    with given.runs.open(newline="", encoding="utf-8") as file:
        runs: list[Row] = list(csv.DictReader(file))
    with given.predictions.open(newline="", encoding="utf-8") as file:
        found: dict[str, Row] = {row["id"]: row for row in csv.DictReader(file)}
    if missing := [row["id"] for row in runs if row["id"] not in found]:
        parser.error(f"{given.predictions} lacks {len(missing)} rows, the first {missing[0]}")
    result = report_long(runs, found) if given.long else report(runs, found)
    if given.models:
        result["left_out"] = left_out(runs, read_models(given.models))
        rows = [
            [name, r["rows"], percent(r["median"]), percent(r["p90"])]
            for name, r in result["left_out"].items()
        ]
        print_table("leave one source out", ["source", "rows", "median", "p90"], rows)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
