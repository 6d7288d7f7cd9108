"""Numbers and names in words, for warnings, the summary and the report."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from parallel3d.tools.dryrun.result import DryRun, Peak
from parallel3d.tools.dryrun.timeline import Timeline


def counted(number: int, noun: str) -> str:
    """``1 gather``, ``2,000 gathers``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def in_bytes(size: float) -> str:
    """``3.2 GiB``, ``41 MiB``, ``12 bytes``: three figures."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= 0.9995 * factor:
            return f"{_figures(size / factor)} {unit}"
    return f"{size:.0f} bytes" if size != 1 else "1 byte"


def in_seconds(seconds: float) -> str:
    """``2.31 s``, ``41.5 ms``, ``870 us``."""
    if not seconds:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= 0.9995 * factor:
            return f"{_figures(seconds / factor)} {unit}"
    return f"{_figures(seconds * 1e6)} us"


def _figures(value: float) -> str:
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:,.0f}"


def pattern_of(name: str) -> str:
    """``layers.*.attention`` for ``layers.3.attention``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def some(names: Iterable[str], most: int = 3) -> str:
    """The first few different ones, and how many more there are."""
    each = [name or "(no unit)" for name in dict.fromkeys(names)]
    left = len(each) - most
    return ", ".join(each[:most]) + (f" and {left} more" if left > 0 else "")


# The head figures of a dry run, for the summary and the page.


@dataclass(frozen=True)
class Figures:
    """Of the shown step, and of the whole run.

    Attributes:
        numel: elements of the whole model's parameters. state: bytes of parameters on this rank.
        peak, capacity: bytes. step_peak: from the first forward on.
        step, exposed: predicted seconds; exposed: in which the computation waits for collectives.
        flops: of matmuls and attention in the step. used: part of the GPU's peak rate that they are.
        calls, traffic: collectives of the step, and their bytes.
    """

    numel: int
    state: int
    peak: int
    step_peak: int
    capacity: float
    step: float
    exposed: float
    flops: float
    used: float
    calls: int
    traffic: int

    def shown(self) -> list[tuple[str, str]]:
        """(name, value) in words."""
        beside = f", {in_bytes(self.step_peak)} in steps" if self.step_peak != self.peak else ""
        waits = f" ({self.exposed / self.step:.0%})" if self.step else ""
        return [
            ("parameters of the model", _count(self.numel)),
            ("parameters on this rank", in_bytes(self.state)),
            ("peak memory", f"{in_bytes(self.peak)} of {in_bytes(self.capacity)}{beside}"),
            ("a step, predicted", in_seconds(self.step)),
            ("waits for collectives", f"{in_seconds(self.exposed)}{waits}"),
            ("FLOPs of a step", f"{self.flops / 1e12:,.3g} T ({self.used:.0%} of peak)"),
            ("collectives of a step", f"{self.calls:,} ({in_bytes(self.traffic)})"),
        ]


def figures_of(run: DryRun, times: Timeline) -> Figures:
    """Of ``run`` with these times."""
    gpu, step = times.cluster.gpu, times.step_seconds
    mine = [operation for operation in run.operations if operation.step == times.step]
    flops = sum(operation.flops for operation in mine)
    calls = [
        run.collectives[o.collective]
        for o in mine
        if o.kind == "collective" and o.collective is not None
    ]
    return Figures(
        numel=sum(prod(p.shape) for p in run.parameters),
        state=sum(p.bytes for p in run.parameters),
        peak=run.peak.bytes,
        step_peak=(run.step_peak or run.peak).bytes,
        capacity=gpu.capacity_gib * 2**30,
        step=step,
        exposed=sum(times.exposed().values()),
        flops=flops,
        used=flops / (gpu.peak * 1e12 * step) if step else 0.0,
        calls=len(calls),
        traffic=sum(call.bytes for call in calls),
    )


def peaks_of(run: DryRun) -> list[tuple[Peak, str]]:
    """(peak, when in words): the whole run's; the training's after it, if that is another."""
    later = run.step_peak
    if later is None or later.operation == run.peak.operation:
        return [(run.peak, "")]
    return [(run.peak, ""), (later, " from the first forward on")]


def _count(number: int) -> str:
    for unit, factor in (("B", 10**9), ("M", 10**6)):
        if number >= factor:
            return f"{number / factor:,.2f} {unit}"
    return f"{number:,}"
