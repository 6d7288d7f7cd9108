"""Captured steps: replays of a CUDA graph against eager steps, bit for bit; the host's time of a replay."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _support.optim.recorded_graph import RecordedGraph
from page import Part
from ranks import Outcome, Rank, backend_of, run_cases
from runner import running
from torch import Tensor
from truth import Case, build, loss_of, ours, sample

import parallel3d as p3d
from parallel3d.optim.capture import CapturedStep

REPLAYS, REPLAYS_SMALL = 200, 5
WARM_UP = 3
MOST_MS = 1.0  # of the host, a replay on one rank
CASE_SECONDS = 60.0
HEAD = ["mesh", "case", "ranks' backend", "replays", "first that differs", "host ms", "verdict"]


@dataclass(frozen=True)
class GraphCase(Case):
    """One training; ``static``: buffers at fixed addresses. recompute: activations are recomputed."""

    static: bool = False
    recompute: bool = False
    replays: int = REPLAYS


def cases(world: int, device_type: str, *, small: bool) -> list[GraphCase]:
    """The trainings on a world of this size; those of large weights on a GPU, as they take a CPU minutes."""
    meshes = {1: [(1, 1, 1)], 2: [(1, 2, 1), (2, 1, 1), (1, 1, 2)]}[world]
    more: dict[str, Any] = {"replays": REPLAYS_SMALL} if small else {}
    found = []
    for sizes in meshes:
        found += [
            GraphCase("bf16, accumulated", sizes, mixed=True, micro_batches=2, **more),
            GraphCase("fp32, clip, static", sizes, clip=True, static=True, **more),
        ]
        if small:
            continue
        if sizes[2] == 1:
            found.append(GraphCase("recomputed", sizes, mixed=True, recompute=True))
        if sizes[2] == 1 and device_type == "cuda":
            found.append(GraphCase("large weights", sizes, width=1024, hidden=4096))
        if sizes[0] > 1:
            found.append(GraphCase("HFSDP", sizes, hfsdp=True))
    return found


class Training:
    """A model on our engine, its optimizer, and a step of all micro-batches."""

    def __init__(self, case: GraphCase, here: Rank) -> None:
        self.case, self.mesh = case, here.mesh(case.layout)
        model = build(case, here.device)
        if case.recompute:
            model = p3d.parallelize(model, self.mesh, activation_checkpointing=True)
        else:
            model = ours(model, case, self.mesh)
        self.model: Any = model
        if case.static:
            self.model.set_static_memory(True)
        self.lr = torch.tensor(1e-2, device=here.device)
        options: dict[str, Any] = {"lr": self.lr, "fused": True, "capturable": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)

    def step(self, ids: Tensor) -> tuple[Tensor, ...]:
        """``ids``: (micro-batches, samples, length). Returns the loss, and the norm if it clips."""
        total = torch.zeros((), device=ids.device)
        for number, each in enumerate(ids.unbind()):
            self.model.set_requires_all_reduce(number == len(ids) - 1)
            loss = loss_of(self.model, each, self.mesh) / len(ids)
            loss.backward()
            total = total + loss.detach()
        found: tuple[Tensor, ...] = (total,)
        if self.case.clip:
            found += (p3d.optim.clip_grad_norm_(self.model.parameters(), 0.05),)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found

    def tensors(self) -> list[Tensor]:
        """The weights and the optimizer's state."""
        state = [v for each in self.optimizer.state.values() for v in each.values()]
        return [getattr(t, "_local_tensor", t) for t in (*self.model.parameters(), *state)]


def train(
    training: Training, here: Rank, step: Callable[[Any], Any], steps: int
) -> tuple[list[Tensor], list[float]]:
    """Returns what the steps have returned, stacked, and the host's seconds of each."""
    case, found, seconds = training.case, [], []
    data_rank = here.rank // case.sizes[2]
    for number in range(steps):
        parts = [sample(case, number, m, data_rank, here.device) for m in range(case.micro_batches)]
        ids = torch.stack(parts)
        training.lr.fill_(1e-2 / (1 + number % 7))
        here.synchronize()
        start = time.perf_counter()
        out = step(ids)
        seconds.append(time.perf_counter() - start)
        found.append(torch.stack([each.detach().clone() for each in out]))
    return found, seconds


def work(here: Rank, case: GraphCase) -> dict[str, Any]:
    """One case on one rank."""
    steps = WARM_UP + case.replays
    eager = Training(case, here)
    expected, _ = train(eager, here, eager.step, steps)
    training = Training(case, here)
    example = torch.stack([sample(case, 0, m, 0, here.device) for m in range(case.micro_batches)])
    if here.is_cuda:
        step = p3d.capture(training.step, training.model, training.optimizer, example)
    else:
        step = CapturedStep(
            training.step,
            training.model,
            [training.optimizer],
            example,
            WARM_UP,
            RecordedGraph(),
            None,
        )
    found, seconds = train(training, here, step, steps)
    differs = next((n for n in range(steps) if not torch.equal(found[n], expected[n])), None)
    return {
        "reason": step.reason or "",
        "captured": step.is_captured,
        "differs": differs,
        "same_end": all(map(torch.equal, training.tensors(), eager.tensors())),
        "host_ms": statistics.median(seconds[WARM_UP + 1 :]) * 1e3,
    }


def _graph(world: int, device_type: str, small: bool) -> Part:
    """The part ``graph1``: one process; ``graph2``: two ranks."""
    return run(f"graph{world}", world, device_type, small)


graph1, graph2 = (partial(_graph, world) for world in (1, 2))


def run(name: str, world: int, device_type: str, small: bool) -> Part:
    """A part of these trainings."""
    part = Part(name, "replays of a captured step against eager steps, bit for bit", HEAD)
    part.rows = [row for row in running().before.get("rows", []) if row[-1] == "ok"]
    part.data = dict(running().before.get("data", {}))
    right = {(row[0], row[1]) for row in part.rows}
    by_label = {
        case.label: case
        for case in cases(world, device_type, small=small)
        if (case.mesh, case.name) not in right
    }
    backend, why = backend_of(device_type, world, running().folder) if by_label else ("", "")
    if why:
        part.failed.append(f"NCCL does not run {world} ranks on one card here: {why}")
        return part
    outcome = run_cases(
        work,
        list(by_label.items()),
        world=world,
        device_type=device_type,
        backend=backend,
        folder=running().folder,
        limit=running().limit(CASE_SECONDS),
        deadline=running().end,
        each=lambda label, outcome: _report(part, by_label[label], outcome),
    )
    part.left_out += outcome.left_out
    part.notes.append(
        f"the first {WARM_UP} steps warm up; the learning rate changes, and so does the batch, in each step"
    )
    if device_type == "cpu":
        part.notes.append(
            "on a CPU a list of operations, replayed one by one, stands for the graph"
        )
    else:
        part.notes.append(f"failed if a replay takes the host more than {MOST_MS} ms on one rank")
    return part


def _report(part: Part, case: GraphCase, outcome: Outcome) -> None:
    """Adds the row of a case, and what is wrong."""
    row: list[Any] = [case.mesh, case.name, outcome.backend]
    if case.label in outcome.failed:
        part.failed.append(f"{case.label}: {outcome.failed[case.label]}")
        part.rows.append([*row, "", "", "", "FAILED"])
        return
    ranks = outcome.results[case.label]
    part.data[case.label] = ranks
    wrong = {f"not captured: {r['reason']}" for r in ranks if not r["captured"]}
    wrong |= {
        f"step {r['differs']} differs from the eager one" for r in ranks if r["differs"] is not None
    }
    wrong |= {"weights or state differ at the end" for r in ranks if not r["same_end"]}
    host = max(r["host_ms"] for r in ranks)
    if outcome.backend == "nccl" and len(ranks) == 1 and host > MOST_MS:
        wrong.add(f"a replay takes the host {host:.2f} ms")
    part.failed += [f"{case.label}: {each}" for each in sorted(wrong)]
    first = min((r["differs"] for r in ranks if r["differs"] is not None), default="none")
    part.rows.append([*row, case.replays, first, host, "FAILED" if wrong else "ok"])
