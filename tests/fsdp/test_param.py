"""Layouts at rest: every rank's shard is where its DTensor placements say, and nothing is lost."""

import itertools

import pytest
import torch
from _support.fsdp.wrapped import Holder, cpu_mesh, tp_param
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel3d._layout.param_layout import local_chunk
from parallel3d._torch.dtensor import StridedShard
from parallel3d.fsdp import fully_shard
from parallel3d.testing import fake_world, local_world, shards_of

MESHES = [(1, 4, 2), (1, 2, 3), (2, 2, 2)]
SIZES = [1, 3, 8, 9, 12, 13, 17]


EVERYWHERE = list(itertools.product(MESHES, [None, Replicate(), Shard(0), Shard(1)]))


@pytest.mark.parametrize(
    ("mesh_shape", "placement"),
    # Replicate() is cut as None is, and replicas as each other: in the longer run only.
    [
        pytest.param(*e, marks=[pytest.mark.full] * (e[1] == Replicate() or e[0][0] > 1))
        for e in EVERYWHERE
    ],
    ids=str,
)
def test_shards_are_where_placements_say(mesh_shape, placement) -> None:
    world_size = torch.Size(mesh_shape).numel()
    for rows, cols in itertools.product(SIZES, (5, 8)):
        whole = torch.arange(rows * cols, dtype=torch.float32).view(rows, cols)
        with local_world(world_size):
            mesh = cpu_mesh(*mesh_shape)
            param = nn.Parameter(whole) if placement is None else tp_param(whole, mesh, placement)
            model = fully_shard(Holder(param), mesh=mesh)
            covered = torch.zeros(rows, cols)
            for _, box, local in shards_of(model.weight):
                assert torch.equal(local, whole[box]), (rows, cols, box)
                covered[box] += 1
            assert model.weight.shape == whole.shape
        assert (covered > 0).all(), "some rows are on no rank"
        if placement is None and mesh_shape[0] == 1:
            assert (covered == mesh_shape[2]).all(), "some rows are on two shard ranks"


@pytest.mark.parametrize(
    "shape,tp_placement,expected",
    [
        ((16, 8), None, (Replicate(), Shard(0), Replicate())),
        ((16, 8), Shard(1), (Replicate(), Shard(0), Shard(1))),
        ((16, 8), Shard(0), (Replicate(), StridedShard(0, split_factor=2), Shard(0))),
        ((9, 8), Shard(0), (Replicate(), Shard(1), Shard(0))),  # DTensor can't stride 9 rows
        ((17, 8), Shard(0), (Replicate(), Shard(1), Shard(0))),
        ((9,), Shard(0), (Replicate(), Replicate(), Shard(0))),  # no other dim to shard
        ((9,), None, (Replicate(), Shard(0), Replicate())),
        ((), None, (Replicate(), Replicate(), Replicate())),
    ],
    ids=str,
)
def test_placements(shape, tp_placement, expected) -> None:
    with fake_world(3, 8):
        mesh = cpu_mesh(1, 4, 2)
        whole = torch.zeros(shape)
        param = nn.Parameter(whole)
        if tp_placement is not None:
            param = tp_param(whole, mesh, tp_placement)
        model = fully_shard(Holder(param), mesh=mesh)
        assert model.weight.placements == expected
        assert model.weight.device_mesh == mesh


@pytest.mark.parametrize("names", [("shard",), ("replicate", "shard")])
def test_tp_parameter_with_a_data_mesh(names) -> None:
    """The mesh without its tp axis, as one calls torch's: the parameter's mesh is put together."""
    with fake_world(0, 8):
        whole = cpu_mesh(2, 2, 2)
        param = tp_param(torch.zeros(8, 4), whole, Shard(0))
        model = fully_shard(Holder(param), mesh=whole[names])
        assert model.weight.device_mesh.mesh_dim_names == (*names, "tp")


def test_buffers_are_contiguous_and_shared() -> None:
    """The shards of a unit lie in one buffer, one after another, each with a storage of its own."""
    with fake_world(0, 2):
        model = fully_shard(nn.Linear(8, 6), mesh=cpu_mesh())
        weight, bias = (p.to_local() for p in model.parameters())
        assert bias.data_ptr() == weight.data_ptr() + 24 * 4
        for shard in (weight, bias):
            assert shard.storage_offset() == 0
            assert shard.untyped_storage().nbytes() == shard.numel() * 4


@pytest.mark.parametrize(
    ("cuts", "shape", "expected"),
    [
        ((Shard(0), Shard(1)), (8, 4), StridedShard(0, split_factor=2)),
        ((Shard(0), Shard(0)), (16, 4), StridedShard(0, split_factor=4)),
        ((Shard(1), Replicate()), (6, 4), Shard(0)),
        ((Shard(0), Shard(1)), (5, 4), StridedShard(1, split_factor=2)),  # 5 rows are not exact
    ],
    ids=str,
)
@pytest.mark.parity("behaviour: DTensors on two axes, of expert and tensor parallelism")
def test_parameters_with_two_axes_of_their_own(cuts, shape, expected) -> None:
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    with local_world(8) as world:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
        own = mesh["ep", "tp"]
        local = torch.empty(shape).copy_(whole)
        for axis, cut in enumerate(cuts):
            if isinstance(cut, Shard):
                local = local_chunk(local, cut.dim, 2, own.get_local_rank(axis))
        made = DTensor.from_local(
            local, own, cuts, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        model = fully_shard(Holder(nn.Parameter(made)), mesh=mesh["dp"])
        assert model.weight.placements == (expected, *cuts)
        assert model.weight.device_mesh.mesh_dim_names == ("dp", "ep", "tp")
        for _, box, local in shards_of(model.weight):
            assert torch.equal(local, whole[box])
        model.unshard()
        assert model.weight.device_mesh == own and model.weight.placements == cuts
        for full in world.per_rank(model.weight.full_tensor()):
            assert torch.equal(full, whole)
