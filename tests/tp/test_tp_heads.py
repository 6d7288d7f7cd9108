"""Attention whose heads tp doesn't divide: no head is cut, and the numbers are the plain layer's."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tp_world import check_parity

DIM = 12
SIZE = 4  # of a head
# heads, key and value heads, tp
GRID = [
    (4, 1, 2), (4, 2, 4), (8, 2, 4), (6, 6, 4), (6, 3, 2), (6, 2, 4), (5, 1, 2), (7, 7, 3), (3, 3, 4),
    (12, 3, 4), (10, 5, 3), (4, 4, 2),
]  # fmt: skip
SPLIT = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}


class Projections(nn.Module):
    """What the attention layers here have in common."""

    def __init__(self, heads: int, kv: int, bias: bool = True) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, heads * SIZE, bias=bias)
        self.k = nn.Linear(DIM, kv * SIZE, bias=bias)
        self.v = nn.Linear(DIM, kv * SIZE, bias=bias)
        self.o = nn.Linear(heads * SIZE, DIM, bias=bias)


class CountsByShape(Projections):
    """Takes numbers of heads from tensors, as examples/llama.py does."""

    def __init__(self, heads: int, kv: int) -> None:
        super().__init__(heads, kv)
        self.head_dim = SIZE
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class CountsByAttribute(Projections):
    """Reshapes by numbers it keeps."""

    def __init__(self, heads: int, kv: int) -> None:
        super().__init__(heads, kv, bias=False)
        self.n_heads, self.n_kv_heads, self.n_rep = heads, kv, heads // kv

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.n_heads, -1).transpose(1, 2)
        k = self.k(x).view(b, s, self.n_kv_heads, -1).transpose(1, 2)
        v = self.v(x).view(b, s, self.n_kv_heads, -1).transpose(1, 2)
        k, v = (_repeat(t, self.n_rep) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, self.n_heads * SIZE))


def _repeat(x: Tensor, times: int) -> Tensor:
    b, heads, s, size = x.shape
    return x[:, :, None].expand(b, heads, times, s, size).reshape(b, heads * times, s, size)


@pytest.mark.parametrize(("heads", "kv", "tp"), GRID)
@pytest.mark.parametrize("kind", [CountsByShape, CountsByAttribute])
def test_attention_equals_the_plain_layer(kind, heads, kv, tp):
    torch.manual_seed(heads)
    norms = {"[qk]_norm": "replicated_with_grad_allreduce"} if kind is CountsByShape else {}
    check_parity(kind(heads, kv), {**SPLIT, **norms}, tp, torch.randn(2, 5, DIM).double())
