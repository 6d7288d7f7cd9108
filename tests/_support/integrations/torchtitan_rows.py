"""torchtitan: its models by our parallelize with a translated plan, and its own trainer on our engine."""

from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

import parallel3d as p3d
from _support.integrations.rows import Result, Row, Run, difference, whole_weights


def trained(model: Any, layout: p3d.MeshLayout, chunked: bool) -> Run:
    from _support.integrations.titan_programs import Training

    rank = layout.data_rank(dist.get_rank())
    losses = torch.tensor(Training(model, rank, layout.data_size, chunked).steps())
    dist.all_reduce(losses)  # each data rank has its part of the sum
    return Run((losses / layout.tp).tolist(), whole_weights(model))


def run(family: str, layout: p3d.MeshLayout, sequence: bool, chunked: bool, swap: bool) -> Result:
    """One plain process, ours, and torchtitan's own parallelize function on FSDP2 and DTensors: with its
    ``sequence`` parallelism, its default (``chunked``) loss; ``swap``: ours is its function too."""
    from _support.integrations import titan_programs as lib

    with lib.titan():
        plain = lib.build(family, sequence)
        alone = Run(lib.Training(plain, 0, 1, chunked).steps(), whole_weights(plain))
        if swap:
            with mock.patch("torchtitan.distributed.fsdp.fully_shard", p3d.fully_shard):
                model = lib.by_titan(family, layout.sizes, sequence)
        else:
            model = lib.build(family, sequence)
            plan = p3d.integrations.torchtitan.plan(model)
            p3d.parallelize(model, p3d.build_mesh(layout, device_type="cpu"), tp_plan=plan)
        ours = difference(trained(model, layout, chunked), alone)
        peers = lib.by_titan(family, layout.sizes, sequence)
        return Result(ours, difference(trained(peers, layout, chunked), alone))


def row(
    name: str,
    layout: p3d.MeshLayout,
    family: str = "llama3",
    sequence: bool = True,
    chunked: bool = False,
    swap: bool = False,
) -> Row:
    peer = "its parallelize function, FSDP2 and DTensors"
    note = "float64 in place of its casts to float32 and bfloat16"
    return Row(
        f"torchtitan: {name}",
        ("torchtitan",),
        1 if swap else 3,
        layout.sizes,
        peer,
        run,
        (family, layout, sequence, chunked, swap),
        note=note,
    )


def layout(replicate: int, shard: int, tp: int) -> p3d.MeshLayout:
    return p3d.MeshLayout(replicate=replicate, shard=shard, tp=tp)


ROWS = [
    row("Llama 3, plan(model)", layout(1, 2, 2)),
    row("Llama 3, plan(model), chunked loss", layout(2, 1, 2), sequence=False, chunked=True),
    row("Llama 3, plan(model), chunked loss", layout(2, 2, 1), chunked=True),
    row("Qwen3 with experts, plan(model)", layout(1, 2, 2), family="qwen3_moe"),
    row("Qwen3 with experts, plan(model)", layout(2, 1, 2), family="qwen3_moe", sequence=False),
    row("Qwen3 with experts, plan(model)", layout(2, 2, 1), family="qwen3_moe"),
    row("its function on our fully_shard", layout(1, 2, 2), swap=True),
]
