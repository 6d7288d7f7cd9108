"""Models without a plan, as people write them: a ViT, and blocks that can't be split."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FusedAttention(nn.Module):
    """Self-attention with one linear layer for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = FusedAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.0), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """Patches of an image (B, 3, size, size) -> transformer -> (B, classes)."""

    def __init__(
        self, width: int = 16, heads: int = 4, size: int = 8, patch: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Mlp(nn.Module):
    """up, then ``between`` on the hidden features, then down."""

    def __init__(self, between: str = "") -> None:
        super().__init__()
        self.between = between
        self.up, self.down, self.other = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.norm, self.batch_norm = nn.LayerNorm(32), nn.BatchNorm1d(32)
        self.scale = nn.Parameter(torch.ones(32))
        self.register_buffer("constant", torch.randn(32))
        self.width = 32

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y = getattr(self, f"do_{self.between}")(h) if self.between else h
        return y if self.between == "twice" else self.down(y)

    def do_norm(self, h: Tensor) -> Tensor:
        return self.norm(h)

    def do_norm_without_weights(self, h: Tensor) -> Tensor:
        return F.layer_norm(h, h.shape[-1:])

    def do_batch_norm(self, h: Tensor) -> Tensor:
        return self.batch_norm(h.flatten(0, -2)).view(h.shape)

    def do_constant(self, h: Tensor) -> Tensor:
        return h * self.constant

    def do_parameter(self, h: Tensor) -> Tensor:
        return h * self.scale

    def do_softmax(self, h: Tensor) -> Tensor:
        return h.softmax(-1)

    def do_mean(self, h: Tensor) -> Tensor:
        return h - h.mean(-1, keepdim=True)

    def do_roll(self, h: Tensor) -> Tensor:
        return h.roll(1, -1)

    def do_shape(self, h: Tensor) -> Tensor:
        return h.view(-1, 32).relu().view(*h.shape[:-1], 32)

    def do_weight(self, h: Tensor) -> Tensor:
        return h * self.up.weight.square().mean()

    def do_random(self, h: Tensor) -> Tensor:
        return h * torch.rand(h.shape)

    def do_twice(self, h: Tensor) -> Tensor:
        return self.down(h) + self.other(h)

    # These can be split.

    def do_activation(self, h: Tensor) -> Tensor:
        return F.dropout(F.silu(h), 0.3, self.training)

    def do_float32(self, h: Tensor) -> Tensor:
        return h.float().tanh().to(h.dtype)

    def do_gate(self, h: Tensor) -> Tensor:
        gate, up = h.split(16, -1)
        return torch.cat([gate.sigmoid() * up, up], -1)
