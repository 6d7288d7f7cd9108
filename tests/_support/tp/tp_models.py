"""Small models of the tensor-parallel tests; DIM and the usual hidden sizes divide by little."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.tp import Colwise, PrepareInput, Rowwise, VocabParallel

DIM = 6


class Mlp(nn.Module):
    def __init__(self, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, hidden, bias=bias)
        self.down = nn.Linear(hidden, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GatedMlp(nn.Module):
    """Reads its input twice and takes more than one argument."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, hidden, bias=False)
        self.up = nn.Linear(DIM, hidden, bias=False)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        y = self.down(F.silu(self.gate(x)) * self.up(x)) * scale
        return y if shift is None else y + shift


class Norm(nn.Module):
    """Not one of torch's: judged by its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (DIM,)) * (1 + self.weight)


class Block(nn.Module):
    """x + mlp(norm(x)), as a sequence-parallel block has it."""

    def __init__(self, hidden: int, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.drop = nn.Dropout(0.0)
        self.mlp = GatedMlp(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class Lm(nn.Module):
    def __init__(self, vocab: int, hidden: int, *, tied: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, DIM)
        self.layers = nn.ModuleList(Block(hidden, nn.RMSNorm(DIM)) for _ in range(blocks))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


TENSOR_PARALLEL = {
    "embed": "embedding_rowwise",
    "layers.*.mlp": PrepareInput(),
    "layers.*.mlp.gate": Colwise(input="gathered"),
    "layers.*.mlp.up": Colwise(input="gathered"),
    "layers.*.mlp.down": "rowwise",
    "head": "colwise_rep",
}

SEQUENCE_PARALLEL = {
    "embed": VocabParallel(output="sequence"),
    "layers.*.norm": "sequence_parallel",
    "layers.*.drop": "sequence_parallel",
    "layers.*.mlp": PrepareInput("sequence"),
    "layers.*.mlp.gate": Colwise(input="gathered"),
    "layers.*.mlp.up": Colwise(input="gathered"),
    "layers.*.mlp.down": Rowwise(output="sequence"),
    "norm": "sequence_parallel",
    "head": Colwise(input="sequence", output="replicate"),
}
