"""Modules that are nearly linears and embeddings."""

import math

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """Written as GPT-2 needs it: the weight lies (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(x.size()[:-1] + (self.nf,))


# Known by its name, without importing transformers.
Conv1D.__module__ = "transformers.pytorch_utils"


class ScaledEmbedding(nn.Embedding):
    """As Gemma scales what it looks up."""

    def __init__(self, vocab: int, width: int, padding_idx: int | None = 0) -> None:
        super().__init__(vocab, width, padding_idx)
        self.register_buffer("scale", torch.tensor(math.sqrt(width)), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.scale.to(self.weight.dtype)


class NormedEmbedding(ScaledEmbedding):
    """Needs whole vectors; its forward calls that of a subclass."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__(vocab, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.norm(super().forward(input_ids))


class NormedLinear(nn.Linear):
    """Needs all features before the product and after it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.softmax(-1)).softmax(-1)


class BranchingEmbedding(nn.Embedding):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) if self.training else super().forward(input_ids) * 2


class ReadingEmbedding(nn.Embedding):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) / self.weight.norm()


class OffsetEmbedding(nn.Embedding):
    offset = 2

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids + self.offset)


class ScaledLinear(nn.Linear):
    factor = 0.5

    def forward(self, input: Tensor, extra: float = 1.0) -> Tensor:
        return super().forward(input * 2) * self.factor
