"""host_profile: what the host does for a unit and step: launches, events, waits, copies, allocations."""

import copy
import cProfile
import pstats
from collections.abc import Callable, Mapping
from typing import Any

import torch
from models import SmallBlock, Stack, ours, torchs
from page import Part
from runner import running
from share import synchronize
from sides import SIDES, rank_of_many
from torch.profiler import ProfilerActivity, profile

import parallel3d as p3d

__all__ = ["CALLS", "calls_of", "host_profile", "per_unit"]

# Kind of call -> operations, or how the names of CUDA's functions and of collectives begin.
CALLS: dict[str, tuple[str, ...]] = {
    "launches": ("cudaLaunch", "cuLaunch"),
    "events recorded": ("cudaEventRecord",),
    "events waited for": ("cudaStreamWaitEvent",),
    "copies by the driver": ("cudaMemcpy",),
    "fills by the driver": ("cudaMemset",),
    "waits of the host": (
        *("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
        "hipStreamSynchronize",
    ),
    "memory of the driver": ("cudaMalloc", "cudaFree", "cudaHostAlloc"),
    "allocations": ("aten::empty", "aten::empty_strided"),
    "views": (
        *("aten::view", "aten::as_strided", "aten::split", "aten::split_with_sizes"),
        *("aten::slice", "aten::narrow", "aten::detach"),
    ),
    "copies: copy_": ("aten::copy_",),
    "copies: _foreach_copy_": ("aten::_foreach_copy_",),
    "copies: split_with_sizes_copy": ("aten::split_with_sizes_copy", "fsdp::split_with_sizes_copy"),
    "copies: cat, chunk_cat": ("aten::cat", "aten::_chunk_cat", "fsdp::chunk_cat"),
    "copies: all_gather_copy_in": ("fsdp::all_gather_copy_in",),
    "collectives": ("c10d::",),
    "waits for collectives": ("c10d::wait", "_c10d_functional::wait"),
}
PYTHON = "calls of Python"
STEPS = 3  # that are profiled

Table = dict[str, tuple[float, float]]


def calls_of(step: Callable[[], object], device: str) -> dict[str, tuple[int, float]]:
    """Returns what the profiler sees of ``STEPS`` steps: name -> calls, and microseconds of its own."""
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=kinds) as profiler:
        for _ in range(STEPS):
            step()
        synchronize(device)
    return {
        each.key: (each.count, each.self_cpu_time_total)
        for each in profiler.key_averages()
        if each.self_cpu_time_total > 0
    }


def python_of(step: Callable[[], object]) -> tuple[int, list[list[Any]]]:
    """Returns the calls of Python and C functions in ``STEPS`` steps, and the 30 that take longest."""
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(STEPS):
            step()
    stats: Any = pstats.Stats(profiler)
    longest = sorted(stats.stats.items(), key=lambda each: -each[1][2])[:30]
    return stats.total_calls, [
        [f"{file.rpartition('/')[2]}:{line} {name}", calls, seconds * 1e6]
        for (file, line, name), (_, calls, seconds, *_) in longest
    ]


def per_unit(calls: Mapping[str, tuple[int, float]], units: int) -> Table:
    """Returns for each kind of ``CALLS`` how many there are in a unit and step, and their microseconds."""
    found: Table = {}
    for kind, wanted in CALLS.items():
        starts = tuple(each for each in wanted if not each.startswith(("aten::", "fsdp::")))
        those = [v for name, v in calls.items() if name in wanted or name.startswith(starts)]
        found[kind] = (
            sum(count for count, _ in those) / STEPS / units,
            sum(us for _, us in those) / STEPS / units,
        )
    return found


def host_profile(device: str, small: bool) -> Part:
    """Calls of a unit and step by kind, and their time on the host."""
    units = 4 if small else 16
    part = Part(
        "host_profile",
        f"Calls in a forward and backward of {units} units of ten small parameters, a unit and step, and "
        "their own time on the host (under the profiler, which makes each longer); bf16/fp32, collectives "
        "that take no time",
        ["layout", "what", "plain", "ours", "FSDP2", "plain us", "ours us", "FSDP2 us"],
    )
    layouts = {"FSDP": p3d.MeshLayout(shard=64), "HSDP": p3d.MeshLayout(2, 32)}
    for name, layout in layouts.items():
        if small and part.rows:
            break
        if part.rows and running().used_up:
            part.left_out.append(name)
            continue
        with rank_of_many(layout, device, values=False) as (network, mesh):
            plain = Stack(SmallBlock, units, 64).to(device)
            models = {
                "plain": copy.deepcopy(plain).bfloat16(),
                "ours": ours(copy.deepcopy(plain), mesh, mixed=True),
                "torch": torchs(copy.deepcopy(plain), mesh, mixed=True),
            }
            tables: dict[str, Table] = {}
            for side, model in models.items():
                x = torch.randn(8, 64, device=device)

                def step(model: Any = model, x: torch.Tensor = x) -> None:
                    model(x.to(next(model.parameters()).dtype)).sum().backward()
                    model.zero_grad()
                    network.clear()

                for _ in range(4):
                    step()
                calls = calls_of(step, device)
                tables[side] = per_unit(calls, units)
                number, longest = python_of(step)
                tables[side][PYTHON] = (
                    number / STEPS / units,
                    sum(e[2] for e in longest) / STEPS / units,
                )
                own = sorted(calls.items(), key=lambda each: -each[1][1])
                part.data[f"{name}, {side}"] = {"calls": dict(own[:80]), "python": longest}
            models.clear()
        for kind in (*CALLS, PYTHON):
            numbers = [tables[side][kind] for side in ("plain", *SIDES)]
            if any(count for count, _ in numbers):
                part.rows.append([name, kind, *(n for n, _ in numbers), *(us for _, us in numbers)])
        for kind in ("launches", "events recorded", "events waited for"):
            if tables["ours"][kind][0] > tables["torch"][kind][0]:
                part.notes.append(f"{name}: ours has more {kind} than FSDP2")
    part.notes += [
        f"{PYTHON}: of all functions, those of C too; their time is that of the 30 longest",
        "the data of page.json has the 80 operations and the 30 functions that take longest, of each side",
    ]
    if device != "cuda":
        part.notes.append("on a CPU: no launches, events or streams")
    return part
