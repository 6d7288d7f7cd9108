"""A small transformer whose sizes nothing divides, and one step of it on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parallel3d as p3d

VOCABULARY, WIDTH = 19, 24
PLAN = {
    "layers.*.q": "colwise",
    "layers.*.k": "colwise",
    "layers.*.v": "colwise",
    "layers.*.o": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 6)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    """``block`` makes its blocks."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 2) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.trunk(self.tok(ids))))


def tokens(length: int = 17, rows: int = 2, seed: int = 0) -> Tensor:
    """Of one data rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def cut(mesh: Any, length: int = 17, seed: int = 0) -> tuple[Tensor, Tensor]:
    """This rank's part of its data rank's batch."""
    whole = tokens(length, seed=seed)
    return p3d.cp.shard_batch((whole[:, :-1], whole[:, 1:]), mesh)


def made(mesh: Any, build: Callable[[], nn.Module] = Net, **options: Any) -> nn.Module:
    """The model of ``build`` made parallel, with an audit due."""
    torch.manual_seed(0)
    return p3d.parallelize(build(), mesh, **({"audit": True} | options))
