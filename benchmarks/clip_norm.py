"""``clip_grad_norm_`` on a sharded model beside torch's on plain tensors of the local sizes, and on FSDP2.

    python benchmarks/clip_norm.py [--quick] [--json PATH]

CPU time of a call on one rank of a fake group of 64 ranks, in turns. The norm of a sharded model needs a sum
over ranks, which that of plain tensors does not: ``in collectives`` is what ours spends inside c10d's calls,
and is part of its time. FSDP2 has no time where torch's own function raises: on parameters of which some are
sharded over tp and some are not, "must have the same mesh".
"""

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from measure import (
    Claim,
    alternate,
    command_line,
    cpu_seconds,
    no_gc,
    plain_claim,
    print_rows,
    range_of,
)
from models import PLAN, SmallBlock, Stack, local_gradients, local_parameters
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh, fsdp
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import parallel3d as p3d
from parallel3d.fsdp import fully_shard
from parallel3d.testing import fake_world
from parallel3d.tp import resolve_plan

WORLD = 64
LAYOUTS = {
    "FSDP": p3d.MeshLayout(shard=WORLD),
    "HSDP": p3d.MeshLayout(replicate=2, shard=WORLD // 2),
    "FSDP + TP 2": p3d.MeshLayout(shard=WORLD // 2, tp=2),
}
UNITS: dict[str, dict[str, Any]] = {
    "16 units of 10 small parameters": {"blocks": 16, "width": 64},
    "one unit of 100 larger ones": {"blocks": 10, "width": 1024, "as_one": True},
}
Clip = Callable[[], torch.Tensor]


def sharded(
    model: Stack, mesh: DeviceMesh, *, as_one: bool, tp: Callable, shard: Callable
) -> Stack:
    """``model`` tensor-parallel, and sharded block by block or as one unit."""
    if mesh.shape[2] > 1:
        tp(model)
    for block in [] if as_one else model.blocks:
        shard(block)
    shard(model)
    return model


def ours(model: Stack, mesh: DeviceMesh, *, as_one: bool) -> Stack:
    """Under our engine."""
    return sharded(
        model,
        mesh,
        as_one=as_one,
        tp=lambda m: resolve_plan(m, PLAN, tp_size=mesh["tp"].size()).apply(m, mesh),
        shard=lambda m: fully_shard(m, mesh=mesh),
    )


def torchs(model: Stack, mesh: DeviceMesh, *, as_one: bool) -> Stack:
    """Under torch's FSDP2 and TP."""
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {name: styles[style]() for name, style in PLAN.items()}
    data = mesh["replicate", "shard"] if mesh.shape[0] > 1 else mesh["shard"]
    return sharded(
        model,
        mesh,
        as_one=as_one,
        tp=lambda m: parallelize_module(m, mesh["tp"], plan, src_data_rank=None),
        shard=lambda m: fsdp.fully_shard(m, mesh=data),
    )


def in_collectives(clip: Clip, calls: int = 20) -> float:
    """Median seconds of a call inside c10d's all-reduce."""
    spent = 0.0
    original = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        start = time.process_time()
        result = original(*args, **kwargs)
        spent += time.process_time() - start
        return result

    samples = []
    with mock.patch.object(dist, "all_reduce", all_reduce), no_gc():
        for _ in range(calls):
            spent = 0.0
            clip()
            samples.append(spent)
    return statistics.median(samples)


def case(
    name: str, mesh: DeviceMesh, rounds: int, *, blocks: int, width: int, as_one: bool = False
) -> dict[str, Any]:
    """One row: microseconds of a call."""
    start = Stack(SmallBlock, blocks, width)
    models = {
        "ours": ours(copy.deepcopy(start), mesh, as_one=as_one),
        "fsdp2": torchs(copy.deepcopy(start), mesh, as_one=as_one),
    }
    x = torch.randn(4, width)
    for model in models.values():
        model(x).sum().backward()
    plain = []
    both = zip(local_parameters(models["ours"]), local_gradients(models["ours"]), strict=True)
    for local, grad in both:
        assert grad is not None
        plain.append(nn.Parameter(local.detach().clone()))
        plain[-1].grad = grad.clone()
    lists = {key: list(model.parameters()) for key, model in models.items()}
    clips: dict[str, Clip] = {
        "plain": lambda: nn.utils.clip_grad_norm_(plain, 1.0),
        "ours": lambda: p3d.optim.clip_grad_norm_(lists["ours"], 1.0),
        "fsdp2": lambda: nn.utils.clip_grad_norm_(lists["fsdp2"], 1.0),
    }
    try:
        clips["fsdp2"]()
    except RuntimeError:
        del clips["fsdp2"]
    steps = {key: cpu_seconds(clip) for key, clip in clips.items()}
    taken = alternate(steps, rounds=rounds, steps_per_round=8, warmup=4)
    ratios = taken.ratios("ours", "plain")
    return {
        "case": name,
        **{f"{key}_us": taken.median(key) * 1e6 for key in clips},
        "ratio": statistics.median(ratios),
        "ratio_range": range_of(ratios),
        "in_collectives_us": in_collectives(clips["ours"]) * 1e6,
    }


def run(quick: bool) -> tuple[list[Claim], Mapping[str, Any]]:
    """All meshes and both models."""
    rows = []
    for mesh_name, layout in LAYOUTS.items():
        with fake_world(0, WORLD):
            mesh = p3d.build_mesh(layout, device_type="cpu")
            for units, options in UNITS.items():
                name = f"{mesh_name} {layout.sizes}, {units}"
                rows.append(case(name, mesh, 3 if quick else 25, **options))
    print_rows(
        "clip_grad_norm_: microseconds",
        {
            "case": "case",
            "plain": "plain_us",
            "ours": "ours_us",
            "FSDP2": "fsdp2_us",
            "ratio to plain": "ratio",
            "middle half": "ratio_range",
            "in collectives": "in_collectives_us",
        },
        rows,
        missing="raises",
    )
    claims = [plain_claim("clip_grad_norm_", row, "us", bar=1.2) for row in rows]
    return claims, {"clip_norm": rows}


if __name__ == "__main__":
    command_line(__doc__, run)
