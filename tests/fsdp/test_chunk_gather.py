"""chunk and gather: every layout of even and uneven tensors, and what they communicate."""

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from parallel3d import MeshError, Parallel3dError
from parallel3d._torch.dtensor import StridedShard
from parallel3d.fsdp import chunk, gather
from parallel3d.testing import fake_world, local_world, record_collectives

R = Replicate()
LAYOUTS = [
    (R, R, R),
    (R, Shard(0), R),
    (R, Shard(-1), Shard(0)),
    (R, Shard(0), Shard(0)),
    (R, StridedShard(0, split_factor=2), Shard(0)),
    (Shard(1), R, Shard(0)),
    (R, StridedShard(1, split_factor=3), R),
]


def whole_on_ranks(world, tensor: DTensor, expected: torch.Tensor) -> bool:
    cuts = [(axis, p) for axis, p in enumerate(tensor.placements) if p != R]
    if len(cuts) == 1 and isinstance(cuts[0][1], StridedShard):
        return has_rows_of(world, tensor, expected, *cuts[0])
    return all(torch.equal(each, expected) for each in world.per_rank(tensor.full_tensor()))


def has_rows_of(world, tensor: DTensor, expected: torch.Tensor, axis: int, cut) -> bool:
    """Of strides with no shard inside of them, which torch 2.11 can't read, the parts are compared."""
    for rank, local in enumerate(world.per_rank(tensor)):
        place = (tensor.device_mesh.mesh == rank).nonzero()[0, axis]
        ways = tensor.device_mesh.size(axis)
        groups = expected.chunk(cut.split_factor, cut.dim)
        rows = [group.chunk(ways, cut.dim)[place] for group in groups]
        if not torch.equal(local, torch.cat(rows, cut.dim)):
            return False
    return True


@pytest.mark.parametrize("rows", [16, 19])
def test_three_axes(rows) -> None:
    whole = torch.arange(rows * 12.0).view(rows, 12)
    with local_world(8) as world:
        mesh = cpu_mesh(2, 2, 2)
        for layout in LAYOUTS:
            with record_collectives(mesh) as recorder:
                cut = chunk(whole, mesh, layout)
            assert not recorder.calls
            assert whole_on_ranks(world, cut, whole), layout
            for axis, name in enumerate(("replicate", "shard", "tp")):
                with record_collectives(mesh) as recorder:
                    joined = gather(cut, over=name)
                assert joined.placements[axis] == R
                assert len(recorder.calls) == (layout[axis] != R)
                assert {call.axis for call in recorder.calls} <= {name}
                assert whole_on_ranks(world, joined, whole), (layout, name)
        # "tp first, then shard" and the reverse, with one of them whole again.
        assert gather(chunk(whole, mesh, LAYOUTS[4])).placements == (R, R, Shard(0))
        assert gather(chunk(whole, mesh, LAYOUTS[3])).placements == (
            R,
            R,
            StridedShard(0, split_factor=2),
        )


@pytest.mark.parametrize(("sizes", "rows"), [((2, 2), 19), ((4, 2), 9), ((3, 2), 17)], ids=str)
def test_from_a_tensor_parallel_one(sizes, rows) -> None:
    """Uneven too: where DTensor can't tell "tp first, then shard", the tensor is gathered."""
    whole = torch.arange(rows * 12.0).view(rows, 12)
    shard, tp = sizes
    with local_world(shard * tp) as world:
        mesh = cpu_mesh(1, shard, tp)
        for own in (R, Shard(0), Shard(1)):
            part = chunk(whole, mesh["tp"], [own])
            for layout in (
                (R, Shard(0), own),
                (R, Shard(1), own),
                (R, StridedShard(1, split_factor=tp), own),
            ):
                with record_collectives(mesh) as recorder:
                    got = chunk(part, mesh, layout)
                same_dim = isinstance(own, Shard) and layout[1] == own
                assert len(recorder.calls) == same_dim, (own, layout)
                want = chunk(whole, mesh, layout)
                pairs = zip(world.per_rank(got), world.per_rank(want), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs), (own, layout)


@pytest.mark.parametrize("sizes", [(1, 4, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("rows", [9, 17])
def test_cuts_too_uneven_for_full_tensor(sizes, rows) -> None:
    """It raises on the last rank only, where the others wait, or takes rows for others."""
    whole = torch.arange(rows * 2.0).view(rows, 2)
    _, shard, tp = sizes
    with local_world(8) as world:
        mesh = cpu_mesh(*sizes)
        for layout in (
            (R, StridedShard(0, split_factor=tp), Shard(0)),
            (StridedShard(0, split_factor=shard * tp), Shard(0), Shard(1)),
        ):
            cut = chunk(whole, mesh, layout)
            for axis, name in enumerate(("replicate", "shard", "tp")):
                joined = gather(cut, over=name)
                assert joined.placements[axis] == R
                want = world.per_rank(chunk(whole, mesh, joined.placements))
                pairs = zip(world.per_rank(joined), want, strict=True)
                assert all(torch.equal(a, b) for a, b in pairs), (layout, name)
            again = chunk(cut, mesh, (Shard(0), R, Shard(1)))
            assert whole_on_ranks(world, again, whole), layout


def test_refusals() -> None:
    with fake_world(0, 4):
        mesh = cpu_mesh(1, 2, 2)
        whole = torch.zeros(4, 3)
        partial = DTensor.from_local(whole, mesh, [R, Partial(), R], run_check=False)
        with pytest.raises(Parallel3dError, match="reduce partial values first"):
            chunk(partial, mesh, [R, R, Shard(0)])
        for layout, match in (
            ([R, Shard(0)], "placements has length 2"),
            ([R, Shard(2), R], "no such dim"),
            ([R, Partial(), R], "reduce partial values first"),
        ):
            with pytest.raises(Parallel3dError, match=match):
                chunk(whole, mesh, layout)
        with pytest.raises(MeshError, match="not some of those"):
            chunk(chunk(whole, mesh, [R, R, R]), mesh["tp"], [R])
        for wrong in ((1.0, mesh), (whole, "cpu")):
            with pytest.raises(Parallel3dError, match="takes a tensor and a DeviceMesh"):
                chunk(*wrong, [R, R, R])
        with pytest.raises(Parallel3dError, match="takes a DTensor"):
            gather(nn.Parameter(whole))
        with pytest.raises(MeshError, match="is not an axis"):
            gather(chunk(whole, mesh, [R, R, R]), over="data")
