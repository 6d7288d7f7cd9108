"""Models whose inputs and outputs are prepared."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _support.tp.tp_models import DIM, GatedMlp, Mlp


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


class HeadNorm(nn.Module):
    """A norm on each head between a column- and a row-parallel linear."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.q = nn.Linear(DIM, heads * size)
        self.norm = nn.RMSNorm(size)
        self.o = nn.Linear(heads * size, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x).unflatten(-1, (-1, self.size))
        return self.o(self.norm(y).flatten(-2))


class Sums(nn.Module):
    """Puts out parts when its children's inputs are split: no style of its own sums them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Parameter(torch.randn(hidden, DIM))

    def forward(self, x: Tensor) -> tuple[str, Tensor]:
        return "first", F.gelu(self.up(x)) @ self.down


class Second(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[1]


class Cross(nn.Module):
    """Reads two sequences and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(DIM, 8), nn.Linear(DIM, 8)
        self.o = nn.Linear(8, DIM)

    def forward(
        self, x: Tensor, scale: float, memory: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        y = self.q(x) * self.k(memory) * scale
        return self.o(y) if bias is None else self.o(y) + bias


class Gated(Cross):
    """With a parameter for each hidden feature, and one for each of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.scale = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(DIM))

    def forward(
        self, x: Tensor, scale: float, memory: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return self.o(self.q(x * self.scale) * self.k(memory) * self.gate.sigmoid())


class Encoded(nn.Module):
    """A whole memory read by a module that gets a part of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Identity()
        self.cross = Cross()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.cross(self.enter(x), 1.0, memory)


class Gate(nn.Module):
    """Computes something from its input alike on every rank, and something split."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 1)
        self.mlp = GatedMlp(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.router(x).sigmoid() + x.mean(1, keepdim=True)


class OfTwo(nn.Module):
    """What is prepared isn't its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(8)

    def forward(self, name: str | None, x: Tensor, scale: float) -> Tensor:
        assert name == "first"
        return self.mlp(x) * scale


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mlp = nn.Parameter(torch.randn(DIM)), Mlp(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return x + self.mlp(x)
