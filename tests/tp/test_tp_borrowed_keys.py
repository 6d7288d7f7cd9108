"""An attention layer with queries only, which attends to an earlier layer's keys and values (Gemma 3n)."""

import pytest
import torch
from _support.tp.head_models import DIM, SIZE, SPLIT
from _support.tp.tp_world import check_parity
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.tp import resolve_plan


class Layer(nn.Module):
    """Repeats its key and value heads by a number it keeps, as transformers' models do."""

    def __init__(self, heads: int, kv: int, borrows: bool) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = SIZE, heads // kv
        self.q = nn.Linear(DIM, heads * SIZE)
        self.o = nn.Linear(heads * SIZE, DIM)
        if not borrows:
            self.k = nn.Linear(DIM, kv * SIZE)
            self.v = nn.Linear(DIM, kv * SIZE)

    def forward(
        self, x: Tensor, lent: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = self.q(x).view(shape).transpose(1, 2)
        if lent is None:
            lent = tuple(p(x).view(shape).transpose(1, 2) for p in (self.k, self.v))
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in lent)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(2)), lent


class Lends(nn.Module):
    def __init__(self, heads: int, kv: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(heads, kv, False), Layer(heads, kv, True)])

    def forward(self, x: Tensor) -> Tensor:
        lent = None
        for layer in self.layers:
            x, lent = layer(x, lent)
        return x


PLAN = {f"layers.*.{name}": style for name, style in SPLIT.items()}


@pytest.mark.parametrize(("heads", "kv", "tp"), [(4, 1, 2), (4, 2, 2), (8, 2, 4)])
def test_it_gets_as_many_heads_as_the_keys_it_borrows(heads: int, kv: int, tp: int) -> None:
    model = Lends(heads, kv)
    plan = resolve_plan(model, PLAN, tp)
    groups = {a.module: a.values for a in plan.attributes if a.name == "num_key_value_groups"}
    assert groups.get("layers.0") == groups.get("layers.1")
    check_parity(model, PLAN, tp, torch.randn(2, 5, DIM).double())


class LayeredConfig:
    """As transformers' configs of models whose layers differ: some numbers are in no layer's name."""

    @property
    def num_attention_heads(self) -> int:
        raise RuntimeError("read it from a layer's config")


def test_a_number_that_the_config_does_not_tell_is_found_elsewhere() -> None:
    model = Lends(4, 2)
    for layer in model.layers:
        layer.config = LayeredConfig()
    assert resolve_plan(model, PLAN, 2).modules
