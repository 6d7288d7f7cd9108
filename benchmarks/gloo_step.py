"""A training step on 4 gloo processes, ours beside torch's FSDP2 in the same launch, taking turns.

    python benchmarks/gloo_step.py [--quick] [--json PATH]

8 blocks 512-2048-512 and AdamW, 4 x 128 tokens on each rank; FSDP (1, 4, 1) and HSDP (2, 2, 1). On both sides
``fully_shard`` is applied to each block and then to the root, with the same reshard policy (the default of
both), and torch's AdamW steps on its DTensors; "local" is ours with the same AdamW through ``optim.local``. A
step takes as long as its slowest rank. Beside it: what a rank takes of the CPUs (where cores are fewer than
ranks, nothing is gained by waiting less), page faults, and, in rounds of their own, where the calling thread
was.
"""

import copy
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from measure import Claim, Rounds, command_line, no_gc, print_table, range_of
from models import MlpBlock, Stack, ours, torchs
from torch import distributed as dist
from torch import nn
from where import Where, where_the_thread_is

import parallel3d as p3d
from parallel3d.testing import GlooPool

RANKS = 4
WIDTH = 512
DEPTH = 8
TOKENS = (4, 128)
"""Sequences of a rank's batch, and tokens in each."""
LAYOUTS = [p3d.MeshLayout(shard=RANKS), p3d.MeshLayout(replicate=2, shard=RANKS // 2)]
BAR, AIM = 0.85, 0.75
LOCAL = "local"
OURS = {"ours": "", LOCAL: ", ours through optim.local"}


@dataclass(frozen=True)
class Taken:
    """One step of one rank: seconds, and page faults (memory that was asked of the system anew)."""

    backward: float  # forward + backward
    step: float  # that and the optimizer
    user: float  # CPU time of all threads
    system: float
    faults: float


class Trainer:
    """A model with its optimizer and batch."""

    def __init__(self, model: nn.Module, *, local: bool = False) -> None:
        self.model = model
        if local:
            self.optimizer = p3d.optim.local(torch.optim.AdamW, model, lr=1e-4)
        else:
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.x = torch.randn(*TOKENS, WIDTH, generator=generator)

    def run(self) -> None:
        """Forward and backward."""
        self.model(self.x).square().mean().backward()

    def step(self) -> Taken:
        """A training step, all ranks starting together."""
        dist.barrier()
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        self.run()
        backward = time.perf_counter() - start
        self.optimizer.step()
        total = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        self.optimizer.zero_grad()
        return Taken(
            backward,
            total,
            after.ru_utime - before.ru_utime,
            after.ru_stime - before.ru_stime,
            after.ru_minflt - before.ru_minflt,
        )

    def watched(self) -> Where:
        """Forward and backward with the calling thread watched."""
        dist.barrier()
        with where_the_thread_is() as where:
            self.run()
        self.optimizer.zero_grad()
        return where


def worker(
    sizes: tuple[int, int, int], depth: int, rounds: int
) -> dict[str, tuple[list[Taken], list[Where]]]:
    """One rank: variant -> its steps, and those in which it was watched."""
    mesh = p3d.build_mesh(p3d.MeshLayout(*sizes), device_type="cpu")
    plain = Stack(MlpBlock, depth, WIDTH)
    models = {
        "plain": plain,
        "ours": ours(copy.deepcopy(plain), mesh),
        LOCAL: ours(copy.deepcopy(plain), mesh),
        "torch": torchs(copy.deepcopy(plain), mesh),
    }
    trainers = {name: Trainer(model, local=name == LOCAL) for name, model in models.items()}
    for trainer in trainers.values():
        for _ in range(2):
            trainer.step()
    steps: dict[str, list[Taken]] = {name: [] for name in trainers}
    watched: dict[str, list[Where]] = {name: [] for name in trainers}
    order = list(trainers)
    for _ in range(rounds):
        for name in order:
            with no_gc():
                steps[name].append(trainers[name].step())
        order.reverse()
    for _ in range(rounds):
        for name in order:
            with no_gc():
                watched[name].append(trainers[name].watched())
        order.reverse()
    return {name: (steps[name], watched[name]) for name in trainers}


def over_ranks(
    by_rank: list[dict[str, list[Any]]], part: str, join: Callable[[list[float]], float]
) -> Rounds:
    """Attribute ``part`` of all ranks' rounds, joined round by round."""
    return Rounds(
        {
            name: [
                join([getattr(each, part) for each in round_])
                for round_ in zip(*(ranks[name] for ranks in by_rank), strict=True)
            ]
            for name in by_rank[0]
        }
    )


def case(pool: GlooPool, layout: p3d.MeshLayout, *, depth: int, rounds: int) -> dict[str, Any]:
    """One mesh: what each variant takes, and the ratio of each round's steps."""
    ranks = pool.run(worker, layout.sizes, depth, rounds, timeout=900)
    steps = [{name: both[0] for name, both in rank.items()} for rank in ranks]
    watched = [{name: both[1] for name, both in rank.items()} for rank in ranks]
    whole = over_ranks(steps, "step", max)
    cpu = Rounds(
        {
            name: [
                a + b for a, b in zip(user, over_mean(steps, "system").seconds[name], strict=True)
            ]
            for name, user in over_mean(steps, "user").seconds.items()
        }
    )
    above = cpu.above("plain")
    ratios = {name: whole.ratios(name, "torch") for name in OURS}
    return {
        "mesh": str(layout.sizes),
        "ratio": {name: statistics.median(each) for name, each in ratios.items()},
        "spread": {name: range_of(each) for name, each in ratios.items()},
        "cpu_ratio": statistics.median(cpu.ratios("ours", "torch")),
        "cpu_above_plain_ratio": statistics.median(above.ratios("ours", "torch")),
        "seconds": {
            name: {
                "step": whole.median(name),
                "backward": over_ranks(steps, "backward", max).median(name),
                "user": over_mean(steps, "user").median(name),
                "system": over_mean(steps, "system").median(name),
                **{p: over_mean(watched, p).median(name) for p in asdict(Where())},
            }
            for name in whole.seconds
        },
        "faults": {name: over_mean(steps, "faults").median(name) for name in whole.seconds},
    }


def over_mean(by_rank: list[dict[str, list[Any]]], part: str) -> Rounds:
    """The mean of the ranks."""
    return over_ranks(by_rank, part, statistics.mean)


def report(result: dict[str, Any]) -> None:
    """One mesh's table."""
    seconds = result["seconds"]
    names = list(seconds)
    parts = {
        "step with AdamW": "step",
        "forward + backward": "backward",
        "CPU of a rank, user": "user",
        "CPU of a rank, system": "system",
        "calling thread, issuing collectives": "issuing",
        "calling thread, waiting for them": "waiting",
        "calling thread, copies": "copying",
    }
    rows: list[list[object]] = [
        [text, *(seconds[name][part] * 1e3 for name in names), _ratio(seconds, part)]
        for text, part in parts.items()
    ]
    rows[0][-1] = result["ratio"]["ours"]
    for text, part in (("CPU in all", "cpu_ratio"), ("CPU above plain", "cpu_above_plain_ratio")):
        rows.append([text, *("" for _ in names), result[part]])
    rows.append(["page faults", *(result["faults"][name] for name in names), ""])
    print_table(
        f"{result['mesh']}: milliseconds; the step's ratios {result['spread']['ours']}",
        ["", *names, "ours / torch"],
        rows,
    )


def _ratio(seconds: dict[str, dict[str, float]], part: str) -> object:
    peer = seconds["torch"][part]
    return seconds["ours"][part] / peer if peer else ""


def run(quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """FSDP and HSDP."""
    depth, rounds = (4, 3) if quick else (DEPTH, 10)
    with GlooPool(RANKS) as pool:
        results = [case(pool, layout, depth=depth, rounds=rounds) for layout in LAYOUTS]
    for result in results:
        report(result)
    claims = [
        Claim(
            f"training step with AdamW on {RANKS} gloo processes, {r['mesh']}{how}",
            ours=r["seconds"][name]["step"] * 1e3,
            peer=r["seconds"]["torch"]["step"] * 1e3,
            unit="ms",
            against="FSDP2",
            bar=BAR,
            aim=AIM,
            ratio=r["ratio"][name],
            spread=r["spread"][name],
        )
        for r in results
        for name, how in OURS.items()
    ]
    return claims, {"depth": depth, "meshes": results}


if __name__ == "__main__":
    command_line(__doc__, run)
