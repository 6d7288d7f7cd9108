"""What is special to models on meshes: optimizers on pieces, steps in backward, ranks that differ."""

from functools import partial
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

Sizes = tuple[int, int, int]


class Net(nn.Module):
    """With a batch norm, a parameter without elements and one without dims."""

    def __init__(self, dtype: torch.dtype, empty: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 9, dtype=dtype), nn.Linear(9, 5, dtype=dtype)
        self.norm = nn.BatchNorm1d(9, dtype=dtype)
        self.empty = nn.Parameter(torch.zeros(empty, 4, dtype=dtype))
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x))) * self.scale + self.empty.sum()


def build(sizes: Sizes, seed: int, dtype: torch.dtype = torch.float32, empty: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = Net(dtype, empty)
    return p3d.parallelize(model, p3d.build_mesh(MeshLayout(*sizes), device_type="cpu"))


def split(model: nn.Module, make: Any) -> list[torch.optim.Optimizer]:
    big = [p for p in model.parameters() if p.dim() == 2 and p.numel()]
    small = [p for p in model.parameters() if p.dim() != 2]
    return [make(big), p3d.optim.local(torch.optim.AdamW, small, lr=0.01)]


def optimizers(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    local, O = p3d.optim.local, torch.optim
    if kind == "local AdamW":
        return [local(O.AdamW, model, lr=0.01)]
    if kind == "Muon":
        return split(model, partial(local, O.Muon, lr=0.01))
    if kind == "Adafactor":
        return split(model, partial(local, O.Adafactor, lr=0.01))
    assert kind == "in backward"
    trained = [p for p in model.parameters() if p.numel()]
    return [p3d.optim.step_in_backward(model, partial(local, O.AdamW), params=trained, lr=0.01)]


def train(model: nn.Module, kind: str, its: list[torch.optim.Optimizer], seed: int) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model(x).square().sum().backward()
    if kind != "in backward":
        for optimizer in its:
            optimizer.step()
            optimizer.zero_grad()


def there_and_back(kind: str, dtype: torch.dtype, path: str) -> None:
    first, second = ((1, 4, 1), (2, 2, 1)) if dist.get_world_size() == 4 else ((1, 2, 1), (2, 1, 1))
    empty = 1 if kind == "in backward" else 0
    model = build(first, 1, dtype, empty)
    its = optimizers(kind, model)
    for seed in range(2):
        train(model, kind, its, seed)
    save(f"{path}/1", model, its, step=2)
    want = everything(model, *its)
    other = build(second, 2, dtype, empty)
    others = optimizers(kind, other)
    load(f"{path}/1", other, others)
    check_equal(everything(other, *others), want)
    train(other, kind, others, 2)
    want = everything(other, *others)
    save(f"{path}/2", other, others, step=3)
    load(f"{path}/2", model, its)  # into state that is there
    check_equal(everything(model, *its), want)
    train(model, kind, its, 3)
    again = build(first, 3, dtype, empty)
    agains = optimizers(kind, again)
    load(f"{path}/2", again, agains)
    train(again, kind, agains, 3)
    check_equal(everything(again, *agains), everything(model, *its))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) for kind in ("Muon", "in backward")]
    + [pytest.param(k, marks=pytest.mark.full) for k in ("local AdamW", "Adafactor")],
)
def test_optimizers(gloo_pool: GlooPool, tmp_path: Path, kind: str) -> None:
    gloo_pool.run(there_and_back, kind, torch.float32, str(tmp_path), world_size=2, timeout=60)


def test_bfloat16(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(
        there_and_back, "local AdamW", torch.bfloat16, str(tmp_path), world_size=4, timeout=60
    )


def different(path: str) -> None:
    """Plain tensors and values are the first rank's."""
    rank = dist.get_rank()
    model = nn.Linear(2, 2)
    model.register_buffer("mean", torch.full((2,), rank + 1.0))
    extra = {"rank": rank, "tensor": torch.full((3,), rank + 1.0), f"only {rank}": torch.ones(2)}
    save(path, model, step=1, extra=extra)
    info = load(path, model)
    assert (model.mean == 1.0).all() and info.extra["rank"] == 0
    assert torch.equal(info.extra["tensor"], torch.ones(3))
    assert set(info.extra) == {"rank", "tensor", "only 0"}
    save(path, model, step=2, extra={"tensor": torch.ones(3 + rank)})
    assert torch.equal(load(path, model).extra["tensor"], torch.ones(3))
    save(path, nn.Linear(2, 2), step=3)
    with pytest.raises(CheckpointError):
        load(path, nn.Linear(2, 2 + rank))


def test_values_that_differ(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(different, str(tmp_path), world_size=3, timeout=60)


def in_use(path: str) -> None:
    """Within a forward parameters are gathered; they are saved and loaded as they lie at rest."""
    model = build((1, 2, 1), 1)
    want = everything(model)
    save(path, model, step=0)
    seen: list[Any] = []

    def hook(*_: Any) -> None:
        with pytest.raises(ValueError, match=r"is in a forward or backward; call it between"):
            save(path, model, step=1)
        with pytest.raises(ValueError, match=r"is in a forward or backward; call it between"):
            load(path, model)
        seen.append(1)

    handle = model.norm.register_forward_hook(hook)
    model(torch.ones(3, 6)).sum().backward()
    handle.remove()
    assert seen
    for param in model.parameters():
        param.grad = None
    model.unshard()
    save(path, model, step=1)
    other = build((1, 2, 1), 2)
    other.unshard()
    load(path, other)
    got = everything(other)
    for name, _ in model.named_parameters():
        assert torch.equal(got[name], want[name])


@pytest.mark.smoke
def test_in_use(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(in_use, str(tmp_path), world_size=2, timeout=60)
