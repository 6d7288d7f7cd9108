"""Measurement: the time that collectives took on each axis of a mesh, as plain values."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from parallel3d.mesh import MeshLayout
from parallel3d.planner.cluster import AxisLink, Cluster, collective_time

SMALL = 4096
"""Bytes of the message that measures latency."""


@dataclass(frozen=True)
class Measurement:
    """The times of all ranks.

    Attributes:
        layout: the resolved mesh layout.
        hosts: rank -> host name.
        seconds: rank -> (axis, operation, bytes of the whole tensor) -> seconds.
        errors: rank -> why it has no times.
        cluster: what is expected; None if no profile fits.
    """

    layout: MeshLayout
    hosts: dict[int, str]
    seconds: dict[int, dict[tuple[str, str, int], float]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    cluster: Cluster | None = None

    def group_seconds(self, axis: str, operation: str, nbytes: int) -> dict[tuple[int, ...], float]:
        """Returns group of the axis -> seconds of its slowest rank."""
        key = axis, operation, nbytes
        groups = self.layout.groups(axis)
        return {g: max(self.seconds[rank][key] for rank in g) for g in groups}

    def link(self, axis: str) -> AxisLink:
        """How the ranks of the axis's most distributed group lie on nodes."""
        groups = self.layout.groups(axis)
        nodes, group = max((len({self.hosts[rank] for rank in g}), g) for g in groups)
        return AxisLink(len(group), -(-len(group) // nodes))


@dataclass(frozen=True)
class Line:
    """One operation on one axis.

    Attributes:
        groups: group -> bandwidth: bytes of the whole tensor per second of the slowest rank.
        latency: seconds for ``SMALL`` bytes in the slowest group.
        expected, expected_latency: the profile's values; None without a profile.
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
        """The slowest group."""
        return min(self.groups, key=self.groups.__getitem__)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the slowest group."""
        return self.groups[self.slowest]

    @property
    def median(self) -> float:
        return statistics.median(self.groups.values())

    def to_json(self) -> dict[str, Any]:
        groups = [{"ranks": list(g), "bytes_per_second": b} for g, b in self.groups.items()]
        more = {"groups": groups, "bandwidth": self.bandwidth, "slowest": self.slowest}
        return {**asdict(self), **more}


def lines_of(measurement: Measurement) -> list[Line]:
    """Returns the measured operations by axis; none if a rank has failed."""
    if not measurement.seconds or measurement.errors:
        return []
    lines = []
    for axis, operation, nbytes in next(iter(measurement.seconds.values())):
        if nbytes == SMALL:
            continue
        link, cluster = measurement.link(axis), measurement.cluster
        seconds = measurement.group_seconds(axis, operation, nbytes)
        latency = max(measurement.group_seconds(axis, operation, SMALL).values())
        expected = expected_latency = None
        if cluster is not None:
            expected = nbytes / collective_time(operation, nbytes, link, cluster)
            expected_latency = collective_time(operation, SMALL, link, cluster)
        groups = {group: nbytes / taken for group, taken in seconds.items()}
        line = Line(
            axis, operation, nbytes, link.nodes, groups, latency, expected, expected_latency
        )
        lines.append(line)
    return lines
