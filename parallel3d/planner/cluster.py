"""Cluster: the machines. GPUs are data, in hardware.toml or a file of yours."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from math import exp, gcd, isfinite, log2
from os import PathLike
from pathlib import Path
from typing import Any

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.constants import Constant

Table = dict[str, dict[int, tuple[float, float, float]]]


@dataclass(frozen=True)
class Gpu:
    """One accelerator and its links. Rates are of one GPU, in one direction.

    Attributes:
        peak: dense bf16, TFLOP/s.
        capacity_gib: what torch reports as its memory, GiB.
        bandwidth: of its memory, TB/s.
        gemm_efficiency, gemm_start_us: a matmul takes start + FLOPs / (efficiency * peak).
        node: GPUs of a node.
        link: GB/s to the others of its node.
        nic: GB/s to other nodes.
        domain: GPUs that the fast links reach, if more than a node's.
        fp32_slowdown: how many times as long matmuls take in float32.
        power: the power limit over that of the measurements.
        mesh_links: links of a GPU where they go to single peers (xGMI); 0: a switch.
        collectives: operation -> GPUs -> (start us, GB/s, ramp MB), as measured; else derived from ``link``.
        source: where these are from.
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
    domain: int = 0
    power: float = 1.0
    fp32_slowdown: float = 8.0
    mesh_links: int = 0
    collectives: Table = field(default_factory=dict, hash=False, compare=False, repr=False)
    source: str = ""

    @property
    def family(self) -> str:
        """ "a100", "h100" ...: the part of the name before the first dash."""
        return self.name.partition("-")[0]


@dataclass(frozen=True)
class Cluster:
    """``nodes`` nodes of equal GPUs.

    Attributes:
        gpus_per_node: the GPU's own number unless given.
        nic: GB/s from each GPU to other nodes; the GPU's typical one unless given.
    """

    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = None  # type: ignore[assignment]  # filled in below
    nic: float = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.gpus_per_node is None:
            object.__setattr__(self, "gpus_per_node", self.gpu.node)
        if self.nic is None:
            object.__setattr__(self, "nic", self.gpu.nic)
        for name in ("nodes", "gpus_per_node"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise PlanningError(
                    f"{name} is {getattr(self, name)!r}; it must be an int, 1 or more"
                )
        _check_number("nic", self.nic, "GB/s ")

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
            PlanningError: no such GPU, or numbers that can't be.
        """
        return cls(gpu(name, profile), nodes, gpus_per_node, nic)  # type: ignore[arg-type]


def gpu(name: str, profile: str | PathLike[str] | None = None) -> Gpu:
    """The GPU of this name or short name.

    Raises:
        PlanningError: there is none; names the nearest.
    """
    if not isinstance(name, str):
        raise PlanningError(f"the GPU is {name!r}; it must be a name, such as 'h100-80gb-sxm'")
    known = gpus(profile)
    found = known.get(name.lower())
    if found is None:
        near = get_close_matches(name.lower(), known, n=3, cutoff=0.3) or sorted(known)
        raise PlanningError(f"there is no GPU {name!r}; the nearest: {', '.join(near)}")
    return found


def gpus(profile: str | PathLike[str] | None = None) -> dict[str, Gpu]:
    """All GPUs by their names and short names; those of ``profile`` before the built-in ones."""
    found = dict(_built_in())
    if profile is not None:
        try:
            text = Path(profile).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanningError(f"the profile {profile} can't be read: {error}") from error
        found.update(_read(text, str(profile)))
    return found


@lru_cache(maxsize=1)
def _built_in() -> dict[str, Gpu]:
    text = files("parallel3d.planner").joinpath("hardware.toml").read_text(encoding="utf-8")
    return _read(text, "hardware.toml")


def _read(text: str, where: str) -> dict[str, Gpu]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanningError(f"{where} is no TOML: {error}") from None
    tables = {name: _table(entry, where) for name, entry in data.get("collectives", {}).items()}
    found: dict[str, Gpu] = {}
    entries = data.get("gpu", {})
    if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
        raise PlanningError(f"{where}: GPUs are tables, [gpu.NAME]")
    for name, entry in entries.items():
        short = entry.pop("names", [])
        made = _gpu(name, entry, tables, where)
        made = replace(made, source=_sources(made.source, data.get("sources", {})))
        found.update(dict.fromkeys([each.lower() for each in [name, *short]], made))
    return found


def _sources(text: str, legend: Mapping[str, str]) -> str:
    """``text`` with the abbreviations of ``legend`` written out."""
    return re.sub(r"\b[a-z]\b", lambda found: legend.get(found[0], found[0]), str(text))


def _check_number(name: str, value: object, unit: str = "") -> None:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    if not fits or not value > 0:  # type: ignore[operator]
        raise PlanningError(f"{name} is {value!r}; it must be a number {unit}above 0")


def _gpu(name: str, entry: dict[str, Any], tables: Mapping[str, Table], where: str) -> Gpu:
    allowed = {each.name for each in fields(Gpu)} - {"name"}
    if unknown := sorted(set(entry) - allowed):
        raise PlanningError(
            f"{where}: gpu.{name} has {unknown[0]!r}; known are {', '.join(sorted(allowed))}"
        )
    table = entry.get("collectives")
    if table is not None and table not in tables:
        raise PlanningError(f"{where}: gpu.{name}: there are no collectives {table!r}")
    measured = tables[table] if table is not None else {}
    try:
        made = Gpu(**{**entry, "name": name, "collectives": measured})
    except TypeError as error:
        raise PlanningError(f"{where}: gpu.{name}: {error}") from None
    for each in (
        "peak",
        "capacity_gib",
        "bandwidth",
        "gemm_efficiency",
        "node",
        "link",
        "nic",
        "power",
        "fp32_slowdown",
        "gemm_start_us",
    ):
        _check_number(f"{where}: gpu.{name}: {each}", getattr(made, each))
    for each in ("node", "domain", "mesh_links"):
        if type(getattr(made, each)) is not int or getattr(made, each) < 0:
            raise PlanningError(
                f"{where}: gpu.{name}: {each} is {getattr(made, each)!r}; it must be an int"
            )
    return replace(made, domain=made.domain or made.node)


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
    stride = layout.stride(axis)
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
