"""Dropout of attention on ``cp``: exact where its masks are drawn again, and right on average."""

from typing import Any

import pytest
import torch
from _support.cp.reference import axis_of, joined, part_of, sample
from _support.tp.tp_world import RealWorld
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from parallel3d._torch.simulated import for_each_rank
from parallel3d.cp import Sequence, attention
from parallel3d.cp.blocks import Rules, blocks_of
from parallel3d.testing import GlooPool
from parallel3d.testing.worlds import local_world

P = 0.25
CP, HEADS, LENGTH = 2, 4, 12


def drawn(kind: str, sequence: Sequence) -> Tensor:
    """(1, heads, length, length): which weights the ranks keep, each drawing from its seed."""
    kept = torch.zeros(1, HEADS, LENGTH, LENGTH, dtype=torch.bool)
    rules = Rules(sequence, None, 1.0, right=0, dropout=P)
    at = sequence.order().view(CP, -1)
    for rank in range(CP):
        torch.manual_seed(rank)
        q = torch.empty(1, HEADS, sequence.rows, 1)
        keys = [sequence.parts((rank - step) % CP) for step in range(CP)]
        for parts in keys if kind == "ring" else [sequence.whole()]:
            for block in blocks_of(q, rules, sequence.parts(rank), parts):
                keep = torch.rand(1, HEADS, block.q_rows, block.k_rows, dtype=torch.float64) >= P
                rows = at[rank][block.q_row : block.q_row + block.q_rows]
                columns = torch.arange(block.k_at, block.k_at + block.k_rows)
                kept[:, :, rows[:, None], columns] = keep
    return kept


def check_exact(kind: Any) -> None:
    world, axis = RealWorld(), axis_of(CP)
    sequence = Sequence(LENGTH, CP, True)
    wholes = [sample(1, HEADS, LENGTH, 4, seed=n).requires_grad_() for n in range(3)]
    q, k, v = wholes
    if kind == "ulysses":  # each rank's heads as torch's own function drops them
        each = []
        for rank in range(CP):
            torch.manual_seed(rank)
            mine = (x[:, rank * 2 : rank * 2 + 2] for x in wholes)
            each.append(F.scaled_dot_product_attention(*mine, is_causal=True, dropout_p=P))
        wanted = torch.cat(each, 1)
    else:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        weights = (q @ k.mT / 2).masked_fill(~mask, float("-inf")).softmax(-1)
        wanted = (weights * drawn(kind, sequence) / (1 - P)) @ v
    wanted.square().sum().backward()
    parts = [part_of(world, axis, sequence, x.detach()).requires_grad_() for x in wholes]
    torch.manual_seed(dist.get_rank())
    out = attention(*parts, axis, sequence, causal=True, kind=kind, dropout_p=P)
    out.square().sum().backward()
    found = [joined(world, sequence, x.detach()) for x in (out, *(part.grad for part in parts))]
    expected = [wanted, *(x.grad for x in wholes)]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def check_average(kind: Any, options: dict[str, Any]) -> None:
    """Of values that are all 1, with equal scores: each output is a binomial, divided."""
    axis = axis_of(CP)
    batch, length = 512, 8
    sequence = Sequence(length, CP, True)
    shape = (batch, HEADS, sequence.rows, 4)
    q, k, v = torch.zeros(shape), torch.zeros(shape), torch.ones(shape)
    torch.manual_seed(dist.get_rank())
    out = attention(q, k, v, axis, sequence, causal=False, kind=kind, dropout_p=P, **options)
    deviation = (P / (1 - P) / length) ** 0.5
    numbers = batch * HEADS * sequence.rows
    assert abs(out[..., 0].mean() - 1) < 5 * deviation / numbers**0.5
    assert abs(out[..., 0].std() / deviation - 1) < 0.05
    # Each weight of its own: no two heads, rows, samples or ranks have the same masks.
    both = RealWorld().per_rank(out[..., 0])
    for a, b in ((both[0], both[1]), (out[:, 0, :, 0], out[:, 1, :, 0]), (out[0], out[1])):
        assert not torch.equal(a, b)


@pytest.mark.parametrize("kind", ["ulysses", "gather", "ring"])
def test_as_the_same_masks_give(kind: str, gloo_pool: GlooPool) -> None:
    gloo_pool.run(check_exact, kind, world_size=CP)


@pytest.mark.parametrize("kind", ["ulysses", "gather", "ring"])
def test_on_average(kind: str, gloo_pool: GlooPool) -> None:
    gloo_pool.run(check_average, kind, {}, world_size=CP)
    gloo_pool.run(check_average, kind, {"softcap": 5.0}, world_size=CP)


@pytest.mark.parametrize("kind", ["ulysses", "gather", "ring"])
def test_simulated_ranks_draw_as_their_seeds_say(kind: Any) -> None:
    """The same seed on all ranks, another on each, and the same again."""
    found = []
    for seeds in ((3, 3), (3, 4), (3, 4)):
        with local_world(CP) as world:
            axis = axis_of(CP)
            for_each_rank(
                lambda rank, seeds=seeds: torch.default_generator.manual_seed(seeds[rank])
            )
            parts = [
                world.map(lambda rank: torch.ones(1, HEADS, LENGTH // CP, 4)).requires_grad_()
                for _ in range(3)
            ]
            sequence = Sequence(LENGTH, CP, True)
            out = attention(
                *parts, axis, sequence, causal=False, kind=kind, dropout_p=P, softcap=5.0
            )
            out.sum().backward()
            found.append(
                [t[..., 0] for x in (out, parts[2].grad) for t in world.per_rank(x.detach())]
            )
    alike, apart, again = found
    torch.testing.assert_close(apart, again, rtol=0, atol=0)
    assert torch.equal(alike[0], apart[0]) == (kind != "ulysses")  # its heads come from both ranks
    assert not torch.equal(apart[0], apart[1])
