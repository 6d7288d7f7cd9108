"""A Llama, written as one would for a single device: it knows nothing of parallelism.

Grouped-query attention, rotary positions, SwiGLU and RMSNorm; over bytes, so it needs no tokenizer.
The layers count heads by looking at what their projections return, never at the configuration: that
is all a model has to do to run unchanged when tensor parallelism leaves it a part of the heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["SIZES", "Llama", "LlamaConfig"]


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a :class:`Llama`; ``LlamaConfig.named("tiny")`` gives a ready-made one.

    ``tied``: the embedding's table is the output head's weight as well.
    """

    dim: int = 128
    n_layers: int = 2
    n_heads: int = 8
    n_kv_heads: int = 4
    hidden_dim: int = 352
    vocab_size: int = 256
    max_seq_len: int = 128
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @classmethod
    def named(cls, size: str) -> "LlamaConfig":
        """The configuration called ``size``.

        ``nano`` (0.1 M parameters), ``tiny`` (0.4 M) and ``small`` (24 M) are for tests; ``1b``, ``8b``,
        ``70b`` and ``405b`` are the shapes of Llama 3.2 1B and Llama 3.1, with sequences of 8,192 tokens and
        plain rotary positions (Llama 3.1 stretches them for 131,072).
        """
        if size not in SIZES:
            raise ValueError(f"size {size!r} is unknown: choose from {', '.join(SIZES)}")
        return SIZES[size]


_LLAMA_3: dict[str, Any] = {"vocab_size": 128_256, "max_seq_len": 8192, "rope_theta": 500_000.0}

SIZES = {
    "nano": LlamaConfig(dim=64, hidden_dim=176, max_seq_len=32),
    "tiny": LlamaConfig(),
    "small": LlamaConfig(
        dim=512, n_layers=8, n_heads=16, n_kv_heads=8, hidden_dim=1408, max_seq_len=512
    ),
    "1b": LlamaConfig(2048, 16, 32, 8, 8192, **_LLAMA_3, tied=True),
    "8b": LlamaConfig(4096, 32, 32, 8, 14336, **_LLAMA_3),
    "70b": LlamaConfig(8192, 80, 64, 8, 28672, **_LLAMA_3),
    "405b": LlamaConfig(16384, 126, 128, 8, 53248, **_LLAMA_3),
}


class Linear(nn.Linear):
    """A projection without bias, with the standard deviation of its initial weights."""

    def __init__(self, in_features: int, out_features: int, *, init_std: float = 0.02) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.init_std = init_std


class RotaryEmbedding(nn.Module):
    """Rotates the pairs (i, i + head_dim / 2) of every head by angles that grow with position.

    Each layer has a table of its own: it is small, and one that was passed to the layers would be
    rounded on the way by mixed precision, which casts a layer's inputs.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        for name in ("cos", "sin"):
            table = torch.empty(config.max_seq_len, config.head_dim // 2)
            self.register_buffer(name, table, persistent=False)

    def fill_tables(self) -> None:
        """Computes the tables, in float64 before they are rounded to the dtype they have."""
        seq_len, half = self.cos.shape
        exponent = torch.arange(half, dtype=torch.float64, device=self.cos.device) / half
        position = torch.arange(seq_len, dtype=torch.float64, device=self.cos.device)
        angle = torch.outer(position, self.theta**-exponent)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """(batch, heads, seq, head_dim) -> the same; computed in float32 at least."""
        if positions is None:
            seq_len = x.shape[-2]
            cos, sin = self.cos[:seq_len], self.sin[:seq_len]
        else:
            cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal attention in which ``n_heads / n_kv_heads`` query heads share a key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = Linear(config.dim, config.dim)
        self.wk = Linear(config.dim, kv_dim)
        self.wv = Linear(config.dim, kv_dim)
        self.wo = Linear(config.dim, config.dim, init_std=_residual_std(config))
        self.rope = RotaryEmbedding(config)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        q, k, v = (
            rearrange(project(x), "b s (h d) -> b h s d", d=self.head_dim)
            for project in (self.wq, self.wk, self.wv)
        )
        q, k = self.rope(q, positions), self.rope(k, positions)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(rearrange(mixed, "b h s d -> b s (h d)"))


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = Linear(config.dim, config.hidden_dim)
        self.w2 = Linear(config.hidden_dim, config.dim, init_std=_residual_std(config))
        self.w3 = Linear(config.dim, config.hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on the normalised residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        places = () if positions is None else (positions,)
        x = x + self.attention(self.attention_norm(x), *places)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """A decoder-only transformer: token ids in, the next token's logits out.

    Under ``torch.device("meta")`` it is built without memory and without values; whoever gives it
    memory then calls ``_init_weights`` for each of its modules.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Linear(config.dim, config.vocab_size)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight
        if not self.output.weight.is_meta:
            self.apply(self._init_weights)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """(batch, seq) token ids, seq at most ``max_seq_len`` -> (batch, seq, vocab) logits.

        positions: (batch or 1, seq), where a token is in its sequence, of which these may be a part; by
        default 0, 1 and so on.
        """
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x) if positions is None else layer(x, positions)
        return self.output(self.norm(x))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Gives ``module``'s own parameters and buffers, not its children's, their first values."""
        match module:
            case Linear():
                nn.init.normal_(module.weight, std=module.init_std)
            case nn.Embedding():
                nn.init.normal_(module.weight, std=0.02)
            case nn.RMSNorm():
                nn.init.ones_(module.weight)
            case RotaryEmbedding():
                module.fill_tables()


def _residual_std(config: LlamaConfig) -> float:
    """For what adds to the residual stream, so that depth does not widen it (GPT-2)."""
    return 0.02 / (2 * config.n_layers) ** 0.5
