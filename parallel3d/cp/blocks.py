"""Divides attention into blocks of queries and keys, from their positions in the sequence; without torch.

Keys that no query may attend to are in no block. Blocks with a mask are small, to keep the mask small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple


class BlockForm(Enum):
    """Which of a block's scores are used."""

    FULL = "all of it"
    CAUSAL = "on and below the diagonal of a square"
    MASKED = "what the mask says"


class Block(NamedTuple):
    """Consecutive queries, and consecutive keys that they attend to.

    Attributes:
        q_row, k_row: index of the first query and key in this rank's tensors.
        q_at, k_at: positions of the first query and key in the sequence.
        q_rows, k_rows: numbers of queries and keys.
    """

    form: BlockForm
    q_row: int
    q_at: int
    q_rows: int
    k_row: int
    k_at: int
    k_rows: int


QUERIES = 1024
"""Largest number of queries in a block that needs a mask, is small, or has a window."""


def plan_blocks(
    q_parts: Iterable[tuple[int, int, int]],
    k_parts: Iterable[tuple[int, int, int]],
    *,
    length: int,
    left: int | None,
    right: int | None,
    dense: bool,
    small: bool,
    elements: int,
) -> list[Block]:
    """Returns the blocks of queries with keys.

    Args:
        q_parts, k_parts: (first row, its position, number of rows) of consecutive queries and keys.
        length: keys from here on are padding, which without a causal mask must be left out.
        left, right: number of keys before and after its own position that a query attends to; None: all.
        dense: whether further masks apply anywhere.
        small: whether every block must be small, because its scores are materialized.
        elements: largest number of scores in a small block, or of elements in a mask.
    """
    if dense or small or left is not None or right not in (None, 0):
        q_parts = [tile for part in q_parts for tile in _cut(part, min(QUERIES, elements))]
    k_parts = list(k_parts)
    found: list[Block] = []
    for q_row, q_at, q_rows in q_parts:
        for k_row, k_at, k_rows in k_parts:
            for form, first, last in _intervals(
                q_at, q_rows, k_at, k_rows, length, left, right, dense
            ):
                whole = k_row + first - k_at, first, last - first
                most = max(elements // q_rows, 1)
                cut = small or form is BlockForm.MASKED
                tiles = list(_cut(whole, most)) if cut else [whole]
                if form is BlockForm.CAUSAL and len(tiles) > 1:
                    form = BlockForm.MASKED
                for tile in tiles:
                    _append(found, Block(form, q_row, q_at, q_rows, *tile), merge=not small)
    return found


def _append(found: list[Block], block: Block, *, merge: bool) -> None:
    """Adds a block to ``found``. With ``merge`` a FULL block is instead joined to a last FULL block that it
    continues in the tensors; the two need not be neighbours in the sequence."""
    last = found[-1] if found and merge else block
    if last is not block and last.form is block.form is BlockForm.FULL:
        same_queries = (last.q_row, last.q_rows) == (block.q_row, block.q_rows)
        if same_queries and last.k_row + last.k_rows == block.k_row:
            found[-1] = last._replace(k_rows=last.k_rows + block.k_rows)
            return
        same_keys = (last.k_row, last.k_rows) == (block.k_row, block.k_rows)
        if same_keys and last.q_row + last.q_rows == block.q_row:
            found[-1] = last._replace(q_rows=last.q_rows + block.q_rows)
            return
    found.append(block)


def _intervals(
    q_at: int,
    q_rows: int,
    k_at: int,
    k_rows: int,
    length: int,
    left: int | None,
    right: int | None,
    dense: bool,
) -> Iterator[tuple[BlockForm, int, int]]:
    """Yields (form, first, last) of the keys at positions first to last - 1 that some of the queries see."""
    q_end = q_at + q_rows
    first, last = k_at, k_at + k_rows
    if left is not None:
        first = max(first, q_at - left)
    if right is not None:
        last = min(last, q_end + right)
    if right != 0:
        last = min(last, length)
    if last <= first:
        return
    if dense:
        yield BlockForm.MASKED, first, last
        return
    # All queries see the keys from ``full`` to ``after``.
    full = first if left is None else min(max(first, q_end - 1 - left), last)
    after = last if right is None else max(min(last, q_at + right + (right > 0)), first)
    square = right == 0 and after == q_at and last == q_end and (left is None or left >= q_rows - 1)
    if after <= full or (not square and 2 * (after - full) < last - first):
        whole = square and first == after
        yield (BlockForm.CAUSAL if whole else BlockForm.MASKED), first, last
        return
    if first < full:
        yield BlockForm.MASKED, first, full
    yield BlockForm.FULL, full, after
    if after < last:
        yield (BlockForm.CAUSAL if square else BlockForm.MASKED), after, last


def _cut(part: tuple[int, int, int], most: int) -> Iterator[tuple[int, int, int]]:
    row, at, rows = part
    for start in range(0, rows, most):
        yield row + start, at + start, min(most, rows - start)
