"""shard_placement_fn: a dim, and a mesh, for each parameter."""

import pytest
import torch
from _support.fsdp.wrapped import Holder, cpu_mesh, shard_blocks, tp_param
from _support.models import Block, Lm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import Partial, Replicate, Shard

from parallel3d import MeshError, MeshLayout, Parallel3dError
from parallel3d._torch.dtensor import StridedShard
from parallel3d.fsdp import ShardPlacementResult, fully_shard
from parallel3d.fsdp.inspect import unit_of
from parallel3d.testing import assert_parity, fake_world, local_world, record_collectives, shards_of


def data_mesh(size: int):
    return init_device_mesh("cpu", (size,))


class TestDims:
    def test_uneven_middle_dim(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(5, 4, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.conv(x) * self.conv.weight.view(-1)[:4].sum()  # contiguous, as ever

        def images(index: int) -> torch.Tensor:
            return torch.randn(2, 5, 4, 4, generator=torch.Generator().manual_seed(index))

        def apply(model, mesh):
            fn = lambda p: Shard(1) if p.ndim > 1 else None  # noqa: E731
            return fully_shard(model, mesh=mesh, shard_placement_fn=fn)

        assert_parity(Net, images, MeshLayout(1, 2, 1), apply=apply, steps=1, fp32=False)

    def test_uneven_local_tensors_are_in_one_piece(self) -> None:
        """Fused optimizers on CPU run over the memory: gaps in it were taken for rows."""
        with local_world(2) as world:
            model = Holder(nn.Parameter(torch.ones(3, 5)))
            fully_shard(model, mesh=data_mesh(2), shard_placement_fn=lambda _: Shard(1))
            model.weight.grad = torch.ones_like(model.weight)
            for local in world.per_rank(model.weight.to_local()):
                assert local.T.is_contiguous()
            options = {"lr": 0.25, "weight_decay": 0.0, "fused": True}
            torch.optim.AdamW(model.parameters(), **options).step()  # by 0.25 at first
            for local in world.per_rank(model.weight.to_local()):
                torch.testing.assert_close(local, torch.full_like(local, 0.75))

    @pytest.mark.parametrize("dim", range(-3, 3))
    def test_rows_are_where_placements_say(self, dim) -> None:
        whole = torch.arange(5 * 3 * 7, dtype=torch.float32).view(5, 3, 7)
        with local_world(4):
            model = Holder(nn.Parameter(whole))
            fully_shard(model, mesh=data_mesh(4), shard_placement_fn=lambda _: Shard(dim))
            assert model.weight.placements == (Shard(dim % 3),)
            covered = torch.zeros_like(whole)
            for _, box, local in shards_of(model.weight):
                assert torch.equal(local, whole[box])
                covered[box] += 1
            assert (covered == 1).all()

    def test_is_asked_once_for_each_of_the_users_parameters(self) -> None:
        asked = []
        with fake_world(0, 2):
            model = Lm(tied=True)
            before = list(model.parameters())
            fully_shard(model, mesh=data_mesh(2), shard_placement_fn=asked.append)
        assert len(asked) == len(before)
        assert all(a is b for a, b in zip(asked, before, strict=True))

    def test_none_is_the_default(self) -> None:
        with fake_world(0, 2):
            model = fully_shard(Block(), mesh=data_mesh(2), shard_placement_fn=lambda _: None)
            assert all(p.placements == (Shard(0),) for p in model.parameters())


class TestUnderTensorParallelism:
    @pytest.mark.parametrize(
        ("shape", "tp", "dim", "expected"),
        [
            ((16, 8), Shard(0), 0, StridedShard(0, split_factor=2)),
            ((16, 8), Shard(0), 1, Shard(1)),
            ((16, 8), Shard(1), 1, StridedShard(1, split_factor=2)),
            ((9, 7), Shard(0), 1, Shard(1)),
            ((9, 7), Replicate(), 0, Shard(0)),
        ],
        ids=str,
    )
    def test_dims_that_work(self, shape, tp, dim, expected) -> None:
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
        with local_world(8):
            mesh = cpu_mesh(1, 4, 2)
            model = Holder(tp_param(whole, mesh, tp))
            fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
            assert model.weight.placements == (Replicate(), expected, tp)
            for _, box, local in shards_of(model.weight):
                assert torch.equal(local, whole[box])

    def test_a_dim_that_does_not_work(self) -> None:
        with fake_world(0, 8):
            mesh = cpu_mesh(1, 4, 2)
            model = Holder(tp_param(torch.zeros(9, 7), mesh, Shard(0)))
            before = model.weight
            with pytest.raises(Parallel3dError, match=r"weight of shape \(9, 7\).*dim 0.*work: 1$"):
                fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(0))
            assert model.weight is before and type(model) is Holder


class Experts(nn.Module):
    """Layers, and experts that are sharded over fewer ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.experts = nn.Parameter(torch.randn(5, 12, 12) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.einsum("bi,eij->bj", x, self.experts)


def floats(index: int) -> torch.Tensor:
    return torch.randn(3, 12, generator=torch.Generator().manual_seed(index))


class TestMeshes:
    @pytest.mark.parity("argument: shard_placement_fn: mesh per parameter")
    @pytest.mark.parametrize("kind", ["DeviceMesh", "FSDPMeshInfo", "HSDPMeshInfo"])
    def test_experts_on_a_mesh_of_their_own(self, kind) -> None:
        """All four ranks average the gradients of both meshes; buckets are apart."""

        def apply(model, mesh):
            data = data_mesh(4)
            pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            other = {
                "DeviceMesh": lambda: pairs,
                "FSDPMeshInfo": lambda: FSDPMeshInfo(data, shard_mesh_dim=0),
                "HSDPMeshInfo": lambda: HSDPMeshInfo(pairs, shard_mesh_dim=1, replicate_mesh_dim=0),
            }[kind]()
            experts = model.experts

            def place(param):
                if param is experts or param.shape == (20, 12):
                    return ShardPlacementResult(Shard(param.ndim - 2), other)
                return None

            shard_blocks(model, data, shard_placement_fn=place)
            buckets = unit_of(model.layers[0]).group.buckets
            assert [len(b.params) for b in buckets] == ([6] if kind == "FSDPMeshInfo" else [5, 1])
            return model

        assert_parity(Experts, floats, MeshLayout(1, 4, 1), apply=apply, steps=2, fp32=False)

    @pytest.mark.parity("argument: shard_placement_fn: mesh per parameter")
    def test_gradients_are_averaged_over_the_parameters_own_mesh(self) -> None:
        """Experts of two groups of ranks: each group averages over its own two ranks."""

        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.everywhere = nn.Parameter(torch.ones(4))
                self.expert = nn.Parameter(torch.ones(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * (self.everywhere + self.expert)

        with local_world(4) as world:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))
            model = Two()
            expert, info = model.expert, FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)
            fully_shard(
                model,
                mesh=mesh._flatten("dp"),
                shard_placement_fn=lambda p: (
                    ShardPlacementResult(None, info) if p is expert else None
                ),
            )
            model(world.map(lambda rank: torch.full((4,), float(rank)))).sum().backward()
            assert [float(t[0]) for t in world.per_rank(model.everywhere.grad)] == [1.5] * 4
            assert [float(t[0]) for t in world.per_rank(model.expert.grad)] == [0.5, 0.5, 2.5, 2.5]

    @pytest.mark.parity("argument: shard_placement_fn: mesh per parameter")
    def test_collectives_of_two_meshes(self) -> None:
        with fake_world(0, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            model = Experts()
            experts = model.experts
            fn = lambda p: ShardPlacementResult(None, mesh["b"]) if p is experts else None  # noqa: E731
            fully_shard(model, mesh=mesh._flatten("all"), shard_placement_fn=fn)
            with record_collectives() as recorder:
                model(torch.zeros(3, 12)).sum().backward()
            for op in ("all_gather", "reduce_scatter"):
                assert sorted(call.group_size for call in recorder.select(op)) == [2, 4]


WRONG = {
    "a number": (lambda p: 0, Parallel3dError, r"returned 0 for parameter weight; it must return"),
    "a partial": (lambda p: Partial(), Parallel3dError, r"Partial.* must return Shard\(dim\)"),
    "replicate": (lambda p: Replicate(), Parallel3dError, r"Replicate.* must return Shard\(dim\)"),
    "a strided shard": (
        lambda p: StridedShard(0, split_factor=2),
        Parallel3dError,
        r"must return Shard\(dim\)",
    ),
    "too large": (lambda p: Shard(2), Parallel3dError, r"Shard\(2\).*from -2 to 1"),
    "too small": (lambda p: Shard(-3), Parallel3dError, r"Shard\(-3\).*\(6, 4\).*from -2 to 1"),
    "no mesh": (
        lambda p: ShardPlacementResult(Shard(0), "ep"),
        MeshError,
        r"mesh_info='ep' for parameter weight; it must be a DeviceMesh",
    ),
    "no function": ({"weight": 1}, Parallel3dError, r"it must be a function"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_answers(case) -> None:
    fn, error, says = WRONG[case]
    with fake_world(0, 2):
        model = nn.Linear(4, 6)
        before = dict(model.named_parameters())
        with pytest.raises(error, match=says):
            fully_shard(model, mesh=data_mesh(2), shard_placement_fn=fn)
        assert dict(model.named_parameters()) == before and type(model) is nn.Linear


def test_a_scalar_has_no_dim() -> None:
    with fake_world(0, 2), pytest.raises(Parallel3dError, match="a scalar; return None"):
        fully_shard(
            Holder(nn.Parameter(torch.tensor(1.0))),
            mesh=data_mesh(2),
            shard_placement_fn=lambda _: Shard(0),
        )


def test_an_error_in_the_function_leaves_the_model() -> None:
    def fn(param: nn.Parameter) -> None:
        if param.ndim == 1:
            raise KeyError("bias")

    with fake_world(0, 2):
        model = nn.Linear(4, 6)
        before = dict(model.named_parameters())
        with pytest.raises(KeyError):
            fully_shard(model, mesh=data_mesh(2), shard_placement_fn=fn)
        assert dict(model.named_parameters()) == before and type(model) is nn.Linear


def gradients_beside_experts(reshard: bool | int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Experts().double()
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0, dtype=torch.float64)))
    experts, pairs = model.experts, init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def place(param: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(None, pairs) if param is experts else None

    shard_blocks(model, data_mesh(4), reshard_after_forward=reshard, shard_placement_fn=place)
    model(floats(torch.distributed.get_rank()).double()).square().mean().backward()
    return [p.grad.to_local() for p in model.parameters() if p.grad is not None]


def to_two_ranks() -> None:
    """Two ranks are some of one mesh's and all of the other's; a scalar is whole on all."""
    want, got = map(gradients_beside_experts, (True, 2))
    assert len(want) == len(got) == 13
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parity("argument: reshard_after_forward=int")
def test_reshard_to_fewer_ranks_on_meshes_of_several_sizes(gloo_pool) -> None:
    gloo_pool.run(to_two_ranks, world_size=4)
