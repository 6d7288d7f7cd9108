"""A dry run on a mesh with cp: whose axes its collectives have, and on which streams they are."""

from collections.abc import Callable

import pytest
import torch
from _support.cp_axis import Sizes, batch, build, layout_of, loss, plan_of
from torch import distributed as dist

import parallel3d as p3d
from parallel3d.tools.dryrun import compare, record, timeline, warnings_of
from parallel3d.tools.dryrun.timeline import link_of, stream_of


def program(sizes: Sizes) -> Callable[[], None]:
    def run() -> None:
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

    return run


@pytest.mark.parametrize("sizes", [(1, 1, 8, 1), (1, 2, 2, 2)], ids=str)
def test_axes_and_streams(sizes: Sizes) -> None:
    layout = layout_of(sizes)
    run = record(program(sizes), rank=3, world_size=8, gpus_per_node=4)
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
    assert compare(run, record(program(sizes), rank=0, world_size=8, gpus_per_node=4)) is None
