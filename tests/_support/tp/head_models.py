"""Attention layers of the tests of uneven heads, and the grid of heads they are tried on."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.tp import Colwise, RopeOutput

DIM = 12
SIZE = 4  # of a head
# heads, key and value heads, tp
GRID = [
    (4, 1, 2), (4, 2, 4), (8, 2, 4), (6, 6, 4), (6, 3, 2), (6, 2, 4), (5, 1, 2), (7, 7, 3), (3, 3, 4),
    (12, 3, 4), (10, 5, 3), (4, 4, 2),
]  # fmt: skip
SPLIT = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
NORMS = {"[qk]_norm": "replicated_with_grad_allreduce"}


class Projections(nn.Module):
    """What the attention layers here have in common."""

    def __init__(self, heads: int, kv: int, bias: bool = True) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, heads * SIZE, bias=bias)
        self.k = nn.Linear(DIM, kv * SIZE, bias=bias)
        self.v = nn.Linear(DIM, kv * SIZE, bias=bias)
        self.o = nn.Linear(heads * SIZE, DIM, bias=bias)


class CountsByShape(Projections):
    """Takes numbers of heads from tensors, as examples/llama/llama.py does."""

    plan: ClassVar = {**SPLIT, **NORMS}

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

    plan: ClassVar = SPLIT

    def __init__(self, heads: int, kv: int) -> None:
        super().__init__(heads, kv, bias=False)
        self.n_heads, self.n_kv_heads, self.n_rep = heads, kv, heads // kv
        self.q_width = heads * SIZE

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.n_heads, -1).transpose(1, 2)
        k = self.k(x).view(b, s, self.n_kv_heads, -1).transpose(1, 2)
        v = self.v(x).view(b, s, self.n_kv_heads, -1).transpose(1, 2)
        k, v = (t.repeat_interleave(self.n_rep, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, self.q_width))


class CountsByConfig(CountsByAttribute):
    """Reshapes by numbers that can't be set for one layer."""

    def __init__(self, heads: int, kv: int) -> None:
        super().__init__(heads, kv)
        self.config = type("Config", (), {"n_heads": heads, "n_kv_heads": kv})()

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.config.n_heads, -1).transpose(1, 2)
        k, v = (
            p(x).view(b, s, self.config.n_kv_heads, -1).transpose(1, 2) for p in (self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class Interleaved(nn.Module):
    """One projection for all: a head's query, key and value beside each other, as in GPT-NeoX."""

    plan: ClassVar = {"query_key_value": "colwise", "dense": "rowwise"}

    def __init__(self, heads: int, kv: int) -> None:
        super().__init__()
        self.head_size = SIZE
        self.query_key_value = nn.Linear(DIM, 3 * heads * SIZE)
        self.dense = nn.Linear(heads * SIZE, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.query_key_value(x).view(*x.shape[:-1], -1, 3 * self.head_size).transpose(1, 2)
        y = F.scaled_dot_product_attention(*y.chunk(3, -1), is_causal=True)
        return self.dense(y.transpose(1, 2).flatten(2))


class Latent(nn.Module):
    """Keys and values from a latent (DeepSeek) beside a key that all heads share, values of another size, and
    a gate for each head."""

    plan: ClassVar = {
        "q_b_proj": "colwise",
        "kv_a_proj": RopeOutput(features=2),
        "kv_b_proj": "colwise",
        "g_proj": "colwise",
        "o_proj": "rowwise",
        "kv_a_norm": "replicated",
    }

    def __init__(self, heads: int, kv: int) -> None:
        super().__init__()
        self.num_heads, self.v_head_dim = heads, 2
        self.q_b_proj = nn.Linear(DIM, heads * (SIZE + 2))
        self.kv_a_proj = nn.Linear(DIM, 7)
        self.kv_a_norm = nn.RMSNorm(5)
        self.kv_b_proj = nn.Linear(5, heads * (SIZE + 2))
        self.g_proj = nn.Linear(DIM, heads)
        self.o_proj = nn.Linear(heads * 2, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_b_proj(x).view(b, s, -1, SIZE + 2).transpose(1, 2)
        latent, rope = self.kv_a_proj(x).split([5, 2], -1)
        kv = self.kv_b_proj(self.kv_a_norm(latent)).view(b, s, -1, SIZE + 2).transpose(1, 2)
        k, v = kv.split([SIZE, 2], -1)
        k = torch.cat([k, rope.unsqueeze(1).expand(b, k.shape[1], s, 2)], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        y = y * self.g_proj(x).sigmoid().unsqueeze(-1)
        return self.o_proj(y.reshape(b, s, -1))


class Sections(nn.Module):
    """One projection of all queries, then all keys, then all values; and a parameter for each head."""

    def __init__(self, heads: int, kv: int) -> None:
        super().__init__()
        self.head_dim, self.q_size, self.kv_size = SIZE, heads * SIZE, kv * SIZE
        self.qkv_proj = nn.Linear(DIM, (heads + 2 * kv) * SIZE)
        self.o_proj = nn.Linear(heads * SIZE, DIM)
        self.sinks = nn.Parameter(torch.randn(heads))
        self.plan = self.plan_of(heads, kv)

    @staticmethod
    def plan_of(heads: int, kv: int) -> dict:
        return {
            "qkv_proj": Colwise(packed=(heads * SIZE, kv * SIZE, kv * SIZE)),
            "o_proj": "rowwise",
            "": "local_params",
            "sinks": "colwise",
        }

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv_proj(x).split([self.q_size, self.kv_size, self.kv_size], -1)
        q, k, v = (t.reshape(*x.shape[:-1], -1, self.head_dim).transpose(1, 2) for t in parts)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2)
        sinks = self.sinks.reshape(-1, 1, 1).expand(*scores.shape[:-1], 1)
        y = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Sinks(CountsByShape):
    """A parameter for each head and one for each feature of one, in a layer whose projections come apart."""

    plan: ClassVar = {
        **CountsByShape.plan,
        "": "local_params",
        "sinks": "colwise",
        "scale": "replicated_with_grad_allreduce",
    }

    def __init__(self, heads: int, kv: int) -> None:
        super().__init__(heads, kv)
        self.sinks, self.scale = nn.Parameter(torch.randn(heads)), nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True, enable_gqa=True)
        return self.o((y * self.sinks.view(-1, 1, 1)).transpose(1, 2).flatten(2))


KINDS = (CountsByShape, CountsByAttribute, CountsByConfig, Interleaved, Latent, Sections, Sinks)
