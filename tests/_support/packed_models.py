"""Models with packed weights: gate and up in one, q, k and v in one; and heads that tp doesn't divide."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from parallel3d._layout.packing import Packing, cut_sections
from parallel3d.tp import Colwise, Rowwise
from parallel3d.tp.collectives import SequenceLength, TpAxis
from parallel3d.tp.forwards import TpState, bind_forward
from parallel3d.tp.styles.base import ParamRule, Style

DIM, HEAD = 8, 2
VOCAB = 16


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up one linear."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.gate_up = nn.Linear(DIM, 2 * hidden)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Attention(nn.Module):
    """Causal, with ``group`` query heads to a key head; q, k and v are one linear."""

    def __init__(self, heads: int, group: int) -> None:
        super().__init__()
        self.heads, self.group = heads, group
        self.qkv = nn.Linear(DIM, (heads + 2 * (heads // group)) * HEAD)
        self.out = nn.Linear(heads * HEAD, DIM, bias=False)

    @property
    def sections(self) -> tuple[int, int, int]:
        kv = self.heads // self.group * HEAD
        return self.heads * HEAD, kv, kv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # By chunks, and views that infer the heads: simulated ranks have different numbers of them.
        parts = self.qkv(x).chunk(self.group + 2, -1)
        q = torch.cat(parts[: self.group], -1)
        q, k, v = (each.view(*x.shape[:-1], -1, HEAD).transpose(1, 2) for each in (q, *parts[-2:]))
        if self.group > 1:
            k, v = (each.repeat_interleave(self.group, dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class Block(nn.Module):
    """Both, with norms and residuals."""

    def __init__(self, heads: int, group: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention(heads, group)
        self.mlp = Mlp(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PackedLm(nn.Module):
    """Embedding, a block, head. ``heads`` 8 in groups of 2, or 6."""

    def __init__(self, heads: int = 8, group: int = 2, hidden: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Block(heads, group, hidden)])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def even_lm() -> PackedLm:
    """4 groups of heads and 12 hidden features: tp 2 and 4 divide both."""
    return PackedLm()


def uneven_lm() -> PackedLm:
    """6 heads and 6 hidden features: of 4 tp ranks two have 2 and two have 1."""
    return PackedLm(heads=6, group=1, hidden=6)


@dataclass(frozen=True)
class PackedColumns(Style):
    """An ``nn.Linear`` whose output features are ``sections``, each cut in groups of ``multiple_of``."""

    sections: tuple[int, ...] = ()
    multiple_of: tuple[int, ...] | int = 1

    def packing(self, dim: int, tp: int) -> Packing:
        return cut_sections(dim, self.sections, tp, self.multiple_of)

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        rule = ParamRule(Shard(0), packing=self.packing(0, tp))
        return {name: rule for name, _ in module.named_parameters()}

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        bind_forward(module, TpState(Colwise(), axis, sequence))


@dataclass(frozen=True)
class PackedRows(PackedColumns):
    """The same of its input features."""

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        rules = {"weight": ParamRule(Shard(1), packing=self.packing(1, tp))}
        if module.bias is not None:
            rules["bias"] = ParamRule(Replicate())
        return rules

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        bind_forward(module, TpState(Rowwise(), axis, sequence))


def packed_plan(model: PackedLm) -> dict[str, Style | str]:
    block = model.layers[0]
    attention, hidden = block.attention, block.mlp.hidden
    group = attention.group * HEAD
    q = attention.heads * HEAD
    return {
        "embed": "embedding",
        "layers.*.attention.qkv": PackedColumns(attention.sections, (group, HEAD, HEAD)),
        "layers.*.attention.out": PackedRows((q,), group),
        "layers.*.mlp.gate_up": PackedColumns((hidden, hidden)),
        "layers.*.mlp.down": PackedRows((hidden,)),
        "head": "colwise_gather_output",
    }


def packed_tokens(index: int) -> torch.Tensor:
    """(2, 5) token ids."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, VOCAB, (2, 5), generator=generator)
