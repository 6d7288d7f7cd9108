"""The optimizer's step on a sharded model: torch's AdamW on its DTensors beside ``optim.local``.

    python benchmarks/optimizers.py [--quick] [--json PATH]

CPU time of a step on one rank of a fake process group of 64; nothing is communicated in it. ``floor`` is the
same class on plain tensors of the local shards. Ratios are to torch's step on the same parameters.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import alternate, print_table, range_of, write_json
from models import SmallBlock, Stack, ours

import parallel3d as p3d
from parallel3d.testing import fake_world

UNITS = 16
WORLD = 64
WIDTH = 256


def timed(optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    """Seconds of CPU time of one step."""

    def step() -> float:
        start = time.process_time()
        optimizer.step()
        return time.process_time() - start

    return step


def case(*, foreach: bool, rounds: int) -> dict[str, Any]:
    """One row: milliseconds per step."""
    mesh = p3d.build_mesh(p3d.MeshLayout(1, WORLD, 1), device_type="cpu")
    plain = Stack(SmallBlock, UNITS, WIDTH)
    x = torch.randn(4, WIDTH)
    models = {name: ours(copy.deepcopy(plain), mesh, mixed=False) for name in ("torch", "local")}
    for model in models.values():
        model(x).sum().backward()
    params: list[Any] = list(models["torch"].parameters())
    shards = [torch.nn.Parameter(p.to_local().clone()) for p in params]
    for shard, param in zip(shards, params, strict=True):
        shard.grad = param.grad.to_local().clone()
    options: dict[str, Any] = {"lr": 1e-4, "foreach": foreach}
    steps = {
        "floor": timed(torch.optim.AdamW(shards, **options)),
        "torch": timed(torch.optim.AdamW(models["torch"].parameters(), **options)),
        "local": timed(p3d.optim.local(torch.optim.AdamW, models["local"], **options)),
    }
    taken = alternate(steps, rounds=rounds, steps_per_round=6, warmup=3)
    ratios = taken.ratios("local", "torch")
    return {
        "foreach": str(foreach),
        **{f"{name}_ms": taken.median(name) * 1e3 for name in steps},
        "ratio": statistics.median(ratios),
        "ratio_range": range_of(ratios),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--json", type=Path, help="write the results there too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 4 if args.quick else 20
    with fake_world(0, WORLD):
        rows = [case(foreach=foreach, rounds=rounds) for foreach in (False, True)]
    head = ["foreach", "floor ms", "torch ms", "optim.local ms", "ratio", "middle half"]
    print_table(
        f"AdamW step, {UNITS} units of 10 parameters of width {WIDTH}, one of {WORLD} ranks",
        head,
        [list(row.values()) for row in rows],
    )
    if args.json:
        write_json(args.json, {"optimizers": rows})


if __name__ == "__main__":
    main()
