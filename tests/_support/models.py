"""Small plain models that many tests use. Sizes are odd on purpose: few axes divide them."""

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from parallel3d.tp import Colwise, Rowwise, SequenceParallel, VocabParallel

VOCAB = 19


class Block(nn.Module):
    """Norm, two linears with biases, residual."""

    def __init__(self, dim: int = 12, hidden: int = 20) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Lm(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(
        self,
        dim: int = 12,
        hidden: int = 20,
        layers: int = 2,
        vocab: int = VOCAB,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


LM_PLAN = {
    "embed": "embedding",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}
TORCHS_PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
"""The same for torch's ``parallelize_module``."""
SEQUENCE_PLAN = {
    "embed": VocabParallel(output="sequence"),
    "layers.*.norm": SequenceParallel(),
    "layers.*.up": Colwise(input="sequence"),
    "layers.*.down": Rowwise(output="sequence"),
    "norm": SequenceParallel(),
    "head": Colwise(input="sequence", output="replicate"),
}


def tokens(index: int, batch: int = 2, length: int = 5, vocab: int = VOCAB) -> torch.Tensor:
    """Sample ``index``: (batch, length) token ids."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, vocab, (batch, length), generator=generator)


def lm_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy."""
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
