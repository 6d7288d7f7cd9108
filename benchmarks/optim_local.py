"""AdamW's step through ``optim.local`` on a sharded model, beside the same class on plain tensors.

    python benchmarks/optim_local.py [--quick] [--json PATH]

100 parameters of 64 x 512 on this rank, one of 8 ranks of a fake group; nothing is communicated in a step.
CPU time of the step, in turns. ``on DTensors`` is torch's AdamW on the same Parameters.
"""

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from measure import (
    Claim,
    alternate,
    command_line,
    cpu_seconds,
    plain_claim,
    print_rows,
    range_of,
)
from models import local_gradients, local_parameters
from torch import nn
from torch.distributed import DeviceMesh

import parallel3d as p3d
from parallel3d.fsdp import fully_shard
from parallel3d.testing import fake_world

WORLD, PARAMS, ROWS, WIDTH = 8, 100, 64, 512

CASES: dict[str, dict[str, Any]] = {
    "units of 10": {"in_unit": 10},
    "one unit of 100": {"in_unit": 100},
    "units of 10, uneven": {"in_unit": 10, "lacking": 3},
    "one unit of 100, uneven": {"in_unit": 100, "lacking": 3},
    "units of 10, one gradient missing in each": {"in_unit": 10, "missing": True},
    "one unit of 100, ten gradients missing": {"in_unit": 100, "missing": True},
    "units of 10, gradients of the user's": {"in_unit": 10, "own": True},
}


class Unit(nn.Module):
    """Parameters whose gradients cost nothing."""

    def __init__(self, number: int, rows: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(rows, WIDTH) for _ in range(number))

    def forward(self) -> torch.Tensor:
        return torch.stack([weight.square().sum() for weight in self.weights]).sum()


def sharded(mesh: DeviceMesh, in_unit: int, rows: int) -> nn.ModuleList:
    """Units under the engine."""
    units = nn.ModuleList(Unit(in_unit, rows) for _ in range(PARAMS // in_unit))
    for unit in units:
        fully_shard(unit, mesh=mesh)
    return units


def case(
    name: str,
    kind: str,
    rounds: int,
    *,
    in_unit: int,
    lacking: int = 0,
    missing: bool = False,
    own: bool = False,
) -> dict[str, Any]:
    """One row.

    Args:
        lacking: how many rows the last rank has less.
        missing: every tenth parameter is without a gradient.
        own: gradients are tensors of the user's, not views of the reduced buffer.
    """
    mesh = p3d.build_mesh(p3d.MeshLayout(shard=WORLD), device_type="cpu")
    models = [sharded(mesh, in_unit, ROWS * WORLD - lacking) for _ in range(2)]
    for units in models:
        for unit in units:
            unit().backward()
        for number, param in enumerate(units.parameters()):
            if missing and number % 10 == 3:
                param.grad = None
            elif own and param.grad is not None:
                param.grad = param.grad * 1.5
    plain = []
    for local, grad in zip(local_parameters(models[0]), local_gradients(models[0]), strict=True):
        shard = nn.Parameter(local.detach().clone())
        assert shard.shape == (ROWS, WIDTH)
        shard.grad = None if grad is None else grad.clone()
        plain.append(shard)
    options: dict[str, Any] = {"lr": 1e-4, kind: True}
    optimizers = {
        "plain": torch.optim.AdamW(plain, **options),
        "ours": p3d.optim.local(torch.optim.AdamW, models[0], **options),
        "dtensor": torch.optim.AdamW(models[1].parameters(), **options),
    }
    steps = {key: cpu_seconds(each.step) for key, each in optimizers.items()}
    taken = alternate(steps, rounds=rounds, steps_per_round=4, warmup=2)
    ratios = taken.ratios("ours", "plain")
    return {
        "case": f"{name}, {kind}",
        **{f"{key}_ms": taken.median(key) * 1e3 for key in steps},
        "ratio": statistics.median(ratios),
        "ratio_range": range_of(ratios),
    }


def run(quick: bool) -> tuple[list[Claim], Mapping[str, Any]]:
    """All cases, foreach and fused."""
    with fake_world(0, WORLD):
        rows = [
            case(name, kind, 3 if quick else 15, **options)
            for name, options in CASES.items()
            for kind in ("foreach", "fused")
        ]
    print_rows(
        f"AdamW step on {PARAMS} parameters of {ROWS} x {WIDTH} local elements, milliseconds",
        {
            "case": "case",
            "plain": "plain_ms",
            "optim.local": "ours_ms",
            "on DTensors": "dtensor_ms",
            "ratio": "ratio",
            "middle half": "ratio_range",
        },
        rows,
    )
    claims = [plain_claim("AdamW through optim.local", row, "ms", bar=1.1) for row in rows]
    return claims, {"optim_local": rows}


if __name__ == "__main__":
    command_line(__doc__, run)
