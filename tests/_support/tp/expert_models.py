"""Mixtures of experts."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _support.tp.tp_models import DIM
from parallel3d.tp import Experts, parse_style

COUNT = 4


class ExpertWeights(nn.Module):
    """As Hugging Face holds experts. ``transposed``: (experts, in, out)."""

    def __init__(self, hidden: int, *, transposed: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.is_transposed = transposed
        up, down = (COUNT, 2 * hidden, DIM), (COUNT, DIM, hidden)
        if transposed:
            up, down = (COUNT, DIM, 2 * hidden), (COUNT, hidden, DIM)
        self.gate_up_proj = nn.Parameter(torch.randn(up))
        self.down_proj = nn.Parameter(torch.randn(down))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(COUNT, 2 * hidden)) if bias else None
        self.down_proj_bias = nn.Parameter(torch.randn(COUNT, DIM)) if bias else None
        self.identity = nn.Identity()

    def gate_and_up(self, y: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = y.chunk(2, -1)
        return gate, up

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, *, scale: float = 1.0) -> Tensor:
        """(N, DIM), (N, k) experts, COUNT being the identity, (N, k) -> (N, DIM)."""
        result = torch.zeros_like(x)
        for expert in range(COUNT + 1):
            mine = torch.where(chosen == expert, weights, 0).sum(-1, keepdim=True) * scale
            if expert == COUNT:
                result = result + self.identity(x) * mine
                continue
            up, down = self.gate_up_proj[expert], self.down_proj[expert]
            if not self.is_transposed:
                up, down = up.t(), down.t()
            y = x @ up
            if self.gate_up_proj_bias is not None:
                y = y + self.gate_up_proj_bias[expert]
            gate, value = self.gate_and_up(y)
            y = (F.silu(gate) * value) @ down
            if self.down_proj_bias is not None:
                y = y + self.down_proj_bias[expert]
            result = result + y * mine
        return result


class Moe(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, COUNT + 1)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        return x + self.experts(x, chosen, weights=weights, scale=2.0)


class TakingTurns(ExpertWeights):
    is_concatenated = False

    def gate_and_up(self, y: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = y[..., ::2], y[..., 1::2]
        return gate, up


class Counting(ExpertWeights):
    """Reads in its forward how wide an expert is; the model is as wide."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.intermediate_size, self.hidden_size, self.top_k = hidden, DIM, hidden
        self.gate_up_size = 2 * hidden
        self.num_routed = hidden  # a number of something else, by its name

    def gate_and_up(self, y: Tensor) -> tuple[Tensor, Tensor]:
        assert self.num_routed
        y = y.reshape(-1, self.gate_up_size)
        gate, up = y.split(self.intermediate_size, -1)
        return gate, up


def plan_for(up: str, down: str) -> dict:
    rules = (("gate_up_proj", parse_style(up)), ("down_proj", parse_style(down)))
    return {"experts": Experts(rules), "experts.identity": "moe_identity_expert"}
