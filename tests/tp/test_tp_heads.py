"""Attention whose heads tp doesn't divide: no head is cut, and the numbers are the plain layer's."""

import pytest
import torch
from head_models import DIM, GRID, KINDS, CountsByShape
from tp_world import check_parity, real_world


def on_real_ranks(kind: type, cases: list[tuple[int, int]], tp: int) -> None:
    for heads, kv in cases:
        torch.manual_seed(heads)
        x = torch.randn(2, 5, DIM).double()
        check_parity(kind(heads, kv), kind.plan, tp, x, on=real_world)


@pytest.mark.parametrize(("heads", "kv", "tp"), GRID)
def test_attention_equals_the_plain_layer_on_simulated_ranks(heads, kv, tp):
    torch.manual_seed(heads)
    model = CountsByShape(heads, kv)
    check_parity(model, model.plan, tp, torch.randn(2, 5, DIM).double())


# torch's simulated ranks can't reshape by sizes that differ by rank in all the ways that models do.
@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_equals_the_plain_layer_on_real_ranks(gloo_pool, kind, tp):
    cases = [(heads, kv) for heads, kv, ranks in GRID if ranks == tp]
    gloo_pool.run(on_real_ranks, kind, cases, tp, world_size=tp)
