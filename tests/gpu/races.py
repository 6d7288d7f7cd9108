"""Races: a training must compute the same bits however long operations take on their streams.

Each run repeats two steps from the same weights with delays drawn from a seed, and with NaN in freed memory
(``disturbed``). Most runs are on a network of this process alone, whose collectives work on streams of their
own; some are on NCCL with four ranks on one card.

Two controls say how much that shows. Our engine without one of its waits must be seen to fail. And torch's
FSDP2 with HSDP and CPU offload, of which a race is known (https://github.com/pytorch/pytorch/pull/180665), is
disturbed alike: whether it was seen to fail is a note.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from _support.models import SEQUENCE_PLAN, lm_loss, tokens
from disturbed import Disturber, delay_modules, disturb_engine, network_of_one
from page import Part
from ranks import Outcome, Rank, backend_of, run_cases
from runner import running
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from truth import VOCAB, Case, build, ours, torchs

import parallel3d as p3d
from parallel3d.fsdp import context

STEPS = 2
LENGTH = 4  # tokens of a sample: sequence parallelism divides them


@dataclass(frozen=True)
class Trial:
    """One training, disturbed again and again.

    Attributes:
        name: of the row. case: the training. peer: on torch's FSDP2.
        alone: on the network of one process; else on this world's process group.
        sequence: with sequence parallelism, whose norms have partial gradients, summed over tp.
        without: which wait our engine is to leave out; see ``CONTROLS``.
        seeds: how many runs, at most. seconds: after which no further one is begun.
        most_ms: the longest delay, in milliseconds.
    """

    name: str
    case: Case
    peer: bool = False
    alone: bool = True
    sequence: bool = False
    without: str = ""
    seeds: int = 3
    seconds: float = 20.0
    most_ms: float = 5.0


HSDP = (2, 2, 1)
OFFLOAD = "HSDP bf16, offload"
FETCH = "the all-gather does not wait for the fetch"


def trials(device_type: str, *, small: bool) -> list[Trial]:
    """Those on the network of one process."""
    size: dict[str, Any] = {} if small else {"width": 256, "hidden": 1024}
    hsdp = Case("hsdp", HSDP, mixed=True, **size)
    wanted = [
        (60, Trial("HSDP bf16", hsdp)),
        (40, Trial(OFFLOAD, replace(hsdp, offload=True))),
        (30, Trial("HSDP bf16, accumulation", replace(hsdp, micro_batches=2))),
        (30, Trial("HFSDP bf16", replace(hsdp, hfsdp=True))),
        (30, Trial("HSDP, a wire of bf16", replace(hsdp, wire=True))),
        (20, Trial("FSDP and TP", Case("tp", (1, 2, 2), **size), sequence=True)),
    ]
    if not small:
        large = Case("large", HSDP, mixed=True, width=1024, hidden=4608)
        wanted.append((20, Trial("HSDP bf16, large weights", large)))
    found = [replace(trial, seeds=3 if small else seeds) for seeds, trial in wanted]
    for name in controls(device_type):
        case = replace(hsdp, offload=name == FETCH)
        found.append(Trial(name, case, without=name, seeds=3 if small else 20, seconds=15.0))
    name = f"FSDP2, {OFFLOAD}"
    peer = Trial(name, replace(hsdp, offload=True), peer=True, seeds=2 if small else 40)
    return [*found, peer]


# -- controls: waits that are left out ------------------------------------------------------------------


def _nothing(*args: Any) -> None:
    """In place of a wait."""


def _gather(comm: Any) -> None:
    comm.gather.wait_stream = _nothing


def _scatter(comm: Any) -> None:
    comm.scatter.wait_stream = _nothing


def _replicate(comm: Any) -> None:
    comm.replicate.wait_event = _nothing


def _gathered(comm: Any) -> None:
    issue = comm.issue_gather

    def issue_gather(bucket: Any, compute: Any = None) -> None:
        issue(bucket, compute)
        if bucket.gathering is not None:
            bucket.gathering = (None, bucket.gathering[1])

    comm.issue_gather = issue_gather


def _reduced(comm: Any) -> None:
    def drop(flight: Any, compute: Any) -> None:
        flight.source = None
        flight.held.clear()

    comm._wait_for = drop


def _inputs(comm: Any) -> None:
    reduce = comm.reduce

    def reduce_and_free(bucket: Any, *, all_reduce: bool) -> None:
        reduce(bucket, all_reduce=all_reduce)
        for flight in comm.in_flight:
            flight.source = None

    comm.reduce = reduce_and_free


CONTROLS: dict[str, Callable[[Any], None]] = {
    "the all-gather does not wait for compute": _gather,
    FETCH: _gather,
    "compute does not wait for the all-gather": _gathered,
    "the reduce-scatter does not wait for compute": _scatter,
    "the all-reduce does not wait for the reduce-scatter": _replicate,
    "compute does not wait for the reductions": _reduced,
    "inputs of a reduce-scatter are freed at once": _inputs,
}
ON_CPU = ["compute does not wait for the all-gather"]


def controls(device_type: str) -> list[str]:
    """Those that the device's comm has."""
    return list(CONTROLS) if device_type == "cuda" else ON_CPU


@contextmanager
def weakened(name: str) -> Iterator[None]:
    """Engines that begin to run in the body leave out the wait."""
    make = context.make_comm

    def make_comm(device_type: str) -> Any:
        comm = make(device_type)
        CONTROLS[name](comm)
        return comm

    if not name:
        yield
        return
    with patch.object(context, "make_comm", make_comm):
        yield


# -- one training ---------------------------------------------------------------------------------------


class Training:
    """A model, its optimizer and its first weights."""

    def __init__(self, trial: Trial, here: Rank, disturber: Disturber) -> None:
        self.trial, self.here, self.disturber = trial, here, disturber
        case = trial.case
        mesh = here.mesh(case.layout)
        plain = build(case, here.device)
        if trial.sequence:
            self.model: Any = p3d.parallelize(plain, mesh, SEQUENCE_PLAN)
        else:
            self.model = (torchs if trial.peer else ours)(plain, case, mesh)
        delay_modules(self.model, disturber)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.first = [local_of(param).clone() for param in self.model.parameters()]
        layout = case.layout
        data_rank = layout.data_rank(here.rank)
        self.samples = [
            tokens(10 * number + data_rank, 4, LENGTH, VOCAB).to(here.device)
            for number in range(STEPS * case.micro_batches)
        ]

    def run(self) -> dict[str, torch.Tensor]:
        """Two steps from the first weights: losses, gradients and weights by name."""
        self.here.synchronize()
        params = dict(self.model.named_parameters())
        with torch.no_grad():
            for param, first in zip(params.values(), self.first, strict=True):
                local_of(param).copy_(first)
        # HFSDP renews its copy only when it sees a change.
        torch.autograd.graph.increment_version(list(params.values()))
        self.here.synchronize()
        found: dict[str, torch.Tensor] = {}
        count = self.trial.case.micro_batches
        for step in range(STEPS):
            for micro in range(count):
                if count > 1:
                    self.model.set_requires_all_reduce(micro == count - 1)
                loss = lm_loss(self.model, self.samples[step * count + micro])
                loss.backward()
                found[f"loss {step}.{micro}"] = loss.detach().clone()
            for name, param in params.items():
                if param.grad is not None:
                    found[f"gradient {step} of {name}"] = local_of(param.grad).clone()
            self.disturber.delay()  # a late optimizer: the next gather must wait for it
            self.optimizer.step()
            self.optimizer.zero_grad()
        for name, param in params.items():
            found[f"weight {name}"] = local_of(param).clone()
        self.here.synchronize()
        return {name: tensor.detach().cpu() for name, tensor in found.items()}


@torch.no_grad()
def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def work(here: Rank, trial: Trial) -> dict[str, Any]:
    """One trial on one rank."""
    disturber = Disturber(here.device_type, trial.most_ms)
    if not trial.alone:
        with disturb_engine(disturber):
            return _repeat(Training(trial, here, disturber), trial, disturber)
    world = math.prod(trial.case.sizes)
    alone = Rank(0, world, here.device_type, here.folder)
    with network_of_one(world, disturber), weakened(trial.without), disturb_engine(disturber):
        return _repeat(Training(trial, alone, disturber), trial, disturber)


def _repeat(training: Training, trial: Trial, disturber: Disturber) -> dict[str, Any]:
    """Runs undisturbed, then by every seed.

    Without a wait the undisturbed run may be wrong already, so it is compared with an engine that has all.
    """
    begun = time.monotonic()
    if trial.without:
        with patch.dict(CONTROLS, {trial.without: _nothing}):
            whole = Training(replace(trial, without=""), training.here, disturber)
            whole.run()
            right = whole.run()
    else:
        training.run()  # the first step knows no order to gather ahead in
        right = training.run()
    finite = all(bool(t.isfinite().all()) for t in right.values())
    again = [] if trial.without else different(training.run(), right)
    found: dict[str, Any] = {"finite": finite, "undisturbed": again, "differed": [], "runs": 0}
    for seed in range(trial.seeds):
        with disturber.seeded(1000 * seed + training.here.rank):
            result = training.run()
        names = different(result, right)
        found["runs"] += 1
        if names:
            found["differed"].append([seed, names[:3]])
        stop = time.monotonic() > begun + trial.seconds or bool(names and trial.without)
        if _any_rank(stop, trial):
            break
    found["points"] = disturber.points // max(1, found["runs"])
    found["seconds"] = time.monotonic() - begun
    return found


def _any_rank(stop: bool, trial: Trial) -> bool:
    """Whether any rank is to stop: they run the same number of seeds."""
    if trial.alone:
        return stop
    flag = torch.tensor([float(stop)])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def different(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """The names of what is not the same bit for bit."""
    if list(found) != list(right):
        return ["other names"]
    return [name for name, tensor in found.items() if not torch.equal(tensor, right[name])]


# -- the part -------------------------------------------------------------------------------------------

HEAD = ["trial", "on", "runs", "runs that differed", "delays a run", "seconds", "verdict"]


def races(device_type: str, small: bool) -> Part:
    """The part ``races``: on the network of one process."""
    part = _run("races", trials(device_type, small=small), 1, device_type)
    part.notes.append(
        "one process: collectives are computed by this process, on a stream for each group; what an engine "
        "does around them is real"
    )
    if device_type == "cpu":
        part.notes.append(
            "a CPU has no streams: works are delayed, and results come when waited for"
        )
    return part


def races_ranks(device_type: str, small: bool) -> Part:
    """The part ``races_ranks``: HSDP on four ranks."""
    return _run("races_ranks", [_on_ranks(small=small)], 4, device_type)


def races_offload(device_type: str, small: bool) -> Part:
    """The part ``races_offload``: HSDP on four ranks, with CPU offload."""
    trial = _on_ranks(small=small)
    case = replace(trial.case, offload=True)
    offload = replace(trial, name="HSDP, offload", case=case)
    return _run("races_offload", [offload], 4, device_type)


def _run(name: str, wanted: list[Trial], world: int, device_type: str) -> Part:
    title = "a training under random delays, and NaN in freed memory: the same bits"
    part = Part(name, title, HEAD)
    backend, where = "", "one process"
    if world > 1:
        backend, why = backend_of(device_type, world, running().folder)
        where = f"{world} ranks, {backend}"
        if why:
            part.notes.append(f"NCCL does not run {world} ranks on one card here: {why}")
    # Each trial stops at its seconds, so that all have a part of the time. Few take all of theirs.
    most = 2 * running().left / sum(trial.seconds for trial in wanted)
    by_name = {
        trial.name: replace(trial, seconds=trial.seconds * min(1.0, most)) for trial in wanted
    }
    outcome = run_cases(
        work,
        list(by_name.items()),
        world=world,
        device_type=device_type,
        backend=backend,
        folder=running().folder,
        limit=running().limit(90.0),
        deadline=running().end,
        each=lambda trial, outcome: _report(part, by_name[trial], outcome, where),
    )
    part.left_out += outcome.left_out
    return part


def _on_ranks(*, small: bool) -> Trial:
    """On a real process group of four ranks. A collective there takes some 15 ms on one card."""
    size: dict[str, Any] = {} if small else {"width": 256, "hidden": 1024}
    hsdp = Case("hsdp", HSDP, mixed=True, **size)
    seeds, seconds = (2, 10.0) if small else (40, 25.0)
    most = 2.0 if small else 30.0
    return Trial("HSDP", hsdp, alone=False, seeds=seeds, seconds=seconds, most_ms=most)


def _report(part: Part, trial: Trial, outcome: Outcome, where: str) -> None:
    """Adds the row of a trial, and what is wrong."""
    if trial.name in outcome.failed:
        text = f"{trial.name} ({where}): {outcome.failed[trial.name]}"
        verdict = "did not end" if trial.peer else "FAILED"
        (part.notes if trial.peer else part.failed).append(text)
        part.rows.append([trial.name, where, "", "", "", "", verdict])
        return
    ranks = outcome.results[trial.name]
    part.data[f"{trial.name} ({where})"] = ranks
    runs = ranks[0]["runs"]
    seeds = {seed for rank in ranks for seed, _ in rank["differed"]}
    first = next((f"seed {s}: {', '.join(n)}" for r in ranks for s, n in r["differed"]), "")
    wrong = ""
    if not all(rank["finite"] for rank in ranks):
        wrong = "the undisturbed run is not finite: it shows nothing"
    elif any(rank["undisturbed"] for rank in ranks):
        names = next(rank["undisturbed"] for rank in ranks if rank["undisturbed"])
        wrong = f"two undisturbed runs differ, in {', '.join(names[:3])}"
    elif trial.without and not seeds:
        wrong = f"in {runs} runs it was not seen to fail: the test is too weak"
    elif seeds and not trial.without and not trial.peer:
        wrong = f"{len(seeds)} of {runs} disturbed runs differ, {first}"
    if trial.peer:
        seen = f"was seen to fail: {first}" if seeds else "was not seen to fail"
        part.notes.append(f"control, {trial.name}: {wrong or seen} ({len(seeds)} of {runs} runs)")
        wrong = ""
    if wrong:
        part.failed.append(f"{trial.name} ({where}): {wrong}")
    kind = "control seen" if trial.without else "control" if trial.peer else "ok"
    row = [trial.name, where, runs, len(seeds), ranks[0]["points"], ranks[0]["seconds"]]
    part.rows.append([*row, "FAILED" if wrong else kind])
