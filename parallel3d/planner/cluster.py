"""Cluster: how many nodes of which GPU. GPUs are read from hardware.toml or from a TOML file of the user."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from math import exp, gcd, inf, log2
from os import PathLike
from pathlib import Path
from typing import Any

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.arguments import Mistakes, check_number, check_size, nearest, own_data
from parallel3d.planner.constants import Constant

Table = dict[str, dict[int, tuple[float, float, float]]]


@dataclass(frozen=True)
class HostTimes:
    """Microseconds that one process's CPU takes, as ``calibrate`` measures them. 0: not measured; the planner
    then uses constants.toml and stacks.toml.

    Attributes:
        launch: to launch one operation of an eager model, including autograd's bookkeeping for it.
        unit: that the engine spends in one unit's forward, and again in its backward.
        replicate, tp: what is added to ``unit`` if the mesh has a ``replicate``, or a ``tp`` axis.
        optimizer: for an optimizer's step, per parameter.
    """

    launch: float = 0.0
    unit: float = 0.0
    replicate: float = 0.0
    tp: float = 0.0
    optimizer: float = 0.0


@dataclass(frozen=True)
class Gpu:
    """One type of accelerator and its links. Rates are for one GPU and one direction.

    Attributes:
        peak: dense bf16 TFLOP/s of the datasheet.
        capacity_gib: GiB of memory that torch reports.
        bandwidth: TB/s of its memory.
        gemm_efficiency, gemm_start_us: a large matmul takes gemm_start_us + FLOPs / (gemm_efficiency * peak).
        node: number of GPUs in a node.
        link: GB/s to the other GPUs of its node.
        nic: GB/s to other nodes.
        host: GB/s to and from the host's memory, while the other GPUs of the node are idle.
        host_shared: fraction of ``host`` that is left to each GPU while all GPUs of the node copy.
        host_gib: GiB of the host's memory per GPU of the node.
        domain: number of GPUs that the fast links join, if that is more than one node (NVL72).
        watts: its power limit, W; by default so high that it doesn't lower the clock.
        sustained: fraction of the peak that the matmuls of a training reach, measured under load. If it is
            given, the planner takes off nothing more for the power limit and for training. 0: not measured.
        attention: measured (head_dim, forward TFLOP/s, backward TFLOP/s) of ``attention_kernel`` for long
            causal sequences; empty: the planner derives them from ``peak``.
        attention_kernel: the kernel that torch's scaled_dot_product_attention ran when ``attention`` was
            measured.
        host_times: times of the host's CPU, if they were measured.
        like: name of a GPU of the same family, for a name that doesn't begin with the family's.
        fp32_slowdown: factor by which matmuls take longer in float32 than in bf16.
        mesh_links: number of links to single peers (xGMI) that a GPU has; 0: its links go to a switch.
        collectives: operation -> number of GPUs -> measured (start us, GB/s, ramp MB), the constants of
            ``describe_collective``; empty: derived from ``link``.
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
    host_shared: float = 1.0
    host_gib: float = 119.0
    domain: int = 0
    watts: float = 1e6
    fp32_slowdown: float = 8.0
    mesh_links: int = 0
    sustained: float = 0.0
    attention: tuple[tuple[int, float, float], ...] = ()
    attention_kernel: str = ""
    host_times: HostTimes = HostTimes()
    like: str = ""
    collectives: Table = field(default_factory=dict, hash=False, repr=False)
    source: str = ""

    @property
    def family(self) -> str:
        """Its family ("a100", "h100" ...): ``like``, or else the name, up to the first dash."""
        return (self.like or self.name).partition("-")[0]


_OTHER = (
    *("name", "domain", "mesh_links", "collectives", "source"),
    *("sustained", "attention", "attention_kernel", "host_times", "like"),
)
MEASURED = tuple(each.name for each in fields(Gpu) if each.name not in _OTHER)
"""The numbers of a ``Gpu`` that must be above 0."""
DEVICES = ("cuda", "cpu")
"""What ``calibrate`` measures."""


@dataclass(frozen=True)
class Cluster:
    """``nodes`` nodes of ``gpus_per_node`` equal GPUs.

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
        mistakes = Mistakes()
        for name in ("nodes", "gpus_per_node"):
            mistakes.of(partial(check_size, name, getattr(self, name)))
        mistakes.of(lambda: check_number("nic", self.nic, "GB/s "))
        mistakes.end()

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def domain(self) -> int:
        """Number of the job's GPUs that fast links (NVLink) join: a node's, or those of a rack of several
        nodes.

        Where a rack's links join several nodes, the job is assumed to have whole racks if their size divides
        its GPUs; else the largest power of two of a rack's nodes (16 of the 18 of an NVL72, as SLURM's
        segments).
        """
        rack = self.gpu.domain
        if rack <= max(self.gpu.node, self.gpus_per_node):
            return self.gpus_per_node
        if self.world_size <= rack or self.world_size % rack == 0:
            return min(self.world_size, rack)
        return self.gpus_per_node * 2 ** int(log2(rack // self.gpus_per_node))

    @classmethod
    def of(
        cls,
        name: str,
        nodes: int = 1,
        gpus_per_node: int | None = None,
        nic: float | None = None,
        profile: str | PathLike[str] | None = None,
    ) -> Cluster:
        """Returns a cluster of ``nodes`` nodes of the GPU called ``name``.

        Args:
            nic: GB/s from each GPU to other nodes; by default the GPU's own.
            profile: a TOML file with more GPUs (the form of hardware.toml), as ``calibrate`` writes.

        Raises:
            PlanningError: the GPU is unknown, or a number is out of range.
        """
        return cls(gpu(name, profile), nodes, gpus_per_node, nic)  # type: ignore[arg-type]


def gpu(name: str, profile: str | PathLike[str] | None = None) -> Gpu:
    """Returns the ``Gpu`` of this full or short name.

    Args:
        name: such as "h100-80gb-sxm" or "h100", in any case.
        profile: a TOML file of further GPUs, as for ``gpus``.

    Raises:
        PlanningError: no GPU has this name, or ``profile`` is given and doesn't contain it; the message names
            the nearest.
    """
    if not isinstance(name, str):
        raise PlanningError(f"the GPU is {name!r}; it must be a name, such as 'h100-80gb-sxm'")
    known = gpus(profile)
    if (lower := name.lower()) not in known:
        raise PlanningError(f"there is no GPU {name!r}; the nearest: {nearest(lower, known)}")
    if profile is not None and lower in _built_in() and known[lower] == _built_in()[lower]:
        own = ", ".join(sorted(set(known) - set(_built_in()))) or "none"
        raise PlanningError(
            f"the GPU {name!r} is not in the profile {profile}, which has: {own}; name one of these, or "
            "leave the profile out"
        )
    return known[lower]


def gpus(profile: str | PathLike[str] | None = None) -> dict[str, Gpu]:
    """Returns all GPUs by their full and short names.

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
    """Makes a ``Gpu`` of its TOML table ``entry``; ``sources`` maps the one-letter abbreviations in
    ``source`` to texts."""
    allowed = {each.name for each in fields(Gpu)} - {"name"}
    if unknown := sorted(set(entry) - allowed):
        raise PlanningError(f"{where} has {unknown[0]!r}; known are {', '.join(sorted(allowed))}")
    table = entry.get("collectives", "")
    if table and table not in tables:
        raise PlanningError(f"{where}: there are no collectives {table!r}")
    given = {**entry, "name": name, "collectives": tables.get(table, {})}
    given["host_times"] = _host_times(entry.get("host_times", {}), where)
    given["attention"] = _attention(entry.get("attention", {}), where)
    try:
        made = Gpu(**given)
    except TypeError as error:
        raise PlanningError(f"{where}: {error}") from None
    for number in (*MEASURED, *(["sustained"] if made.sustained else [])):
        check_number(f"{where}: {number}", getattr(made, number))
    if bool(made.attention) != bool(made.attention_kernel):
        raise PlanningError(f"{where}: attention and attention_kernel must be given together")
    for count in ("node", "domain", "mesh_links"):
        value = getattr(made, count)
        if type(value) is not int or value < 0:
            raise PlanningError(f"{where}: {count} is {value!r}; it must be an int")
    source = re.sub(r"\b[a-z]\b", lambda word: sources.get(word[0], word[0]), str(made.source))
    return replace(made, domain=made.domain or made.node, source=source)


def _host_times(entry: object, where: str) -> HostTimes:
    known = [each.name for each in fields(HostTimes)]
    if not isinstance(entry, dict) or (unknown := sorted(set(entry) - set(known))):
        what = f"has {unknown[0]!r}" if isinstance(entry, dict) else f"is {entry!r}"
        raise PlanningError(f"{where}: host_times {what}; known are {', '.join(known)}, in us")
    for name, value in entry.items():
        if value != 0:
            check_number(f"{where}: host_times.{name}", value, "us ")
    return HostTimes(**entry)


def _attention(entry: object, where: str) -> tuple[tuple[int, float, float], ...]:
    try:
        rates = [(int(n), float(a), float(b)) for n, (a, b) in entry.items()]  # type: ignore[attr-defined]
        if min((number for rate in rates for number in rate), default=1.0) <= 0:
            raise ValueError
    except (TypeError, ValueError, AttributeError):
        raise PlanningError(
            f"{where}: attention is {entry!r}; it must be head_dim = [forward, backward], TFLOP/s above 0"
        ) from None
    return tuple(sorted(rates))


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
# Not by rings: each rank's own bytes to its peers, or to the next rank.
_PEER = ("all_to_all", "send")
_RAMP = ((8e6, 0.68), (16e6, 0.79), (inf, 0.87))  # (most bytes a GPU, part of the bandwidth)


@dataclass(frozen=True)
class AxisLink:
    """How the ranks of one group of a mesh axis are distributed over nodes.

    Attributes:
        size: ranks of the group.
        per_node: number of these ranks on one node.
    """

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)


def link_of(layout: MeshLayout, axis: str, cluster: Cluster, *, sharded: bool = True) -> AxisLink:
    """Returns how the groups of ``axis`` are distributed over nodes, given the order of the mesh's axes.

    Args:
        axis: a mesh axis. "shard" includes cp's ranks, which shard parameters with it; "efsdp" means the
            ranks that shard the same experts, which is what is left of shard x cp x tp outside of ``ep``.
        sharded: whether parameters are sharded. If not, "replicate" and "efsdp" mean all ranks that hold the
            same parameters and reduce their gradients together.
    """
    ranks = (layout.shard if sharded or axis == "shard" else layout.data_size) * layout.cp
    if axis == "efsdp":
        return placed(ranks * layout.tp // layout.ep, layout.ep, cluster)
    if axis == "shard" or (axis == "replicate" and not sharded):
        return placed(ranks, layout.stride("cp"), cluster)
    return placed(getattr(layout, axis), layout.stride(axis), cluster)


def placed(size: int, stride: int, cluster: Cluster) -> AxisLink:
    """Returns how a group of ``size`` ranks, ``stride`` ranks apart, is distributed over nodes. If nodes
    don't have whole groups, it is the worst group: ``per_node`` is the fewest ranks that one has on a node.
    """
    per_domain = max(cluster.domain // stride, 1)
    return AxisLink(size, size if per_domain % size == 0 else gcd(size, per_domain))


def collective_time(kind: str, nbytes: float, link: AxisLink, cluster: Cluster) -> float:
    """Returns the predicted seconds of one collective.

    On one node it is a fit of NVIDIA's measured NCCL tables (hardware.toml). On several nodes it is the time
    of a ring; for an all-reduce, of a tree if that is faster (latency 35 us x log2(nodes), 0.6 of the ring's
    bandwidth). An all-to-all, and a send of every rank to the next one, are not in the tables: a rank is
    assumed to send at an all-gather's rate within a node, and at its network card's rate between nodes.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "send".
        nbytes: bytes of the whole tensor that is gathered, scattered or reduced; for "all_to_all" and "send"
            bytes of one rank's tensor.
    """
    return 0.0 if link.size == 1 or not nbytes else _collective(kind, nbytes, link, cluster)[0]


def describe_collective(
    kind: str, nbytes: float, link: AxisLink, cluster: Cluster
) -> tuple[str, dict[str, Constant]]:
    """Returns the formula by which ``collective_time`` predicts this collective, and the formula's constants
    by name."""
    _, formula, constants = _collective(kind, nbytes, link, cluster)
    return formula, {constant.name: constant for constant in constants}


@lru_cache(maxsize=65536)
def _collective(
    kind: str, nbytes: float, link: AxisLink, cluster: Cluster
) -> tuple[float, str, tuple[Constant, ...]]:
    """Returns (predicted seconds, the formula as text, the formula's constants)."""
    source, flat = cluster.gpu.source, "latency + bytes / rate"
    if kind in _PEER:
        latency, rate = _peer(kind, link, cluster)
        why = "in a node as an all-gather's; across: the rank's own network card"
        given = Constant("rate", rate / 1e9, "GB/s", f"{why}; {source}")
        return latency + nbytes / rate, flat, (Constant("latency", latency * 1e6, "us", why), given)
    if link.nodes == 1:
        start, bandwidth, ramp = _constants(kind, link.size, cluster)
        is_measured = cluster.gpu.collectives.get(kind)
        where = f"{'fit of measured NCCL times' if is_measured else '0.8 of the links'}; {source}"
        sizes = (start * 1e6, "us"), (bandwidth / 1e9, "GB/s"), (ramp / 1e6, "MB")
        named = zip(("start", "bandwidth", "ramp"), sizes, strict=True)
        seconds = start + (nbytes + ramp * (1 - exp(-nbytes / ramp))) / bandwidth
        formula = "start + (bytes + ramp (1 - exp(-bytes / ramp))) / bandwidth"
        return seconds, formula, tuple(Constant(name, *size, where) for name, size in named)
    latency, rate = _ring(nbytes, link, cluster)
    given_by = source if cluster.nic == cluster.gpu.nic else "as given"
    constants = (
        Constant("latency", latency * 1e6, "us", _LATENCY),
        Constant("rate", rate / 1e9, "GB/s", _RATE),
        Constant("nic", cluster.nic, "GB/s", given_by),
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
    """Returns (seconds to start, bytes a second, bytes of ramp) of a collective of ``size`` ranks on one
    node, see ``_fit_collective`` in calibrate.py."""
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
    """Returns (seconds of latency, bytes a second that one rank sends) of an all-to-all, or of a send of
    every rank to the next one.

    An all-to-all sends within the node and, through the rank's own network card, to other nodes at the same
    time. A send is as slow as its slowest link. Within a node the rate is that of an all-gather.
    """
    n, own, is_send = link.size, link.per_node, kind == "send"
    latency, seconds = 0.0, []  # seconds a byte that the rank has
    if own > 1:
        latency, gathered, _ = _constants("all_gather", own, cluster)
        seconds.append((1.0 if is_send else (own - 1) / n) / (gathered * (own - 1) / own))
    if link.nodes > 1:
        seconds.append((1.0 if is_send else (n - own) / n) / (cluster.nic * 0.96e9))
        latency = (1 if is_send else link.nodes) * (11e-6 + 3.3e-6 * own)
    return latency, 1 / max(seconds)


def _ring(nbytes: float, link: AxisLink, cluster: Cluster) -> tuple[float, float]:
    """Returns (seconds of latency, bytes a second) of a collective that runs as a ring over several nodes."""
    n = link.size
    rate = link.per_node * cluster.nic * 0.96e9 * n / (n - 1)
    if link.per_node > 1:
        rate = min(rate, _constants("all_gather", link.per_node, cluster)[1])
    part = next(part for most, part in _RAMP if nbytes / n * link.nodes <= most)
    return link.nodes * (11e-6 + 3.3e-6 * link.per_node), rate * part
