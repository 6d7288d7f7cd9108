"""Cluster: the machines. GPUs are data, in hardware.toml or a file of yours."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from math import exp, gcd, inf, log2
from os import PathLike
from pathlib import Path
from typing import Any

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.arguments import check_number, check_size, nearest, own_data
from parallel3d.planner.constants import Constant

Table = dict[str, dict[int, tuple[float, float, float]]]


@dataclass(frozen=True)
class Gpu:
    """One accelerator and its links. Rates are of one GPU, in one direction.

    Attributes:
        peak: dense bf16, TFLOP/s.
        capacity_gib: memory that torch reports, GiB.
        bandwidth: bandwidth of its memory, TB/s.
        gemm_efficiency, gemm_start_us: a matmul takes start + FLOPs / (efficiency * peak).
        node: GPUs of a node.
        link: GB/s to the others of its node.
        nic: GB/s to other nodes.
        host: GB/s to and from the memory of its host.
        host_gib: GiB of that memory: a GPU's part of its node's.
        domain: GPUs that the fast links reach, if more than a node's.
        watts: its power limit; without one its clock is not limited.
        fp32_slowdown: factor by which matmuls take longer in float32 than in bf16.
        mesh_links: links of a GPU if they go to single peers (xGMI); 0: a switch.
        collectives: operation -> GPUs -> (start us, GB/s, ramp MB), as measured; else derived from ``link``.
        source: where these numbers are from.
    """

    name: str
    peak: float
    capacity_gib: float
    bandwidth: float
    gemm_efficiency: float
    gemm_start_us: float
    node: int
    link: float
    nic: float
    host: float = 31.0
    host_gib: float = 119.0
    domain: int = 0
    watts: float = 1e6
    fp32_slowdown: float = 8.0
    mesh_links: int = 0
    collectives: Table = field(default_factory=dict, hash=False, compare=False, repr=False)
    source: str = ""

    @property
    def family(self) -> str:
        """ "a100", "h100" ...: the part of the name before the first dash."""
        return self.name.partition("-")[0]


_OTHER = ("name", "domain", "mesh_links", "collectives", "source")
MEASURED = tuple(each.name for each in fields(Gpu) if each.name not in _OTHER)
"""The numbers of a ``Gpu`` that must be above 0."""


@dataclass(frozen=True)
class Cluster:
    """``nodes`` nodes of equal GPUs.

    Attributes:
        gpus_per_node: GPUs of a node; by default ``gpu.node``.
        nic: GB/s from each GPU to other nodes; by default ``gpu.nic``.
    """

    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = None  # type: ignore[assignment]  # filled in below
    nic: float = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if not isinstance(self.gpu, Gpu):
            raise PlanningError(
                f"Cluster(gpu={self.gpu!r}): gpu must be a Gpu; by its name it is "
                f"Cluster.of({self.gpu!r}, nodes={self.nodes!r})"
            )
        if self.gpus_per_node is None:
            object.__setattr__(self, "gpus_per_node", self.gpu.node)
        if self.nic is None:
            object.__setattr__(self, "nic", self.gpu.nic)
        check_size("nodes", self.nodes)
        check_size("gpus_per_node", self.gpus_per_node)
        check_number("nic", self.nic, "GB/s ")

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def domain(self) -> int:
        """GPUs that are joined by the fast links."""
        rack = self.gpu.domain if self.gpu.domain > self.gpu.node else 0
        return max(rack, self.gpus_per_node)

    @classmethod
    def of(
        cls,
        name: str,
        nodes: int = 1,
        gpus_per_node: int | None = None,
        nic: float | None = None,
        profile: str | PathLike[str] | None = None,
    ) -> Cluster:
        """The cluster of ``nodes`` nodes of the GPU ``name``.

        Args:
            nic: GB/s from each GPU to other nodes.
            profile: a TOML file with more GPUs (the form of hardware.toml), as ``calibrate`` writes.

        Raises:
            PlanningError: the GPU is unknown, or a number is out of range.
        """
        return cls(gpu(name, profile), nodes, gpus_per_node, nic)  # type: ignore[arg-type]


def gpu(name: str, profile: str | PathLike[str] | None = None) -> Gpu:
    """The GPU of this name or short name.

    Args:
        name: such as "h100-80gb-sxm" or "h100", in any case.
        profile: a TOML file of further GPUs, as for ``gpus``.

    Raises:
        PlanningError: no GPU has this name; the message names the nearest.
    """
    if not isinstance(name, str):
        raise PlanningError(f"the GPU is {name!r}; it must be a name, such as 'h100-80gb-sxm'")
    known = gpus(profile)
    if (lower := name.lower()) not in known:
        raise PlanningError(f"there is no GPU {name!r}; the nearest: {nearest(lower, known)}")
    return known[lower]


def gpus(profile: str | PathLike[str] | None = None) -> dict[str, Gpu]:
    """All GPUs by their names and short names.

    Args:
        profile: a TOML file of GPUs, as ``calibrate`` writes; they replace built-in ones of the same name.

    Raises:
        PlanningError: the profile can't be read, or contains anything but GPUs.
    """
    if profile is None:
        return dict(_built_in())
    try:
        data = tomllib.loads(Path(profile).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise PlanningError(f"{profile} is no TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanningError(f"the profile {profile} can't be read: {error}") from error
    return {**_built_in(), **_read(data, str(profile))}


@lru_cache(maxsize=1)
def _built_in() -> dict[str, Gpu]:
    return _read(own_data("hardware.toml"), "hardware.toml")


def _read(data: dict[str, Any], where: str) -> dict[str, Gpu]:
    tables = {name: _table(entry, where) for name, entry in data.get("collectives", {}).items()}
    known: dict[str, Gpu] = {}
    entries = data.get("gpu", {})
    if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
        raise PlanningError(f"{where}: GPUs are tables, [gpu.NAME]")
    for name, entry in entries.items():
        short = entry.pop("names", [])
        made = _gpu(name, entry, tables, f"{where}: gpu.{name}", data.get("sources", {}))
        known.update(dict.fromkeys([each.lower() for each in [name, *short]], made))
    return known


def _gpu(
    name: str, entry: dict[str, Any], tables: dict[str, Table], where: str, sources: dict[str, str]
) -> Gpu:
    """One entry; ``sources``: the abbreviations in its source written out."""
    allowed = {each.name for each in fields(Gpu)} - {"name"}
    if unknown := sorted(set(entry) - allowed):
        raise PlanningError(f"{where} has {unknown[0]!r}; known are {', '.join(sorted(allowed))}")
    table = entry.get("collectives", "")
    if table and table not in tables:
        raise PlanningError(f"{where}: there are no collectives {table!r}")
    try:
        made = Gpu(**{**entry, "name": name, "collectives": tables.get(table, {})})
    except TypeError as error:
        raise PlanningError(f"{where}: {error}") from None
    for number in MEASURED:
        check_number(f"{where}: {number}", getattr(made, number))
    for count in ("node", "domain", "mesh_links"):
        value = getattr(made, count)
        if type(value) is not int or value < 0:
            raise PlanningError(f"{where}: {count} is {value!r}; it must be an int")
    source = re.sub(r"\b[a-z]\b", lambda word: sources.get(word[0], word[0]), str(made.source))
    return replace(made, domain=made.domain or made.node, source=source)


def _table(entry: dict[str, Any], where: str) -> Table:
    try:
        return {
            kind: {int(n): (float(a), float(b), float(c)) for n, (a, b, c) in sizes.items()}
            for kind, sizes in entry.items()
        }
    except (TypeError, ValueError, AttributeError):
        raise PlanningError(
            f"{where}: collectives are by operation and number of GPUs [start us, GB/s, ramp MB]"
        ) from None


# Seconds that a collective takes on a mesh axis, from measured tables of NCCL.

_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}  # of a ring over the whole tensor
_PEER = (
    "all_to_all",
    "send",
)  # not by rings: each rank's own bytes to its peers, or to the next rank
_RAMP = ((8e6, 0.68), (16e6, 0.79), (inf, 0.87))  # (most bytes a GPU, part of the bandwidth)


@dataclass(frozen=True)
class AxisLink:
    """How the ranks of one axis's group are placed on the nodes.

    Attributes:
        size: ranks of the group.
        per_node: number of these ranks on one node.
    """

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)


def link_of(layout: MeshLayout, axis: str, cluster: Cluster) -> AxisLink:
    """Returns how groups of ``axis`` are placed on nodes. The ranks of inner axes lie between their ranks.

    If groups differ because their ends are not those of nodes, it is the placement of the worst group:
    ``per_node`` is then the smallest number of its ranks on a node.
    """
    return _placed(getattr(layout, axis), layout.stride(axis), cluster)


def shard_link(layout: MeshLayout, cluster: Cluster) -> AxisLink:
    """The placement of the ranks that share a copy's parameters: those of shard and cp, joined."""
    return _placed(layout.shard * layout.cp, layout.stride("cp"), cluster)


def experts_link(layout: MeshLayout, cluster: Cluster) -> AxisLink:
    """The placement of the ranks of a copy that have the same experts: efsdp, outside of ep."""
    return _placed(layout.ranks_of_a_copy // layout.ep, layout.ep, cluster)


def _placed(size: int, stride: int, cluster: Cluster) -> AxisLink:
    per_domain = max(cluster.domain // stride, 1)
    return AxisLink(size, size if per_domain % size == 0 else gcd(size, per_domain))


def collective_time(kind: str, nbytes: float, link: AxisLink, cluster: Cluster) -> float:
    """Returns the predicted seconds of one collective.

    On one node they are fits of NVIDIA's measured NCCL tables, see hardware.toml. On several nodes they are
    those of a ring, or, if faster, for an all-reduce those of a tree, with a latency of 35 us x log2(nodes)
    and 0.6 of the ring's bandwidth. An all-to-all, and a send of all ranks to the next one, are not in those
    tables. On one node a rank is taken to send as many bytes a second as in an all-gather, on several as many
    as its network card.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "send".
        nbytes: bytes of the whole tensor that is gathered, scattered or reduced; for "all_to_all" and "send"
            bytes of the tensor of one rank.
    """
    return 0.0 if link.size == 1 or not nbytes else _collective(kind, nbytes, link, cluster)[0]


def describe_collective(
    kind: str, nbytes: float, link: AxisLink, cluster: Cluster
) -> tuple[str, dict[str, Constant]]:
    """The formula that ``collective_time`` uses, and its constants."""
    _, formula, constants = _collective(kind, nbytes, link, cluster)
    each = (Constant(*one) for one in constants)
    return formula, {constant.name: constant for constant in each}


@lru_cache(maxsize=65536)
def _collective(
    kind: str, nbytes: float, link: AxisLink, cluster: Cluster
) -> tuple[float, str, tuple[tuple[str, float, str, str], ...]]:
    """(seconds, formula, fields of its constants)."""
    source, flat = cluster.gpu.source, "latency + bytes / rate"
    if kind in _PEER:
        latency, rate = _peer(kind, link, cluster)
        why = "in a node as an all-gather's; across: the rank's own network card"
        given = (
            ("latency", latency * 1e6, "us", why),
            ("rate", rate / 1e9, "GB/s", f"{why}; {source}"),
        )
        return latency + nbytes / rate, flat, given
    if link.nodes == 1:
        start, bandwidth, ramp = _constants(kind, link.size, cluster)
        is_measured = cluster.gpu.collectives.get(kind)
        where = f"{'fit of measured NCCL times' if is_measured else '0.8 of the links'}; {source}"
        sizes = (start * 1e6, "us"), (bandwidth / 1e9, "GB/s"), (ramp / 1e6, "MB")
        named = zip(("start", "bandwidth", "ramp"), sizes, strict=True)
        seconds = start + (nbytes + ramp * (1 - exp(-nbytes / ramp))) / bandwidth
        formula = "start + (bytes + ramp (1 - exp(-bytes / ramp))) / bandwidth"
        return seconds, formula, tuple((name, *size, where) for name, size in named)
    latency, rate = _ring(nbytes, link, cluster)
    constants = (
        ("latency", latency * 1e6, "us", _LATENCY),
        ("rate", rate / 1e9, "GB/s", _RATE),
        ("nic", cluster.nic, "GB/s", source if cluster.nic == cluster.gpu.nic else "as given"),
    )
    passes = _PASSES[kind]
    ring = latency * passes + nbytes * passes / rate
    if kind != "all_reduce":
        return ring, flat, constants
    tree = 35e-6 * log2(link.nodes) + 17e-6 + nbytes * passes / (0.6 * rate)
    formula = f"min(2 ({flat}), 17 us + 35 us log2(nodes) + 2 bytes / (0.6 rate))"
    return min(ring, tree), formula, constants


_LATENCY = "nodes (11 + 3.3 ranks of a node) us, fitted to NCCL 2.27's tuning numbers, mean 6 %"
_RATE = (
    "ranks of a node * 0.96 nic * n / (n - 1), at most a node's own; * 0.68, 0.79 or 0.87 by size"
)


@lru_cache(maxsize=4096)
def _constants(kind: str, size: int, cluster: Cluster) -> tuple[float, float, float]:
    """(seconds to start, bytes a second, bytes of ramp) on one node."""
    table = cluster.gpu.collectives.get(kind)
    if table:
        known = min((n for n in table if n >= size), default=max(table))
        start, bandwidth, ramp = table[known]
        return start * 1e-6, bandwidth * 1e9, ramp * 1e6
    # No table: a ring on the links' datasheet rate, 80 % of it, as on the GPUs that there are tables of.
    rate = cluster.gpu.link * 1e9 * 0.8
    if cluster.gpu.mesh_links:
        rate *= min(size - 1, cluster.gpu.mesh_links) / cluster.gpu.mesh_links
    return 15e-6, rate * size / (size - 1) / _PASSES[kind], 8e6


def _peer(kind: str, link: AxisLink, cluster: Cluster) -> tuple[float, float]:
    """Returns (seconds of latency, bytes a second of one rank) of an all-to-all or a send to the next rank.

    An all-to-all sends to ranks of the same node and to other nodes at the same time, the latter through the
    rank's own network card. A send is as slow as its slowest link. The rate of an all-gather counts the whole
    tensor, of which (n - 1) / n enters a rank.
    """
    n, own = link.size, link.per_node
    is_send = kind == "send"
    latency, seconds = 0.0, []  # seconds a byte that the rank has
    if own > 1:
        latency, gathered, _ = _constants("all_gather", own, cluster)
        seconds.append((1.0 if is_send else (own - 1) / n) / (gathered * (own - 1) / own))
    if link.nodes > 1:
        seconds.append((1.0 if is_send else (n - own) / n) / (cluster.nic * 0.96e9))
        latency = (1 if is_send else link.nodes) * (11e-6 + 3.3e-6 * own)
    return latency, 1 / max(seconds)


def _ring(nbytes: float, link: AxisLink, cluster: Cluster) -> tuple[float, float]:
    """Returns (seconds of latency, bytes a second) of a ring across nodes.

    The latency is nodes x (11 + 3.3 x ranks of a node) us, fitted, like the tree's, to NCCL 2.27's own tuning
    numbers (mean error 6 %). The bandwidth is 0.96 of that of all ranks' network cards together.
    """
    n = link.size
    rate = link.per_node * cluster.nic * 0.96e9 * n / (n - 1)
    if link.per_node > 1:
        rate = min(rate, _constants("all_gather", link.per_node, cluster)[1])
    part = next(part for most, part in _RAMP if nbytes / n * link.nodes <= most)
    return link.nodes * (11e-6 + 3.3e-6 * link.per_node), rate * part
