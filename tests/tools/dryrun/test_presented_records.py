"""Recorded programs, not ones made by hand: their timeline and comparison."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import parallel3d as p3d
from parallel3d.mesh import MeshLayout
from parallel3d.tools.dryrun.as_json import from_json, to_json
from parallel3d.tools.dryrun.compare import compare
from parallel3d.tools.dryrun.record import record
from parallel3d.tools.dryrun.result import DryRun
from parallel3d.tools.dryrun.timeline import calls_of, timeline

WORLD = 8


class Model(nn.Module):
    def __init__(self, skipped: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.skipped = skipped

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if not (self.skipped and number == 2 and dist.get_rank() == 4):
                x = layer(x).relu()
        return x


def run(rank: int, *, skipped: bool = False, more_on: int = -1) -> DryRun:
    def program() -> None:
        mesh = p3d.build_mesh(MeshLayout(2, 2, 2), device_type="cpu")
        with torch.device("meta"):
            model = Model(skipped)
        p3d.parallelize(model, mesh, tp_plan={"layers.*": "colwise_gather_output"})
        p3d.materialize(model, device="cpu", seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(torch.randn(16, 64)).square().mean()
            loss.backward()
            if dist.get_rank() == more_on:  # the classic: one rank that logs
                dist.all_reduce(loss.detach())
            optimizer.step()
            optimizer.zero_grad()

    return record(program, WORLD, rank)


@pytest.fixture(scope="module")
def first() -> DryRun:
    return run(0)


def test_a_records_timeline_has_its_steps_streams_and_overlap(first: DryRun) -> None:
    found = timeline(first)
    assert (found.complete, found.step) == (2, 1)
    assert {"compute", "tp", "gather", "reduce", "all-reduce"} <= set(found.busy())
    calls = calls_of(first, found)
    assert len(calls) == len(first.collectives)
    gathers = [c for c in calls if c.op == "all_gather" and c.axis == "shard"]
    assert all(call.waited is not None for call in gathers)
    # In the second step units are gathered ahead, while the one before computes.
    ahead = [c for c in gathers if c.step == 1 and c.phase == "forward" and c.beside > 0]
    assert len(ahead) >= 2
    assert from_json(to_json(first)) == first


def test_ranks_of_a_program_without_branches_agree(first: DryRun) -> None:
    assert compare(first, run(2)) is None


def test_a_rank_that_communicates_more_is_found(first: DryRun) -> None:
    found = compare(first, run(2, more_on=2))
    assert found is not None
    assert (found.kind, found.consequence) == ("extra calls", "hang")
    assert found.second is not None and found.second.call.op == "all_reduce"
    assert found.second.call.group_size == WORLD and found.second.call.axis is None


def test_a_rank_that_skips_a_layer_is_found(first: DryRun) -> None:
    found = compare(first, run(4, skipped=True))  # of the replicate group of rank 0
    assert found is not None
    assert found.first is not None and found.first.call.unit == "layers.2"
    assert found.consequence.endswith("hang") or found.consequence == "silently wrong"
