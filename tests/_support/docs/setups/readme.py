"""What README's first example needs: a Llama whose modules have the names of its plan, and tokens."""

import torch
from llama import Llama, LlamaConfig
from torch.nn import functional as F


class MyModel(Llama):
    def __init__(self) -> None:
        super().__init__(
            LlamaConfig(dim=32, n_heads=4, n_kv_heads=4, hidden_dim=64, max_seq_len=16)
        )
        self.embed, self.head = self.tok_embeddings, self.output
        del self.tok_embeddings, self.output

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


data = torch.arange(2 * 2 * 2 * 9).view(2, 2, 2, 9) % 256  # steps, micro-batches, rows, tokens
