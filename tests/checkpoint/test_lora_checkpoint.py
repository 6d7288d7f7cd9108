"""Adapters alone: only="trainable" keeps what is trained, a small folder, on any mesh."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.checkpoint.dcp_models import check_equal, everything
from torch import distributed as dist
from torch import nn

import parallel3d as p3d
from parallel3d import MeshLayout
from parallel3d.checkpoint import load, save
from parallel3d.errors import CheckpointError
from parallel3d.testing import GlooPool

DIM = 32


class LoRA(nn.Module):
    """A frozen linear and a low-rank update."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def plain(seed: int, rank: int = 3, adapters: bool = True) -> nn.Module:
    """The same base for all seeds; other adapters."""
    torch.manual_seed(0)
    model = Base()
    torch.manual_seed(seed)
    for layer in model.layers if adapters else ():
        layer.up, layer.down = LoRA(layer.up, rank), LoRA(layer.down, rank)
    return model.requires_grad_(adapters).train() if not adapters else model


def build(sizes: tuple[int, int, int] | None, seed: int, rank: int = 3):
    model = plain(seed, rank)
    if sizes is not None:
        mesh = p3d.build_mesh(MeshLayout(*sizes), device_type="cpu")
        plan = {
            "layers.*.up.base": "colwise",
            "layers.*.up.up": "colwise",
            "layers.*.down.base": "rowwise",
            "layers.*.down.down": "rowwise",
        }
        model = p3d.parallelize(model, mesh, plan if sizes[2] > 1 else None)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.1 / seed)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.linspace(-1, 1, 2 * DIM).reshape(2, DIM)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def stored(folder: Path) -> int:
    """Numbers in it, without random states."""
    tensors = json.loads((folder / "index.json").read_text())["tensors"]
    return sum(prod(t["shape"]) for name, t in tensors.items() if not name.startswith("rng."))


def save_on(sizes, path: str) -> dict[str, Any]:
    model, optimizer = build(sizes, 1)
    train(model, optimizer)
    folder = save(path, model, optimizer, step=1, only="trainable")
    whole_folder = save(f"{path}-whole", model, optimizer, step=1)
    if not dist.is_initialized() or dist.get_rank() == 0:
        assert stored(folder) < 0.45 * stored(whole_folder)
    return everything(model, optimizer)


def load_on(sizes, path: str, want: dict[str, Any]) -> None:
    model, optimizer = build(sizes, 2)
    info = load(path, model, optimizer)
    assert info.step == 1 and optimizer.param_groups[0]["lr"] == 0.1
    check_equal(everything(model, optimizer), want)
    train(model, optimizer)


MESHES = [(1, 2, 2), (2, 2, 1), None]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(MESHES[0], marks=pytest.mark.slow),
        pytest.param(MESHES[1], marks=pytest.mark.full),
        pytest.param(MESHES[2], marks=pytest.mark.slow),
    ],
)
def test_adapters(gloo_pool: GlooPool, tmp_path: Path, sizes) -> None:
    path = str(tmp_path / "run")
    want = (
        save_on(None, path)
        if sizes is None
        else gloo_pool.run(save_on, sizes, path, world_size=4)[0]
    )
    for other in MESHES:
        if other is None:
            load_on(None, path, want)
        elif other != sizes:
            gloo_pool.run(load_on, other, path, want, world_size=4)


def test_other_adapters(tmp_path: Path) -> None:
    model, optimizer = build(None, 1)
    train(model, optimizer)
    folder = save(tmp_path, model, optimizer, step=1, only="trainable")
    index = (folder / "index.json").read_text()
    assert "down.weight" in index and "base" not in index and "calls" not in index

    def refused(other: nn.Module, named: str, optimizer=None) -> None:
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(CheckpointError, match=named):
            load(tmp_path, other, optimizer)
        for name, value in other.state_dict().items():
            assert torch.equal(value, before[name])

    refused(build(None, 2, rank=4)[0], r"is float32 of shape \(.*3.*\) in .*but here .*\(.*4")
    refused(plain(2, adapters=False), r"only='trainable'.*the model doesn't have its 'layers")
    other, more = build(None, 2)
    other.layers[0].up.base.requires_grad_(True)
    refused(other, r"only='trainable'.*it doesn't have .*'layers.0.up.base.weight'")
    other, more = build(None, 2)
    other.layers[0].up = other.layers[0].up.base
    refused(other, r"the model doesn't have its 'layers.0.up.down.weight")
    other, more = build(None, 2)
    refused(other, "no optimizer state of", torch.optim.AdamW(other.parameters()))
    load(tmp_path, other, more)
    assert not other.layers[0].up.base.weight.requires_grad


def test_all_into_adapters_and_wrong_only(tmp_path: Path) -> None:
    """What holds everything loads too; what was frozen stays frozen."""
    model, optimizer = build(None, 1)
    train(model, optimizer)
    save(tmp_path, model, optimizer, step=1)
    other, another = build(None, 2)
    load(tmp_path, other, another)
    for name, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    with pytest.raises(CheckpointError, match="only is 'adapters'"):
        save(tmp_path / "x", model, step=1, only="adapters")
