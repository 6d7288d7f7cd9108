"""Checkpoints by torch.distributed.checkpoint between our models and torch's, on real processes."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.testing import shards_of

DIM = 6  # not a multiple of 4: the last of four shard ranks holds no row of a norm
VOCAB = 20

PLAN = {
    "embed": "embedding",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Lm(nn.Module):
    def __init__(self, vocab: int, *hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, DIM)
        self.layers = nn.ModuleList(Block(size) for size in hidden)
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# What each side builds; the values come from a seed, so that every rank knows the whole ones.


def even_model() -> Lm:
    """12 and 10 hidden features: 6 and 5 on each of two tp ranks, then 3 + 3 and 3 + 2 on shard."""
    return _filled(Lm(VOCAB, 12, 10), seed=1)


def uneven_model() -> Lm:
    """Rows that a shard axis of 4 after a tp axis of 2 can't cut as DTensor tells it."""
    return _filled(Lm(17, 9, 17), seed=2).double()


def _filled(model: Lm, seed: int) -> Lm:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():  # norms and biases too: ones and zeros would hide mistakes
            param.copy_(torch.randn(param.shape, generator=generator))
    return model


def ours(model: Lm, layout: MeshLayout) -> Lm:
    return parallelize(model, build_mesh(layout, device_type="cpu"), tp_plan=PLAN)


def theirs(model: Lm) -> Lm:
    """torch's own: shard 2 x tp 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    for layer in model.layers:
        torch_fully_shard(layer, mesh=mesh["dp"])
    return torch_fully_shard(model, mesh=mesh["dp"])


def scramble(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> None:
    """What a load misses stays nan."""
    with torch.no_grad():
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.fill_(float("nan"))


def load_and_compare(model: nn.Module, path: str, expected: dict[str, torch.Tensor]) -> None:
    """Loads ``path`` over nans; the shards and the whole tensors then equal ``expected``."""
    scramble(model.parameters())
    state = model.state_dict()
    assert list(state) == list(expected)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    compare(model.state_dict(), expected)


def compare(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, want in expected.items():
        got = state[name]
        assert got.shape == want.shape and got.dtype == want.dtype, name
        for rank, box, part in shards_of(got):
            assert torch.equal(part, want[box]), f"{name}: shard of rank {rank}"
        if isinstance(got, DTensor):
            assert torch.equal(got.full_tensor(), want), f"{name}: whole"


def load_whole(path: str, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, in full, as a program without any parallelism reads them."""
    whole = {name: torch.full_like(tensor, float("nan")) for name, tensor in like.items()}
    dcp.load(whole, checkpoint_id=path, no_dist=True)
    return whole


# torch's checkpoint into ours, and ours into torch's


def from_torch(path: str) -> None:
    expected = even_model().state_dict()
    dcp.save(theirs(even_model()).state_dict(), checkpoint_id=path)
    compare(load_whole(path, expected), expected)
    for layout in (MeshLayout(shard=2, tp=2), MeshLayout(shard=4)):
        load_and_compare(ours(even_model(), layout), path, expected)


def to_torch(path: str, layout: MeshLayout) -> None:
    expected = even_model().state_dict()
    model = ours(even_model(), layout)
    dcp.save(model.state_dict(), checkpoint_id=path)
    compare(model.state_dict(), expected)  # saving has changed nothing
    compare(load_whole(path, expected), expected)
    load_and_compare(theirs(even_model()), path, expected)


@pytest.mark.slow  # so does tests/checkpoint/test_dcp_interchange.py
def test_torchs_checkpoint_loads_into_ours(gloo_pool, tmp_path: Path) -> None:
    gloo_pool.run(from_torch, str(tmp_path), world_size=4)


@pytest.mark.parametrize("layout", [MeshLayout(shard=2, tp=2), MeshLayout(shard=4)], ids=str)
def test_our_checkpoint_loads_into_torchs(gloo_pool, tmp_path: Path, layout) -> None:
    gloo_pool.run(to_torch, str(tmp_path), layout, world_size=4)


# Uneven rows, with optimizer state

UNEVEN = MeshLayout(shard=4, tp=2)


def batch(sample: int) -> torch.Tensor:
    return torch.randint(17, (2, 5), generator=torch.Generator().manual_seed(100 + sample))


def loss_of(model: nn.Module, sample: int) -> torch.Tensor:
    tokens = batch(sample)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train(model: nn.Module, samples: list[list[int]]) -> torch.optim.Optimizer:
    """One AdamW step for each list of samples, on the mean of their losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in samples:
        for sample in step:
            (loss_of(model, sample) / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors of ``optimizer.state_dict()``, under the parameters' names."""
    state = optimizer.state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    return {
        f"optimizer.{name}.{key}": value
        for name, slots in zip(names, state.values(), strict=True)
        for key, value in slots.items()
    }


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), **by_name(model, optimizer)}


def plain_trained() -> tuple[Lm, torch.optim.Optimizer]:
    model = uneven_model()
    size = UNEVEN.data_size
    return model, train(model, [[step * size + rank for rank in range(size)] for step in range(2)])


def save_uneven(path: str) -> None:
    model = ours(uneven_model(), UNEVEN)
    data_rank = UNEVEN.data_rank(dist.get_rank())
    optimizer = train(model, [[step * UNEVEN.data_size + data_rank] for step in range(2)])
    saved = everything(model, optimizer)
    dcp.save(saved, checkpoint_id=path)

    # What a plain program reads is what plain training gives, but for the order of sums.
    plain, plain_optimizer = plain_trained()
    expected = everything(plain, plain_optimizer)
    assert sorted(saved) == sorted(expected)
    for name, got in load_whole(path, expected).items():
        torch.testing.assert_close(got, expected[name], rtol=0, atol=1e-12, msg=name)
    # Each rank's chunks lie where the file says: no rank saved another's rows as its own.
    compare(saved, load_whole(path, expected))
    if dist.get_rank() == 0:
        torch.save(load_whole(path, expected), f"{path}/whole.pt")


def load_uneven(path: str, layout: MeshLayout) -> None:
    expected = torch.load(f"{path}/whole.pt")
    model = ours(uneven_model(), layout)
    optimizer = train(model, [[50]])  # has state, of other values
    state = everything(model, optimizer)
    scramble(list(state.values()))
    dcp.load(state, checkpoint_id=path)
    compare(state, expected)
    # The tensors were loaded in place: the model and its optimizer have the values.
    for name, tensor in everything(model, optimizer).items():
        local = [t.to_local() if isinstance(t, DTensor) else t for t in (tensor, state[name])]
        assert local[0].shape == local[1].shape and torch.equal(*local), name
    got = model(batch(7)).detach()
    plain = uneven_model()
    plain.load_state_dict({name: expected[name] for name in plain.state_dict()})
    torch.testing.assert_close(got, plain(batch(7)).detach(), rtol=0, atol=1e-12)


FEW = [MeshLayout(shard=3, tp=2)]
LOADED_ON = [UNEVEN, MeshLayout()]
MORE = [MeshLayout(2, 2), MeshLayout(replicate=2, shard=2, tp=2), MeshLayout(shard=8)]


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(FEW, marks=pytest.mark.slow),
        pytest.param(LOADED_ON, marks=pytest.mark.slow),
        pytest.param(MORE, marks=pytest.mark.full),
    ],
    ids=["few", "some", "more"],
)
def test_uneven_rows_round_trip_with_optimizer_state(gloo_pool, tmp_path: Path, layouts) -> None:
    gloo_pool.run(save_uneven, str(tmp_path), world_size=UNEVEN.world_size)
    for layout in layouts:
        gloo_pool.run(load_uneven, str(tmp_path), layout, world_size=layout.world_size)


# torch's helpers that name optimizer state by parameter


def through_torchs_helpers(path: str) -> None:
    samples = [[dist.get_rank() // 2]]
    model = ours(even_model(), MeshLayout(shard=2, tp=2))
    state = get_optimizer_state_dict(model, train(model, samples))
    exp_avg = state["state"]["layers.0.up.weight"]["exp_avg"]
    expected = exp_avg.full_tensor().clone()
    assert expected.abs().max() > 0
    dcp.save({"optimizer": state}, checkpoint_id=path)

    other = ours(even_model(), MeshLayout(shard=4))
    optimizer = torch.optim.AdamW(other.parameters())
    state = get_optimizer_state_dict(other, optimizer)
    dcp.load({"optimizer": state}, checkpoint_id=path)
    set_optimizer_state_dict(other, optimizer, state)
    got = optimizer.state[other.layers[0].up.weight]["exp_avg"]
    assert torch.equal(got.full_tensor(), expected)


@pytest.mark.slow
def test_torchs_optimizer_state_helpers(gloo_pool, tmp_path: Path) -> None:
    gloo_pool.run(through_torchs_helpers, str(tmp_path), world_size=4)


# A shard lies in its bucket's buffer: copies and files hold the shard only


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 40_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x))


def save_one_small(path: str) -> None:
    mesh = build_mesh(MeshLayout(shard=2, tp=2), device_type="cpu")
    model = parallelize(Wide(), mesh, tp_plan={"up": "colwise_gather_output"})
    weight = model.state_dict()["norm.weight"]
    dcp.save({"norm.weight": weight}, checkpoint_id=f"{path}/dcp")
    torch.save(weight, f"{path}/{dist.get_rank()}.pt")
    assert copy.deepcopy(model.norm.weight).to_local().untyped_storage().nbytes() == 4 * 4


def test_one_parameter_does_not_drag_its_bucket_into_the_file(gloo_pool, tmp_path: Path) -> None:
    gloo_pool.run(save_one_small, str(tmp_path), world_size=4)
    for files in (list((tmp_path / "dcp").iterdir()), list(tmp_path.glob("*.pt"))):
        assert files and sum(file.stat().st_size for file in files) < 20_000  # the bucket: 1.4 MB


def save_by_torch(path: str) -> None:
    model = ours(even_model(), MeshLayout(shard=2, tp=2))
    expected = even_model().state_dict()
    optimizer = train(model, [[0]])
    trained = {name: t.full_tensor().clone() for name, t in model.state_dict().items()}
    file = f"{path}/{dist.get_rank()}.pt"
    torch.save([model.state_dict(), optimizer.state_dict()], file)

    scramble(model.parameters())
    state, optimizer_state = torch.load(file, weights_only=False)
    model.load_state_dict(state)
    compare(model.state_dict(), trained)
    assert not torch.equal(trained["head.weight"], expected["head.weight"])
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(optimizer_state)
    for param in model.parameters():
        got, want = other.state[param]["exp_avg"], optimizer.state[param]["exp_avg"]
        assert torch.equal(got.full_tensor(), want.full_tensor())
        copied = copy.deepcopy(param)
        assert type(copied) is type(param) and copied.placements == param.placements
        assert torch.equal(copied.full_tensor(), param.full_tensor())
        with torch.no_grad():
            copied.zero_()
    compare(model.state_dict(), trained)  # the copies were copies


def test_torch_save_by_each_rank(gloo_pool, tmp_path: Path) -> None:
    gloo_pool.run(save_by_torch, str(tmp_path), world_size=4)
