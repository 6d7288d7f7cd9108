"""How the tensors of tp ranks make up the plain model's: copies, shards, slices, or parts of a sum.

Pure functions of plain tensors. A form is accepted only if it fits the ranks of every tp group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

import torch
from torch import Tensor

from parallel3d.audit.findings import gap_between, named

_SINGLE = 1e-6  # relative differences below this may be float32's rounding

Kind = Literal["whole", "shard", "slices", "partial"]
ALL: frozenset[str] = frozenset({"whole", "shard", "slices", "partial"})
WHOLE: frozenset[str] = frozenset({"whole"})


@dataclass(frozen=True)
class FitGroup:
    """One tp group: its data rank and its ranks in the order of the tp axis."""

    data_rank: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """How the ranks of a tp group hold a tensor, as its ``kind`` says.

    ``"whole"``: each rank has all of it; ``"shard"``: each has the next part along ``dim``; ``"slices"``:
    each has entries ``index`` along ``dim``, such as packed sections or heads that ranks share;
    ``"partial"``: the ranks' tensors add up to it.
    """

    kind: Kind
    dim: int = 0
    index: tuple[Tensor, ...] = ()  # for each tp rank, the entries along ``dim`` that it has
    odd: str = ""  # why the form is unusual


@dataclass(frozen=True)
class FitGap:
    """No ``Fit`` explains what the ranks hold of a plain tensor: the relative difference by the best of them,
    a rank with that difference, and a guess at the cause."""

    difference: float
    rank: int
    hint: str = ""


def apart(want: Tensor, got: Tensor, floor: float) -> float:
    """Returns the relative difference of two tensors of any dtype; ``floor``: see ``gap_between``."""
    return gap_between(_doubles(want), _doubles(got), math.inf, floor).difference


def take(whole: Tensor, fit: Fit, tp_rank: int) -> Tensor:
    """Returns what rank ``tp_rank`` of a tp group holds of ``whole`` by a fit other than ``"partial"``."""
    return whole.index_select(fit.dim, fit.index[tp_rank]) if fit.index else whole


@dataclass(frozen=True)
class Comparison:
    """One tensor of the plain model and what the ranks of the parallel model hold of it."""

    plain: Mapping[int, Tensor]  # by data rank
    parallel: Mapping[int, Tensor]  # by rank
    groups: Sequence[FitGroup]
    bound: float  # largest accepted difference, relative to the largest plain value
    floor: float = 0.0  # lower bound of that largest value

    def fit(self, kinds: frozenset[str] = ALL) -> Fit | FitGap:
        """Returns the Fit, of one of ``kinds``, by which ranks hold the tensor, or how far off all are."""
        best: FitGap | None = None
        for fit in self._candidates(kinds):
            gap = self._gap(fit)
            if gap.difference <= self.bound:
                return fit
            if best is None or gap.difference < best.difference:
                best = gap
        hint = self.hint()
        if best is None:
            want, got = self._first()
            best = FitGap(math.inf, self.groups[0].ranks[0])
            shapes = f"shape {tuple(got.shape)} where the plain model has {tuple(want.shape)}"
            hint = hint or shapes
        return replace(best, hint=hint)

    def fit_gradient(self, fit: Fit) -> Literal["whole", "partial"] | FitGap:
        """Compares gradients of a tensor that ranks hold by ``fit``. Returns ``"whole"`` if ranks have their
        parts of the plain one, ``"partial"`` if theirs add up to it, else the gap."""
        if fit.kind == "partial":
            fit = Fit("whole")
        whole = self._gap(fit)
        if whole.difference <= self.bound:
            return "whole"
        several = len(self.groups[0].ranks) > 1
        if several and self._gap(replace(fit, kind="partial")).difference <= self.bound:
            return "partial"
        return replace(whole, hint=self.hint())

    def hint(self) -> str:
        """Returns a text if ranks' tensors relate simply to the plain one: a factor, a missing sum; or ""."""
        first, (want, got) = self.groups[0], self._first()
        if want.shape != got.shape or not want.numel():
            return ""
        whole = Fit("whole")
        if self.bound < self._gap(whole).difference < _SINGLE:
            return "as small as float32 rounds: is something computed in it?"
        factor = _factor(want, got)
        if factor is not None and abs(factor - 1) > self.bound:
            scaled = {rank: value * factor for rank, value in self.plain.items()}
            if replace(self, plain=scaled)._gap(whole).difference <= self.bound:
                axes = _axes(factor, len(first.ranks), len(self.groups))
                return f"{factor:.4g} times the plain model's{axes}"
        if len(first.ranks) > 1:
            if self._gap(Fit("partial")).difference <= self.bound:
                return "the sum over the tp ranks is the plain model's: a reduction is missing"
            scale = _scale(want, self.floor)
            if any(
                apart(self.parallel[group.ranks[0]], self.parallel[rank], scale) > self.bound
                for group in self.groups
                for rank in group.ranks[1:]
            ):
                return "the ranks of one tp group have different values"
        return ""

    def _first(self) -> tuple[Tensor, Tensor]:
        """Returns, for the first tp group, the plain model's tensor and the tensor of its first rank."""
        first = self.groups[0]
        return self.plain[first.data_rank], self.parallel[first.ranks[0]]

    def _gap(self, fit: Fit) -> FitGap:
        """Returns the largest relative difference between what ranks hold and what they should by ``fit``."""
        worst = FitGap(-1.0, self.groups[0].ranks[0])
        for group in self.groups:
            want = self.plain[group.data_rank]
            parts = [self.parallel[rank] for rank in group.ranks]
            scale = _scale(want, self.floor)
            if fit.kind == "partial":
                pairs = [(_total(parts, fit, want), want)]
            else:
                pairs = [(part, take(want, fit, i)) for i, part in enumerate(parts)]
            for rank, (got, expected) in zip(group.ranks, pairs, strict=False):
                difference = apart(expected, got, scale)
                if difference > worst.difference:
                    worst = FitGap(difference, rank)
        return worst

    def _candidates(self, kinds: frozenset[str]) -> Iterator[Fit]:
        whole, _ = self._first()
        parts = [self.parallel[rank] for rank in self.groups[0].ranks]
        alike = all(part.shape == whole.shape for part in parts)
        if alike and "whole" in kinds:
            yield Fit("whole")
        if len(parts) == 1:
            return
        dim = _sharded_dim(whole, parts)
        if dim is not None:
            sizes = [part.shape[dim] for part in parts]
            if sum(sizes) == whole.shape[dim] and "shard" in kinds:
                yield Fit("shard", dim, tuple(torch.arange(whole.shape[dim]).split(sizes)))
            if "slices" in kinds:
                index = tuple(_entries(whole, part, dim, self.bound) for part in parts)
                if all(len(entries) == size for entries, size in zip(index, sizes, strict=True)):
                    yield Fit("slices", dim, index, _oddity(index, whole.shape[dim]))
        # Infinities can't be told from their sum, nor can integers that are ids.
        if alike and "partial" in kinds and whole.is_floating_point() and whole.isfinite().all():
            yield Fit("partial", odd="each tp rank has a part of a sum that was not reduced here")


def _axes(factor: float, tp: int, data: int) -> str:
    """Returns a text that gives ``factor`` in terms of the numbers of tp and data ranks, or ""."""
    text = named(factor, {"tp": tp, "the number of data ranks": data}).removeprefix(" = ")
    if not text:
        return ""
    return f" ({text})" if text.startswith("1 / ") else f" ({text} is {factor:.0f})"


def _doubles(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def _scale(want: Tensor, floor: float) -> float:
    floor = floor if want.is_floating_point() or want.is_complex() else max(floor, 1.0)
    finite = _doubles(want)
    finite = finite[finite.isfinite()]
    return max(float(finite.abs().max()) if finite.numel() else 0.0, floor, 1e-30)


def _factor(want: Tensor, got: Tensor) -> float | None:
    a, b = _doubles(want).flatten(), _doubles(got).flatten()
    norm = float(a @ a)
    return float(a @ b) / norm if norm > 0 and math.isfinite(norm) else None


def _total(parts: Sequence[Tensor], fit: Fit, want: Tensor) -> Tensor:
    """Adds up the parts, each at its index if ``fit`` has one; returns an empty tensor if shapes differ."""
    if not fit.index:
        numbers = [part.double() if part.dtype == torch.bool else part for part in parts]
        alike = all(part.shape == parts[0].shape for part in parts)
        return sum(numbers[1:], numbers[0]) if alike else torch.zeros(0)
    total = torch.zeros_like(want)
    for part, index in zip(parts, fit.index, strict=True):
        if part.shape != want.index_select(fit.dim, index).shape:
            return torch.zeros(0)
        total.index_add_(fit.dim, index, part.to(total.dtype))
    return total


def _sharded_dim(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    """Returns the dim in which parts are smaller than the whole, if it is only one; else None."""
    if any(part.dim() != whole.dim() for part in parts):
        return None
    dims = {d for part in parts for d in range(whole.dim()) if part.shape[d] != whole.shape[d]}
    if len(dims) != 1:
        return None
    (dim,) = dims
    return dim if all(part.shape[dim] <= whole.shape[dim] for part in parts) else None


def _oddity(index: Sequence[Tensor], size: int) -> str:
    """Returns what is unusual in the ranks' entries (some missing, another order); "" if nothing is."""
    if torch.unique(torch.cat(tuple(index))).numel() < size:
        return "entries of the plain model's that no tp rank has"
    ascending = all(bool((entries[1:] > entries[:-1]).all()) for entries in index)
    starts = [int(entries[0]) for entries in index if entries.numel()]
    if not ascending or starts != sorted(starts):
        return "the plain model's entries in another order"
    return ""


def _entries(whole: Tensor, part: Tensor, dim: int, bound: float) -> Tensor:
    """Returns where along ``dim`` of ``whole`` each entry of ``part`` is; it ends before the first that isn't
    there.

    Entries are compared by a random projection. If several are equal, the one is taken that is followed by
    the most matching entries.
    """
    a, b = (_doubles(t).movedim(dim, 0).unsqueeze(-1).flatten(1) for t in (whole, part))
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(a.shape[1], dtype=torch.float64, generator=generator) + 0.5
    keys, wanted = (a @ weights).tolist(), (b @ weights).tolist()
    near = 10 * bound * max(1e-30, *map(abs, keys)) if keys else 0.0

    def run(i: int, j: int) -> int:
        """Returns how many entries agree in a row, from ``i`` of the whole and ``j`` of the part on."""
        pairs = zip(keys[i:], wanted[j:], strict=False)
        return len(list(takewhile(lambda pair: abs(pair[0] - pair[1]) <= near, pairs)))

    entries: list[int] = []
    while len(entries) < len(wanted):
        j = len(entries)
        starts = [i for i, key in enumerate(keys) if abs(key - wanted[j]) <= near]
        if not starts:
            break
        best = max(starts, key=lambda i: run(i, j))
        entries.extend(range(best, best + run(best, j)))
    return torch.tensor(entries, dtype=torch.long)
