"""host_nccl: the host's time with real communicators: two ranks on one card, by NCCL_HOSTID."""

import copy
import statistics
import time
from functools import partial
from typing import Any

import torch
from host_profile import calls_of, per_unit
from measure import Rounds, no_gc, range_of
from models import SmallBlock, Stack, ours, torchs
from page import Part
from ranks import Outcome, Rank, backend_of, run_cases
from runner import running
from sides import SIDES
from torch import distributed as dist

import parallel3d as p3d

ROUNDS, LEAST = 12, 4
COUNTED = ("launches", "events recorded", "events waited for")


def host_nccl(device: str, small: bool) -> Part:
    """Microseconds of the host above the plain model, a unit and step."""
    units = 4 if small else 16
    backend, why = backend_of(device, 2, running().folder)
    part = Part(
        "host_nccl",
        f"Time of the host above the plain model's, forward and backward, {units} units of ten small "
        f"parameters, on two ranks of one card by {backend}: ours against torch's FSDP2",
        ["case", "plain us", "ours us", "FSDP2 us", "ours / FSDP2", "middle half"]
        + [f"{what}: {whose}" for what in COUNTED for whose in ("ours", "FSDP2")],
    )
    if why:
        part.notes.append(f"NCCL does not run two ranks on one card here: {why}")
    cases = {
        f"FSDP {name}": {"mixed": mixed, "units": units, "rounds": LEAST if small else ROUNDS}
        for name, mixed in (("bf16/fp32", True), ("fp32", False))[: 1 if small else 2]
    }
    seconds = running().left / len(cases)

    def report(name: str, outcome: Outcome) -> None:
        if name in outcome.failed:
            part.failed.append(f"{name}: {outcome.failed[name]}")
            return
        found = outcome.results[name][0]
        taken = Rounds(found["seconds"])
        above = taken.above("plain")
        ratios = above.ratios("ours", "torch")
        us = [taken.median("plain"), above.median("ours"), above.median("torch")]
        counts = [found["calls"][side][what][0] for what in COUNTED for side in SIDES]
        row = [name, *(each / units * 1e6 for each in us), statistics.median(ratios)]
        part.rows.append([*row, range_of(ratios), *counts])
        part.data[name] = found

    outcome = run_cases(
        _work,
        [(name, {**case, "stop": 0.5 * seconds}) for name, case in cases.items()],
        world=2,
        device_type=device,
        backend=backend,
        folder=running().folder,
        limit=running().limit(120.0),
        deadline=running().end,
        exact=False,
        each=report,
    )
    part.left_out += outcome.left_out
    part.notes += [
        "real time of the host, which does not wait for the GPU; rank 0"
        if device == "cuda"
        else "CPU time of all threads of rank 0",
        "ranks on one card take turns, and NCCL sends by sockets: how long a step takes says nothing",
    ]
    return part


def _work(here: Rank, case: dict[str, Any]) -> dict[str, Any]:
    """One case on one rank: rounds in which the sides take turns, as many on both ranks."""
    mesh = here.mesh(p3d.MeshLayout(shard=2))
    torch.manual_seed(0)
    plain = Stack(SmallBlock, case["units"], 64).to(here.device)
    models: dict[str, Any] = {
        "plain": copy.deepcopy(plain).bfloat16() if case["mixed"] else copy.deepcopy(plain),
        "ours": ours(copy.deepcopy(plain), mesh, mixed=case["mixed"]),
        "torch": torchs(copy.deepcopy(plain), mesh, mixed=case["mixed"]),
    }
    x = torch.randn(8, 64, device=here.device)
    clock = time.perf_counter if here.is_cuda else time.process_time

    def step(side: str) -> float:
        model = models[side]
        inputs = x.bfloat16() if case["mixed"] and side == "plain" else x
        start = clock()
        model(inputs).sum().backward()
        seconds = clock() - start
        here.synchronize()
        model.zero_grad()
        return seconds

    for side in models:
        for _ in range(3):
            step(side)
    end = time.monotonic() + case["stop"]
    order = list(models)
    seconds: dict[str, list[float]] = {side: [] for side in models}
    for number in range(case["rounds"]):
        over = torch.tensor(float(number >= LEAST and time.monotonic() > end))
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        if over:
            break
        with no_gc():
            for side in order:
                seconds[side].append(step(side))
        order.reverse()
    calls = {
        side: per_unit(calls_of(partial(step, side), here.device_type), case["units"])
        for side in SIDES
    }
    return {"seconds": seconds, "calls": calls}
