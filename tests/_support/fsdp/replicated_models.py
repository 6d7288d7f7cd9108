"""Plain models, and copies whose units are not sharded, and what the gradients of these must be."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel3d import MeshLayout, build_mesh
from parallel3d.fsdp import fully_shard
from parallel3d.testing import shards_of

WIDTH = 6


class Block(nn.Module):
    """Notes its output; ``recomputes``: a submodule, which is no unit, in backward; ``first`` is called
    before all else."""

    def __init__(self, recomputes: bool = True) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recomputes = recomputes
        self.first = lambda: None
        self.seen = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first()
        y = self.norm(x)
        up = checkpoint(self.up, y, use_reentrant=False) if self.recomputes else self.up(y)
        self.seen = x + torch.tanh(up)
        return self.seen


class Model(nn.Module):
    """``skip``: leaves the second block out; ``twice``: runs the first one again."""

    def __init__(self, recomputes: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(recomputes) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, *, skip: bool = False, twice: bool = False) -> torch.Tensor:
        for block in (self.blocks[0], *self.blocks[1 + skip :]):
            x = block(x)
        return self.head(self.blocks[0](x) if twice else x)


def plain(recomputes: bool = True) -> Model:
    torch.manual_seed(0)
    return Model(recomputes).double()


def wrapped(ranks: int, model: Model | None = None) -> Model:
    mesh = build_mesh(MeshLayout(replicate=ranks, shard=1), device_type="cpu")
    model = plain() if model is None else model
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(rank: int = 0) -> torch.Tensor:
    return torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def check(model: nn.Module, expected: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if param.grad is not None:
            for _, _, local in shards_of(param.grad):
                torch.testing.assert_close(local, other.grad, rtol=0, atol=1e-12, msg=name)
