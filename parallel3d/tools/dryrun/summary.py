"""Prints a dry run in the terminal with rich (``cli`` extra)."""

from __future__ import annotations

from collections import Counter
from textwrap import indent

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from parallel3d.tools.dryrun.compare import Divergence
from parallel3d.tools.dryrun.result import DryRun, Peak
from parallel3d.tools.dryrun.timeline import Timeline, calls_of, timeline
from parallel3d.tools.dryrun.warnings import all_warnings
from parallel3d.tools.dryrun.wording import (
    AXIS_COLUMNS,
    axis_rows,
    by_size,
    counted,
    figures_of,
    grouped,
    in_bytes,
    in_seconds,
    pattern_of,
    peaks_of,
    placements_of,
    share,
    total_bytes,
)
from parallel3d.tools.terminal import output, titled_table


def print_summary(
    run: DryRun,
    predicted: Timeline | None = None,
    divergence: Divergence | None = None,
    console: Console | None = None,
) -> None:
    """Prints the run's main numbers, collectives by axis, memory peak, placements and warnings.

    Args:
        run: the dry run.
        predicted: the predicted times; by default ``timeline(run)``.
        divergence: the result of ``compare`` with another rank.
        console: where to print; by default the terminal, or 120 columns without a terminal.
    """
    console = console or output(120)
    times = predicted or timeline(run)
    wide = console.width >= 100
    mesh = " x ".join(f"{axis} {size}" for axis, size in run.mesh.items())
    heading = (
        f"{f' ({mesh})' if mesh else ''}: {counted(run.steps, 'step')}, "
        f"{counted(len(run.operations), 'operation')}, {counted(len(run.collectives), 'collective')}, in "
        f"{in_seconds(run.seconds)}; times as predicted for {times.cluster.gpu.name}"
    )
    rank = f"dry run of rank {run.rank} of {run.world_size:,}"
    console.print(Text.assemble((rank, "bold"), heading))
    figures = Table.grid(padding=(0, 2))
    for name, value in figures_of(run, times):
        figures.add_row(Text(name, "dim"), Text(value))
    console.print(figures)
    console.print(_collectives(run, times, wide))
    for peak, when in peaks_of(run):
        console.print(_peak(peak, when, wide))
    if run.parameters:
        console.print(_parameters(run, wide))
    clean, held_up = (
        "a step can be captured in a CUDA graph",
        "to the capture of a step in a CUDA graph",
    )
    for found, none, one, more in (
        (run.races, "no races between streams", "race", "between streams"),
        (run.obstacles, clean, "obstacle", held_up),
    ):
        if found is not None:
            heading = f"{counted(len(found), one)} {more}" if found else none
            console.print(Text(heading, "bold"))
        for text in map(str, found or ()):
            console.print(Text(indent(text, "  ")), soft_wrap=True)
    warnings = all_warnings(run, times, divergence)
    console.print(Text(counted(len(warnings), "warning") if warnings else "no warnings", "bold"))
    for each in warnings:
        line = Text.assemble((f"{each.kind}: ", "bold red"), each.text)
        console.print(Padding(line, (0, 0, 0, 2)))


def _collectives(run: DryRun, times: Timeline, wide: bool) -> Table:
    title = f"collectives of step {times.step} ({in_seconds(times.step_seconds)})"
    shown = [i for i, name in enumerate(AXIS_COLUMNS) if wide or name not in ("ranks", "takes")]
    table = titled_table(title, *(AXIS_COLUMNS[i] for i in shown), left=2)
    for cells, part in axis_rows(run, times, calls_of(run, times)):
        texts = [Text(cell) for cell in cells]
        texts[-1].stylize("red" if part >= 0.05 else "")
        table.add_row(*(texts[i] for i in shown))
    return table


def _peak(peak: Peak, when: str, wide: bool) -> Table:
    where = f"{peak.phase}, {peak.module or 'no module'}"
    title = f"memory at its peak{when}: {in_bytes(peak.bytes)}, {where}"
    table = titled_table(title, "kind", "bytes", "", *(("the largest tensors",) if wide else ()))
    table.columns[-1].justify = "left"
    for kind, size in by_size(peak):
        tensors = Counter(
            (pattern_of(t.module) or t.made_by, t.shape, t.dtype)
            for t in peak.largest
            if t.kind == kind
        )
        named = "; ".join(
            f"{name} {'x'.join(map(str, shape))} {dtype}"
            + (f" ({count} times)" if count > 1 else "")
            for (name, shape, dtype), count in tensors.most_common(2)
        )
        table.add_row(
            kind, in_bytes(size), share(size, peak.bytes), *((Text(named),) if wide else ())
        )
    return table


def _parameters(run: DryRun, wide: bool) -> Table:
    columns = ("placements", "how many", "bytes", "such as")
    table = titled_table("parameters on this rank", *columns[: 4 if wide else 3])
    table.columns[-1].justify = "left" if wide else "right"
    for placements, group in grouped(run.parameters, placements_of).items():
        example = (Text(pattern_of(group[0].name)),) if wide else ()
        table.add_row(Text(placements), f"{len(group):,}", total_bytes(group), *example)
    return table
