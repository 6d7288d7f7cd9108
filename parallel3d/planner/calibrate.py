"""calibrate: measures matmuls, memory and collectives of the machine at hand, for a hardware profile.

parallel3d calibrate --out profile.toml
torchrun --nproc-per-node 8 -m parallel3d calibrate --out profile.toml     # collectives too
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import exp
from operator import itemgetter
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist

from parallel3d.errors import PlanningError
from parallel3d.planner.cluster import MEASURED, Gpu, gpus
from parallel3d.planner.constants import constant

_MATMULS = ((512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 4096), (16384, 8192))
_ROUNDS = 5
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def calibrate(
    name: str | None = None,
    *,
    device: str | None = None,
    largest: int = 8192,
    seconds: float = 60.0,
) -> Gpu:
    """Measures this machine and, if there is a process group, collectives of 2, 4, 8 ... ranks.

    Args:
        name: name of the profile; by default that of the device. If it names a known GPU, the peak, capacity
            and links of that GPU are kept where they can't be measured.
        device: "cuda" or "cpu"; by default "cuda" if there is one.
        largest: rows of the largest matmul.
        seconds: stop measuring matmuls after this long.

    Returns:
        A GPU whose ``peak`` is the datasheet's if it is known, else the best that was measured.

    Raises:
        PlanningError: the device isn't there.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise PlanningError("there is no CUDA device; calibrate with device='cpu'")
    known = gpus()
    similar, own_name, capacity = _describe(kind)
    base = known.get((name or "").lower()) or known[similar]
    times = _matmul_times(kind, largest, seconds)
    start, rate = _fit_line([f for f, _ in times], [t for _, t in times])
    peak = base.peak if base.name != "cpu" else max(f / t for f, t in times) / 1e12
    measured = replace(
        base,
        name=name or own_name,
        peak=peak,
        gemm_efficiency=min(rate / (peak * 1e12), 1.0),
        gemm_start_us=max(start, 1e-7) * 1e6,
        bandwidth=_copy_rate(kind) / 1e12,
        capacity_gib=capacity,
        source=f"measured on {platform.node()} with torch {torch.__version__}; else {base.name}'s",
    )
    if dist.is_initialized() and dist.get_world_size() > 1:
        table = _collectives(kind)
        link = max(rate for _, rate, _ in table["all_gather"].values())
        node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        measured = replace(measured, collectives=table, node=node, domain=node, link=link)
    return measured


def _describe(kind: str) -> tuple[str, str, float]:
    """(most similar GPU that is known, the device's own name, GiB of its memory)."""
    if kind == "cpu":
        nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return "cpu", f"cpu-{platform.machine()}", nbytes / 2**30
    name, nbytes = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    families = ("gb200", "b200", "h200", "h100", "a100", "mi300x")
    similar = next((family for family in families if family in name.lower()), "a100")
    return similar, name.lower().replace(" ", "-"), nbytes / 2**30


def _timed(function: Callable[[], object], kind: str) -> float:
    """Median seconds of a call, after two to warm up."""
    taken = []
    wait = torch.cuda.synchronize if kind == "cuda" else torch.cpu.synchronize
    for _ in range(_ROUNDS + 2):
        wait()
        begin = time.perf_counter()
        function()
        wait()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[2:])


def _matmul_times(kind: str, largest: int, seconds: float) -> list[tuple[float, float]]:
    """(FLOPs, seconds) of bf16 products of growing size (fp32 on a CPU)."""
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    end = time.monotonic() + seconds
    times: list[tuple[float, float]] = []
    for rows, columns in _MATMULS:
        if rows > largest or (len(times) >= 2 and time.monotonic() > end):
            break
        a = torch.randn(rows, columns, device=kind).to(dtype)
        b = torch.randn(columns, columns, device=kind).to(dtype)
        product = partial(torch.mm, a, b, out=torch.empty_like(a))
        times.append((2.0 * rows * columns * columns, _timed(product, kind)))
    return times


def _copy_rate(kind: str) -> float:
    """Bytes a second that copies read and write, over the part of the bandwidth that copies reach."""
    count = 2**28 if kind == "cuda" else 2**25
    a, b = torch.ones(count, device=kind), torch.empty(count, device=kind)
    rate = 2 * a.numel() * a.element_size() / _timed(lambda: b.copy_(a), kind)
    return rate / constant("memory_efficiency").value


def _fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(start, rate) of y = start + x / rate with the least squared relative error."""
    weights = np.array(y) ** -2.0
    mean_x, mean_y = np.average([x, y], axis=1, weights=weights)
    (spread, both), _ = np.cov([x, y], aweights=weights, ddof=0)
    slope = both / spread if spread and both > 0 else mean_y / mean_x
    return float(max(mean_y - slope * mean_x, 0.0)), float(1 / slope)


def _collectives(kind: str) -> dict[str, dict[int, tuple[float, float, float]]]:
    """Operation -> ranks -> (start us, GB/s, ramp MB). All ranks call it; the slowest rank's times count."""
    world = dist.get_world_size()
    sizes = [n for n in (2, 4, 8, 16, 32) if n < world and world % n == 0] + [world]
    most = 2**28 if kind == "cuda" else 2**23
    table: dict[str, dict[int, tuple[float, float, float]]] = {name: {} for name in COLLECTIVES}
    for size in sizes:
        groups = [dist.new_group(list(range(i, i + size))) for i in range(0, world, size)]
        group = groups[dist.get_rank() // size]
        for name in COLLECTIVES:
            times = []
            nbytes = 2**12
            while nbytes <= most:
                seconds = collective_seconds(name, nbytes, size, group, kind)
                slowest = torch.tensor([seconds], device=kind)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                times.append((nbytes, slowest.item()))
                nbytes *= 4
            table[name][size] = _fit_collective(times)
    return table


def collective_seconds(
    name: str, nbytes: int, size: int, group: dist.ProcessGroup, kind: str
) -> float:
    """Median seconds of a collective, as this rank sees it. All ranks of the group call it.

    Args:
        name: one of ``COLLECTIVES``.
        nbytes: bytes of the whole float32 tensor, rounded to a multiple of ``size`` elements.
        kind: "cuda" or "cpu".
    """
    count = max(nbytes // 4 // size, 1) * size
    whole = torch.ones(count, device=kind)
    part = torch.ones(count // size, device=kind)
    if name == "all_gather":
        return _timed(lambda: dist.all_gather(list(whole.chunk(size)), part, group=group), kind)
    if name == "reduce_scatter":
        return _timed(lambda: dist.reduce_scatter(part, list(whole.chunk(size)), group=group), kind)
    return _timed(lambda: dist.all_reduce(whole, group=group), kind)


def _fit_collective(times: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Fits t = start + (S + ramp (1 - exp(-S / ramp))) / bandwidth and returns (start us, GB/s, ramp MB).

    Args:
        times: measured (bytes S, seconds t).
    """
    fits = []
    for ramp in (0.25e6, 0.5e6, 1e6, 2e6, 4e6, 8e6, 16e6, 32e6):
        x = [s + ramp * (1 - exp(-s / ramp)) for s, _ in times]
        y = [t for _, t in times]
        start, rate = _fit_line(x, y)
        error = sum(abs((start + a / rate) / b - 1) for a, b in zip(x, y, strict=True))
        fits.append((error, (round(start * 1e6, 2), round(rate / 1e9, 4), ramp / 1e6)))
    return min(fits, key=itemgetter(0))[1]


def write_profile(gpu: Gpu, path: str | PathLike[str]) -> Path:
    """Writes a file for ``Cluster.of(name, profile=path)``; returns its path."""
    lines = [f'[gpu."{gpu.name}"]', *(f"{name} = {getattr(gpu, name):.6g}" for name in MEASURED)]
    if gpu.mesh_links:
        lines.append(f"mesh_links = {gpu.mesh_links}")
    lines.append(f"source = {json.dumps(gpu.source, ensure_ascii=False)}")
    if gpu.collectives:
        lines += ['collectives = "own"', "", "[collectives.own]"]
        for kind, table in gpu.collectives.items():
            sizes = ", ".join(f"{n} = [{a}, {b}, {c}]" for n, (a, b, c) in table.items())
            lines.append(f"{kind} = {{ {sizes} }}")
    profile = Path(path)
    profile.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return profile
