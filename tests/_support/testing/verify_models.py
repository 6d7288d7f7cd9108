"""Small models with all that verify must follow, and tensor parallelism written by hand for one of them."""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import DeviceMesh
from torch.nn import functional as F

from parallel3d.tp import Colwise, Rowwise, SequenceParallel, VocabParallel

DIM, HEADS, VOCAB = 16, 4, 19


class Rope(nn.Module):
    """Rotary positions of (batch, seq, heads, 4)."""

    def __init__(self, length: int = 8) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(length), torch.tensor([1.0, 0.1]))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        rows = slice(start, start + x.shape[1])
        cos, sin = self.cos[rows, None], self.sin[rows, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    """Counts its heads by ``-1``."""

    def __init__(self, kv_heads: int = HEADS, bias: bool = False) -> None:
        super().__init__()
        self.wq = nn.Linear(DIM, DIM, bias=bias)
        self.wk = nn.Linear(DIM, DIM // HEADS * kv_heads, bias=bias)
        self.wv = nn.Linear(DIM, DIM // HEADS * kv_heads, bias=bias)
        self.wo = nn.Linear(DIM, DIM, bias=bias)
        self.rope = Rope()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, DIM // HEADS)) for w in (self.wq, self.wk, self.wv))
        return self.attend(self.rope(q), self.rope(k), v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, hidden: int = 24, bias: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, hidden, bias=bias)
        self.drop = nn.Dropout(drop)
        self.down = nn.Linear(hidden, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, kv_heads: int, bias: bool, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attn = Attention(kv_heads, bias)
        self.drop = nn.Dropout(drop)
        self.mlp = Mlp(bias=bias, drop=drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Loss(nn.Module):
    """Next-token cross entropy."""

    def forward(self, logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Decoder(nn.Module):
    """Puts out its loss, as Hugging Face's models do."""

    def __init__(
        self,
        *,
        kv_heads: int = HEADS,
        bias: bool = False,
        drop: float = 0.0,
        tied: bool = False,
        vocab: int = VOCAB,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, DIM)
        self.drop = nn.Dropout(drop)
        self.layers = nn.ModuleList(Block(kv_heads, bias, drop) for _ in range(layers))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, vocab, bias=False)
        self.criterion = Loss()
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        return self.criterion(self.head(self.norm(x)), ids)


PLAN = {
    "embed": "embedding",
    "layers.*.attn.w{q,k,v}": "colwise",
    "layers.*.attn.wo": "rowwise",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
    "head": "colwise_gather_output",
}
SEQUENCE = {
    "embed": VocabParallel(output="sequence"),
    "drop": SequenceParallel(),
    "layers.*.norm{1,2}": SequenceParallel(),
    "layers.*.attn.w{q,k,v}": Colwise(input="sequence"),
    "layers.*.attn.wo": Rowwise(output="sequence"),
    "layers.*.drop": SequenceParallel(),
    "layers.*.mlp.up": Colwise(input="sequence"),
    "layers.*.mlp.down": Rowwise(output="sequence"),
    "norm": SequenceParallel(),
    "head": Colwise(input="sequence", output="replicate"),
}


def ids(index: int, length: int = 6, vocab: int = VOCAB) -> Tensor:
    """Sample ``index``: (2, length) token ids."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, vocab, (2, length), generator=generator)


# ---- tensor parallelism by hand, after Shoeybi et al., "Megatron-LM", 2019 ----


class Copy(torch.autograd.Function):
    """The same; its gradients summed."""

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    """The sum; its gradient as it is."""

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def on_each(whole: Tensor) -> Tensor:
    """A copy that every simulated rank has its own of."""
    return torch.empty(whole.shape, dtype=whole.dtype).copy_(whole.detach())


def part(whole: Tensor, dim: int, tp: DeviceMesh, rank=None) -> nn.Parameter:
    """A tp rank's part of a parameter, which the axis divides."""
    size = whole.shape[dim] // tp.size()
    rank = tp.get_local_rank() if rank is None else rank
    cut = on_each(whole).narrow(dim, rank * size, size).clone()
    return nn.Parameter(cut, requires_grad=whole.requires_grad)


class ColumnLinear(nn.Linear):
    """Output features split."""

    tp: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Copy.apply(x, self.tp.get_group()), self.weight, self.bias)


class RowLinear(nn.Linear):
    """Input features split, the bias added once."""

    tp: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        y = Sum.apply(F.linear(x, self.weight), self.tp.get_group())
        return y if self.bias is None else y + self.bias


class RowEmbedding(nn.Embedding):
    """Rows split; the vocabulary must divide."""

    tp: DeviceMesh

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = on_each(ids) - self.tp.get_local_rank() * rows
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return Sum.apply(self.mask(found, elsewhere), self.tp.get_group())

    def mask(self, found: Tensor, elsewhere: Tensor) -> Tensor:
        return found.masked_fill(elsewhere.unsqueeze(-1), 0.0)


def by_hand(model: nn.Module, mesh: DeviceMesh, whole: str = "-") -> nn.Module:
    """Megatron's layers, and an average of the gradients over the data ranks; in place.

    Modules whose names begin with ``whole`` are not split.
    """
    tp, average = mesh["tp"], average_over(mesh)
    for name, module in list(model.named_modules()):
        own = "" if name.startswith(whole) else name.rpartition(".")[2]
        if own in ("wq", "wk", "wv", "up"):
            module.__class__, cut = ColumnLinear, {"weight": 0, "bias": 0}
        elif own in ("wo", "down"):
            module.__class__, cut = RowLinear, {"weight": 1}
        elif own == "embed":
            module.__class__, cut = RowEmbedding, {"weight": 0}
        else:
            cut = {}
        module.tp = tp
        for key, param in list(module._parameters.items()):
            if param is not None:
                new = part(param, cut[key], tp) if key in cut else nn.Parameter(on_each(param))
                module._parameters[key] = new
                new.register_post_accumulate_grad_hook(average)
    return model


def average_over(mesh: DeviceMesh, *axes: str):
    """A hook that averages a gradient over the data ranks."""

    groups = [mesh[axis].get_group() for axis in axes or ("replicate", "shard")]

    def average(param: Tensor) -> None:
        for group in groups:
            dist.all_reduce(param.grad, group=group)
            param.grad.div_(group.size())

    return average
