"""Models with fused weights."""

from torch import Tensor, nn
from torch.nn import functional as F

from _support.tp.tp_models import DIM


class FusedMlp(nn.Module):
    """One linear for gate and up."""

    def __init__(self, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.gate_up = nn.Linear(DIM, 2 * hidden, bias=bias)
        self.down = nn.Linear(hidden, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class FusedAttention(nn.Module):
    """One linear for q, k and v, of more query heads than key heads."""

    def __init__(self, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.size, self.groups = size, heads // kv_heads
        self.sections = (heads * size, kv_heads * size, kv_heads * size)
        self.qkv = nn.Linear(DIM, sum(self.sections))
        self.o = nn.Linear(heads * size, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)  # (batch, heads, T, size)
        kv = y.shape[1] // (self.groups + 2)
        q, k, v = y.split((self.groups * kv, kv, kv), 1)
        k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(-2))
