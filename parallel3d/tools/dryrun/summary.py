"""A dry run in the terminal, by rich (``cli`` extra): wide and narrow, with and without colours."""

from __future__ import annotations

import os
from collections import Counter, defaultdict

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from parallel3d.tools.dryrun.calls import Call, calls_of
from parallel3d.tools.dryrun.compare import Divergence
from parallel3d.tools.dryrun.result import DryRun, Peak
from parallel3d.tools.dryrun.timeline import Timeline, timeline
from parallel3d.tools.dryrun.warnings import all_warnings
from parallel3d.tools.dryrun.wording import (
    counted,
    figures_of,
    in_bytes,
    in_seconds,
    pattern_of,
    peaks_of,
)

_WIDE = 100
_TENSORS = 5


def print_summary(
    run: DryRun,
    predicted: Timeline | None = None,
    divergence: Divergence | None = None,
    console: Console | None = None,
) -> None:
    """Prints the figures, collectives by axis, the peak of memory, placements and warnings.

    Args:
        predicted: ``timeline(run)``, or one with other machines.
        divergence: what ``compare`` with another rank has found.
        console: where to; the terminal unless given, without a terminal 120 columns.
    """
    to = console or _console()
    times = predicted or timeline(run)
    wide = to.width >= _WIDE
    to.print(_heading(run, times))
    to.print(_figures(run, times))
    to.print(_collectives(run, times, wide))
    for peak, when in peaks_of(run):
        to.print(_peak(peak, when, wide))
    if run.parameters:
        to.print(_parameters(run, wide))
    _warn(to, run, times, divergence)


def _console() -> Console:
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=120)


def _heading(run: DryRun, times: Timeline) -> Text:
    mesh = " x ".join(f"{axis} {size}" for axis, size in run.mesh.items())
    return Text.assemble(
        ("dry run ", "bold"),
        (f"of rank {run.rank} of {run.world_size:,}", "bold"),
        f"{f' ({mesh})' if mesh else ''}: {counted(run.steps, 'step')}, ",
        f"{counted(len(run.operations), 'operation')}, {counted(len(run.collectives), 'collective')}, in "
        f"{in_seconds(run.seconds)}; times as predicted for {times.cluster.gpu.name}",
    )


def _figures(run: DryRun, times: Timeline) -> Table:
    made = Table.grid(padding=(0, 2))
    for name, value in figures_of(run, times).shown():
        made.add_row(Text(name, "dim"), Text(value))
    return made


def _table(title: str, *columns: str, left: int = 1) -> Table:
    """The first ``left`` columns are words, the others numbers."""
    made = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i < left else "right", overflow="fold")
    return made


def _collectives(run: DryRun, times: Timeline, wide: bool) -> Table:
    groups: dict[tuple[str, str, int], list[Call]] = defaultdict(list)
    for call in calls_of(run, times):
        if call.step == times.step:
            it = call.collective
            groups[it.axis or "none", it.op, it.group_size].append(call)
    title = f"collectives of step {times.step} ({in_seconds(times.step_seconds)})"
    more = ("ranks", "take") if wide else ()
    made = _table(
        title, "axis", "operation", *more[:1], "calls", "bytes", *more[1:], "waited for", left=2
    )
    for (axis, op, ranks), each in groups.items():
        waited = sum(call.exposed for call in each)
        share = waited / times.step_seconds if times.step_seconds else 0.0
        made.add_row(
            Text(axis),
            Text(op),
            *((str(ranks),) if wide else ()),
            f"{len(each):,}",
            in_bytes(sum(call.collective.bytes for call in each)),
            *((in_seconds(sum(call.seconds for call in each)),) if wide else ()),
            Text(f"{in_seconds(waited)} ({share:.0%})", "red" if share >= 0.05 else ""),
        )
    return made


def _peak(peak: Peak, when: str, wide: bool) -> Table:
    where = f"{peak.phase}, {peak.module or 'no module'}"
    title = f"memory at its peak{when}: {in_bytes(peak.bytes)}, {where}"
    made = _table(title, "kind", "bytes", "", *(("the largest tensors",) if wide else ()))
    made.columns[-1].justify = "left"
    for kind, size in sorted(peak.by_kind.items(), key=lambda item: -item[1]):
        tensors = Counter(
            (pattern_of(t.module) or t.made_by, t.shape, t.dtype)
            for t in peak.largest
            if t.kind == kind
        )
        named = "; ".join(
            f"{name} {'x'.join(map(str, shape))} {dtype}"
            + (f" ({count} times)" if count > 1 else "")
            for (name, shape, dtype), count in tensors.most_common(_TENSORS)[: 2 if wide else 0]
        )
        part = f"{size / peak.bytes:.0%}" if peak.bytes else ""
        made.add_row(kind, in_bytes(size), part, *((Text(named),) if wide else ()))
    return made


def _parameters(run: DryRun, wide: bool) -> Table:
    """By placement."""
    groups: dict[str, list[int]] = defaultdict(list)
    names: dict[str, list[str]] = defaultdict(list)
    for parameter in run.parameters:
        how = ", ".join(f"{axis} {p}" for axis, p in parameter.placements.items()) or "plain tensor"
        groups[how].append(parameter.bytes)
        names[how].append(pattern_of(parameter.name))
    made = _table(
        "parameters on this rank",
        "placements",
        "how many",
        "bytes",
        *(("such as",) if wide else ()),
    )
    made.columns[-1].justify = "left" if wide else "right"
    for how, sizes in groups.items():
        some = next(iter(dict.fromkeys(names[how])))
        made.add_row(
            Text(how), f"{len(sizes):,}", in_bytes(sum(sizes)), *((Text(some),) if wide else ())
        )
    return made


def _warn(to: Console, run: DryRun, times: Timeline, divergence: Divergence | None) -> None:
    warnings = all_warnings(run, times, divergence)
    to.print(Text(counted(len(warnings), "warning") if warnings else "no warnings", "bold"))
    for each in warnings:
        to.print(Padding(Text.assemble((f"{each.kind}: ", "bold red"), each.text), (0, 0, 0, 2)))
