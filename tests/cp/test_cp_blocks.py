"""The blocks of queries and keys: what counts is in one of them, what doesn't is in as few as can be."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


bound = st.one_of(st.none(), st.integers(0, 9))


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 4),
    length=st.integers(1, 40),
    balanced=st.booleans(),
    left=bound,
    right=bound,
    dense=st.booleans(),
    small=st.booleans(),
    elements=st.integers(1, 64),
    pair=st.tuples(st.integers(0, 3), st.integers(0, 4)),
)
def test_every_pair_that_counts_is_computed_once(
    size: int,
    length: int,
    balanced: bool,
    left: int | None,
    right: int | None,
    dense: bool,
    small: bool,
    elements: int,
    pair: tuple[int, int],
) -> None:
    sequence = Sequence(length, size, balanced)
    q_parts = sequence.parts(pair[0] % size)
    k_parts = sequence.whole() if pair[1] >= size else sequence.parts(pair[1])
    how = {"length": length, "left": left, "right": right}
    found = plan_blocks(q_parts, k_parts, **how, dense=dense, small=small, elements=elements)
    q_at, k_at = positions(q_parts), positions(k_parts)
    times = computed(found, q_at, k_at, lambda q, k: allowed(length, left, right, q, k))
    assert torch.equal(times, allowed(length, left, right, q_at[:, None], k_at).long())
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
