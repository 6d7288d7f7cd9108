"""Times collectives on every axis of the mesh, and the checks of these times."""

import statistics
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from parallel3d.errors import Parallel3dError
from parallel3d.mesh import MeshLayout, build_mesh
from parallel3d.mesh.agreement import name_ranks
from parallel3d.mesh.build import backend_string, default_device_type, set_device
from parallel3d.observability.flops import gpus_called
from parallel3d.planner.calibrate import COLLECTIVES, collective_seconds
from parallel3d.planner.cluster import AxisLink, Cluster, collective_time
from parallel3d.tools.doctor.finding import ON_AXES, Area, Result, Seen, ranks_by_value
from parallel3d.tools.doctor.store_group import StoreGroup

SMALL = 4096
"""Bytes of the message that measures latency."""


@dataclass(frozen=True)
class Measurement:
    """The times of collectives on all ranks.

    Attributes:
        layout: the resolved mesh layout.
        hosts: rank -> host name.
        seconds: rank -> (axis, operation, bytes of the whole tensor) -> seconds.
        errors: rank -> why it could not measure.
        cluster: the planner's profile to compare with; None if there is none for this device.
    """

    layout: MeshLayout
    hosts: dict[int, str]
    seconds: dict[int, dict[tuple[str, str, int], float]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    cluster: Cluster | None = None

    def group_seconds(self, axis: str, operation: str, nbytes: int) -> dict[tuple[int, ...], float]:
        """Returns ranks of a group of the axis -> seconds of the group's slowest rank."""
        key = axis, operation, nbytes
        groups = self.layout.groups(axis)
        return {g: max(self.seconds[rank][key] for rank in g) for g in groups}

    def link(self, axis: str) -> AxisLink:
        """Returns how the axis's group that is spread over most nodes is distributed over them."""
        groups = self.layout.groups(axis)
        nodes, group = max((len({self.hosts[rank] for rank in g}), g) for g in groups)
        return AxisLink(len(group), -(-len(group) // nodes))


@dataclass(frozen=True)
class Line:
    """The times of one operation on one mesh axis.

    Attributes:
        groups: ranks of a group -> its bandwidth: bytes of the whole tensor per second, on its slowest rank.
        latency: seconds for a tensor of ``SMALL`` bytes in the slowest group.
        expected, expected_latency: what the planner's profile predicts for both; None without a profile.
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
        """Ranks of the group with the lowest bandwidth."""
        return min(self.groups, key=self.groups.__getitem__)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of that group."""
        return self.groups[self.slowest]

    def to_json(self) -> dict[str, Any]:
        groups = [{"ranks": list(g), "bytes_per_second": b} for g, b in self.groups.items()]
        more = {"groups": groups, "bandwidth": self.bandwidth, "slowest": self.slowest}
        return {**asdict(self), **more}


def lines_of(measurement: Measurement) -> list[Line]:
    """Returns a ``Line`` for each measured axis and operation; none if a rank has failed."""
    if not measurement.seconds or measurement.errors:
        return []
    lines = []
    for axis, operation, nbytes in next(iter(measurement.seconds.values())):
        if nbytes == SMALL:
            continue
        link, cluster = measurement.link(axis), measurement.cluster
        seconds = measurement.group_seconds(axis, operation, nbytes)
        latency = max(measurement.group_seconds(axis, operation, SMALL).values())
        expected: tuple[float | None, float | None] = (None, None)
        if cluster is not None:
            whole, small = (collective_time(operation, n, link, cluster) for n in (nbytes, SMALL))
            expected = nbytes / whole, small
        groups = {group: nbytes / taken for group, taken in seconds.items()}
        lines.append(Line(axis, operation, nbytes, link.nodes, groups, latency, *expected))
    return lines


# The time that collectives take on every axis, on this rank.

_BYTES = {"cuda": 2**28, "cpu": 2**22}  # of the whole tensor


def measure(layout: MeshLayout, group: StoreGroup, megabytes: float | None) -> dict[str, Any]:
    """Makes a process group and the mesh, and times collectives of ``megabytes``. Returns "seconds": [[axis,
    operation, bytes, seconds], ...] and "error", which is a text, so that ranks can exchange it."""
    device = default_device_type()
    try:
        set_device(device, group.rank)
        dist.init_process_group(
            backend_string(device),
            store=dist.PrefixStore("group", group.store),
            rank=group.rank,
            world_size=group.world_size,
            timeout=timedelta(seconds=group.seconds),
        )
        nbytes = _BYTES.get(device, 2**28) if megabytes is None else int(megabytes * 1e6)
        mesh = build_mesh(layout, device_type=device)
        torch.set_num_threads(1)
        groups = {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()}
        seconds = [
            [axis, name, size, collective_seconds(name, size, own.size(), own, device)]
            for axis, own in groups.items()
            if own.size() > 1
            for name in COLLECTIVES
            for size in (SMALL, max(nbytes, 2 * SMALL))
        ]
        return {"seconds": seconds, "error": ""}
    except (Parallel3dError, RuntimeError) as error:  # backends raise RuntimeError
        return {"seconds": [], "error": " ".join(str(error).split())[:500]}
    finally:
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()


def profile_of(device: str, gib: float) -> str | None:
    """Returns the planner's name of torch's ``device``; ``gib`` of memory decides between several."""
    near = [gpu for gpu in gpus_called(device) if abs(gpu.capacity_gib - gib) < 0.1 * gib]
    return min(near, key=lambda gpu: abs(gpu.capacity_gib - gib)).name if near else None


AREA = Area("collectives", ON_AXES)
SLOW = 0.6
"""An axis with less than this part of the profile's bandwidth is slow. The profile's tables are accurate to
15 % within a node and 20 % between nodes."""
UNEQUAL = 0.6
"""A group with less than this part of its axis's median bandwidth, in two operations, is slow."""
_LATE = 4.0  # times the profile's latency


@AREA.warning(
    "Choose a tp that divides the ranks of a node; start equal numbers of ranks on all nodes."
)
def tp_across_nodes(measurement: Measurement) -> Result:
    """Tensor parallelism waits for its collectives in every layer: between nodes they take many times as long
    as within one."""
    if measurement.layout.tp == 1:
        return None
    groups = measurement.layout.groups("tp")
    across = [g for g in groups if len({measurement.hosts[rank] for rank in g}) > 1]
    if not across:
        return None
    text = f"{len(across)} of {len(groups)} tp groups lie on several nodes: {name_ranks(across[0])}"
    return Seen(f"{text} on {_hosts(measurement, across[0])}", ranks=sum(across, ()))


@AREA.error("Read the rank's error, then check the network between these nodes (NCCL_DEBUG=INFO).")
def collective_failed(measurement: Measurement) -> Result:
    """A collective failed here: training would fail or hang at the same place."""
    errors = measurement.errors
    lines = (f"{name_ranks(ranks)}: {text}" for text, ranks in ranks_by_value(errors).items())
    return Seen("\n".join(lines), ranks=tuple(errors)) if errors else None


@AREA.warning(
    "NCCL_DEBUG=INFO shows which transport is used (NET/Socket instead of NET/IB, SHM instead of P2P); "
    "parallel3d calibrate makes a profile of these machines, if the built-in one is not theirs."
)
def axis_slow(measurement: Measurement) -> Result:
    """The planner's profile predicts more bandwidth: communication will take longer than the computation that
    should hide it."""
    return "\n".join(
        f"{line.operation} on {line.axis}: {line.bandwidth / 1e9:.3g} GB/s, "
        f"{line.bandwidth / line.expected:.0%} of {line.expected / 1e9:.3g} GB/s"
        for line in lines_of(measurement)
        if line.expected and line.bandwidth < SLOW * line.expected
    )


@AREA.note(
    "Check the network between the nodes (ping, interrupt moderation), and look for busy CPUs."
)
def axis_late(measurement: Measurement) -> Result:
    """Small messages (norms, losses, tensor parallelism on short sequences) take longer than the profile
    predicts."""
    return "\n".join(
        f"{line.operation} on {line.axis}: {line.latency * 1e6:,.0f} us for 4 KiB instead of "
        f"{line.expected_latency * 1e6:,.0f}"
        for line in lines_of(measurement)
        if line.expected_latency and line.latency > _LATE * line.expected_latency
    )


@AREA.warning(
    "Its nodes differ from the others: a slower link, a busy or throttled device. Test them alone (doctor "
    "on these nodes), and leave them out if they stay slow."
)
def group_slow(measurement: Measurement) -> Result:
    """All groups of the axis wait for the slowest in every step."""
    slow: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for line in lines_of(measurement):
        usual = (statistics.median if len(line.groups) > 2 else max)(line.groups.values())
        for group, bandwidth in line.groups.items():
            if bandwidth < UNEQUAL * usual:
                text = f"{line.operation} {bandwidth / 1e9:.3g} GB/s, others {usual / 1e9:.3g}"
                slow.setdefault((line.axis, group), []).append(text)
    slow = {key: texts for key, texts in slow.items() if len(texts) > 1}  # a single one is noise
    lines = (
        f"{axis}, {name_ranks(group)} on {_hosts(measurement, group)}: {'; '.join(texts)}"
        for (axis, group), texts in slow.items()
    )
    ranks = sum((group for _, group in slow), ())
    return Seen("\n".join(lines), ranks=ranks) if slow else None


def _hosts(measurement: Measurement, group: tuple[int, ...]) -> str:
    return ", ".join(dict.fromkeys(measurement.hosts[rank] for rank in group))
