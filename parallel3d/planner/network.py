"""Seconds that a collective takes on a mesh axis, from measured tables of NCCL."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, gcd, log2

from parallel3d.mesh import MeshLayout
from parallel3d.planner.cluster import Cluster
from parallel3d.planner.terms import Constant

__all__ = ["AxisLink", "collective_time", "describe_collective", "link_of"]

_WHOLE = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
_RAMP = ((8e6, 0.68), (16e6, 0.79), (float("inf"), 0.87))  # bytes a GPU -> part of the bandwidth


@dataclass(frozen=True)
class AxisLink:
    """How the ranks of one axis's group lie on the nodes.

    Attributes:
        size: ranks of the group.
        per_node: how many of them are on one node.
    """

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)


def link_of(layout: MeshLayout, axis: str, cluster: Cluster) -> AxisLink:
    """Of ``axis``: the inner axes' ranks lie between its own.

    Where groups don't end with nodes, it is the worst group's: the fewest ranks that one of its nodes has.
    """
    stride = {"tp": 1, "shard": layout.tp, "replicate": layout.tp * layout.shard}[axis]
    size = getattr(layout, axis)
    places = max(cluster.domain // stride, 1)  # of this axis on a node
    return AxisLink(size, size if places % size == 0 else gcd(size, places))


@lru_cache(maxsize=65536)
def collective_time(kind: str, nbytes: float, link: AxisLink, cluster: Cluster) -> float:
    """Seconds of one collective.

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        nbytes: of the whole tensor: what is gathered, scattered or reduced.
    """
    if link.size == 1 or not nbytes:
        return 0.0
    if link.nodes == 1:
        return _within(kind, nbytes, link.size, cluster)
    return _across(kind, nbytes, link, cluster)


def _within(kind: str, nbytes: float, size: int, cluster: Cluster) -> float:
    """One node. Source: fits of NVIDIA's measured NCCL tables, see hardware.toml."""
    start, bandwidth, ramp = _constants(kind, size, cluster)
    return start + (nbytes + ramp * (1 - exp(-nbytes / ramp))) / bandwidth


@lru_cache(maxsize=4096)
def _constants(kind: str, size: int, cluster: Cluster) -> tuple[float, float, float]:
    table = cluster.gpu.collectives.get(kind)
    if table:
        known = min((n for n in table if n >= size), default=max(table))
        start, bandwidth, ramp = table[known]
        return start * 1e-6, bandwidth * 1e9, ramp * 1e6
    # No table: a ring on the links' datasheet rate, 80 % of it, as on the GPUs that there are tables of.
    rate = cluster.gpu.link * 1e9 * 0.8
    if cluster.gpu.mesh_links:
        rate *= min(size - 1, cluster.gpu.mesh_links) / cluster.gpu.mesh_links
    return 15e-6, rate * size / (size - 1) / _WHOLE[kind], 8e6


def _across(kind: str, nbytes: float, link: AxisLink, cluster: Cluster) -> float:
    """Several nodes: a ring, or for an all-reduce a tree where that is faster.

    Latency of a ring: nodes x (11 + 3.3 x ranks of a node) us; of a tree: 35 us x log2(nodes) at 0.6 of the
    ring's bandwidth; both fitted to NCCL 2.27's own tuning numbers (mean 6 %). Bandwidth: every rank's NIC
    at 0.96 of its rate.
    """
    latency, rate = _ring(nbytes, link, cluster)
    whole = _WHOLE[kind]
    ring = latency * whole + nbytes * whole / rate
    if kind != "all_reduce":
        return ring
    tree = 35e-6 * log2(link.nodes) + 17e-6 + nbytes * whole / (0.6 * rate)
    return min(ring, tree)


def _ring(nbytes: float, link: AxisLink, cluster: Cluster) -> tuple[float, float]:
    """(seconds of latency, bytes a second) of a ring across nodes."""
    n = link.size
    rate = link.per_node * cluster.nic * 0.96e9 * n / (n - 1)
    if link.per_node > 1:
        rate = min(rate, _constants("all_gather", link.per_node, cluster)[1])
    per_gpu = nbytes / n * link.nodes
    return link.nodes * (11e-6 + 3.3e-6 * link.per_node), rate * next(
        part for most, part in _RAMP if per_gpu <= most
    )


def describe_collective(
    kind: str, nbytes: float, link: AxisLink, cluster: Cluster
) -> tuple[str, tuple[tuple[str, Constant], ...]]:
    """The formula that ``collective_time`` uses, and its constants."""
    source = cluster.gpu.source
    if link.nodes == 1:
        start, bandwidth, ramp = _constants(kind, link.size, cluster)
        measured = (
            "fit of measured NCCL times"
            if cluster.gpu.collectives.get(kind)
            else "0.8 of the links"
        )
        where = f"{measured}; {source}"
        return "start + (bytes + ramp (1 - exp(-bytes / ramp))) / bandwidth", (
            ("start", Constant("start", start * 1e6, "us", where)),
            ("bandwidth", Constant("bandwidth", bandwidth / 1e9, "GB/s", where)),
            ("ramp", Constant("ramp", ramp / 1e6, "MB", where)),
        )
    latency, rate = _ring(nbytes, link, cluster)
    own = cluster.nic != cluster.gpu.nic
    formula = "latency + bytes / rate"
    if kind == "all_reduce":
        formula = (
            "min(2 (latency + bytes / rate), 17 us + 35 us log2(nodes) + 2 bytes / (0.6 rate))"
        )
    why = "nodes (11 + 3.3 ranks of a node) us, fitted to NCCL 2.27's tuning numbers, mean 6 %"
    how = "ranks of a node * 0.96 nic * n / (n - 1), at most a node's own; * 0.68, 0.79 or 0.87 by size"
    return formula, (
        ("latency", Constant("latency", latency * 1e6, "us", why)),
        ("rate", Constant("rate", rate / 1e9, "GB/s", how)),
        ("nic", Constant("nic", cluster.nic, "GB/s", "as given" if own else source)),
    )
