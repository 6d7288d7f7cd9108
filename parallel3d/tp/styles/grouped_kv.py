"""GroupedKv: the key or value projection where tp ranks have key and value heads in common.

Plans don't name it: ``tp/heads/align.py`` puts it in the place of Colwise.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.nn import functional as F

from parallel3d._compat_simulated import combine_ranks, ranks_of, value_on_rank
from parallel3d._packing import pick_by_rank
from parallel3d.tp.base_forward import bind_base_forward
from parallel3d.tp.checks import ParamRule, fit_rules
from parallel3d.tp.collectives import TpAxis
from parallel3d.tp.forwards import SequenceLength, TpState, take_input
from parallel3d.tp.styles.kinds import linear_kind
from parallel3d.tp.styles.linear import Colwise

__all__ = ["GroupedKv"]


@dataclass(frozen=True)
class GroupedKv(Colwise):
    """The key or value projection where ranks have key and value heads in common.

    Weight and bias are whole on every rank, at rest too; each rank computes the heads its query heads
    attend to, so its gradient is a part.

    Attributes:
        kv_heads: how many the model has.
        heads: [rank] -> the heads it puts out, in order; one comes as often as it is named.
    """

    kv_heads: int = 1
    heads: tuple[tuple[int, ...], ...] = ()

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        linear_kind(self, module)
        rule = ParamRule(Replicate(), "partial")
        return fit_rules(module, weight=rule, bias=rule)

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        # The heads a rank needs are neighbours: its rows of the weight are a view.
        spans = [(min(heads), max(heads) - min(heads) + 1) for heads in self.heads]
        kind = linear_kind(self, module)
        size = kind.out_features // self.kv_heads
        state = _GroupedState(
            self,
            axis,
            sequence,
            dim=kind.out_dim,
            start=pick_by_rank([first * size for first, _ in spans], axis.rank),
            heads=pick_by_rank([number for _, number in spans], axis.rank),
            size=size,
            repeats=any(len(h) != number for h, (_, number) in zip(self.heads, spans, strict=True)),
        )
        bind_base_forward(module, kind.base, grouped_kv_linear, state)


@dataclass
class _GroupedState(TpState):
    """What the forward of a :class:`GroupedKv` needs beside the usual.

    Attributes:
        dim: of the weight that holds the heads.
        start: where this rank's begin there.
        heads: how many it computes, each of ``size`` rows.
        repeats: whether a head comes out more than once on some rank.
        index: which of the computed heads come out, in order; made on the device of the first forward.
    """

    dim: int = 0
    start: int = 0
    heads: int = 0
    size: int = 0
    repeats: bool = False
    index: Tensor | None = field(default=None, repr=False)


def grouped_kv_linear(self: Any, input: Tensor) -> Tensor:
    """(..., in) -> (..., heads this rank puts out x head size)."""
    tp: _GroupedState = self._parallel3d_tp
    style: Any = tp.style
    x = take_input(input, style.input, style.sequence_dim, tp, read_only=True)
    rows = tp.heads * tp.size
    weight = self.weight.narrow(tp.dim, tp.start, rows)
    bias = None if self.bias is None else self.bias.narrow(0, tp.start, rows)
    y = F.linear(x, weight.t() if tp.dim else weight, bias)
    if not tp.repeats:
        return y
    if tp.index is None or tp.index.device != y.device:
        tp.index = _index(style.heads, tp.axis.rank, y.device)
    return y.unflatten(-1, (tp.heads, tp.size)).index_select(-2, tp.index).flatten(-2)


def _index(heads: tuple[tuple[int, ...], ...], rank: int, device: torch.device) -> Tensor:
    if isinstance(rank, torch.SymInt):
        return combine_ranks(
            {r: _index(heads, value_on_rank(rank, r), device) for r in ranks_of(rank)}
        )
    mine = heads[rank]
    return torch.tensor([head - min(mine) for head in mine], device=device)
