"""Layers as people write them, with a plan by hand for each: what becomes of it on tp ranks."""

from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.tp import Colwise

DIM, HEADS = 32, 8
SIZE = DIM // HEADS
QKVO = {"{q,k,v}": "colwise", "o": "rowwise"}
PARTIAL = "replicated_with_grad_allreduce"


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


class Apart(nn.Module):
    """q, k, v and o of their own; subclasses say how they are seen as heads."""

    plan: ClassVar = QKVO
    kv = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.k, self.v = (nn.Linear(DIM, self.kv * SIZE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(attend(*(self.heads_of(y) for y in (self.q(x), self.k(x), self.v(x)))))

    def heads_of(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (-1, SIZE)).transpose(1, 2)


class ViewBySize(Apart):
    def heads_of(self, y: Tensor) -> Tensor:
        return y.view(*y.shape[:2], -1, SIZE).transpose(1, 2)


class SelfHeads(Apart):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS

    def heads_of(self, y: Tensor) -> Tensor:
        return y.view(*y.shape[:2], self.heads, -1).transpose(1, 2)


class SelfH(Apart):
    """With a size of a head beside it, by which a number of heads is found that it doesn't use."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.head_dim = HEADS, SIZE

    def heads_of(self, y: Tensor) -> Tensor:
        return y.view(*y.shape[:2], self.h, -1).transpose(1, 2)


class Computed(Apart):
    def __init__(self) -> None:
        super().__init__()
        self.dim, self.head_dim = DIM, SIZE

    def heads_of(self, y: Tensor) -> Tensor:
        return y.view(*y.shape[:2], self.dim // self.head_dim, -1).transpose(1, 2)


class NumHeads(Apart):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS

    def heads_of(self, y: Tensor) -> Tensor:
        return y.view(*y.shape[:2], self.num_heads, -1).transpose(1, 2)


class GroupedBySize(Apart):
    kv = 2


class GroupedByNames(Apart):
    kv = 2

    def __init__(self) -> None:
        super().__init__()
        self.n_q, self.n_k = HEADS, 2

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.n_q, -1)).transpose(1, 2)
        k, v = (y.unflatten(-1, (self.n_k, -1)).transpose(1, 2) for y in (self.k(x), self.v(x)))
        return self.o(attend(q, k, v))


class OneKeyHead(Apart):
    """Multi-query: the keys and values of all heads are computed whole."""

    plan: ClassVar = {"q": "colwise", "{k,v}": "replicate", "o": "rowwise"}
    kv = 1


class Cross(SelfHeads):
    def forward(self, x: Tensor) -> Tensor:
        y = x.flip(1)
        return self.o(attend(*(self.heads_of(t) for t in (self.q(x), self.k(y), self.v(y)))))


class Normed(Apart):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.RMSNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads_of(y) for y in (self.q(x), self.k(x), self.v(x)))
        return self.o(attend(self.q_norm(q), k, v))


class NormedInPlan(Normed):
    plan: ClassVar = {**QKVO, "q_norm": PARTIAL}


class EinopsLayer(Apart):
    """The number of heads lies in a module of its own, beside one that is found."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.see = HEADS, See(HEADS)

    def heads_of(self, y: Tensor) -> Tensor:
        return self.see(y)


class See(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.h = h

    def forward(self, y: Tensor) -> Tensor:
        return rearrange(y, "b s (h d) -> b h s d", h=self.h)


class Fused(nn.Module):
    """timm's: all queries, then all keys, then all values."""

    plan: ClassVar = {"qkv": "colwise", "proj": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, -1)
        return self.proj(attend(*y.permute(2, 0, 3, 1, 4)))


class FusedPacked(Fused):
    plan: ClassVar = {"qkv": Colwise(packed=3), "proj": "rowwise"}


class ToQkv(nn.Module):
    """lucidrains'."""

    plan: ClassVar = {"to_qkv": Colwise(packed=3), "to_out.0": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.to_qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.to_out = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in parts)
        return self.to_out(attend(q, k, v))


class TwoLayers(nn.Module):
    """Has the modules of a gated MLP."""

    plan: ClassVar = {"{a,b}": "colwise", "c": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.n = HEADS
        self.a, self.b, self.c = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, v = (y.unflatten(-1, (self.n, -1)).transpose(1, 2) for y in (self.a(x), self.b(x)))
        return self.c(attend(q, q, v))


class Mlp(nn.Module):
    plan: ClassVar = {"{a,b}": "colwise", "c": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(DIM, 64), nn.Linear(DIM, 64), nn.Linear(64, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.silu(self.a(x)) * self.b(x))


class MlpCutInTwoWays(Mlp):
    plan: ClassVar = {"a": "packed_colwise", "b": "colwise", "c": "rowwise"}


class MlpNormed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.c(y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * self.b(x))


class MlpFused(nn.Module):
    plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 128), nn.Linear(64, DIM)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class MlpFusedPacked(MlpFused):
    plan: ClassVar = {"up": "packed_colwise", "down": "rowwise"}


# Right on 2 and 4 ranks.
RIGHT = [Apart, ViewBySize, Computed, NumHeads, NormedInPlan, FusedPacked, Mlp, MlpFusedPacked]
# Refused on 2 and 4 ranks, and what is said.
REFUSED = {
    SelfHeads: r"No number of heads fits.*LocalSizes\(names=\('heads',\)\)",
    SelfH: r"LocalSizes\(names=\('h',\)\)",
    GroupedByNames: "No number of heads fits",
    OneKeyHead: "the gradient of",
    Cross: r"LocalSizes\(names=\('heads',\)\)",
    Normed: f"'layers.\\*.q_norm' has no style.*give it '{PARTIAL}'",
    EinopsLayer: r"taken to have 8 heads.*reads no attribute that is a size",
    Fused: r"'layers.\*.qkv': tp.Colwise\(packed=\(32, 32, 32\)\)",
    ToQkv: r"LocalSizes\(names=\('heads',\)\)",
    TwoLayers: r"LocalSizes\(names=\('n',\)\)",
    MlpCutInTwoWays: "output 0 differs",
    MlpNormed: "output 0 differs",
    MlpFused: r"'layers.\*.up': tp.Colwise\(packed=\(64, 64\)\)",
}


class Net(nn.Module):
    """Two of a kind, between an embedding and a head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, DIM)
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(DIM, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def plan_of(kind: type[nn.Module]) -> dict:
    return {f"layers.*.{name}": style for name, style in kind.plan.items()}
