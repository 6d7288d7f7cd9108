"""The blocks of queries and keys: what counts is in one of them, what doesn't is in as few as can be."""

import random
from functools import partial
from typing import Any

import pytest
import torch

from parallel3d.cp import Sequence
from parallel3d.cp.blocks import Block, BlockForm, plan_blocks


def allowed(length: int, left: int | None, right: int | None, q: Any, k: Any) -> torch.Tensor:
    mask = ((k < length) if right != 0 else (k >= 0)) & (q >= 0)
    if left is not None:
        mask = mask & (k >= q - left)
    if right is not None:
        mask = mask & (k <= q + right)
    return mask


def positions(parts: Any) -> torch.Tensor:
    """Of the rows of a tensor."""
    return torch.cat([torch.arange(at, at + rows) for _, at, rows in parts])


def computed(
    blocks: list[Block], q_at: torch.Tensor, k_at: torch.Tensor, mask: Any
) -> torch.Tensor:
    """(queries, keys): how often each pair counts."""
    times = torch.zeros(len(q_at), len(k_at), dtype=torch.int64)
    for form, q_row, q_first, q_rows, k_row, k_first, k_rows in blocks:
        queries, keys = q_at[q_row : q_row + q_rows], k_at[k_row : k_row + k_rows]
        part = torch.ones(q_rows, k_rows, dtype=torch.bool)
        if form is BlockForm.CAUSAL:
            assert q_rows == k_rows and q_first == k_first
            part = part.tril()
        if form is BlockForm.MASKED:
            # The positions that the mask is made from are those of the rows.
            assert torch.equal(queries, torch.arange(q_first, q_first + q_rows))
            assert torch.equal(keys, torch.arange(k_first, k_first + k_rows))
            part = mask(queries[:, None], keys)
        times[q_row : q_row + q_rows, k_row : k_row + k_rows] += part
    return times


def test_every_pair_that_counts_is_computed_once() -> None:
    draw = random.Random(0)
    for _ in range(300):
        size, length, elements = draw.randint(1, 4), draw.randint(1, 40), draw.randint(1, 64)
        left, right = (draw.choice([None, draw.randint(0, 9)]) for _ in range(2))
        dense, small = draw.random() < 0.5, draw.random() < 0.5
        sequence = Sequence(length, size, draw.random() < 0.5)
        q_parts = sequence.parts(draw.randrange(size))
        k_rank = draw.randint(0, 4)
        k_parts = sequence.whole() if k_rank >= size else sequence.parts(k_rank)
        how = {"length": length, "left": left, "right": right}
        found = plan_blocks(q_parts, k_parts, **how, dense=dense, small=small, elements=elements)
        q_at, k_at = positions(q_parts), positions(k_parts)
        mask = partial(allowed, length, left, right)
        times = computed(found, q_at, k_at, mask)
        assert torch.equal(times, mask(q_at[:, None], k_at).long())
        for block in found:
            assert block.q_rows * block.k_rows <= max(elements, block.q_rows) or (
                block.form is not BlockForm.MASKED and not small
            )


@pytest.mark.parametrize("size", [2, 3, 8])
def test_under_a_causal_mask_nothing_masked_is_computed(size: int) -> None:
    """Whole blocks and squares on the diagonal, as many on each rank: for an all-gather, and for the ring."""
    rows = 16
    sequence = Sequence(2 * size * rows, size, True)
    how = {"length": sequence.length, "left": None, "right": 0, "dense": False, "small": False}
    works = set()
    for rank in range(size):
        for keys in ([sequence.whole()], [sequence.parts(source) for source in range(size)]):
            blocks = [
                block
                for k_parts in keys
                for block in plan_blocks(sequence.parts(rank), k_parts, **how, elements=1 << 20)
            ]
            assert {block.form for block in blocks} <= {BlockForm.FULL, BlockForm.CAUSAL}
            squares = sum(block.form is BlockForm.CAUSAL for block in blocks)
            whole = sum(b.q_rows * b.k_rows for b in blocks if b.form is BlockForm.FULL)
            works.add((squares, whole))
    assert works == {(2, (2 * size - 1) * rows * rows)}


def test_a_step_of_the_ring_is_one_block() -> None:
    sequence = Sequence(64, 4, True)
    how = {"length": 64, "left": None, "right": 0, "dense": False, "small": False}
    for rank in range(4):
        for source in range(4):
            found = plan_blocks(
                sequence.parts(rank), sequence.parts(source), **how, elements=1 << 20
            )
            assert len(found) == (3 if rank == source else 1)


def test_a_window_leaves_out_the_keys_before_it() -> None:
    sequence = Sequence(1 << 20, 8, True)
    how = {"length": 1 << 20, "left": 4095, "right": 0, "dense": False, "small": False}
    found = plan_blocks(sequence.parts(3), sequence.whole(), **how, elements=1 << 26)
    scores = sum(block.q_rows * block.k_rows for block in found)
    assert scores <= 1.3 * sequence.rows * 4096
    masked = [b.q_rows * b.k_rows for b in found if b.form is BlockForm.MASKED]
    assert max(masked) <= 1 << 20
