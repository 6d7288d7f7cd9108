"""Numbers and names as text, for warnings, the summary and the report."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import prod
from typing import TypeVar

from parallel3d._util.arguments import counted as counted
from parallel3d._util.recorder import Collective
from parallel3d.tools.dryrun.result import DryRun, ParameterPlacement, Peak
from parallel3d.tools.dryrun.timeline import TimedCollective, Timeline

_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


def in_bytes(size: float) -> str:
    """Returns the size as text: "3.20 GiB", "41.0 MiB", "12 bytes"."""
    if abs(size) < 0.9995 * 2**10:
        return f"{size:.0f} bytes" if size != 1 else "1 byte"
    return _scaled(size, GiB=2**30, MiB=2**20, KiB=2**10)


def in_seconds(seconds: float) -> str:
    """Returns the seconds as text: "2.31 s", "41.5 ms", "870 us"."""
    return _scaled(seconds, s=1.0, ms=1e-3, us=1e-6) if seconds else "0 s"


def _scaled(value: float, **units: float) -> str:
    """Returns ``value`` with three digits in the first of ``units`` that it fills, else in the last."""
    filled = (unit for unit, factor in units.items() if abs(value) >= 0.9995 * factor)
    unit = next(filled, list(units)[-1])
    size = value / units[unit]
    digits = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    return f"{size:,.{digits}f} {unit}"


def share(part: float, whole: float) -> str:
    """Returns ``part / whole`` as text, "12%"; "0%" if ``whole`` is 0."""
    return f"{part / whole:.0%}" if whole else "0%"


def total_bytes(items: Iterable[Collective | ParameterPlacement]) -> str:
    """Returns the sum of the bytes of all ``items`` as text."""
    return in_bytes(sum(item.bytes for item in items))


def pattern_of(name: str) -> str:
    """Returns the name with its numbers as ``*``: "layers.*.attention" for "layers.3.attention"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def first_few(names: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """Returns the first ``most`` names as text, and how many more there are."""
    left = len(names) - most
    return between.join(names[:most]) + (f" and {left} more" if left > 0 else "")


def some(names: Iterable[str]) -> str:
    """Returns the first few of the different names as text."""
    return first_few([name or "(no unit)" for name in dict.fromkeys(names)])


def placements_of(parameter: ParameterPlacement) -> str:
    """Returns the parameter's placements as text: "replicate R, shard S(0)"."""
    return ", ".join(f"{axis} {p}" for axis, p in parameter.placements.items()) or "plain tensor"


def grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Returns key -> the items with that key, in the order in which the keys appear."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# What both the summary and the report show.


def figures_of(run: DryRun, times: Timeline) -> list[tuple[str, str]]:
    """Returns (name, value) of the run's most important numbers, as texts."""
    gpu, step, held = times.cluster.gpu, times.step_seconds, run.reserved
    reserved = ""
    if held is not None:
        segments = counted(held.segments, "segment")
        reserved = (
            f"{in_bytes(held.bytes)} in {segments}, {in_bytes(held.expandable)} if expandable"
        )
    operations = [operation for operation in run.operations if operation.step == times.step]
    flops = sum(operation.flops for operation in operations)
    issued = (o.collective for o in operations if o.kind == "collective")
    calls = [run.collectives[index] for index in issued if index is not None]
    in_steps = (run.step_peak or run.peak).bytes
    later = f", {in_bytes(in_steps)} in steps" if in_steps != run.peak.bytes else ""
    exposed = sum(times.exposed().values())
    waits = f" ({exposed / step:.0%})" if step else ""
    used = flops / (gpu.peak * 1e12 * step) if step else 0.0
    return [
        ("parameters of the model", _numel(sum(prod(p.shape) for p in run.parameters))),
        ("parameters on this rank", total_bytes(run.parameters)),
        (
            "peak memory",
            f"{in_bytes(run.peak.bytes)} of {in_bytes(gpu.capacity_gib * 2**30)}{later}",
        ),
        *([("reserved by torch", reserved)] if reserved else []),
        ("a step, predicted", in_seconds(step)),
        ("waits for collectives", f"{in_seconds(exposed)}{waits}"),
        ("FLOPs of a step", f"{flops / 1e12:,.3g} T ({used:.0%} of peak)"),
        ("collectives of a step", f"{len(calls):,} ({total_bytes(calls)})"),
    ]


def _numel(number: int) -> str:
    for unit, factor in (("B", 10**9), ("M", 10**6)):
        if number >= factor:
            return f"{number / factor:,.2f} {unit}"
    return f"{number:,}"


AXIS_COLUMNS = "axis", "operation", "ranks", "calls", "bytes", "takes", "waited for", "of the step"


def axis_of(call: TimedCollective, run: DryRun) -> str:
    """Returns the mesh axis of ``call``; "all ranks" or "other group" if its group is no axis."""
    return call.axis or ("all ranks" if call.group_size == run.world_size else "other group")


def axis_rows(
    run: DryRun, times: Timeline, calls: Iterable[TimedCollective]
) -> list[tuple[tuple[str, ...], float]]:
    """Returns a row for each axis and operation of the shown step: (cells of ``AXIS_COLUMNS``, the fraction
    of the step in which the compute stream waits for these calls)."""
    rows: list[tuple[tuple[str, ...], float]] = []
    shown = (call for call in calls if call.step == times.step)
    groups = grouped(shown, lambda c: (axis_of(c, run), c.op, str(c.group_size)))
    for cells, group in groups.items():
        seconds, exposed = sum(c.seconds for c in group), sum(c.exposed for c in group)
        part = exposed / times.step_seconds if times.step_seconds else 0.0
        amount = f"{len(group):,}", total_bytes(group)
        spent = in_seconds(seconds), in_seconds(exposed), f"{part:.1%}"
        rows.append(((*cells, *amount, *spent), part))
    return rows


def by_size(peak: Peak) -> list[tuple[str, int]]:
    """Returns (kind, bytes) of the memory at ``peak``, the largest first."""
    return sorted(peak.by_kind.items(), key=lambda item: -item[1])


def peaks_of(run: DryRun) -> Sequence[tuple[Peak, str]]:
    """Returns (peak, when as text) of the run and, if it is another, from the first forward on."""
    peaks, later = [(run.peak, "")], run.step_peak
    if later is not None and later.operation != run.peak.operation:
        peaks.append((later, " from the first forward on"))
    return peaks
