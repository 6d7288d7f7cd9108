"""GroupedKv: the key or value projection where tp ranks have key and value heads in common.

Plans don't name it: ``tp/heads.py`` puts it in the place of Colwise.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.nn import functional as F

from parallel3d._compat import combine_ranks, ranks_of, value_on_rank
from parallel3d._packing import pick_by_rank
from parallel3d.tp.checks import ParamRule, fit_rules, need_plain
from parallel3d.tp.collectives import TpAxis
from parallel3d.tp.forwards import SequenceLength, TpState, bind_forward, take_input
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
        need_plain(self, module, nn.Linear)
        rule = ParamRule(Replicate(), "partial")
        return fit_rules(module, weight=rule, bias=rule)

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        bind_forward(module, grouped_kv_linear, _GroupedState(self, axis, sequence))


@dataclass
class _GroupedState(TpState):
    """Attributes:
    index: which of the computed heads come out, in order; made in the first forward on its device.
    """

    index: Tensor | None = field(default=None, repr=False)


def grouped_kv_linear(self: Any, input: Tensor) -> Tensor:
    """(..., in) -> (..., heads this rank puts out x head size)."""
    tp: _GroupedState = self._parallel3d_tp
    style: Any = tp.style
    x = take_input(input, style.input, style.sequence_dim, tp, read_only=True)
    # The heads a rank needs are neighbours: its weight rows are a view.
    spans = [(min(heads), max(heads) - min(heads) + 1) for heads in style.heads]
    size = self.out_features // style.kv_heads
    first = pick_by_rank([a for a, _ in spans], tp.axis.rank)
    count = pick_by_rank([n for _, n in spans], tp.axis.rank)

    def own(whole: Tensor) -> Tensor:
        return whole.narrow(0, first * size, count * size)

    y = F.linear(x, own(self.weight), None if self.bias is None else own(self.bias))
    if all(len(heads) == n for heads, (_, n) in zip(style.heads, spans, strict=True)):
        return y
    if tp.index is None or tp.index.device != y.device:
        tp.index = _index(style.heads, tp.axis.rank, y.device)
    return y.unflatten(-1, (count, size)).index_select(-2, tp.index).flatten(-2)


def _index(heads: tuple[tuple[int, ...], ...], rank: int, device: torch.device) -> Tensor:
    if isinstance(rank, torch.SymInt):
        return combine_ranks(
            {r: _index(heads, value_on_rank(rank, r), device) for r in ranks_of(rank)}
        )
    mine = heads[rank]
    return torch.tensor([head - min(mine) for head in mine], device=device)
