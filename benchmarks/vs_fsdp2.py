"""Our engine beside torch's FSDP2, in the same launch, taking turns.

    python benchmarks/vs_fsdp2.py [--quick] [--only host|tp|gloo] [--json PATH]

host: what wrapping a model costs the CPU, per unit and step, on a fake process group of 64 ranks.
tp:   the same with tensor parallelism under it.
gloo: the time of a training step on 4 real processes.

Every ratio is ours / torch's: below 1 we are faster. On both sides ``fully_shard`` is applied to each
block and then to the root, with the same reshard policy (the default of both).
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measure import Rounds, alternate, no_gc, print_table, range_of, write_json
from models import MlpBlock, SmallBlock, Stack, ours, ours_tp, torchs, torchs_tp
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh

import parallel3d as p3d
from parallel3d.testing import GlooPool, fake_world

UNITS = 16
WORLD = 64
WIDTH = 64
RANKS = 4
TOKENS = (4, 128)
"""Sequences and tokens in each, of each rank's batch, in the gloo benchmark."""

# ---- host time ----


def host_step(model: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    """Forward and backward; seconds of CPU time of this process.

    CPU time, because nothing here waits for anything: on a busy machine it leaves the others out.
    """

    def step() -> float:
        start = time.process_time()
        model(x).sum().backward()
        seconds = time.process_time() - start
        model.zero_grad()
        return seconds

    return step


def host_case(mesh: DeviceMesh, *, mixed: bool, rounds: int, tp: bool = False) -> dict[str, Any]:
    """One row: microseconds per unit and step above the plain model."""
    plain = Stack(SmallBlock, UNITS, WIDTH)
    left, right = (ours_tp, torchs_tp) if tp else (ours, torchs)
    models = {
        "plain": plain.bfloat16() if mixed else copy.deepcopy(plain),
        "ours": left(copy.deepcopy(plain).float(), mesh, mixed=mixed),
        "torch": right(copy.deepcopy(plain).float(), mesh, mixed=mixed),
    }
    x = torch.randn(8, WIDTH)
    steps = {
        name: host_step(model, x.bfloat16() if mixed and name == "plain" else x)
        for name, model in models.items()
    }
    taken = alternate(steps, rounds=rounds, steps_per_round=8, warmup=4)
    above = taken.above("plain")
    ratios = above.ratios("ours", "torch")
    inside = {name: _in_collectives(steps[name]) / UNITS * 1e6 for name in ("ours", "torch")}
    cost = {name: above.median(name) / UNITS * 1e6 for name in ("ours", "torch")}
    own = {name: cost[name] - inside[name] for name in cost}
    return {
        "mesh": str(tuple(mesh.shape)),
        "policy": "bf16/fp32" if mixed else "fp32",
        "plain_us": taken.median("plain") / UNITS * 1e6,
        "ours_us": cost["ours"],
        "torch_us": cost["torch"],
        "ratio": statistics.median(ratios),
        "ratio_range": range_of(ratios),
        "ours_in_collectives_us": inside["ours"],
        "torch_in_collectives_us": inside["torch"],
        "ratio_without_collectives": own["ours"] / own["torch"],
    }


_COLLECTIVES = [
    getattr(dist, name)
    for name in (
        "all_gather_single",
        "all_gather_into_tensor",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "all_reduce",
    )
    if hasattr(dist, name)
]


def _in_collectives(step: Callable[[], float], steps: int = 10) -> float:
    """Seconds per step inside c10d's calls. The fake group copies what it would receive, in as many
    pieces as there are ranks: time that both sides pay and neither can save."""
    spent = [0.0]
    samples = []
    with _timed_collectives(spent), no_gc():
        for _ in range(steps):
            spent[0] = 0.0
            step()
            samples.append(spent[0])
    return statistics.median(samples)


@contextmanager
def _timed_collectives(spent: list[float]) -> Iterator[None]:
    """Adds the seconds of every c10d collective call to ``spent[0]``, wherever it was imported to."""

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = function(*args, **kwargs)
            spent[0] += time.process_time() - start
            return result

        return call

    wrappers = {function: timed(function) for function in _COLLECTIVES}
    places = [
        (module, name, value)
        for module_name, module in list(sys.modules.items())
        if module_name == "torch.distributed" or module_name.startswith("parallel3d")
        for name, value in list(vars(module).items())
        if callable(value) and any(value is function for function in _COLLECTIVES)
    ]
    for module, name, value in places:
        setattr(module, name, wrappers[value])
    try:
        yield
    finally:
        for module, name, value in places:
            setattr(module, name, value)


def run_host(quick: bool) -> list[dict[str, Any]]:
    """FSDP and HSDP, both policies."""
    rounds = 6 if quick else 25
    layouts = [p3d.MeshLayout(shard=WORLD), p3d.MeshLayout(replicate=2, shard=WORLD // 2)]
    with fake_world(0, WORLD):
        results = [
            host_case(mesh, mixed=mixed, rounds=rounds)
            for mesh in [p3d.build_mesh(layout, device_type="cpu") for layout in layouts]
            for mixed in (False, True)
        ]
    _print_host(f"host time per unit and step, {UNITS} units of 10 parameters", results)
    return results


def run_tp(quick: bool) -> list[dict[str, Any]]:
    """FSDP over TP 2, both policies."""
    layout = p3d.MeshLayout(shard=WORLD // 2, tp=2)
    rounds = 4 if quick else 15
    with fake_world(0, WORLD):
        # One mesh for all: torch hands out an equal, earlier mesh's groups for a later one's.
        mesh = p3d.build_mesh(layout, device_type="cpu")
        results = [host_case(mesh, mixed=mixed, rounds=rounds, tp=True) for mixed in (False, True)]
    _print_host("host time per unit and step with 2 colwise/rowwise pairs on tp", results)
    return results


def _print_host(title: str, results: list[dict[str, Any]]) -> None:
    print_table(
        f"{title}: microseconds above the plain model",
        ["mesh, policy", "plain", "ours", "torch", "ratio", "middle half"]
        + ["in collectives: ours", "torch", "ratio without"],
        [
            [f"{r['mesh']} {r['policy']}", r["plain_us"], r["ours_us"], r["torch_us"], r["ratio"]]
            + [r["ratio_range"], r["ours_in_collectives_us"], r["torch_in_collectives_us"]]
            + [r["ratio_without_collectives"]]
            for r in results
        ],
    )


# ---- step time on real processes ----


Times = tuple[float, float, float]
"""Seconds of forward + backward, of that and AdamW, and the CPU time of all of it."""


def gloo_worker(
    sizes: tuple[int, int, int], width: int, depth: int, rounds: int
) -> dict[str, list[Times]]:
    """One rank: variant -> the times of each of its steps."""
    mesh = p3d.build_mesh(p3d.MeshLayout(*sizes), device_type="cpu")
    plain = Stack(MlpBlock, depth, width)
    models = {
        "plain": plain,
        "ours": ours(copy.deepcopy(plain), mesh),
        "torch": torchs(copy.deepcopy(plain), mesh),
    }
    x = torch.randn(*TOKENS, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    steps = {name: gloo_step(model, x) for name, model in models.items()}
    for step in steps.values():
        for _ in range(2):
            step()
    taken: dict[str, list[Times]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(rounds):
        for name in order:
            with no_gc():
                taken[name].append(steps[name]())
        order.reverse()
    return taken


def gloo_step(model: nn.Module, x: torch.Tensor) -> Callable[[], Times]:
    """A training step, all ranks starting together."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Times:
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        model(x).square().mean().backward()
        backward = time.perf_counter() - start
        optimizer.step()
        total = time.perf_counter() - start
        cpu = time.process_time() - cpu
        optimizer.zero_grad()
        return backward, total, cpu

    return step


def gloo_case(pool: GlooPool, layout: p3d.MeshLayout, rounds: int, depth: int) -> list[dict]:
    """Three rows: the step without and with the optimizer, which takes as long as its slowest rank, and
    what it takes of the CPUs, a rank's share, above what the plain model takes: where there are fewer
    cores than ranks, as on most machines that run this, nothing is gained by waiting less."""
    by_rank = pool.run(gloo_worker, layout.sizes, 512, depth, rounds, timeout=600)

    def rounds_of(part: int, over_ranks: Callable[[list[float]], float]) -> Rounds:
        return Rounds(
            {
                name: [over_ranks([times[i][part] for times in ranks]) for i in range(rounds)]
                for name, ranks in ((n, [r[n] for r in by_rank]) for n in by_rank[0])
            }
        )

    cpu = rounds_of(2, statistics.mean)
    above = cpu.above("plain")
    above.seconds["plain"] = cpu.seconds["plain"]
    kinds = {
        "forward + backward": rounds_of(0, max),
        "with AdamW": rounds_of(1, max),
        "CPU time above plain": above,
    }
    results = []
    for what, taken in kinds.items():
        ratios = taken.ratios("ours", "torch")
        results.append(
            {
                "mesh": str(layout.sizes),
                "step": what,
                **{f"{name}_ms": taken.median(name) * 1e3 for name in ("plain", "ours", "torch")},
                "ratio": statistics.median(ratios),
                "ratio_range": range_of(ratios),
            }
        )
    return results


def run_gloo(quick: bool) -> list[dict[str, Any]]:
    """FSDP and HSDP on 4 processes."""
    results = []
    layouts = [p3d.MeshLayout(shard=RANKS), p3d.MeshLayout(replicate=2, shard=RANKS // 2)]
    depth = 4 if quick else 8
    with GlooPool(RANKS) as pool:
        for layout in layouts:
            results += gloo_case(pool, layout, 3 if quick else 10, depth)
    print_table(
        f"step time on {RANKS} gloo processes, {depth} blocks 512-2048-512, {TOKENS[0]} x {TOKENS[1]} "
        "tokens on each rank: milliseconds",
        ["mesh, step", "plain (no communication)", "ours", "torch", "ratio", "middle half"],
        [
            [f"{r['mesh']} {r['step']}", r["plain_ms"], r["ours_ms"], r["torch_ms"], r["ratio"]]
            + [r["ratio_range"]]
            for r in results
        ],
    )
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"host": run_host, "tp": run_tp, "gloo": run_gloo}
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under a minute")
    parser.add_argument("--only", choices=parts, help="one part")
    parser.add_argument("--json", type=Path, help="also write the results there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chosen = [options.only] if options.only else list(parts)
    results = {part: parts[part](options.quick) for part in chosen}
    print("ratio: ours / torch, median over rounds; below 1 ours is faster")
    if options.json:
        write_json(options.json, {"quick": options.quick, **results})


if __name__ == "__main__":
    main()
