"""Prints a Diagnosis as tables."""

from collections import Counter

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from parallel3d.mesh.agreement import name_ranks
from parallel3d.tools.doctor.collectives import SLOW, Line
from parallel3d.tools.doctor.doctor import Diagnosis
from parallel3d.tools.doctor.finding import (
    Finding,
    Severity,
    all_checks,
    name_hosts,
    ranks_by_value,
)
from parallel3d.tools.terminal import titled_table

_STYLE = {Severity.error: "bold red", Severity.warning: "yellow", Severity.note: "cyan"}


def render(found: Diagnosis, console: Console) -> None:
    """Prints the machines, the findings, the collectives and a summary."""
    console.print(_machines(found))
    if found.findings:
        console.print(_findings(found))
    if found.lines:
        console.print(_collectives(found.lines))
    elif found.not_measured:
        console.print(Text(f"collectives not measured: {found.not_measured}", style="dim"))
    console.print(_summary(found))
    console.print(_passed(found))


def _machines(found: Diagnosis) -> Table:
    columns = ("node", "ranks", "devices", "torch", "CUDA", "NCCL", "addresses")
    table = titled_table("nodes", *columns, left=len(columns))
    for host, ranks in ranks_by_value(found.hosts()).items():
        own = found.facts[ranks[0]]
        kinds = Counter(device.name for device in own.devices)
        table.add_row(
            host,
            name_ranks(ranks).partition(" ")[2],
            ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "CPU",
            *(own.versions.get(name, "-") for name in ("torch", "cuda", "nccl")),
            ", ".join(f"{i.name} {i.addresses[0]}" for i in own.usable) or "-",
        )
    return table


def _findings(found: Diagnosis) -> Table:
    table = titled_table("findings", "", "what", "why, and what to do", left=3)
    table.leading = 1
    for each in found.findings:
        where = Text(_where(each, found), style="dim")
        what = Group(Text(each.name, style="bold"), Text(each.seen), where)
        advice = Group(Text(each.why), Text(f"do: {each.do}", style="green"))
        table.add_row(Text(each.severity, style=_STYLE[each.severity]), what, advice)
    return table


def _where(finding: Finding, found: Diagnosis) -> str:
    """Returns the nodes and ranks of a finding as text; "" if there is only one node or it names no ranks."""
    hosts = found.hosts()
    ranks = set(finding.ranks)
    if len(hosts) < 2 or not ranks:
        return ""
    if ranks == set(hosts):
        return "on all ranks"
    named = dict.fromkeys(hosts.get(rank, "?") for rank in finding.ranks)
    return f"on {name_hosts(named, ranks)}"


def _collectives(lines: list[Line]) -> Table:
    columns = ("axis", "operation", "groups", "MB", "GB/s", "4 KiB, us", "part of profile")
    title = "collectives in the slowest group; the profile's values in brackets"
    table = titled_table(title, *columns, left=3)
    for line in lines:
        size, groups = len(line.slowest), len(line.groups)
        part = line.bandwidth / line.expected if line.expected else None
        table.add_row(
            line.axis,
            line.operation,
            f"{groups} of {size} ranks on {line.nodes} node{'s' if line.nodes > 1 else ''}",
            f"{line.nbytes / 1e6:,.0f}",
            f"{line.bandwidth / 1e9:.3g}" + _expected(line.expected, 1e-9),
            f"{line.latency * 1e6:,.0f}" + _expected(line.expected_latency, 1e6),
            Text(f"{part:.0%}", "green" if part >= SLOW else "yellow") if part else "no profile",
        )
    return table


def _expected(value: float | None, scale: float) -> str:
    return "" if value is None else f" ({value * scale:.3g})"


def _passed(found: Diagnosis) -> Text:
    """Returns a text with the checks that have no finding, by area."""
    by_area: dict[str, list[str]] = {}
    for check in all_checks():
        if check.name in found.passed:
            by_area.setdefault(check.area, []).append(check.name)
    lines = (f"{area}: {', '.join(names)}" for area, names in by_area.items())
    return Text("\n".join(lines), style="dim")


def _summary(found: Diagnosis) -> Text:
    counts = Counter(finding.severity for finding in found.findings)
    parts = [
        f"{counts[severity]} {severity}{'s' if counts[severity] > 1 else ''}"
        for severity in reversed(Severity)
        if counts[severity]
    ]
    parts.append(f"{len(found.passed)} checks passed")
    if count := len(found.not_run):
        parts.append(f"{count} not run: they compare processes, or measure collectives")
    return Text(", ".join(parts), style="bold red" if found.failed else "bold green")
