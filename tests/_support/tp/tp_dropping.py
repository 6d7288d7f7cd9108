"""Models that drop out, and what they dropped, noted."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.tp import Colwise, Rowwise, SequenceParallel, VocabParallel

DIM, HEADS = 32, 4


class Note(nn.Dropout):
    """Dropout that keeps its last masks."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.masks.append((y.detach() != 0) | (x.detach() == 0))
        return y


class Attention(nn.Module):
    """As Hugging Face writes it: heads by ``-1``, dropout of probabilities, functional."""

    def __init__(self, attention_dropout: float = 0.5, sdpa: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, DIM) for _ in range(3))
        self.o_proj = nn.Linear(DIM, DIM)
        self.attention_dropout = attention_dropout
        self.sdpa = sdpa
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).view(len(x), -1, p.weight.shape[0] // 8, 8).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        drop = self.attention_dropout if self.training else 0.0
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop)
        else:
            probs = (q @ k.transpose(-1, -2)).softmax(-1)
            dropped = F.dropout(probs, drop, self.training)
            self.masks.append(dropped.detach() != 0)
            y = dropped @ v
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = Attention(p)
        self.residual = Note(p)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.inside = Note(p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.residual(self.attn(self.norm1(x)))
        return x + self.residual(self.down(self.inside(F.gelu(self.up(self.norm2(x))))))


class Dropping(nn.Module):
    """Dropout everywhere: embedding, attention, hidden features, residuals, before the head."""

    def __init__(self, p: float = 0.5, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, DIM)
        self.embedded = Note(p)
        self.layers = nn.ModuleList(Layer(p) for _ in range(layers))
        self.norm = nn.LayerNorm(DIM)
        self.last = Note(p)
        self.head = nn.Linear(DIM, 20)
        self.recompute = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedded(self.embed(ids))
        for layer in self.layers:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.head(self.last(self.norm(x)))

    def noted(self) -> dict[str, list[Tensor]]:
        """What was dropped by module, and forgets it."""
        found = {}
        for name, module in self.named_modules():
            if hasattr(module, "masks"):
                found[name] = list(module.masks)
                module.masks.clear()
        return found


TENSOR = {
    "embed": VocabParallel(),
    "layers.*.attn.{q,k,v}_proj": Colwise(multiple_of=8),
    "layers.*.attn.o_proj": Rowwise(multiple_of=8),
    "layers.*.up": Colwise(),
    "layers.*.down": Rowwise(),
    "head": Colwise(output="replicate"),
}
SEQUENCE = {
    "embed": VocabParallel(output="sequence"),
    "embedded": SequenceParallel(),
    "layers.*.norm{1,2}": SequenceParallel(),
    "layers.*.residual": SequenceParallel(),
    "layers.*.attn.{q,k,v}_proj": Colwise(input="sequence", multiple_of=8),
    "layers.*.attn.o_proj": Rowwise(output="sequence", multiple_of=8),
    "layers.*.up": Colwise(input="sequence"),
    "layers.*.down": Rowwise(output="sequence"),
    "norm": SequenceParallel(),
    "last": SequenceParallel(),
    "head": Colwise(input="sequence", output="replicate"),
}
