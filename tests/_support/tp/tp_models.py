"""Small models of the tensor-parallel tests; DIM and the usual hidden sizes divide by little."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.tp import Colwise, Experts, PrepareInput, Rowwise, VocabParallel, parse_style

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


# ---- fused weights ----


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


# ---- modules that are nearly linears and embeddings ----


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


# ---- inputs and outputs that are prepared ----


class Sinks(nn.Module):
    """Attention-like: a parameter for each head, and one for the features of a head."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.q, self.o = nn.Linear(DIM, heads * size), nn.Linear(heads * size, DIM)
        self.sinks = nn.Parameter(torch.randn(heads))
        self.scale = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x).unflatten(-1, (-1, self.size))
        y = y * self.sinks[:, None].sigmoid() * self.scale
        return self.o(y.flatten(-2))


class Latent(nn.Module):
    """Compressed keys and values; the last features of the compression go to all heads as they are."""

    qk_rope_head_dim = 2

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.size, self.rank = size, 5
        self.q = nn.Linear(DIM, heads * (size + 2))
        self.kv_a = nn.Linear(DIM, self.rank + 2)
        self.norm = nn.LayerNorm(self.rank)
        self.kv_b = nn.Linear(self.rank, heads * 2 * size)
        self.o = nn.Linear(heads * size, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.size + 2)).transpose(1, 2)
        latent, rope = self.kv_a(x).split((self.rank, 2), -1)
        kv = self.kv_b(self.norm(latent)).unflatten(-1, (-1, 2 * self.size)).transpose(1, 2)
        k, v = kv.chunk(2, -1)
        k = torch.cat([k, rope[:, None].expand(-1, k.shape[1], -1, -1)], -1)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(-2))


class HeadNorm(nn.Module):
    """A norm on each head between a column- and a row-parallel linear."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.q = nn.Linear(DIM, heads * size)
        self.norm = nn.RMSNorm(size)
        self.o = nn.Linear(heads * size, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x).unflatten(-1, (-1, self.size))
        return self.o(self.norm(y).flatten(-2))


class Sums(nn.Module):
    """Puts out parts when its children's inputs are split: no style of its own sums them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Parameter(torch.randn(hidden, DIM))

    def forward(self, x: Tensor) -> tuple[str, Tensor]:
        return "first", F.gelu(self.up(x)) @ self.down


class Second(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[1]


class Cross(nn.Module):
    """Reads two sequences and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(DIM, 8), nn.Linear(DIM, 8)
        self.o = nn.Linear(8, DIM)

    def forward(
        self, x: Tensor, scale: float, memory: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        y = self.q(x) * self.k(memory) * scale
        return self.o(y) if bias is None else self.o(y) + bias


class Gated(Cross):
    """With a parameter for each hidden feature, and one for each of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.scale = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(DIM))

    def forward(
        self, x: Tensor, scale: float, memory: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return self.o(self.q(x * self.scale) * self.k(memory) * self.gate.sigmoid())


class Encoded(nn.Module):
    """A whole memory read by a module that gets a part of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Identity()
        self.cross = Cross()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.cross(self.enter(x), 1.0, memory)


class Gate(nn.Module):
    """Computes something from its input alike on every rank, and something split."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 1)
        self.mlp = GatedMlp(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.router(x).sigmoid() + x.mean(1, keepdim=True)


class OfTwo(nn.Module):
    """What is prepared isn't its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(8)

    def forward(self, name: str | None, x: Tensor, scale: float) -> Tensor:
        assert name == "first"
        return self.mlp(x) * scale


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mlp = nn.Parameter(torch.randn(DIM)), Mlp(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return x + self.mlp(x)


# ---- mixtures of experts ----


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
