"""Replicate only, (n, 1, 1): ours beside torch's ``DistributedDataParallel``.

    python benchmarks/replicate_only.py [--quick] [--json PATH]

host:   CPU time per unit and step above the plain model, on a fake group of 8, 16 units of 10 parameters.
        Works of the fake group have no future, which DDP's own all-reduce waits for: its reducer is given a
        communication hook that all-reduces the same buffer.
memory: the largest sum of live tensors' storages over a step, 8 blocks of width 512.
step:   forward, backward and AdamW on 4 gloo processes, 8 blocks of width 512.

DDP is measured by default and with ``gradient_as_bucket_view=True``; claims are against the better one. AdamW
steps on our DTensors one by one, on DDP's tensors too; "local" is ours with the same AdamW through
``optim.local``.
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from host_time import host_step
from measure import Claim, Rounds, alternate, command_line, no_gc, print_table, range_of
from memory import PeakMemory
from models import MlpBlock, SmallBlock, Stack, ours
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import parallel3d as p3d
from parallel3d.testing import GlooPool, fake_world

UNITS, WORLD, RANKS = 16, 8, 4
DEPTH, WIDTH = 8, 512
TOKENS = (4, 128)
"""Sequences of a rank's batch, and tokens in each."""
PEERS = ("DDP", "DDP, bucket views")
LOCAL = "local"


def _hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    buffer.div_(dist.get_world_size())
    dist.all_reduce(buffer)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def variants(plain: Stack, mesh: DeviceMesh, *, hooked: bool) -> dict[str, nn.Module]:
    """Ours and DDP's two."""
    models: dict[str, nn.Module] = {"ours": ours(copy.deepcopy(plain), mesh)}
    for name in PEERS:
        models[name] = DistributedDataParallel(
            copy.deepcopy(plain), gradient_as_bucket_view="views" in name
        )
        if hooked:
            models[name].register_comm_hook(None, _hook)  # type: ignore[operator]
    return models


def _mesh(ranks: int) -> DeviceMesh:
    return p3d.build_mesh(p3d.MeshLayout(replicate=ranks, shard=1), device_type="cpu")


def _claim(
    what: str, unit: str, rounds: Rounds, scale: float, name: str = "ours", bar: float = 1.0
) -> Claim:
    peer = min(PEERS, key=rounds.median)
    ratios = rounds.ratios(name, peer)
    return Claim(
        f"replicate only: {what}",
        rounds.median(name) * scale,
        rounds.median(peer) * scale,
        unit,
        peer,
        bar,
        0.9,
        statistics.median(ratios),
        range_of(ratios),
    )


# ---- host time ----


def run_host(quick: bool) -> tuple[list[Claim], dict[str, float]]:
    """Above the plain model."""
    with fake_world(0, WORLD):
        plain = Stack(SmallBlock, UNITS, 64)
        models = {"plain": plain, **variants(plain, _mesh(WORLD), hooked=True)}
        x = torch.randn(8, 64)
        steps = {name: host_step(model, x) for name, model in models.items()}
        taken = alternate(steps, rounds=80 if quick else 400, steps_per_round=2, warmup=4)
    # A difference of small numbers: medians of many rounds before anything is subtracted.
    above = taken.chunks(8).above("plain")
    # DDP writes the gradients of the step before again; ours are the user's, and new in each backward.
    claim = _claim("host time", "us/unit", above, 1e6 / UNITS, bar=1.3)
    return [claim], {name: above.median(name) / UNITS * 1e6 for name in above.seconds}


# ---- memory ----


def run_memory() -> tuple[list[Claim], dict[str, float]]:
    """Parameters, gradients and all: MiB."""
    peaks = {}
    with fake_world(0, WORLD):
        plain = Stack(MlpBlock, DEPTH, WIDTH)
        x = torch.randn(*TOKENS, WIDTH)
        for name, model in variants(plain, _mesh(WORLD), hooked=True).items():
            with PeakMemory([x]) as memory:
                for _ in range(3):
                    memory.reset()
                    model(x).square().mean().backward()
                    model.zero_grad()
            peaks[name] = memory.peak / 2**20
    peer = min(PEERS, key=lambda name: peaks[name])
    what = "replicate only: peak memory"
    return [Claim(what, peaks["ours"], peaks[peer], "MiB", peer, 1.0, 0.9)], peaks


# ---- step ----


def trainer(model: nn.Module, x: torch.Tensor, *, local: bool) -> Callable[[], float]:
    """Forward, backward and AdamW; seconds, all ranks starting together."""
    if local:
        optimizer = p3d.optim.local(torch.optim.AdamW, model, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        seconds = time.perf_counter() - start
        optimizer.zero_grad()
        return seconds

    return step


def worker(rounds: int) -> dict[str, list[float]]:
    """One rank: variant -> seconds of each step."""
    x = torch.randn(*TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    plain, mesh = Stack(MlpBlock, DEPTH, WIDTH), _mesh(RANKS)
    models = {LOCAL: ours(copy.deepcopy(plain), mesh), **variants(plain, mesh, hooked=False)}
    steps = {name: trainer(model, x, local=name == LOCAL) for name, model in models.items()}
    for step in steps.values():
        step()
        step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(rounds):
        for name in order:
            with no_gc():
                taken[name].append(steps[name]())
        order.reverse()
    return taken


def run_step(quick: bool) -> tuple[list[Claim], dict[str, float]]:
    """A step takes as long as its slowest rank."""
    with GlooPool(RANKS) as pool:
        by_rank = pool.run(worker, 3 if quick else 10, timeout=600)
    taken = Rounds(
        {
            name: [max(s) for s in zip(*(r[name] for r in by_rank), strict=True)]
            for name in by_rank[0]
        }
    )
    what = f"step on {RANKS} gloo processes"
    claims = [
        _claim(what, "ms", taken, 1e3),
        _claim(f"{what}, ours through optim.local", "ms", taken, 1e3, LOCAL),
    ]
    return claims, {name: taken.median(name) * 1e3 for name in taken.seconds}


def run(quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """All three."""
    parts = {
        "host time, us per unit above plain": run_host(quick),
        "peak memory, MiB": run_memory(),
        f"step on {RANKS} gloo processes, ms": run_step(quick),
    }
    names = ("ours", LOCAL, *PEERS)
    print_table(
        "replicate only",
        ["", *names],
        [[what, *(v.get(name, "") for name in names)] for what, (_, v) in parts.items()],
    )
    claims = [claim for each, _ in parts.values() for claim in each]
    return claims, {what: values for what, (_, values) in parts.items()}


if __name__ == "__main__":
    command_line(__doc__, run)
