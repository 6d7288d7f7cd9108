"""Checks of the mesh on the nodes, and of the time that its collectives take."""

from __future__ import annotations

from parallel3d.mesh.agreement import name_ranks
from parallel3d.tools.doctor.finding import ON_AXES, Area, Result, Seen
from parallel3d.tools.doctor.measuring import Measurement, lines_of

COLLECTIVES = Area("collectives", ON_AXES)
SLOW = 0.6
"""An axis with less than this part of the profile's bandwidth is slow. The profile's tables are accurate to
15 % within a node and 20 % between nodes."""
UNEQUAL = 0.6
"""A group with less than this part of its axis's median bandwidth, in two operations, is slow."""
_LATE = 4.0  # times the profile's latency


@COLLECTIVES.warning(
    why="Tensor parallelism waits for its collectives in every layer: between nodes they take many times as "
    "long as within one.",
    do="Choose a tp that divides the ranks of a node; start equal numbers of ranks on all nodes.",
)
def tp_across_nodes(measurement: Measurement) -> Result:
    if measurement.layout.tp == 1:
        return None
    groups = measurement.layout.groups("tp")
    across = [g for g in groups if len({measurement.hosts[rank] for rank in g}) > 1]
    if not across:
        return None
    text = f"{len(across)} of {len(groups)} tp groups lie on several nodes: {name_ranks(across[0])}"
    ranks = tuple(sorted({rank for group in across for rank in group}))
    return Seen(f"{text} on {_hosts(measurement, across[0])}", ranks=ranks)


@COLLECTIVES.error(
    why="Training would fail or hang at the same place.",
    do="Read the rank's error, then check the network between these nodes (NCCL_DEBUG=INFO).",
)
def collective_failed(measurement: Measurement) -> Result:
    if not measurement.errors:
        return None
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(measurement.errors.items()):
        by_text.setdefault(text, []).append(rank)
    lines = (f"{name_ranks(ranks)}: {text}" for text, ranks in by_text.items())
    return Seen("\n".join(lines), ranks=tuple(sorted(measurement.errors)))


@COLLECTIVES.warning(
    why="The planner's profile predicts more: communication will take longer than the computation that "
    "should hide it.",
    do="NCCL_DEBUG=INFO shows which transport is used (NET/Socket instead of NET/IB, SHM instead of P2P); "
    "parallel3d calibrate makes a profile of these machines, if the built-in one is not theirs.",
)
def axis_slow(measurement: Measurement) -> Result:
    return "\n".join(
        f"{line.operation} on {line.axis}: {line.bandwidth / 1e9:.3g} GB/s, "
        f"{line.bandwidth / line.expected:.0%} of {line.expected / 1e9:.3g} GB/s"
        for line in lines_of(measurement)
        if line.expected and line.bandwidth < SLOW * line.expected
    )


@COLLECTIVES.note(
    why="Small messages (norms, losses, tensor parallelism on short sequences) take too long.",
    do="Check the network between the nodes (ping, interrupt moderation), and look for busy CPUs.",
)
def axis_late(measurement: Measurement) -> Result:
    return "\n".join(
        f"{line.operation} on {line.axis}: {line.latency * 1e6:,.0f} us for 4 KiB instead of "
        f"{line.expected_latency * 1e6:,.0f}"
        for line in lines_of(measurement)
        if line.expected_latency and line.latency > _LATE * line.expected_latency
    )


@COLLECTIVES.warning(
    why="All groups wait for the slowest in every step.",
    do="Its nodes differ from the others: a slower link, a busy or throttled device. Test them alone (doctor "
    "on these nodes), and leave them out if they stay slow.",
)
def group_slow(measurement: Measurement) -> Result:
    slow: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for line in lines_of(measurement):
        usual = line.median if len(line.groups) > 2 else max(line.groups.values())
        for group, bandwidth in line.groups.items():
            if bandwidth < UNEQUAL * usual:
                text = f"{line.operation} {bandwidth / 1e9:.3g} GB/s, others {usual / 1e9:.3g}"
                slow.setdefault((line.axis, group), []).append(text)
    slow = {key: texts for key, texts in slow.items() if len(texts) > 1}  # a single one is noise
    lines = (
        f"{axis}, {name_ranks(group)} on {_hosts(measurement, group)}: {'; '.join(texts)}"
        for (axis, group), texts in slow.items()
    )
    ranks = tuple(sorted({rank for _, group in slow for rank in group}))
    return Seen("\n".join(lines), ranks=ranks) if slow else None


def _hosts(measurement: Measurement, group: tuple[int, ...]) -> str:
    return ", ".join(dict.fromkeys(measurement.hosts[rank] for rank in group))
