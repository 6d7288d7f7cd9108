"""Tensor-parallel linears by themselves, beside torch's ``parallelize_module``.

    python benchmarks/tp_linears.py [--quick] [--only host|overlap] [--json PATH]

host:    what a gated MLP's forward and backward cost the CPU above the plain module's, on a fake process
         group: microseconds, and ours / torch's.
overlap: a training step of a gated MLP on 2 gloo processes, with the sums of input gradients beside the
         weight gradients and without: milliseconds, and with / without.
"""

import argparse
import copy
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import alternate, print_table, range_of, write_json
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from parallel3d import MeshLayout, build_mesh, parallelize, tp
from parallel3d.testing import GlooPool, fake_world
from parallel3d.tp.overlap import WORTHWHILE

PLAN = {"gate": tp.Colwise(), "up": tp.Colwise(), "down": tp.Rowwise()}


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def timed(model: nn.Module, x: Tensor, clock: Callable[[], float]) -> Callable[[], float]:
    """Forward and backward, in seconds."""

    def step() -> float:
        start = clock()
        model(x * 1).sum().backward()
        seconds = clock() - start
        model.zero_grad()
        return seconds

    return step


def host(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for least, name in ((2**60, "small inputs"), (0, "as if large: overlapped")):
        WORTHWHILE["cpu"] = least
        with fake_world(0, 2):
            mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
            plain, x = Gated(16), torch.randn(4, 16, requires_grad=True)
            ours, torchs = copy.deepcopy(plain), copy.deepcopy(plain)
            tp.resolve_plan(ours, PLAN, 2).apply(ours, mesh)
            for module in ours.modules():  # as the engine does before a forward
                for key, p in module._parameters.items():
                    if isinstance(p, DTensor):
                        module._parameters[key] = nn.Parameter(p.to_local())
            styles = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(torchs, mesh["tp"], styles, src_data_rank=None)
            sides = {"plain": plain, "ours": ours, "torch": torchs}
            steps = {key: timed(model, x, time.process_time) for key, model in sides.items()}
            taken = alternate(steps, rounds=rounds, steps_per_round=20, warmup=20)
        above = taken.above("plain")
        rows.append(
            {
                "case": name,
                "plain us": round(taken.median("plain") * 1e6, 1),
                "ours us": round(above.median("ours") * 1e6, 1),
                "torch us": round(above.median("torch") * 1e6, 1),
                "ratio": range_of(above.ratios("ours", "torch")),
            }
        )
    return rows


def on_ranks(width: int, tokens: int, rounds: int) -> Any:
    torch.set_num_threads(1)
    mesh = build_mesh(MeshLayout(1, 1, dist.get_world_size()), device_type="cpu")
    torch.manual_seed(0)
    model = parallelize(Gated(width), mesh, PLAN)
    x = torch.randn(tokens, width, requires_grad=True)

    def step(least: int) -> float:
        WORTHWHILE["cpu"] = least
        dist.barrier()
        return timed(model, x, time.perf_counter)()

    steps = {
        "with": functools.partial(step, 0),
        "without": functools.partial(step, 2**60),
    }
    return alternate(steps, rounds=rounds, steps_per_round=4, warmup=2)


def overlap(rounds: int) -> list[dict[str, Any]]:
    rows = []
    with GlooPool(2) as pool:
        for width, tokens in ((256, 256), (512, 1024), (1024, 2048)):
            taken = pool.run(on_ranks, width, tokens, rounds, world_size=2, timeout=300)[0]
            rows.append(
                {
                    "width": width,
                    "tokens": tokens,
                    "with ms": round(taken.median("with") * 1e3, 2),
                    "without ms": round(taken.median("without") * 1e3, 2),
                    "ratio": range_of(taken.ratios("with", "without")),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("host", "overlap"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 5 if args.quick else 25
    found = {
        name: run(rounds)
        for name, run in (("host", host), ("overlap", overlap))
        if args.only in (None, name)
    }
    for name, rows in found.items():
        print_table(name, list(rows[0]), [list(row.values()) for row in rows])
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
