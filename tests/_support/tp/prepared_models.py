"""Models whose inputs and outputs are prepared."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _support.tp.tp_models import DIM


class Sinks(nn.Module):
    """Attention-like: a parameter for each head, and one for the features of a head."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.q, self.o = nn.Linear(DIM, heads * size), nn.Linear(heads * size, DIM)
        self.sinks = nn.Parameter(torch.randn(heads))
        self.scale = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x).unflatten(-1, (-1, self.size))
        y = y * self.sinks[:, None].sigmoid() * self.scale
        return self.o(y.flatten(-2))


class Latent(nn.Module):
    """Compressed keys and values; the last features of the compression go to all heads as they are."""

    qk_rope_head_dim = 2

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.size, self.rank = size, 5
        self.q = nn.Linear(DIM, heads * (size + 2))
        self.kv_a = nn.Linear(DIM, self.rank + 2)
        self.norm = nn.LayerNorm(self.rank)
        self.kv_b = nn.Linear(self.rank, heads * 2 * size)
        self.o = nn.Linear(heads * size, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.size + 2)).transpose(1, 2)
        latent, rope = self.kv_a(x).split((self.rank, 2), -1)
        kv = self.kv_b(self.norm(latent)).unflatten(-1, (-1, 2 * self.size)).transpose(1, 2)
        k, v = kv.chunk(2, -1)
        k = torch.cat([k, rope[:, None].expand(-1, k.shape[1], -1, -1)], -1)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(-2))
