"""Recorded programs, not ones made by hand: their timeline, streams and comparison, with cp too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _support.cp_axis import Sizes, batch, build, layout_of, loss, plan_of
from torch import Tensor, nn
from torch import distributed as dist

import parallel3d as p3d
from parallel3d.mesh import MeshLayout
from parallel3d.tools.dryrun import compare, record, timeline, warnings_of
from parallel3d.tools.dryrun.result import DryRun, from_json, to_json
from parallel3d.tools.dryrun.timeline import calls_of, link_of, stream_of

WORLD = 8


class Model(nn.Module):
    def __init__(self, skipped: int = -1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.skipped = skipped

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == self.skipped else layer(x).relu()
        return x


def run(rank: int, *, skipped: int = -1, more_on: int = -1) -> DryRun:
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
    found = compare(first, run(4, skipped=2))  # of the replicate group of rank 0
    assert found is not None
    assert found.first is not None and found.first.call.unit == "layers.2"
    assert found.consequence.endswith("hang") or found.consequence == "silently wrong"


# ---- cp: whose axes its collectives have, and on which streams they are ----


def with_cp(sizes: Sizes) -> Callable[[], None]:
    def program() -> None:
        mesh = p3d.build_mesh(layout_of(sizes))
        model = p3d.parallelize(build(), mesh, plan_of(sizes))
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            (ids,) = p3d.cp.shard_batch((batch(step),), mesh, balanced=False)
            # In the place of what attention exchanges.
            dist.all_reduce(torch.ones(4, device=ids.device), group=mesh.get_group("cp"))
            loss(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()

    return program


@pytest.mark.parametrize("sizes", [(1, 1, 8, 1), (1, 2, 2, 2)], ids=str)
def test_axes_and_streams_with_cp(sizes: Sizes) -> None:
    layout = layout_of(sizes)
    run = record(with_cp(sizes), rank=3, world_size=8, gpus_per_node=4)
    assert run.mesh == layout.as_dict()
    for axis in layout.axes:
        assert run.axis_ranks[axis] == next(g for g in layout.groups(axis) if 3 in g)
    joined = tuple(range(3 % layout.tp, 8, layout.tp))
    assert run.axis_ranks["shard_cp"] == joined
    streams = {(call.axis, call.op): stream_of(call) for call in run.collectives}
    assert streams["shard_cp", "all_gather"] == "gather"
    assert streams["shard_cp", "reduce_scatter"] == "reduce"
    assert {s for (axis, _), s in streams.items() if axis == "cp"} == {"cp"}
    assert {axis for axis, _ in streams} == {"shard_cp", "cp", *(["tp"] if layout.tp > 1 else [])}
    found = timeline(run)
    gather = next(call for call in run.collectives if call.op == "all_gather")
    assert link_of(run, gather, found.cluster).nodes == 2  # of 4 GPUs
    assert not any(warning.kind.startswith("whole on") for warning in warnings_of(run))
    assert compare(run, record(with_cp(sizes), rank=0, world_size=8, gpus_per_node=4)) is None
