"""What the engine costs the CPU beside torch's FSDP2 and ``parallelize_module``, in turns in one process.

    python benchmarks/host_time.py [--quick] [--json PATH]

CPU time of forward and backward above the plain model's, per unit and step, on a fake process group: 16
units of ten small parameters, so that next to nothing is computed. On both sides ``fully_shard`` is applied
to each block and then to the root, with the same reshard policy (the default of both). The time inside the
collectives' own calls is printed beside: the fake group copies what it would receive, in as many pieces as
there are ranks, which both sides pay and neither can save.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from measure import Claim, alternate, command_line, no_gc, print_table, range_of
from models import SmallBlock, Stack, ours, ours_tp, torchs, torchs_tp, torchs_tp_alone
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh

import parallel3d as p3d
from parallel3d.testing import fake_world

UNITS = 16
WIDTH = 64


@dataclass(frozen=True)
class Kind:
    """One kind of mesh, what runs on it, and what is claimed of it."""

    what: str
    sizes: tuple[int, int, int]
    ours: Callable[..., Stack]
    torchs: Callable[..., Stack]
    against: str
    bar: float
    aim: float
    policies: tuple[bool, ...] = (False, True)  # bf16/fp32?


KINDS = (
    Kind("FSDP", (1, 64, 1), ours, torchs, "FSDP2", 0.5, 0.35),
    Kind("HSDP", (2, 32, 1), ours, torchs, "FSDP2", 0.5, 0.35),
    Kind("FSDP and TP", (1, 32, 2), ours_tp, torchs_tp, "FSDP2 + TP", 0.22, 0.15),
    Kind(
        "TP alone", (1, 1, 2), ours_tp, torchs_tp_alone, "parallelize_module", 0.15, 0.1, (False,)
    ),
)


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


def measure(kind: Kind, mesh: DeviceMesh, *, mixed: bool, rounds: int) -> dict[str, Any]:
    """One row: microseconds per unit and step above the plain model."""
    plain = Stack(SmallBlock, UNITS, WIDTH)
    models = {
        "plain": copy.deepcopy(plain).bfloat16() if mixed else copy.deepcopy(plain),
        "ours": kind.ours(copy.deepcopy(plain), mesh, mixed=mixed),
        "torch": kind.torchs(copy.deepcopy(plain), mesh, mixed=mixed),
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
        "case": f"{kind.what} {kind.sizes} {'bf16/fp32' if mixed else 'fp32'}",
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
    """Seconds per step inside c10d's calls."""
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


def rows_of(kind: Kind, quick: bool) -> list[dict[str, Any]]:
    """All policies of one kind."""
    mesh = p3d.build_mesh(p3d.MeshLayout(*kind.sizes), device_type="cpu")
    rounds = 6 if quick else 25
    return [measure(kind, mesh, mixed=mixed, rounds=rounds) for mixed in kind.policies]


def run(quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """All kinds of meshes and policies."""
    claims, results = [], []
    for kind in KINDS:
        with fake_world(0, kind.sizes[0] * kind.sizes[1] * kind.sizes[2]):
            rows = rows_of(kind, quick)
        results += rows
        claims += [
            Claim(
                f"host time, {row['case']}",
                row["ours_us"],
                row["torch_us"],
                "us",
                kind.against,
                kind.bar,
                kind.aim,
                row["ratio"],
                row["ratio_range"],
            )
            for row in rows
        ]
    print_table(
        f"host time per unit and step, {UNITS} units of 10 parameters: microseconds above the plain model",
        ["mesh, policy", "plain", "ours", "torch", "ratio", "middle half"]
        + ["in collectives: ours", "torch", "ratio without"],
        [list(row.values()) for row in results],
    )
    return claims, {"host_time": results}


if __name__ == "__main__":
    command_line(__doc__, run)
