"""Cluster: the machines. GPUs are data, in hardware.toml or a file of yours."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from math import isfinite
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
