"""A small mixture with routed and shared experts, in three kinds of experts modules."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["HIDDEN", "VOCAB", "Batched", "Looped", "Mixture", "Transposed", "batch", "loss"]

HIDDEN, VOCAB = 8, 17


class Batched(nn.Module):
    """Each pair of a token and an expert by itself, as a batched product."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, 12, HIDDEN) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, 12) * 0.3)
        self.bias = nn.Parameter(torch.randn(experts, HIDDEN) * 0.1)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        top_k, chosen = index.shape[1], index.flatten()
        x = hidden.repeat_interleave(top_k, 0)
        y = torch.tanh(torch.einsum("th,tih->ti", x, self.up[chosen]))
        y = torch.einsum("ti,thi->th", y, self.down[chosen]) + self.bias[chosen]
        return (y * weights.flatten().unsqueeze(1)).unflatten(0, (-1, top_k)).sum(1)


class Looped(Batched):
    """One expert after the other, those that got a token: code that branches on the routing."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            token, place = torch.where(index == expert)
            y = torch.tanh(hidden[token] @ self.up[expert].T) @ self.down[expert].T
            y = (y + self.bias[expert]) * weights[token, place].unsqueeze(1)
            out = out.index_add(0, token, y)
        return out


class Transposed(nn.Module):
    """Other names, another layout of the weights, no bias, and no gate."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, HIDDEN, 10) * 0.3)
        self.w2 = nn.Parameter(torch.randn(experts, 10, HIDDEN) * 0.3)

    def forward(self, tokens: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        picked = [
            torch.einsum(
                "ti,tio->to",
                F.silu(torch.einsum("th,thi->ti", tokens, self.w1[ids[:, k]])),
                self.w2[ids[:, k]],
            )
            * scores[:, k].unsqueeze(1)
            for k in range(ids.shape[1])
        ]
        return torch.stack(picked).sum(0)


class Block(nn.Module):
    def __init__(self, kind: type[nn.Module], experts: int, top_k: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, experts)
        self.register_buffer("expert_bias", torch.zeros(experts))
        self.experts = kind(experts)
        self.shared = nn.Linear(HIDDEN, HIDDEN)
        self.top_k = top_k

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        index = (scores + self.expert_bias).topk(self.top_k, -1).indices
        weights = scores.gather(1, index)
        weights = weights / weights.sum(-1, keepdim=True)
        routed = self.experts(flat, index, weights)
        return x + (routed + torch.tanh(self.shared(flat))).view_as(x)


class Mixture(nn.Module):
    def __init__(
        self,
        kind: type[nn.Module] = Batched,
        experts: int = 4,
        *,
        top_k: int = 2,
        layers: int = 2,
        hot: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block(kind, experts, top_k) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCAB)
        if hot:  # every token goes to the last experts; the others stay empty
            with torch.no_grad():
                for layer in self.layers:
                    layer.router.bias[-top_k:] += 50.0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class MixedHead(Mixture):
    """Its head is a mixture too, whose experts lie in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4)
        self.experts = Batched(4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        flat = x.flatten(0, 1)
        weights, index = self.router(flat).softmax(-1).topk(2, -1)
        return self.head(x + self.experts(flat, index, weights).view_as(x))


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batch(sample: int, rows: int = 2, length: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(sample)
    return torch.randint(0, VOCAB, (rows, length), generator=generator)
