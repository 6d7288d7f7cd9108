"""The mesh on the nodes that there are, and what its collectives take."""

from __future__ import annotations

from parallel3d.mesh.agreement import name_ranks
from parallel3d.tools.doctor.finding import Result, Seen, Severity, on_axes
from parallel3d.tools.doctor.measuring import Line, Measurement, lines_of

AREA = "collectives"
SLOW = 0.6
"""Of the profile's bandwidth: less is slow. Its tables are good to 15 % within a node, 20 % between nodes."""
UNEQUAL = 0.6
"""Of the median of an axis's groups: one with less, in two operations, is odd."""
_LATE = 4.0  # times the profile's latency


@on_axes(
    "tp-across-nodes",
    AREA,
    Severity.warning,
    why="Tensor parallelism waits for its collectives in every layer: between nodes they take many times as "
    "long as within one.",
    do="Choose a tp that divides the ranks of a node; start equal numbers of ranks on all nodes.",
)
def tp_across(found: Measurement) -> Result:
    if found.layout.tp == 1:
        return None
    groups = found.layout.groups("tp")
    across = [g for g in groups if len({found.hosts[rank] for rank in g}) > 1]
    if not across:
        return None
    text = f"{len(across)} of {len(groups)} tp groups lie on several nodes: {name_ranks(across[0])}"
    return Seen(
        f"{text} on {_hosts(found, across[0])}", ranks=tuple(sorted({r for g in across for r in g}))
    )


@on_axes(
    "collective-failed",
    AREA,
    Severity.error,
    why="Training would fail or hang at the same place.",
    do="Look at what the rank says, then at the network between these nodes (NCCL_DEBUG=INFO).",
)
def failed(found: Measurement) -> Result:
    if not found.errors:
        return None
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(found.errors.items()):
        by_text.setdefault(text, []).append(rank)
    said = (f"{name_ranks(ranks)}: {text}" for text, ranks in by_text.items())
    return Seen("\n".join(said), ranks=tuple(sorted(found.errors)))


@on_axes(
    "axis-slow",
    AREA,
    Severity.warning,
    why="The planner's profile expects more: communication that should hide behind computation will not.",
    do="NCCL_DEBUG=INFO shows which transport is used (NET/Socket instead of NET/IB, SHM instead of P2P); "
    "parallel3d calibrate makes a profile of these machines, if the built-in one is not theirs.",
)
def slow(found: Measurement) -> Result:
    lines = [
        each for each in lines_of(found) if each.expected and each.bandwidth < SLOW * each.expected
    ]
    return "\n".join(_slow(each) for each in lines) or None


def _slow(line: Line) -> str:
    assert line.expected is not None
    return (
        f"{line.operation} on {line.axis}: {line.bandwidth / 1e9:.3g} GB/s, "
        f"{line.bandwidth / line.expected:.0%} of {line.expected / 1e9:.3g} GB/s"
    )


@on_axes(
    "axis-late",
    AREA,
    Severity.note,
    why="Small messages (norms, losses, tensor parallelism on short sequences) take too long.",
    do="Look at the network between the nodes (ping, interrupt moderation), and at CPUs that are busy.",
)
def late(found: Measurement) -> Result:
    said = [
        f"{each.operation} on {each.axis}: {each.latency * 1e6:,.0f} us for 4 KiB instead of "
        f"{each.expected_latency * 1e6:,.0f}"
        for each in lines_of(found)
        if each.expected_latency and each.latency > _LATE * each.expected_latency
    ]
    return "\n".join(said) or None


@on_axes(
    "group-slow",
    AREA,
    Severity.warning,
    why="All groups wait for the slowest in every step.",
    do="Its nodes have something that the others don't: a slower link, a busy or throttled device. Test them "
    "alone (doctor on these nodes), and leave them out if it stays so.",
)
def group_slow(found: Measurement) -> Result:
    slow: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for each in lines_of(found):
        usual = each.median if len(each.groups) > 2 else max(each.groups.values())
        for group, bandwidth in each.groups.items():
            if bandwidth < UNEQUAL * usual:
                text = f"{each.operation} {bandwidth / 1e9:.3g} GB/s, others {usual / 1e9:.3g}"
                slow.setdefault((each.axis, group), []).append(text)
    odd = {key: said for key, said in slow.items() if len(said) > 1}  # one alone is noise
    if not odd:
        return None
    lines = (
        f"{axis}, {name_ranks(group)} on {_hosts(found, group)}: {'; '.join(said)}"
        for (axis, group), said in odd.items()
    )
    return Seen("\n".join(lines), ranks=tuple(sorted({rank for _, g in odd for rank in g})))


def _hosts(found: Measurement, group: tuple[int, ...]) -> str:
    return ", ".join(dict.fromkeys(found.hosts[rank] for rank in group))
