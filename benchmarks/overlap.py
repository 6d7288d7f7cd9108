"""Overlap: a step's time where its communication takes as long as its computation.

    python benchmarks/overlap.py [--quick] [--json PATH]

One process is rank 0 of 8 on an emulated network. Before each round its bandwidth is set so that what a step
sends takes as long in sum, on the busiest link, as the plain model's step. Eight blocks in fp32, ours and
torch's FSDP2 in turns; what is compared is the step with the larger of the two: 1.0 is all hidden, 2.0
nothing. With one unit gathered ahead of its use, the first gather, the first gather of the backward and the
last reduction have nothing to hide behind: 27 / 24 = 1.125 if nothing but the blocks takes time, which
tests/testing/test_emulated_schedule.py has exactly.

Time is CPU time of the process plus what waiting would take, which other processes don't disturb; the last
row is in real time.
"""

import copy
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from emulated_network import EmulatedNetwork, Link, Transfer, VirtualClock
from measure import Claim, Rounds, command_line, no_gc, print_table, range_of
from models import MlpBlock, Stack, ours, torchs
from torch import nn

import parallel3d as p3d

BLOCKS, WIDTH, TOKENS, WORLD = 8, 256, 2048, 8
STEPS = 1
REAL_TIME = "FSDP, in real time"
CASES: dict[str, tuple[p3d.MeshLayout, dict[str, str]]] = {
    "FSDP": (p3d.MeshLayout(shard=WORLD), {}),
    "HSDP, replicate on its own NIC": (p3d.MeshLayout(2, WORLD // 2), {"replicate": "second"}),
    "HSDP, on one NIC": (p3d.MeshLayout(2, WORLD // 2), {}),
    REAL_TIME: (p3d.MeshLayout(shard=WORLD), {}),
}


def timed(
    model: nn.Module, x: torch.Tensor, log: list[list[Transfer]] | None, network: EmulatedNetwork
) -> Callable[[], float]:
    """A step: forward and backward; returns seconds. ``log`` gets each step's transfers."""

    def step() -> float:
        network.clear()
        start = network.clock.now()
        model(x).sum().backward()
        seconds = network.clock.now() - start
        if log is not None:
            log.append(network.timeline)
        model.zero_grad()
        return seconds

    return step


def bytes_by_link(transfers: list[Transfer]) -> dict[str, int]:
    """What they send on each link."""
    sent: dict[str, int] = defaultdict(int)
    for transfer in transfers:
        sent[transfer.link] += transfer.bytes
    return sent


def exposed(steps: list[list[Transfer]]) -> dict[str, float]:
    """Milliseconds that a step's caller waits, by operation, medians over ``steps``."""
    ops = sorted({t.op for step in steps for t in step})
    return {
        op: statistics.median(sum(t.waited for t in s if t.op == op) for s in steps) * 1e3
        for op in ops
    }


def case(name: str, *, rounds: int) -> dict[str, Any]:
    """One mesh and its links."""
    layout, extra = CASES[name]
    links = {"first": Link(), "second": Link()}
    axes = {"replicate": "first", "shard": "first", "tp": "first"} | extra
    clock = None if name == REAL_TIME else VirtualClock(time.process_time)
    with EmulatedNetwork(world_size=WORLD, links=links, axes=axes, clock=clock) as network:
        mesh = p3d.build_mesh(layout, device_type="cpu")
        network.attach(mesh)
        plain = Stack(MlpBlock, BLOCKS, WIDTH)
        models = {
            "plain": plain,
            "ours": ours(copy.deepcopy(plain), mesh),
            "torch": torchs(copy.deepcopy(plain), mesh),
        }
        x = torch.randn(TOKENS, WIDTH)
        log: dict[str, list[list[Transfer]]] = {"ours": [], "torch": []}
        steps = {key: timed(model, x, log.get(key), network) for key, model in models.items()}
        for step in steps.values():
            step(), step()  # the first knows no order to gather ahead in
        sent = max(bytes_by_link(log["ours"][-1]).values())
        if sent != max(bytes_by_link(log["torch"][-1]).values()):
            raise AssertionError("the two engines send different amounts")
        taken = Rounds({key: [] for key in steps})
        gc.freeze()
        for _ in range(rounds):
            for key, step in steps.items():
                with no_gc():
                    seconds = [step() for _ in range(STEPS)]
                taken.seconds[key].append(statistics.median(seconds))
                # The machine's speed changes; compute = communication is to stay.
                if key == "plain":
                    bandwidth = sent / taken.seconds[key][-1]
                    network.links = {name: Link(bandwidth=bandwidth) for name in network.links}
        gc.unfreeze()
        return _row(name, taken, log)


def _row(name: str, taken: Rounds, log: dict[str, list[list[Transfer]]]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": name, "compute_ms": taken.median("plain") * 1e3}
    for key, steps in log.items():
        ratios = taken.ratios(key, "plain")
        row[key] = {
            "step_ms": taken.median(key) * 1e3,
            "ratio": statistics.median(ratios),
            "ratio_range": range_of(ratios),
            "waited_ms": exposed(steps[-STEPS * len(ratios) :]),
        }
    return row


def run(quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """All cases."""
    rows = [case(name, rounds=2 if quick else 6) for name in CASES]
    print_table(
        f"step with compute = communication, {BLOCKS} blocks of width {WIDTH}, {TOKENS} tokens, rank 0 of "
        f"{WORLD}: milliseconds, and the step / the larger of the two",
        [
            "case",
            "each of the two",
            "ours",
            "FSDP2",
            "ours /",
            "FSDP2 /",
            "ours waits",
            "FSDP2 waits",
        ],
        [
            [r["case"], r["compute_ms"]]
            + [r[key]["step_ms"] for key in ("ours", "torch")]
            + [r[key]["ratio"] for key in ("ours", "torch")]
            + [sum(r[key]["waited_ms"].values()) for key in ("ours", "torch")]
            for r in rows
        ],
    )
    claims = [
        Claim(
            f"overlap, {r['case']}",
            r["ours"]["step_ms"],
            r["compute_ms"],
            "ms",
            f"larger of the two (FSDP2: {r['torch']['ratio']:.2f})",
            bar=1.25,
            aim=1.12,
            ratio=r["ours"]["ratio"],
            spread=r["ours"]["ratio_range"],
        )
        for r in rows
        if r["case"] != REAL_TIME
    ]
    return claims, {"cases": rows}


if __name__ == "__main__":
    command_line(__doc__, run)
