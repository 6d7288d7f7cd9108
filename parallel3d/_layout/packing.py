"""Packing: the rows of one dim that each rank of one axis holds, where they are not ``torch.chunk``'s.

A fused gate-and-up weight is split so that every rank has its part of gate and its part of up; attention
weights are split between heads, also where the heads don't divide evenly. DTensor's placements can't express
this.
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
    """The rows of ``dim`` that each rank holds, in the order of its local tensor.

    Attributes:
        dim: dim of the parameter, from 0.
        rows: for each rank intervals (first row, number of rows), none of them empty. Together the ranks hold
            each row once.
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
        return tuple(sum(number for _, number in rank) for rank in self.rows)

    @property
    def size(self) -> int:
        return sum(self.lengths)

    @property
    def is_even(self) -> bool:
        return len(set(self.lengths)) == 1

    def length_on(self, rank: int) -> int:
        """Returns the number of rows of ``rank``, which may be a ``SymInt`` of simulated ranks."""
        return pick_by_rank(self.lengths, rank)

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Returns a copy of the rows of ``whole`` that ``rank`` (or simulated ranks' ``SymInt``) holds."""
        if isinstance(rank, torch.SymInt):
            ranks = {r: value_on_rank(rank, r) for r in ranks_of(rank)}
            return combine_ranks(
                {r: self.take(value_on_rank(whole, r), at) for r, at in ranks.items()}
            )
        intervals = self.rows[rank] or ((0, 0),)
        return torch.cat([whole.narrow(self.dim, *interval) for interval in intervals], self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the whole tensor from ``parts``, the ranks' local tensors; the inverse of ``take``."""
        by_first: dict[int, Tensor] = {}
        for part, intervals in zip(parts, self.rows, strict=True):
            pieces = part.split([number for _, number in intervals], self.dim) if intervals else ()
            by_first |= {first: piece for (first, _), piece in zip(intervals, pieces, strict=True)}
        return torch.cat([by_first[first] for first in sorted(by_first)], self.dim)

    def rows_of(self, rank: int, first: int, number: int) -> list[tuple[int, Interval]]:
        """Returns where rows ``first`` to ``first + number`` of ``rank``'s local tensor lie in the whole
        tensor: for each interval of consecutive rows (how many of these rows come before it, the interval).
        """
        found, start = [], 0
        for begin, length in self.rows[rank]:
            low, high = max(first, start), min(first + number, start + length)
            if low < high:
                found.append((low - first, (begin + low - start, high - low)))
            start += length
        return found


def pick_by_rank(values: Sequence[int], rank: int) -> int:
    """Returns ``values[rank]``; ``rank`` may be a ``SymInt`` of simulated ranks, as then is the result."""
    if not isinstance(rank, torch.SymInt):
        return values[rank]
    # One comparison for each value: a SymInt that differs by rank allows only arithmetic.
    total = 0
    for index, value in enumerate(values):
        is_equal = 1 - torch.sym_min(torch.sym_max(rank - index, index - rank), 1)
        total = total + is_equal * value
    return total


def cut_sections(
    dim: int,
    sections: tuple[int, ...],
    ranks: int,
    multiple_of: tuple[int, ...] | int = 1,
    *,
    chunked: bool = False,
) -> Packing:
    """Returns the packing that splits each section of ``dim`` over ``ranks`` as evenly as whole groups allow.

    Args:
        sections: number of rows of each section, such as (F, F) for a fused gate-and-up weight.
        multiple_of: number of rows of a group that is never split (a head), for each section or for all. The
            first ranks get one group more where the groups don't divide evenly.
        chunked: whether the groups are shared as ``torch.chunk`` does: the last ranks get fewer, or none.
    """
    groups = multiple_of if isinstance(multiple_of, tuple) else (multiple_of,) * len(sections)
    starts = [0, *accumulate(sections)]
    rows: list[tuple[Interval, ...]] = []
    for rank in range(ranks):
        intervals: list[Interval] = []
        for start, size, group in zip(starts, sections, groups, strict=False):
            total = size // group
            count, rest = divmod(total, ranks)
            begin, end = (
                min(r * -(-total // ranks), total) if chunked else r * count + min(r, rest)
                for r in (rank, rank + 1)
            )
            first, number = start + begin * group, (end - begin) * group
            if number and intervals and sum(intervals[-1]) == first:  # neighbours are joined
                intervals[-1] = (intervals[-1][0], intervals[-1][1] + number)
            elif number:
                intervals.append((first, number))
        rows.append(tuple(intervals))
    return Packing(dim, tuple(rows))
