"""Packing: which rows of one dim each rank of one axis holds, where ``torch.chunk`` doesn't say.

A fused gate-and-up weight is cut so that every rank has its part of gate and its part of up; attention
weights are cut between heads, also where the heads don't divide. DTensor's placements can't tell such rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from parallel3d._torch.simulated import combine_ranks, ranks_of, value_on_rank

Interval = tuple[int, int]  # (first row, number of rows)


@dataclass(frozen=True)
class Packing:
    """The rows of ``dim`` that each rank holds, in the order in which they lie in its local tensor.

    Attributes:
        dim: of the parameter, from 0.
        rows: [rank] -> intervals (first, number), none of them empty. Together the ranks hold each row once.
    """

    dim: int
    rows: tuple[tuple[Interval, ...], ...]

    def __post_init__(self) -> None:
        held = sorted(interval for rank in self.rows for interval in rank)
        at = 0
        for first, number in held:
            assert first == at and number > 0, f"rows {self.rows} overlap, or leave some out"
            at += number

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many rows each rank holds."""
        return tuple(sum(number for _, number in rank) for rank in self.rows)

    @property
    def size(self) -> int:
        """Rows of the whole."""
        return sum(self.lengths)

    @property
    def is_even(self) -> bool:
        """Whether every rank holds as many rows."""
        return len(set(self.lengths)) == 1

    def length_on(self, rank: int) -> int:
        """How many rows ``rank`` holds; for a ``SymInt`` of simulated ranks, one that differs by rank."""
        return pick_by_rank(self.lengths, rank)

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """The rows of ``whole`` that ``rank`` holds: contiguous, with storage of its own.

        Args:
            rank: a coordinate; under simulated ranks a ``SymInt`` that differs by rank.
        """
        if isinstance(rank, torch.SymInt):
            return combine_ranks(
                {
                    r: self.take(value_on_rank(whole, r), value_on_rank(rank, r))
                    for r in ranks_of(rank)
                }
            )
        parts = [whole.narrow(self.dim, first, number) for first, number in self.rows[rank]]
        if not parts:
            parts = [whole.narrow(self.dim, 0, 0)]
        return torch.cat(parts, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The other way: what the ranks hold, in their order -> the whole."""
        pieces = []
        for part, held in zip(parts, self.rows, strict=True):
            start = 0
            for first, number in held:
                pieces.append((first, part.narrow(self.dim, start, number)))
                start += number
        pieces.sort(key=lambda piece: piece[0])
        return torch.cat([piece for _, piece in pieces], self.dim)

    def rows_of(self, rank: int, first: int, number: int) -> list[tuple[int, Interval]]:
        """Where ``number`` of ``rank``'s rows from ``first`` on are in the whole.

        Returns:
            (how many of them come before, the interval of the whole), one after another.
        """
        found, start = [], 0
        for begin, length in self.rows[rank]:
            low, high = max(first, start), min(first + number, start + length)
            if low < high:
                found.append((low - first, (begin + low - start, high - low)))
            start += length
        return found


def pick_by_rank(values: Sequence[int], rank: int) -> int:
    """``values[rank]``; for a ``SymInt`` of simulated ranks, one that differs by rank."""
    if not isinstance(rank, torch.SymInt):
        return values[rank]
    # One comparison a rank: arithmetic is all that a SymInt that differs by rank can do.
    total = 0
    for index, value in enumerate(values):
        is_it = 1 - torch.sym_min(torch.sym_max(rank - index, index - rank), 1)
        total = total + is_it * value
    return total


def cut_sections(
    dim: int, sections: tuple[int, ...], ranks: int, multiple_of: tuple[int, ...] | int = 1
) -> Packing:
    """Each of the sections that ``dim`` is packed of, cut among ``ranks`` as evenly as whole groups allow.

    Args:
        sections: rows of each; (F, F) for gate and up.
        multiple_of: rows of a group that is never cut (a head), for each section or for all. Ranks get as
            many groups of each section, the first ones one more where they don't divide.
    """
    groups = multiple_of if isinstance(multiple_of, tuple) else (multiple_of,) * len(sections)
    starts = [0, *accumulate(sections)]
    rows: list[tuple[Interval, ...]] = []
    for rank in range(ranks):
        held = []
        for start, size, group in zip(starts, sections, groups, strict=False):
            count, rest = divmod(size // group, ranks)
            before = rank * count + min(rank, rest)
            mine = count + (rank < rest)
            if mine:
                held.append((start + before * group, mine * group))
        rows.append(tuple(_merged(held)))
    return Packing(dim, tuple(rows))


def _merged(intervals: list[Interval]) -> list[Interval]:
    """Neighbours joined."""
    result: list[Interval] = []
    for first, number in intervals:
        if result and sum(result[-1]) == first:
            result[-1] = (result[-1][0], result[-1][1] + number)
        else:
            result.append((first, number))
    return result
