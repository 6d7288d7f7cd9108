"""dp_mesh_dims: parameters that are DTensors on the whole mesh, as torch's SPMD models have them."""

import copy
import inspect
import itertools

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from parallel3d import MeshError, Parallel3dError
from parallel3d._torch.dtensor import StridedShard
from parallel3d.fsdp import DataParallelMeshDims, fully_shard
from parallel3d.optim import clip_grad_norm_
from parallel3d.testing import fake_world, local_world

TORCH_TAKES_DIMS = "dp_mesh_dims" in inspect.signature(torch_fully_shard).parameters  # since 2.12

# Names of the axes, their sizes, what is said of them, and the axis of tensor parallelism.
MESHES = {
    "shard": (("fsdp",), (4,), {"shard": "fsdp"}, None),
    "shard, tp": (("fsdp", "tp"), (2, 2), {"shard": "fsdp"}, "tp"),
    "tp outside": (("tp", "fsdp"), (2, 2), {"shard": "fsdp"}, "tp"),
    "hsdp": (("ddp", "fsdp"), (2, 2), {"shard": "fsdp", "replicate": "ddp"}, None),
    "shard outside replicate": (
        ("fsdp", "ddp"),
        (2, 2),
        {"shard": "fsdp", "replicate": "ddp"},
        None,
    ),
    "ddp": (("ddp",), (4,), {"replicate": "ddp"}, None),
    "ddp, tp": (("ddp", "tp"), (2, 2), {"replicate": "ddp"}, "tp"),
    "two shard axes": (("fsdp", "cp"), (2, 2), {"shard": ("fsdp", "cp")}, None),
    "two replicate axes": (("ddp", "pod"), (2, 2), {"replicate": ("ddp", "pod")}, None),
    "hsdp, tp": (
        ("ddp", "fsdp", "tp"),
        (2, 2, 1),
        {"shard": "fsdp", "replicate": "ddp"},
        "tp",
    ),
    "two shard axes, tp": (("fsdp", "cp", "tp"), (2, 1, 2), {"shard": ("fsdp", "cp")}, "tp"),
}
LIKE_OTHERS = ("shard", "hsdp", "ddp, tp", "two shard axes")  # the rest has all that they have
THREE_AXES = ("hsdp, tp", "two shard axes, tp")  # which DTensor takes seconds for
# DTensor takes seconds to plan an operation on four axes: these are only laid out. Names of the axes, what is
# said of them, the axes of the parameters, and the rows of up.weight that rank 5 of 16 has.
FOUR_AXES = {
    "hsdp, two shard axes, tp": (
        ("ddp", "fsdp", "cp", "tp"),
        {"shard": ("fsdp", "cp"), "replicate": "ddp"},
        ("ddp", "fsdp_cp", "tp"),
        range(24, 28),
    ),
    "two replicate axes, shard, tp": (
        ("pod", "ddp", "fsdp", "tp"),
        {"shard": "fsdp", "replicate": ("pod", "ddp")},
        ("pod", "ddp", "fsdp", "tp"),
        range(16, 24),
    ),
    "an axis that is neither": (
        ("ddp", "ep", "fsdp", "tp"),
        {"shard": "fsdp", "replicate": "ddp"},
        ("ddp", "ep", "fsdp", "tp"),
        range(16, 24),
    ),
}


class Mlp(nn.Module):
    """``up`` is cut by rows, ``down`` by columns, the norm is whole on every tp rank."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def numbered() -> Mlp:
    """An Mlp whose elements are all different."""
    model = Mlp(hidden=32)
    for param in model.parameters():
        param.data = torch.arange(float(param.numel())).view(param.shape)
    return model


CUTS = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}


def distribute(model: nn.Module, mesh, tp: str | None) -> nn.Module:
    """``model`` as DTensors on all of ``mesh``, cut over ``tp``."""
    names = mesh.mesh_dim_names
    for module_name, module in model.named_modules():
        for name, param in list(module.named_parameters(recurse=False)):
            cut = CUTS.get(f"{module_name}.{name}", Replicate())
            placements = [cut if axis == tp else Replicate() for axis in names]
            made = distribute_tensor(param.detach(), mesh, placements, src_data_rank=None)
            setattr(module, name, nn.Parameter(made, requires_grad=param.requires_grad))
    return model


def sample(rank: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def data_rank(mesh, tp: str | None) -> int:
    rank = 0
    for axis, name in enumerate(mesh.mesh_dim_names):
        if name != tp:
            rank = rank * mesh.size(axis) + mesh.get_local_rank(axis)
    return rank


def one_loss(model: nn.Module, mesh, tp: str | None, scale: float = 1.0) -> torch.Tensor:
    """This data rank's own loss; the batch is a DTensor too."""
    placements = [Replicate() if name == tp else Shard(0) for name in mesh.mesh_dim_names]
    x = DTensor.from_local(sample(data_rank(mesh, tp)), mesh, placements, run_check=False)
    out = model(x).redistribute(placements=placements).to_local()
    return out.square().mean() * scale


def beside_torch(key: str) -> None:
    """Gradients, and weights after a step, equal the plain model's, and torch's where it has dp_mesh_dims."""
    names, shape, dims, tp = MESHES[key]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    plain = Mlp().double()
    models = []
    for shard in (fully_shard, torch_fully_shard)[: 1 + TORCH_TAKES_DIMS]:
        model = distribute(copy.deepcopy(plain), mesh, tp)
        for each in (model.up, model):
            shard(each, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
        for _ in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            one_loss(model, mesh, tp).backward()
            optimizer.step()
        models.append(model)
    ours, *theirs = models
    ranks = dist.get_world_size() // (mesh["tp"].size() if tp else 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        sum(plain(sample(rank)).square().mean() / ranks for rank in range(ranks)).backward()
        optimizer.step()
    for (name, want), mine in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert mine.grad.placements == mine.placements
        assert torch.allclose(mine.full_tensor(), want, rtol=0, atol=1e-12), name
        assert torch.allclose(mine.grad.full_tensor(), want.grad, rtol=0, atol=1e-12), name
    for model in theirs:
        for (name, mine), other in zip(ours.named_parameters(), model.parameters(), strict=True):
            assert mine.placements == other.placements, (name, mine.placements, other.placements)
            assert mine.device_mesh.mesh_dim_names == other.device_mesh.mesh_dim_names
            for a, b in ((mine, other), (mine.grad, other.grad)):
                assert torch.allclose(a.to_local(), b.to_local(), rtol=0, atol=1e-12), name


@pytest.mark.parity(
    "argument: dp_mesh_dims: shard",
    "argument: dp_mesh_dims: shard and replicate",
    "argument: dp_mesh_dims: tuple of axes",
)
@pytest.mark.parametrize(
    "key",
    [
        pytest.param(
            key,
            marks=[pytest.mark.full] * (key in LIKE_OTHERS)
            + [pytest.mark.slow] * (key in THREE_AXES),
        )
        for key in MESHES
    ],
)
def test_equal_to_torch_and_to_the_plain_model(gloo_pool, key) -> None:
    size = torch.Size(MESHES[key][1]).numel()
    gloo_pool.run(beside_torch, key, world_size=size)


@pytest.mark.parametrize("key", FOUR_AXES)
def test_four_axes_are_laid_out_as_torch_does(key) -> None:
    names, dims, at_rest, rows = FOUR_AXES[key]
    with fake_world(5, 16):
        mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=names)
        ours, *theirs = (
            shard(
                distribute(numbered(), mesh, "tp"),
                mesh=mesh,
                dp_mesh_dims=DataParallelMeshDims(**dims),
            )
            for shard in (fully_shard, torch_fully_shard)[: 1 + TORCH_TAKES_DIMS]
        )
        weight = ours.up.weight
        assert weight.device_mesh.mesh_dim_names == at_rest
        whole = [Replicate()] * (len(at_rest) - 2)
        assert list(weight.placements) == [*whole, StridedShard(0, split_factor=2), Shard(0)]
        assert torch.equal(weight.to_local(), numbered().up.weight[rows.start : rows.stop])
        for model in theirs:
            for mine, other in zip(ours.parameters(), model.parameters(), strict=True):
                assert mine.placements == other.placements
                assert mine.device_mesh == other.device_mesh
                assert torch.equal(mine.to_local(), other.to_local())


def small_world(key: str) -> None:
    names, shape, dims, tp = MESHES[key]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    plain = Mlp().double()
    grads = []
    for reshard in (True, 2):
        model = distribute(copy.deepcopy(plain), mesh, tp)
        for each in (model.up, model):
            fully_shard(
                each,
                mesh=mesh,
                dp_mesh_dims=DataParallelMeshDims(**dims),
                reshard_after_forward=reshard,
            )
        one_loss(model, mesh, tp).backward()
        grads.append([p.grad.to_local() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parity("argument: reshard_after_forward=int")
@pytest.mark.parametrize("key", ["shard", "two shard axes"])
def test_reshard_to_a_smaller_world(gloo_pool, key) -> None:
    """torch: NotImplementedError."""
    gloo_pool.run(small_world, key, world_size=4)


def micro_batches(key: str, method: str) -> None:
    """Two micro-batches, the reduction of the first put off, then the norm of all gradients."""
    names, shape, dims, tp = MESHES[key]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    plain = Mlp().double()
    model = distribute(copy.deepcopy(plain), mesh, tp)
    for each in (model.up, model):
        fully_shard(each, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
    for last in (False, True):
        getattr(model, method)(last)
        one_loss(model, mesh, tp, scale=1.0 + last).backward()
        partial = any(p.grad.placements != p.placements for p in model.parameters())
        assert partial == (not last)
    ranks = dist.get_world_size() // (mesh["tp"].size() if tp else 1)
    sum(plain(sample(rank)).square().mean() * 3 / ranks for rank in range(ranks)).backward()
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(got.grad.full_tensor(), want.grad, rtol=0, atol=1e-12)
    norm = clip_grad_norm_(model, 0.1)
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert torch.allclose(norm, want, rtol=1e-12)
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(got.grad.full_tensor(), want.grad, rtol=0, atol=1e-12)


@pytest.mark.parity("behaviour: gradient accumulation")
@pytest.mark.parametrize(
    ("key", "method"),
    [
        ("hsdp", "set_requires_all_reduce"),
        ("two replicate axes", "set_requires_gradient_sync"),
        pytest.param("hsdp, tp", "set_requires_all_reduce", marks=pytest.mark.slow),
        pytest.param("hsdp", "set_requires_gradient_sync", marks=pytest.mark.full),
        pytest.param("two replicate axes", "set_requires_all_reduce", marks=pytest.mark.full),
        pytest.param("hsdp, tp", "set_requires_gradient_sync", marks=pytest.mark.full),
    ],
)
def test_accumulation_and_clipping(gloo_pool, key, method) -> None:
    gloo_pool.run(micro_batches, key, method, world_size=4)


def test_placements_that_dtensor_cannot_express_are_avoided() -> None:
    """9 rows over tp 2 and shard 4: torch's strided shards are elsewhere than its DTensor says."""
    with fake_world(0, 8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
        model = distribute(Mlp(hidden=9), mesh, "tp")
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="fsdp"))
        assert model.up.weight.placements == (Shard(1), Shard(0))
        assert model.up.bias.placements == (Replicate(), Shard(0))
        model = distribute(Mlp(hidden=16), mesh, "tp")
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="fsdp"))
        assert model.up.weight.placements == (StridedShard(0, split_factor=2), Shard(0))


def test_rows_are_whole_on_uneven_sizes() -> None:
    for hidden, (names, shape) in itertools.product(
        (3, 8, 9, 13), ((("fsdp", "tp"), (4, 2)), (("tp", "fsdp"), (2, 4)))
    ):
        torch.manual_seed(0)
        plain = Mlp(hidden=hidden)
        with local_world(8) as world:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            model = distribute(copy.deepcopy(plain), mesh, "tp")
            fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="fsdp"))
            for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
                for whole in world.per_rank(got.full_tensor()):
                    assert torch.equal(whole, want), (hidden, names, name)


def shard_with(**dims):
    return lambda model, mesh: fully_shard(
        model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims)
    )


WRONG = {
    "unknown name": (shard_with(shard="dp"), MeshError, r"no axis 'dp'; it has a, b"),
    "the same twice": (shard_with(shard="a", replicate="a"), MeshError, r"'a' twice"),
    "out of order": (shard_with(shard=("b", "a")), MeshError, r"\('a', 'b'\).*mesh's order"),
    "no name": (shard_with(shard=0), Parallel3dError, r"dp_mesh_dims.shard is 0"),
    "an empty tuple": (shard_with(shard=()), Parallel3dError, r"dp_mesh_dims.shard is \(\)"),
    "a dict": (
        lambda model, mesh: fully_shard(model, mesh=mesh, dp_mesh_dims={"shard": "a"}),
        Parallel3dError,
        r"must be a DataParallelMeshDims",
    ),
    "a mesh without names": (
        lambda model, mesh: fully_shard(
            model, mesh=init_device_mesh("cpu", (4,)), dp_mesh_dims=DataParallelMeshDims("a")
        ),
        MeshError,
        r"have no names",
    ),
    "plain parameters": (
        shard_with(shard="a"),
        MeshError,
        r"norm.weight is plain.*distribute_module",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_dims(case) -> None:
    call, error, says = WRONG[case]
    with fake_world(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        model = Mlp()
        before = dict(model.named_parameters())
        with pytest.raises(error, match=says):
            call(model, mesh)
        assert dict(model.named_parameters()) == before and type(model) is Mlp


@pytest.mark.parametrize(
    ("placements", "dims", "says"),
    [
        ([Shard(0), Replicate()], {"shard": "a"}, r"Shard\(dim=0\) on axis 'a'.*Replicate\(\)"),
        ([Shard(0), Replicate()], {"replicate": "a"}, r"Shard\(dim=0\) on axis 'a'"),
        ([Replicate(), Partial()], {"shard": "a"}, r"placement P.*takes Shard\(dim\)"),
        ([Replicate(), Replicate()], None, r"dp_mesh_dims=DataParallelMeshDims"),
    ],
    ids=str,
)
def test_wrong_placements(placements, dims, says) -> None:
    with fake_world(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        model = nn.Linear(4, 6, bias=False)
        weight = DTensor.from_local(torch.zeros(6, 4), mesh, placements, run_check=False)
        model.weight = nn.Parameter(weight)
        options = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(**dims)} if dims else {}
        options = options or {"mesh": mesh["a"]}
        with pytest.raises(Parallel3dError, match=says):
            fully_shard(model, **options)
        assert type(model) is nn.Linear


def test_parameters_of_another_mesh() -> None:
    with fake_world(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        other = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
        model = distribute(Mlp(), other, None)
        with pytest.raises(MeshError, match=r"is a DTensor on .*on the mesh given"):
            fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="a"))
