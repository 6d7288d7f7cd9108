"""How the tensors that tp ranks hold make up the plain model's: whole, cut, in slices, or parts of a sum.

Pure functions of plain tensors. A form is believed only if it fits the ranks of every tp group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_SINGLE = 1e-6


Kind = Literal["whole", "shard", "slices", "partial"]
ALL: frozenset[str] = frozenset({"whole", "shard", "slices", "partial"})


@dataclass(frozen=True)
class Group:
    """One tp group: its data rank and its ranks in the order of the tp axis."""

    data_rank: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """A form that fits.

    Attributes:
        kind: ``"shard"``: one after another along ``dim``. ``"slices"``: other entries along ``dim``, such
            as packed sections or heads that ranks share. ``"partial"``: their sum is the whole.
        index: of each tp rank: which entries along ``dim`` it has.
        odd: why it is seldom meant; ``""`` where it is usual.
    """

    kind: Kind
    dim: int = 0
    index: tuple[Tensor, ...] = ()
    odd: str = ""


@dataclass(frozen=True)
class Gap:
    """That nothing fits: the smallest relative difference of any form, a rank that has it, and a guess."""

    difference: float
    rank: int
    hint: str = ""


def distance(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; nan is equal to nan. Of other shapes it is infinite."""
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    a, b = _doubles(a), _doubles(b)
    apart = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    largest = float(apart.max())
    return math.inf if math.isnan(largest) else largest


def take(whole: Tensor, fit: Fit, tp_rank: int) -> Tensor:
    """What a tp rank holds of ``whole``, of a fit that is not ``partial``."""
    return (
        whole.index_select(fit.dim, fit.index[tp_rank])
        if fit.kind in ("shard", "slices")
        else whole
    )


def fit_value(
    plain: Mapping[int, Tensor],
    parallel: Mapping[int, Tensor],
    groups: Sequence[Group],
    bound: float,
    floor: float = 0.0,
    kinds: frozenset[str] = ALL,
) -> Fit | Gap:
    """The form in which the ranks hold the plain model's values, or how far the nearest is off.

    Args:
        plain: by data rank.
        parallel: by rank.
        bound: of the difference relative to the largest plain value.
        floor: what that is taken for at least.
        kinds: the forms that may be; others are not tried.
    """
    best: Gap | None = None
    for fit in _candidates(plain, parallel, groups, kinds, bound):
        gap = _gap(plain, groups, floor, _sides(fit, plain, parallel))
        if gap.difference <= bound:
            return fit
        if best is None or gap.difference < best.difference:
            best = gap
    hint = hint_of(plain, parallel, groups, bound, floor)
    if best is None:
        rank = groups[0].ranks[0]
        shapes = tuple(parallel[rank].shape), tuple(plain[groups[0].data_rank].shape)
        best = Gap(math.inf, rank)
        hint = hint or f"shape {shapes[0]} where the plain model has {shapes[1]}"
    return Gap(best.difference, best.rank, hint)


def fit_gradient(
    fit: Fit,
    plain: Mapping[int, Tensor],
    parallel: Mapping[int, Tensor],
    groups: Sequence[Group],
    bound: float,
    floor: float,
) -> Literal["whole", "partial"] | Gap:
    """Whether gradients of what fits as ``fit`` are each rank's part of the plain one, or parts of a sum."""
    held = Fit("whole") if fit.kind == "partial" else fit
    whole = _gap(plain, groups, floor, _sides(held, plain, parallel))
    if whole.difference <= bound:
        return "whole"
    if len(groups[0].ranks) > 1:
        summed = _gap(plain, groups, floor, _sums(held, plain, parallel))
        if summed.difference <= bound:
            return "partial"
    return Gap(whole.difference, whole.rank, hint_of(plain, parallel, groups, bound, floor))


def hint_of(
    plain: Mapping[int, Tensor],
    parallel: Mapping[int, Tensor],
    groups: Sequence[Group],
    bound: float,
    floor: float = 0.0,
) -> str:
    """What relates them, if it is simple: a factor, a sum left out, ranks that disagree."""
    first = groups[0]
    want, got = plain[first.data_rank], parallel[first.ranks[0]]
    if want.shape != got.shape or not want.numel():
        return ""
    whole = _gap(plain, groups, floor, _sides(Fit("whole"), plain, parallel))
    if bound < whole.difference < _SINGLE:
        return "as small as float32 rounds: is something computed in it?"
    factor = _factor(want, got)
    if factor is not None and abs(factor - 1) > bound:
        scaled = {rank: value * factor for rank, value in plain.items()}
        off = _gap(scaled, groups, floor, _sides(Fit("whole"), scaled, parallel)).difference
        if off <= bound:
            return f"{factor:.4g} times the plain model's{_axes(factor, len(first.ranks), len(groups))}"
    if len(first.ranks) > 1:
        if _gap(plain, groups, floor, _sums(Fit("whole"), plain, parallel)).difference <= bound:
            return "the sum over the tp ranks is the plain model's: a reduction is missing"
        others = [
            distance(parallel[rank], parallel[group.ranks[0]])
            for group in groups
            for rank in group.ranks[1:]
        ]
        if max(others) > bound * _scale(want, floor):
            return "the ranks of one tp group have different values"
    return ""


def _axes(factor: float, tp: int, data: int) -> str:
    """Which axis of the mesh has that many ranks."""
    for name, size in (("tp", tp), ("the number of data ranks", data)):
        if size > 1 and abs(factor - size) < 1e-6:
            return f" ({name} is {size})"
        if size > 1 and abs(factor - 1 / size) < 1e-6:
            return f" (1 / {name})"
    return ""


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


Side = Iterator[tuple[int, Tensor, Tensor]]  # (rank, found, wanted)


def _gap(
    plain: Mapping[int, Tensor],
    groups: Sequence[Group],
    floor: float,
    sides: Callable[[Group], Side],
) -> Gap:
    worst = Gap(-1.0, groups[0].ranks[0])
    for group in groups:
        scale = _scale(plain[group.data_rank], floor)
        for rank, found, wanted in sides(group):
            apart = distance(found, wanted) / scale
            if apart > worst.difference:
                worst = Gap(apart, rank)
    return worst


def _sides(
    fit: Fit, plain: Mapping[int, Tensor], parallel: Mapping[int, Tensor]
) -> Callable[[Group], Side]:
    if fit.kind == "partial":
        return _sums(Fit("whole"), plain, parallel)

    def sides(group: Group) -> Side:
        for i, rank in enumerate(group.ranks):
            yield rank, parallel[rank], take(plain[group.data_rank], fit, i)

    return sides


def _sums(
    fit: Fit, plain: Mapping[int, Tensor], parallel: Mapping[int, Tensor]
) -> Callable[[Group], Side]:
    """The ranks' tensors added up, each where it belongs."""

    def sides(group: Group) -> Side:
        want = plain[group.data_rank]
        if fit.kind == "whole":
            shapes = {parallel[rank].shape for rank in group.ranks}
            total = sum(_real(parallel[rank]) for rank in group.ranks) if len(shapes) == 1 else None
        else:
            total = torch.zeros_like(want)
            for i, rank in enumerate(group.ranks):
                part = parallel[rank]
                if part.shape != take(want, fit, i).shape:
                    total = None
                    break
                total.index_add_(fit.dim, fit.index[i], part.to(total.dtype))
        yield (
            group.ranks[0],
            torch.zeros(0) if total is None else total,  # type: ignore[misc]
            want,
        )

    return sides


def _real(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype == torch.bool else tensor


# ---- candidates ----


def _candidates(
    plain: Mapping[int, Tensor],
    parallel: Mapping[int, Tensor],
    groups: Sequence[Group],
    kinds: frozenset[str],
    bound: float,
) -> Iterator[Fit]:
    group = groups[0]
    whole, parts = plain[group.data_rank], [parallel[rank] for rank in group.ranks]
    alike = all(part.shape == whole.shape for part in parts)
    if alike and "whole" in kinds:
        yield Fit("whole")
    if len(parts) == 1:
        return
    dim = _cut_dim(whole, parts)
    if dim is not None:
        sizes = [part.shape[dim] for part in parts]
        if sum(sizes) == whole.shape[dim] and "shard" in kinds:
            yield Fit("shard", dim, tuple(torch.arange(whole.shape[dim]).split(sizes)))
        if "slices" in kinds:
            index = tuple(_entries(whole, part, dim, bound) for part in parts)
            if all(len(found) == size for found, size in zip(index, sizes, strict=True)):
                yield Fit("slices", dim, index, _oddity(index, whole.shape[dim]))
    if alike and "partial" in kinds and _may_be_summed(whole):
        yield Fit("partial", odd="each tp rank has a part of a sum that was not reduced here")


def _may_be_summed(whole: Tensor) -> bool:
    """Sums of infinities and of numbers of things say nothing."""
    return whole.is_floating_point() and bool(whole.isfinite().all())


def _cut_dim(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    """The only dim in which the parts have other sizes than the whole."""
    dims = set()
    for part in parts:
        if part.dim() != whole.dim():
            return None
        dims |= {d for d in range(whole.dim()) if part.shape[d] != whole.shape[d]}
    if len(dims) != 1:
        return None
    (dim,) = dims
    return dim if all(part.shape[dim] <= whole.shape[dim] for part in parts) else None


def _oddity(index: Sequence[Tensor], size: int) -> str:
    """What no packed or shared layout does."""
    if torch.unique(torch.cat(tuple(index))).numel() < size:
        return "entries of the plain model's that no tp rank has"
    ascending = all(bool((found[1:] > found[:-1]).all()) for found in index)
    starts = [int(found[0]) for found in index if found.numel()]
    if not ascending or starts != sorted(starts):
        return "the plain model's entries in another order"
    return ""


def _entries(whole: Tensor, part: Tensor, dim: int, bound: float) -> Tensor:
    """Where along ``dim`` of ``whole`` each entry of ``part`` is; shorter where one isn't found.

    Entries are compared by a random projection of theirs; of equal ones the one that goes on longest
    from the one before is taken.
    """
    a, b = (_doubles(t).movedim(dim, 0).unsqueeze(-1).flatten(1) for t in (whole, part))
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(a.shape[1], dtype=torch.float64, generator=generator) + 0.5
    keys, wanted = (a @ weights).tolist(), (b @ weights).tolist()
    near = 10 * bound * max(1e-30, *map(abs, keys)) if keys else 0.0

    def same(i: int, j: int) -> bool:
        return i < len(keys) and abs(keys[i] - wanted[j]) <= near

    def run(i: int, j: int) -> int:
        count = 0
        while j + count < len(wanted) and same(i + count, j + count):
            count += 1
        return count

    found: list[int] = []
    while len(found) < len(wanted):
        j = len(found)
        starts = [i for i in range(len(keys)) if same(i, j)]
        if not starts:
            break
        best = max(starts, key=lambda i: run(i, j))
        found.extend(range(best, best + run(best, j)))
    return torch.tensor(found, dtype=torch.long)
