"""Nine layouts that were measured on one H200, predicted with the host's times of the same run."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llama import Llama, LlamaConfig

from parallel3d.mesh import MeshLayout
from parallel3d.planner import Cluster, Gpu, ModelSpec, Workload, predict, spec_from_module
from parallel3d.planner.cluster import HostTimes, gpu
from parallel3d.planner.stacks import stack_of

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "published"
with (PUBLISHED / "h200_layouts.csv").open() as rows:
    ROWS = list(csv.DictReader(rows))
STACK = stack_of("parallel3d").with_values(
    "this run",
    # Links are streams that sleep. AdamW with foreach reads and writes 20 numbers a parameter, not 7.
    {"overlap_slowdown": 0.0, "optimizer_traffic": 20 / 7},
    "how the run was made",
)
LATENCY, RATE = 15.0, 300.0  # us, GB/s


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    config = LlamaConfig(2048, 16, 32, 8, 8192, 32_000, 2048)
    with torch.device("meta"):
        return spec_from_module(Llama(config), tp_plan=None, seq_len=2048)


def on_emulated_links(each: Gpu, layout: MeshLayout) -> Cluster:
    sizes = sorted({size for size in layout.sizes if size > 1})
    passes = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    table = {
        kind: {n: (LATENCY, RATE * n / (n - 1) / count, 1e-9) for n in sizes}
        for kind, count in passes.items()
    }
    world = layout.world_size
    return Cluster(replace(each, collectives=table, node=world, domain=world), 1, world)


def predicted(spec: ModelSpec, row: dict[str, str], each: Gpu) -> float:
    layout = MeshLayout(*(int(row[axis]) for axis in ("replicate", "shard", "tp")))
    reshard = row["reshard_after_forward"] == "1"
    work = Workload(
        2048, int(row["sequences"]), param_dtype="fp32", reshard_after_forward=reshard, stack=STACK
    )
    return predict(spec, layout, on_emulated_links(each, layout), work).step_seconds


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(list(row.values())[:5]))
def test_within_twelve_percent(spec: ModelSpec, row: dict[str, str]) -> None:
    h200 = gpu("nvidia-h200", PUBLISHED / "h200_profile.toml")
    speed = float(row["step_s"]) / predicted(spec, row, h200)  # tokens/s beside the measured ones
    assert abs(speed - 1) < 0.12


def test_without_the_hosts_times_small_steps_are_far_off(spec: ModelSpec) -> None:
    h200 = replace(gpu("nvidia-h200", PUBLISHED / "h200_profile.toml"), host_times=HostTimes())
    small = [row for row in ROWS if row["sequences"] == "1"]
    assert len(small) == 5 and len(ROWS) == 9
    assert all(float(row["step_s"]) > 1.5 * predicted(spec, row, h200) for row in small)
