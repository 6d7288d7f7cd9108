"""Measurement: what collectives took on each axis of a mesh; values only."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from parallel3d.mesh import MeshLayout
from parallel3d.planner.cluster import AxisLink, Cluster, collective_time

SMALL = 4096  # bytes that show the latency


@dataclass(frozen=True)
class Measurement:
    """Of all ranks.

    Attributes:
        layout: resolved.
        hosts: rank -> name of its machine.
        seconds: rank -> (axis, operation, bytes of the whole tensor) -> what it took there.
        errors: rank -> why it has nothing to say.
        cluster: what to expect; None: no profile fits.
    """

    layout: MeshLayout
    hosts: dict[int, str]
    seconds: dict[int, dict[tuple[str, str, int], float]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    cluster: Cluster | None = None

    @property
    def measured(self) -> list[tuple[str, str, int]]:
        """(axis, operation, bytes) that every rank has a time of."""
        if not self.seconds or self.errors:
            return []
        return list(next(iter(self.seconds.values())))

    def of_groups(self, what: tuple[str, str, int]) -> dict[tuple[int, ...], float]:
        """Each group of the axis -> its slowest rank's seconds."""
        groups = self.layout.groups(what[0])
        return {g: max(self.seconds[rank][what] for rank in g) for g in groups}

    def link(self, axis: str) -> AxisLink:
        """How the axis's groups lie on the machines that there are: of the worst group."""
        worst = max(
            (len({self.hosts[r] for r in group}), group) for group in self.layout.groups(axis)
        )
        nodes, group = worst
        return AxisLink(len(group), -(-len(group) // nodes))


@dataclass(frozen=True)
class Line:
    """One operation on one axis.

    Attributes:
        groups: each with its bandwidth: bytes of the whole tensor over the slowest rank's seconds.
        latency: seconds of ``SMALL`` bytes, of the slowest group.
        expected, expected_latency: by the profile; None without one.
    """

    axis: str
    operation: str
    nbytes: int
    nodes: int
    groups: dict[tuple[int, ...], float]
    latency: float
    expected: float | None
    expected_latency: float | None

    @property
    def slowest(self) -> tuple[int, ...]:
        return min(self.groups, key=self.groups.__getitem__)

    @property
    def bandwidth(self) -> float:
        """Of the slowest group, bytes a second."""
        return self.groups[self.slowest]

    @property
    def median(self) -> float:
        return statistics.median(self.groups.values())


def lines_of(measurement: Measurement) -> list[Line]:
    """By axis and operation."""
    lines = []
    for axis, operation, nbytes in measurement.measured:
        if nbytes == SMALL:
            continue
        link = measurement.link(axis)
        times = measurement.of_groups((axis, operation, nbytes))
        latency = max(measurement.of_groups((axis, operation, SMALL)).values())
        expected = expected_latency = None
        if measurement.cluster is not None:
            expected = nbytes / collective_time(operation, nbytes, link, measurement.cluster)
            expected_latency = collective_time(operation, SMALL, link, measurement.cluster)
        bandwidths = {group: nbytes / seconds for group, seconds in times.items()}
        lines.append(
            Line(
                axis, operation, nbytes, link.nodes, bandwidths, latency, expected, expected_latency
            )
        )
    return lines
