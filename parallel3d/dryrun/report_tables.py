"""The tables of a dry run's page, as HTML; all names are escaped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from html import escape
from typing import TypeVar

from parallel3d._report import table
from parallel3d.dryrun.calls import Call
from parallel3d.dryrun.result import DryRun, ParameterPlacement, Peak
from parallel3d.dryrun.timeline import Timeline
from parallel3d.dryrun.wording import in_bytes, in_seconds, pattern_of

__all__ = ["axes_table", "calls_table", "parameters_tables", "peak_tables", "reads_table"]

_MOST_ROWS = 3000
_T = TypeVar("_T")


def axes_table(run: DryRun, times: Timeline, calls: Sequence[Call]) -> str:
    """By axis and operation, in the shown step."""
    mine = [call for call in calls if call.step == times.step]
    groups = _grouped(mine, lambda c: (c.collective.axis, c.collective.op, c.collective.group_size))
    rows = [
        (
            each[0].collective.axis or "none",
            each[0].collective.op,
            str(each[0].collective.group_size),
            f"{len(each):,}",
            in_bytes(sum(c.collective.bytes for c in each)),
            in_seconds(sum(c.seconds for c in each)),
            in_seconds(exposed := sum(c.exposed for c in each)),
            f"{exposed / times.step_seconds:.1%}" if times.step_seconds else "",
        )
        for each in groups
    ]
    if not rows:
        return "<p>None.</p>"
    columns = ("axis", "operation", "ranks", "calls", "bytes", "takes", "waited for", "of the step")
    return table(columns, rows, 2, wrap=False)


def calls_table(calls: Sequence[Call]) -> str:
    """Of the whole run, equal ones together, in the order of the first; with a filter."""
    groups = _grouped(
        calls,
        lambda c: (
            *(c.collective.axis, c.collective.op, c.collective.unit or c.module, c.phase),
            *(c.collective.bytes, c.collective.group_size, c.collective.asynchronous, c.dtype),
        ),
    )
    rows = [
        (
            f"{each[0].collective.order}",
            each[0].collective.axis or "none",
            each[0].collective.op,
            each[0].collective.unit or each[0].module or "-",
            each[0].phase,
            each[0].dtype,
            "" if each[0].collective.asynchronous else "blocks",
            str(each[0].collective.group_size),
            f"{len(each):,}",
            f"{each[0].collective.bytes:,}",
            in_bytes(sum(c.collective.bytes for c in each)),
            in_seconds(each[0].seconds),
            in_seconds(sum(c.exposed for c in each)),
        )
        for each in groups
    ]
    columns = (
        *("first", "axis", "operation", "unit or module", "phase", "dtype", ""),
        *("ranks", "calls", "bytes each", "bytes in all", "each takes", "waited for"),
    )
    return _filtered("collectives", columns, rows, 7)


def parameters_tables(run: DryRun) -> str:
    """Equal parameters of all blocks together; below it each one, with a filter."""
    if not run.parameters:
        return "<p>None.</p>"
    groups = _grouped(
        run.parameters,
        lambda p: (
            *(pattern_of(p.name), p.shape, p.local_shape, p.dtype),
            *(tuple(p.placements.items()), p.requires_grad),
        ),
    )
    rows = [
        (
            *_parameter(each[0], pattern=True),
            f"{len(each):,}",
            in_bytes(sum(p.bytes for p in each)),
        )
        for each in groups
    ]
    columns = ("parameter", "shape", "on this rank", "placements", "dtype", "")
    grouped = table((*columns, "of them", "bytes here"), rows, 6, wrap=False)
    each = [(*_parameter(p), f"{p.bytes:,}") for p in run.parameters]
    single = _filtered("parameters", (*columns, "bytes here"), each, 6)
    return f"{grouped}<details><summary>Each of the {len(each):,}</summary>{single}</details>"


def _parameter(parameter: ParameterPlacement, pattern: bool = False) -> tuple[str, ...]:
    placements = ", ".join(f"{axis} {how}" for axis, how in parameter.placements.items())
    return (
        pattern_of(parameter.name) if pattern else parameter.name,
        _sizes(parameter.shape),
        _sizes(parameter.local_shape),
        placements or "plain tensor",
        parameter.dtype,
        "" if parameter.requires_grad else "frozen",
    )


def peak_tables(peak: Peak) -> str:
    """What is alive at ``peak``: by kind, and the largest tensors."""
    kinds = [
        (kind, in_bytes(size), f"{size / peak.bytes:.1%}" if peak.bytes else "")
        for kind, size in sorted(peak.by_kind.items(), key=lambda item: -item[1])
    ]
    alike = _grouped(
        peak.largest, lambda t: (t.kind, pattern_of(t.module), t.made_by, t.shape, t.dtype)
    )
    tensors = [
        (
            *(t.kind, pattern_of(t.module) if len(each) > 1 else t.module or "-", t.made_by),
            *(_sizes(t.shape), t.dtype, f"{len(each):,}", in_bytes(t.bytes)),
        )
        for each in alike
        for t in each[:1]
    ]
    parts = table(("kind", "bytes", "of the peak"), kinds, 1, wrap=False)
    if tensors:
        columns = (
            "kind",
            "module or parameter",
            "made by",
            "shape",
            "dtype",
            "of them",
            "bytes each",
        )
        title = f"The {len(peak.largest)} largest tensors at the peak"
        parts += f"<h3>{title}</h3>{table(columns, tensors, 5, wrap=False)}"
    return parts


def reads_table(run: DryRun) -> str:
    """Where the program asked for values that nobody has computed."""
    if not run.unknown:
        return "<p>None.</p>"
    rows = [(read.where, read.what, f"{read.count:,}") for read in run.unknown[:_MOST_ROWS]]
    return table(("where", "what", "how often"), rows, 2)


def _filtered(
    name: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], words: int
) -> str:
    """A table of many rows in a box of its own, with a field that leaves those with all its words."""
    if not rows:
        return "<p>None.</p>"
    shown = table(columns, rows[:_MOST_ROWS], words, wrap=False)
    left = len(rows) - _MOST_ROWS
    more = f"<p>{left:,} more rows are only in the JSON.</p>" if left > 0 else ""
    label = f"filter the {name}: words that a row must have"
    field = (
        f'<input type="search" data-filters="{escape(name)}" placeholder="filter, such as: shard backward" '
        f'aria-label="{escape(label)}"> <span class="soft" id="{escape(name)}-count"></span>'
    )
    return f'{field}<div class="many" id="{escape(name)}">{shown}</div>{more}'


def _grouped(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    found: dict[Hashable, list[_T]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return list(found.values())


def _sizes(shape: Sequence[int]) -> str:
    return " \N{MULTIPLICATION SIGN} ".join(map(str, shape)) or "a number"
