"""Cluster: the machines. GPUs are data, in hardware.toml or a file of yours."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from parallel3d.errors import PlanningError

__all__ = ["Cluster", "Gpu", "gpu", "gpus"]

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
    gpus_per_node: int = 0
    nic: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpus_per_node", self.gpus_per_node or self.gpu.node)
        object.__setattr__(self, "nic", self.nic or self.gpu.nic)
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise PlanningError(
                f"a cluster of {self.nodes} nodes with {self.gpus_per_node} GPUs each: both are 1 or more"
            )

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
        return cls(gpu(name, profile), nodes, gpus_per_node or 0, nic or 0.0)


def gpu(name: str, profile: str | PathLike[str] | None = None) -> Gpu:
    """The GPU of this name or short name.

    Raises:
        PlanningError: there is none; names the nearest.
    """
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
    for name, entry in data.get("gpu", {}).items():
        short = entry.pop("names", [])
        made = _gpu(name, entry, tables, where)
        found.update(dict.fromkeys([name, *short], made))
    return found


def _gpu(name: str, entry: dict[str, Any], tables: Mapping[str, Table], where: str) -> Gpu:
    allowed = {each.name for each in fields(Gpu)} - {"name"}
    if unknown := sorted(set(entry) - allowed):
        raise PlanningError(
            f"{where}: gpu.{name} has {unknown[0]!r}; known are {', '.join(sorted(allowed))}"
        )
    measured = tables.get(entry.get("collectives", ""), {})
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
    ):
        value = getattr(made, each)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise PlanningError(
                f"{where}: gpu.{name}: {each} is {value!r}; it must be a number above 0"
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
