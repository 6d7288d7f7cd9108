"""How far the planner's predictions are from published runs.

    python benchmarks/planner_accuracy.py RUNS.csv PREDICTIONS.csv [--models MODELS.csv [--residuals]] \
        [--json PATH]
    python benchmarks/planner_accuracy.py LONG.csv PREDICTIONS.csv --long [--json PATH]

Scores a file that ``planner_runs.py`` has written: error of tokens/s/GPU and of memory (median,
90th percentile of the absolute relative error), the part of the runs in the intervals, fits or not, and
Spearman's rank correlation in each sweep (rows of one source and model, at least 8 with a speed, the fastest
1.25 times as fast as the slowest). Of runs that the constants were fitted to, that is in-sample.

With ``--models`` the headline is leave-one-out: each source, with all its GPUs, is predicted with constants
that were fitted to all others (planner_fit.py), its intervals are those of the others' errors
(planner_intervals.py). Medians and percentiles are given of rows, and with the same weight for each source.
And ``calibrate``: a stack is fitted to one row of each (source, GPU), and predicts the others.
``--residuals`` writes the planner's table of intervals from it. With ``--long`` each row beside its
prediction: the long-context runs, which are too few and too different for medians to say much.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import planner_intervals as intervals
from measure import print_table
from planner_fit import LeftOut, groups_of, left_out, source_of
from planner_runs import COLUMNS, Models, assumptions, cells_of, predict_run, read_models

from parallel3d.planner.measured import fit_stack
from parallel3d.planner.prediction import Prediction, predict
from parallel3d.planner.uncertainty import Interval, familiarity

Row = Mapping[str, str]
_MOST_FITS = 12  # rows of a group that a stack is fitted to, evenly spread


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


def errors(runs: Sequence[Row], found: Mapping[str, Row], name: str) -> list[tuple[str, float]]:
    """(source, relative error) of ``name`` where it was published: predicted / published - 1."""
    result = []
    for row in runs:
        published = number(row, name)
        if published is not None:
            predicted = number(found[row["id"]], name)
            assert predicted is not None, f"{row['id']} has no {name}"
            result.append((source_of(row), predicted / published - 1))
    return result


def covered(
    runs: Sequence[Row], found: Mapping[str, Row], name: str
) -> tuple[float | None, float | None]:
    """The part of the published values of ``name`` that lie in their intervals: of rows, of sources."""
    inside: dict[str, list[bool]] = {}
    for row in runs:
        published = number(row, name)
        low, high = (number(found[row["id"]], f"{name}_{end}") for end in ("low", "high"))
        if published is not None and low is not None and high is not None:
            inside.setdefault(source_of(row), []).append(low <= published <= high)
    if not inside:
        return None, None
    every = [each for mine in inside.values() for each in mine]
    return statistics.fmean(every), statistics.fmean(map(statistics.fmean, inside.values()))


def summary(runs: Sequence[Row], found: Mapping[str, Row]) -> dict[str, Any]:
    """Of some rows; what ends in "_by_source" has the same weight for each source."""
    right: dict[str, list[bool]] = {}
    for row in runs:
        if row["fits"]:
            right.setdefault(source_of(row), []).append(found[row["id"]]["fits"] == row["fits"])
    result: dict[str, Any] = {"rows": len(runs)}
    for name, column in (("speed", "tokens_per_s_per_gpu"), ("memory", "memory_gib")):
        values = errors(runs, found, column)
        sizes = [(source, abs(v)) for source, v in values]
        plain = [size for _, size in sizes]
        inside, inside_by_source = covered(runs, found, column)
        result[name] = {
            "rows": len(values),
            "median": statistics.median(plain) if sizes else None,
            "p90": quantile(plain, 0.9) if sizes else None,
            "median_by_source": intervals.weighted(sizes, 0.5) if sizes else None,
            "p90_by_source": intervals.weighted(sizes, 0.9) if sizes else None,
            "signed": statistics.median(v for _, v in values) if values else None,
            "covered": inside,
            "covered_by_source": inside_by_source,
        }
    every = [each for mine in right.values() for each in mine]
    result["fits"] = {
        "rows": len(every),
        "right": statistics.fmean(every) if every else None,
        "right_by_source": statistics.fmean(map(statistics.fmean, right.values()))
        if every
        else None,
    }
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


def without_itself(
    runs: Sequence[Row], left: Mapping[str, LeftOut]
) -> tuple[dict[str, Row], list[intervals.Residual]]:
    """(what was predicted of each row by constants and intervals of the other sources, the residuals)."""
    residuals = intervals.residuals_of(runs, left)
    pairs = {
        (each.source, intervals.pair_of(left[each.source].predictions[row["id"]]))
        for each, row in zip(residuals, _timed_by_source(runs), strict=True)
    }
    found: dict[str, Row] = {}
    for source, mine in groups_of(runs).items():
        table = intervals.table_of([each for each in residuals if each.source != source])
        others = {pair for other, pair in pairs if other != source}
        memory = intervals.ends_of(memory_residuals(runs, left, without=source))
        for row in mine:
            prediction = left[source].predictions[row["id"]]
            level = familiarity(others, *intervals.pair_of(prediction))
            named = [row["id"], *cells_of(row, prediction), assumptions(row, prediction)]
            cells = dict(zip(COLUMNS, named, strict=True))
            for name, ends in (("tokens_per_s_per_gpu", table[level]), ("memory_gib", memory)):
                value = float(cells[name])
                for end, by in zip(("low", "high"), ends, strict=True):
                    cells[f"{name}_{end}"] = f"{value * exp(by):.4f}"
            found[row["id"]] = cells
    return found, residuals


def _timed_by_source(runs: Sequence[Row]) -> list[Row]:
    """Rows with a speed, in the order of ``intervals.residuals_of``."""
    groups = groups_of([row for row in runs if number(row, "tokens_per_s_per_gpu")])
    return [row for mine in groups.values() for row in mine]


def memory_residuals(
    runs: Sequence[Row], left: Mapping[str, LeftOut], without: str | None = None
) -> list[intervals.Residual]:
    """ln(published / predicted) of memory."""
    found = []
    for row in runs:
        published, source = number(row, "memory_gib"), source_of(row)
        if published is not None and source != without:
            cells = cells_of(row, left[source].predictions[row["id"]])
            predicted = float(cells[COLUMNS.index("memory_gib") - 1])
            found.append(intervals.Residual(source, row["gpu"], "", log(published / predicted)))
    return found


def calibrated(runs: Sequence[Row], models: Models) -> dict[str, list[float]]:
    """Source and GPU -> predicted / published - 1 of all other rows, for each row that a stack was fitted to.

    Rows of the same stack are fitted: eager and compiled runs of one source are different ones.
    """
    result = {}
    machines: dict[str, list[Row]] = {}
    for row in _timed_by_source(runs):
        machines.setdefault(f"{source_of(row)} {row['gpu']}", []).append(row)
    for group, rows in machines.items():
        known = [(predict_run(r, models), number(r, "tokens_per_s_per_gpu") or 0.0) for r in rows]
        found: list[float] = []
        for at in range(0, len(known), max(1, -(-len(known) // _MOST_FITS))):
            fitted = fit_stack([known[at]])
            stack = known[at][0].workload.profile
            for index, (prediction, published) in enumerate(known):
                if index != at and prediction.workload.profile == stack:
                    work = replace(prediction.workload, stack=fitted)
                    found.append(_again(prediction, work) / published - 1)
        if found:
            result[group] = found
    return result


def _again(prediction: Prediction, work: Any) -> float:
    found = predict(prediction.model, prediction.layout, prediction.cluster, work)
    return found.tokens_per_second_per_gpu


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
    groups = groups_of(runs)
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


def report(title: str, runs: Sequence[Row], found: Mapping[str, Row]) -> dict[str, Any]:
    """Prints the tables; returns their numbers."""
    groups = groups_of(runs)
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
            percent(r["speed"]["covered"]),
            r["memory"]["rows"],
            percent(r["memory"]["median"]),
            r["fits"]["rows"],
            percent(r["fits"]["right"]),
        ]
        for name, r in result.items()
    ]
    head = ["source", "speeds", "median", "p90", "signed", "in interval"]
    print_table(title, [*head, "memory", "median", "fits", "right"], rows)
    ranks = sweeps(runs, found)
    middle = statistics.median(rank for _, rank in ranks.values()) if ranks else None
    print_table(
        f"{title}: rank correlation, {middle or 0:.3f} in the median sweep",
        ["sweep", "rows", "Spearman"],
        [[n, *v] for n, v in ranks.items()],
    )
    return {"errors": result, "sweeps": ranks, "median_sweep": middle}


def print_weighted(name: str, s: Mapping[str, Any]) -> None:
    """Of rows, and with the same weight for each source."""
    rows = [
        [f"{what}, {part}", percent(s[what][part]), percent(s[what][f"{part}_by_source"])]
        for what, parts in (
            ("speed", ("median", "p90", "covered")),
            ("memory", ("median", "p90", "covered")),
            ("fits", ("right",)),
        )
        for part in parts
    ]
    print_table(f"{name}: each source left out", ["", "of rows", "of sources"], rows)


def headline(
    runs: Sequence[Row], models: Models
) -> tuple[dict[str, Any], list[intervals.Residual], dict[str, LeftOut]]:
    """Prints and returns what holds for runs that the constants weren't fitted to."""
    left = left_out(runs, models)
    found, residuals = without_itself(runs, left)
    result = report("each source left out", runs, found)
    result["newer"] = summary([row for row in runs if row["url"]], found)
    for name, rows in (("all", runs), ("of 2025 and 2026", [row for row in runs if row["url"]])):
        print_weighted(name, summary(rows, found))
    result["constants"] = {source: each.constants for source, each in left.items()}
    errors_after = calibrated(runs, models)
    every = [abs(e) for each in errors_after.values() for e in each]
    groups = {name: statistics.median(map(abs, each)) for name, each in errors_after.items()}
    result["calibrated"] = {
        "median": statistics.median(every),
        "p90": quantile(every, 0.9),
        "median_group": statistics.median(groups.values()),
        "groups": groups,
        "ends": [
            quantile([-e for each in errors_after.values() for e in each], q) for q in (0.1, 0.9)
        ],
    }
    print_table(
        f"fitted to one row, the others: median {percent(result['calibrated']['median'])}, "
        f"p90 {percent(result['calibrated']['p90'])}",
        ["source", "median"],
        [[name, percent(value)] for name, value in groups.items()],
    )
    return result, residuals, left


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("predictions", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--residuals", action="store_true", help="Write the planner's table of errors."
    )
    parser.add_argument("--long", action="store_true", help="Each run beside its prediction.")
    given = parser.parse_args()
    with given.runs.open(newline="", encoding="utf-8") as file:
        runs: list[Row] = list(csv.DictReader(file))
    with given.predictions.open(newline="", encoding="utf-8") as file:
        found: dict[str, Row] = {row["id"]: row for row in csv.DictReader(file)}
    if missing := [row["id"] for row in runs if row["id"] not in found]:
        parser.error(f"{given.predictions} lacks {len(missing)} rows, the first {missing[0]}")
    result: dict[str, Any] = {}
    if given.models:
        result["left_out"], residuals, left = headline(runs, read_models(given.models))
        if given.residuals:
            timed = [row for row in runs if number(row, "tokens_per_s_per_gpu")]
            intervals.write(
                residuals,
                {intervals.pair_of(left[source_of(r)].predictions[r["id"]]) for r in timed},
                intervals.ends_of(memory_residuals(runs, left)),
                intervals.verdict(runs, left),
                Interval(*result["left_out"]["calibrated"]["ends"]),
                f"python benchmarks/planner_accuracy.py {given.runs} PREDICTIONS.csv --models {given.models} "
                "--residuals",
            )
    result |= (
        report_long(runs, found) if given.long else report("the predictions given", runs, found)
    )
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
