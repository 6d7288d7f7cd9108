"""A mesh from elsewhere, whose axes are called otherwise."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.errors import MeshError
from parallel3d.fsdp import FSDPModule, fully_shard
from parallel3d.mesh.build import name_axes
from parallel3d.parallelize import parallelize
from parallel3d.testing.worlds import fake_world

LIGHTNING = ("data_parallel", "tensor_parallel")
AS_OURS = {"data_parallel": "shard", "tensor_parallel": "tp"}
PLAN = {"0": "colwise", "2": "rowwise"}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def mesh_of(*shape: int, names: tuple[str, ...] | None = LIGHTNING):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def test_foreign_names_are_an_error_that_shows_the_argument():
    with fake_world(0, 4):
        for shape in ((4, 1), (2, 2)):
            with pytest.raises(MeshError) as caught:
                parallelize(model(), mesh_of(*shape))
            said = str(caught.value)
            assert "'data_parallel', 'tensor_parallel' are not known" in said
            assert 'axes={"data_parallel": "shard", "tensor_parallel": "tp"}' in said
        with pytest.raises(MeshError, match="have no names"):
            parallelize(model(), mesh_of(2, 2, names=None))
        # What the name would mean is there already: no advice to give it twice.
        for names in (("pp", "shard"), ("stage", "dp_shard"), ("tp_outer", "tp")):
            with pytest.raises(MeshError, match=f"'{names[0]}' are not known") as caught:
                parallelize(model(), mesh_of(2, 2, names=names))
            said = str(caught.value)
            assert (
                "axes=" not in said and f'Give a submesh without them, mesh["{names[1]}"]' in said
            )


def test_the_mapping_is_taken():
    with fake_world(0, 4):
        wrapped = parallelize(model(), mesh_of(2, 2), PLAN, axes=AS_OURS)
        assert isinstance(wrapped, FSDPModule)
        weight = wrapped[0].weight
        assert weight.device_mesh.mesh_dim_names == ("shard", "tp")
        assert tuple(weight.shape) == (8, 8) and tuple(weight.to_local().shape) == (2, 8)
        # Of one rank too: a plan isn't needed, and data is all there is.
        alone = parallelize(model(), mesh_of(4, 1), axes=AS_OURS)
        assert tuple(alone[0].weight.to_local().shape) == (2, 8)


def test_some_axes_may_have_our_names():
    with fake_world(0, 4):
        named = name_axes(mesh_of(2, 2, names=("dp_replicate", "fsdp")), {"fsdp": "shard"})
        assert named.mesh_dim_names == ("dp_replicate", "shard")
        ours = mesh_of(2, 2, names=("dp_shard", "tp"))
        assert name_axes(ours) is ours
        one = mesh_of(4, names=None)
        assert name_axes(one) is one
        assert name_axes(mesh_of(4, names=("dp",)), {"dp": "shard"}).mesh_dim_names == ("shard",)


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"data": "shard"}, "'data' is not an axis of the mesh"),
        ({"data_parallel": "dp", "tensor_parallel": "tp"}, "given as 'dp'"),
        ({"data_parallel": "shard"}, "'tensor_parallel' are not known"),
        ({"data_parallel": "shard", "tensor_parallel": "shard"}, "two axes"),
        ({"data_parallel": "tp", "tensor_parallel": "shard"}, "tp is not the innermost axis"),
        ("shard", "it must be a dict"),
    ],
)
def test_mappings_that_do_not_fit(axes, said):
    with fake_world(0, 4), pytest.raises(MeshError, match=said):
        parallelize(model(), mesh_of(2, 2), PLAN, axes=axes)


def test_fully_shard_keeps_positions():
    with fake_world(0, 4):
        wrapped = fully_shard(model(), mesh=mesh_of(2, 2, names=("a", "b")))
        assert wrapped[0].weight.device_mesh.mesh_dim_names == ("a", "b")


def on_ranks() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=LIGHTNING)
    wrapped = parallelize(model(), mesh, PLAN, axes=AS_OURS)
    x = torch.arange(16.0).view(2, 8) / 10 + mesh.get_local_rank(0)
    wrapped(x).square().mean().backward()
    return wrapped[0].weight.grad.full_tensor().flatten().tolist()


@pytest.mark.smoke
def test_it_trains_as_the_plain_model(gloo_pool):
    plain = model()
    for rank in (0, 1):
        x = torch.arange(16.0).view(2, 8) / 10 + rank
        (plain(x).square().mean() / 2).backward()
    want = plain[0].weight.grad.flatten()
    for got in gloo_pool.run(on_ranks, world_size=4):
        torch.testing.assert_close(torch.tensor(got), want)
