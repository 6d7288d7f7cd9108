"""Every argument of ``fully_shard`` but the policies: numbers equal the plain model's."""

import pytest
import torch
from _support.engine.twins import (
    Twins,
    device_mesh,
    floats,
    mean_square,
    same,
    shard_layers,
    train,
)
from _support.models import Block, Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel3d.testing import fake_world, record_collectives


def one_module(engine) -> None:
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        train(
            Block(),
            lambda m: engine.fully_shard(m, mesh=device_mesh()),
            mean_square,
            floats,
            optimizer=optimizer,
        )


@pytest.mark.smoke
@pytest.mark.parity("argument: module")
def test_module(on_ranks, engine) -> None:
    on_ranks(one_module)
    with fake_world(1, 4):
        block = Block()
        cls = type(block)
        assert engine.fully_shard(block, mesh=device_mesh()) is block
        assert isinstance(block, cls) and isinstance(block, engine.FSDPModule)
        assert type(block).__name__ == "FSDPBlock"
        assert all(isinstance(p, DTensor) for p in block.parameters())
        assert block.up.weight.shape == (20, 12) and block.up.weight.to_local().shape == (5, 12)


@pytest.mark.parity("argument: module")
@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_containers_without_forward_are_refused(engine, container) -> None:
    with fake_world(0, 2), pytest.raises(ValueError, match="forward"):
        engine.fully_shard(container(), mesh=device_mesh())


def list_of_modules(engine) -> None:
    def wrap(model: nn.Module) -> None:
        mesh = device_mesh()
        engine.fully_shard([model.norm, model.head], mesh=mesh)
        assert isinstance(model.norm, engine.FSDPModule)
        assert isinstance(model.head, engine.FSDPModule)
        shard_layers(engine, model, mesh)

    train(Lm(), wrap)


@pytest.mark.parity("argument: list of modules")
def test_list_of_modules(on_ranks, engine) -> None:
    on_ranks(list_of_modules)
    with fake_world(0, 2):
        mesh = device_mesh()
        a, b = nn.Linear(2, 2), nn.Linear(2, 2)
        engine.fully_shard([a, b], mesh=mesh)
        root = engine.fully_shard(nn.Sequential(a, b), mesh=mesh)
        with record_collectives(mesh) as recorder:
            root(torch.randn(2, 2)).sum().backward()
        assert recorder.count("reduce_scatter") == 1


class Chunked(Lm):
    """The head runs apart from the rest, once per chunk of the sequence."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def chunked_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    hidden = model(ids)
    chunks = [model.head(chunk).square().mean() for chunk in hidden.split(2, dim=1)]
    return torch.stack(chunks).sum()


def list_run_in_parts(engine) -> None:
    def wrap(model: nn.Module) -> None:
        mesh = device_mesh()
        engine.fully_shard([model.norm, model.head], mesh=mesh)
        shard_layers(engine, model, mesh)

    train(Chunked(), wrap, chunked_loss)


@pytest.mark.parity("argument: list of modules run in parts")
def test_list_run_in_parts(on_ranks) -> None:
    """The forward runs the norm only; the head is called for each chunk after it."""
    on_ranks(list_run_in_parts)


def mesh_none(engine) -> None:
    train(Block(), engine.fully_shard, mean_square, floats)


@pytest.mark.parity("argument: mesh=None")
def test_mesh_none(on_ranks, engine) -> None:
    """All ranks."""
    on_ranks(mesh_none)
    with fake_world(0, 4):
        assert engine.fully_shard(Block()).up.weight.device_mesh.shape == (4,)


def meshes(engine) -> None:
    train(Lm(), lambda m: shard_layers(engine, m, device_mesh(4)))
    for shape in ((2, 2), (4, 1), (1, 4)):
        train(Lm(), lambda m, shape=shape: shard_layers(engine, m, device_mesh(*shape)))


@pytest.mark.parity("argument: mesh 1-D", "argument: mesh 2-D")
def test_meshes(on_ranks, engine) -> None:
    on_ranks(meshes, size=4)
    with fake_world(3, 8):
        for shape, names, placements in (
            ((8,), None, (Shard(0),)),
            ((8,), ("anything",), (Shard(0),)),
            ((2, 4), ("anything", "else"), (Replicate(), Shard(0))),
        ):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            block = engine.fully_shard(Block(), mesh=mesh)
            assert block.up.weight.placements == placements
            assert block.up.weight.device_mesh is mesh


def three_axes(engine) -> None:
    mesh = device_mesh(2, 2, 1, names=("replicate", "shard", "tp"))
    train(Lm(), lambda m: shard_layers(engine, m, mesh))


@pytest.mark.parity("argument: mesh of more axes, by name")
@pytest.mark.torch_fails("refused", match="expects a 1D or 2D DeviceMesh")
def test_three_axes(on_ranks) -> None:
    """The engine takes the axes it knows by name."""
    on_ranks(three_axes, size=4)


def gathers(engine, reshard) -> list[int]:
    """All-gathers in the second forward and backward of three linears and a root without parameters."""
    mesh = device_mesh()
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)], nn.ReLU())
    for layer in model[:3]:
        engine.fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    engine.fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    model(torch.randn(2, 8)).sum().backward()
    with record_collectives(mesh) as recorder:
        loss = model(torch.randn(2, 8)).sum()
        counts = [recorder.count("all_gather")]
        loss.backward()
    return [*counts, recorder.count("all_gather") - counts[0]]


@pytest.mark.parity(
    "argument: reshard_after_forward=None",
    "argument: reshard_after_forward=True",
    "argument: reshard_after_forward=False",
)
def test_reshard_after_forward_decides_what_backward_gathers(engine) -> None:
    with fake_world(0, 4):
        assert gathers(engine, True) == [3, 3]
        assert gathers(engine, None) == [3, 3]
        assert gathers(engine, False) == [3, 0]
        mesh = device_mesh()
        root = engine.fully_shard(nn.Linear(8, 8), mesh=mesh)  # None: not for the root
        with record_collectives(mesh) as recorder:
            root(torch.randn(2, 8)).sum().backward()
        assert recorder.count("all_gather") == 1


def reshard_after_forward(engine) -> None:
    for reshard in (None, True, False):
        train(
            Lm(),
            lambda m, r=reshard: shard_layers(engine, m, device_mesh(), reshard_after_forward=r),
        )


@pytest.mark.parity(
    "argument: reshard_after_forward=None",
    "argument: reshard_after_forward=True",
    "argument: reshard_after_forward=False",
)
def test_reshard_after_forward(on_ranks) -> None:
    on_ranks(reshard_after_forward)


def reshard_to_two(engine) -> list[int]:
    train(
        Lm(vocab=19),
        lambda m: shard_layers(engine, m, device_mesh(4), reshard_after_forward=2),
    )
    hsdp = device_mesh(1, 4)
    train(Lm(), lambda m: shard_layers(engine, m, hsdp, reshard_after_forward=2))

    # Two forwards, then two backwards; and a forward whose backward never comes.
    def twice(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return lm_loss(model, ids) + lm_loss(model, ids.flip(0)) * 2

    mesh = device_mesh(4)
    twins = Twins(Lm(), lambda m: shard_layers(engine, m, mesh, reshard_after_forward=2), twice)
    twins.train()
    with torch.no_grad():
        got, want = twins.sharded(tokens(7)), twins.plain(tokens(7))
    same(got, want, "evaluation")
    with record_collectives(mesh) as recorder:
        twins.backward_sharded()
    return [call.group_size for call in recorder.select("all_gather")]


@pytest.mark.parity("argument: reshard_after_forward=int")
def test_reshard_after_forward_to_a_smaller_world(on_ranks, engine) -> None:
    (sizes, *_) = on_ranks(reshard_to_two, size=4)
    assert set(sizes) == {2, 4}
    with fake_world(0, 4), pytest.raises(ValueError, match="3"):
        engine.fully_shard(Block(), mesh=device_mesh(), reshard_after_forward=3)


@pytest.mark.parity("argument: reshard_after_forward=int")
@pytest.mark.parametrize(("size", "same_as"), [(1, False), (4, True)])
def test_reshard_to_one_rank_or_all(engine, size, same_as) -> None:
    """1: not resharded; all ranks of the mesh: resharded as by True."""
    with fake_world(0, 4):
        assert gathers(engine, size) == gathers(engine, same_as)


def along(dim: int):
    """Two-dimensional parameters are cut along ``dim``."""
    return lambda p: Shard(dim) if p.ndim > 1 else None


def other_dims(engine) -> None:
    def wrap(model: nn.Module) -> None:
        shard_layers(engine, model, device_mesh(), shard_placement_fn=along(1))
        assert model.head.weight.placements == (Shard(1),)
        assert model.head.bias.placements == (Shard(0),)

    train(Lm(), wrap)
    train(Lm(), lambda m: shard_layers(engine, m, device_mesh(), shard_placement_fn=along(-1)))
    hsdp = device_mesh(1, 2)
    train(Lm(), lambda m: shard_layers(engine, m, hsdp, shard_placement_fn=along(1)))


@pytest.mark.parity("argument: shard_placement_fn: dim")
def test_shard_placement_dim(on_ranks) -> None:
    on_ranks(other_dims)


class Experts(nn.Module):
    """A linear and two experts of which each half of the ranks has one... all on one mesh here."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.experts = nn.Parameter(torch.randn(5, 12, 12) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.einsum("bi,eij->bj", x, self.experts)


def two_meshes(engine) -> None:
    """Experts on a mesh of (2, 2), the rest sharded over all four."""
    mesh, other = device_mesh(4), engine.mesh_info(device_mesh(2, 2))

    def wrap(model: nn.Module) -> None:
        def place(p: nn.Parameter):
            chosen = {id(model.experts): other, id(model.layers[0].up.weight): other}
            info = chosen.get(id(p))
            return None if info is None else engine.ShardPlacementResult(Shard(p.ndim - 2), info)

        shard_layers(engine, model, mesh, shard_placement_fn=place)
        assert model.experts.placements == (Replicate(), Shard(1))
        assert model.layers[0].up.weight.placements == (Replicate(), Shard(0))
        assert model.layers[0].down.weight.placements == (Shard(0),)

    train(Experts(), wrap, mean_square, floats)


@pytest.mark.parity("argument: shard_placement_fn: mesh per parameter")
def test_shard_placement_mesh(on_ranks) -> None:
    on_ranks(two_meshes, size=4)


def ignored_params(engine) -> None:
    def wrap(model: nn.Module) -> None:
        kept = model.norm.weight
        engine.fully_shard(
            model, mesh=device_mesh(), ignored_params={kept, model.layers[0].up.bias}
        )
        assert model.norm.weight is kept and not isinstance(kept, DTensor)

    twins = Twins(Lm(), wrap)
    twins.backward()
    for p in twins.sharded.parameters():
        if not isinstance(p, DTensor):  # not reduced: this rank's own
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    twins.check_grads()


@pytest.mark.parity("argument: ignored_params")
def test_ignored_params(on_ranks) -> None:
    on_ranks(ignored_params)


@pytest.mark.parity("argument: dp_mesh_dims: shard")
def test_dp_mesh_dims_names_are_checked(engine) -> None:
    with fake_world(0, 4):
        mesh = device_mesh(2, 2, names=("fsdp", "tp"))
        with pytest.raises(ValueError, match="nowhere"):
            engine.fully_shard(
                Block(), mesh=mesh, dp_mesh_dims=engine.DataParallelMeshDims(shard="nowhere")
            )
    with pytest.raises(ValueError, match="shard"):
        engine.DataParallelMeshDims()
