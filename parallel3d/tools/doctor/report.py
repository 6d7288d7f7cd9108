"""What doctor has found, as tables for people."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from parallel3d.mesh.agreement import name_ranks
from parallel3d.tools.doctor.doctor import Diagnosis
from parallel3d.tools.doctor.finding import Finding, Severity
from parallel3d.tools.doctor.measuring import Line

_STYLE = {
    Severity.error: "bold red",
    Severity.warning: "yellow",
    Severity.note: "cyan",
    Severity.ok: "green",
}


def render(found: Diagnosis, console: Console) -> None:
    """Prints it: the machines, the findings, the collectives, a line that sums up."""
    console.print(_machines(found))
    if found.findings:
        console.print(_findings(found))
    if found.lines:
        console.print(_collectives(found.lines))
    elif found.not_measured:
        console.print(Text(f"collectives not measured: {found.not_measured}", style="dim"))
    console.print(_summary(found))


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )


def _machines(found: Diagnosis) -> Table:
    table = _table("nodes")
    for name in ("node", "ranks", "devices", "torch", "CUDA", "NCCL", "addresses"):
        table.add_column(name, overflow="fold")
    by_host: dict[str, list[int]] = {}
    for rank, host in found.hosts().items():
        by_host.setdefault(host, []).append(rank)
    for host, ranks in by_host.items():
        own = found.facts[ranks[0]]
        kinds = Counter(each.name for each in own.devices)
        table.add_row(
            host,
            name_ranks(ranks).partition(" ")[2],
            ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "CPU",
            *(own.versions.get(name, "-") for name in ("torch", "cuda", "nccl")),
            ", ".join(f"{i.name} {i.addresses[0]}" for i in own.usable) or "-",
        )
    return table


def _findings(found: Diagnosis) -> Table:
    table = _table("findings")
    table.leading = 1
    table.add_column("")
    table.add_column("what", overflow="fold", ratio=3)
    table.add_column("why, and what to do", overflow="fold", ratio=4)
    for each in found.findings:
        what = Group(
            Text(each.name, style="bold"), Text(each.seen), Text(_where(each, found), style="dim")
        )
        advice = Group(Text(each.why), Text(f"do: {each.do}", style="green"))
        table.add_row(Text(each.severity, style=_STYLE[each.severity]), what, advice)
    return table


def _where(finding: Finding, found: Diagnosis) -> str:
    """On which nodes; nothing where there is one process, or all ranks have it."""
    hosts = found.hosts()
    ranks = set(finding.ranks)
    if len(hosts) < 2 or not ranks:
        return ""
    if ranks == set(hosts):
        return "on all ranks"
    names = list(dict.fromkeys(hosts.get(rank, "?") for rank in finding.ranks))
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"on {shown} ({name_ranks(ranks)})"


def _collectives(lines: list[Line]) -> Table:
    table = _table("collectives: of the slowest group; the profile's in brackets")
    for name in ("axis", "operation", "groups"):
        table.add_column(name)
    for name in ("MB", "GB/s", "4 KiB, us", "verdict"):
        table.add_column(name, justify="right")
    for each in lines:
        size, groups = len(each.slowest), len(each.groups)
        table.add_row(
            each.axis,
            each.operation,
            f"{groups} of {size} ranks on {each.nodes} node{'s' if each.nodes > 1 else ''}",
            f"{each.nbytes / 1e6:,.0f}",
            f"{each.bandwidth / 1e9:.3g}" + _expected(each.expected, 1e-9),
            f"{each.latency * 1e6:,.0f}" + _expected(each.expected_latency, 1e6),
            _verdict(each),
        )
    return table


def _expected(value: float | None, scale: float) -> str:
    return "" if value is None else f" ({value * scale:.3g})"


def _verdict(line: Line) -> Text:
    from parallel3d.tools.doctor.checks.axes import SLOW

    if line.expected is None:
        return Text("no profile", style="dim")
    part = line.bandwidth / line.expected
    return Text(f"{part:.0%}", style="green" if part >= SLOW else "yellow")


def _summary(found: Diagnosis) -> Text:
    counts = Counter(each.severity for each in found.findings)
    said = [
        f"{counts[each]} {each}{'s' if counts[each] > 1 else ''}"
        for each in reversed(Severity)
        if counts[each]
    ]
    said.append(f"{len(found.passed)} checks passed")
    style = "bold red" if found.failed else "bold green"
    return Text(", ".join(said), style=style)
