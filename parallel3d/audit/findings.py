"""What an audit has found: differences with their factor and likely cause, and what was not compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""The largest difference that rounding explains, relative to the tensor's largest entry: some eight units of
the last place of float32's and bfloat16's sums of thousands of terms; other dtypes have float32's."""


def bound_of(*dtypes: torch.dtype) -> float:
    """Returns the largest relative difference that rounding can cause in the least precise of ``dtypes``;
    that of float32 is ten times as large where torch multiplies in TF32."""
    reduced = torch.get_float32_matmul_precision() != "highest"
    single = BOUNDS[torch.float32] * (10 if reduced else 1)
    bounds = BOUNDS | {torch.float32: single}
    return max(bounds.get(dtype, single) for dtype in dtypes)


@dataclass(frozen=True)
class Gap:
    """How far a tensor is from that of the plain model."""

    difference: float  # divided by the plain one's largest value; inf: shapes differ, or a NaN
    place: tuple[int, ...] = ()  # the index of the largest difference
    factor: float | None = None  # by which the plain tensor must be multiplied; None: there is none

    def times(self, sizes: Mapping[str, int]) -> str:
        """Returns a text that gives the factor, also in terms of axis sizes; "" if there is no factor."""
        if self.factor is None:
            return ""
        return f"; it is {self.factor:.4g} times the plain one{named(self.factor, sizes)}"


def gap_between(want: Tensor, got: Tensor, bound: float, floor: float = 0.0) -> Gap:
    """Returns how far ``got`` is from ``want``, relative to the largest value of ``want`` or to ``floor`` if
    that is larger. Above ``bound`` it also says whether one is a multiple of the other."""
    if want.shape != got.shape:
        return Gap(inf)
    if not want.numel():
        return Gap(0.0)
    if not want.is_floating_point():
        wrong = want != got
        place = _place(wrong.to(torch.uint8))
        return Gap(inf if bool(wrong.any()) else 0.0, place)
    wide = torch.float64 if torch.float64 in (want.dtype, got.dtype) else torch.float32
    want, got = want.detach().to(wide), got.detach().to(wide)
    unequal = (got - want).abs()
    unequal = torch.where(want.isnan() & got.isnan() | (want == got), 0.0, unequal)
    largest = float(unequal.max())
    scale = max(float(want.nan_to_num(0.0, 0.0, 0.0).abs().max()), floor)
    difference = largest / scale if scale else (inf if largest else 0.0)
    if difference != difference:
        difference = inf
    if difference <= bound:
        return Gap(difference)
    place, factor = _place(unequal), None
    norm = float((want * want).sum())
    if isfinite(norm) and norm > 0 and isfinite(largest):
        ratio = float((want * got).sum()) / norm
        rest = float((got - ratio * want).abs().max())
        if rest <= 4 * bound * scale * max(1.0, abs(ratio)) and abs(ratio - 1) > 0.02:
            factor = ratio
    return Gap(difference, place, factor)


def _place(unequal: Tensor) -> tuple[int, ...]:
    flat = int(unequal.nan_to_num(inf).flatten().argmax()) if unequal.dim() else 0
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), unequal.shape))


@dataclass(frozen=True)
class Finding:
    """A tensor of a unit that differs from that of the plain model.

    Attributes:
        unit: the module's name; "" is the model itself.
        what: ``output``, ``input position_ids``, ``gradient of weight`` and so on.
        gap: the difference, on the rank on which it is largest.
        bound: the largest relative difference that rounding can explain.
        ranks: the ranks on which the tensor differs.
        cause: the likely cause.
    """

    unit: str
    what: str
    gap: Gap
    bound: float
    ranks: tuple[int, ...] = ()
    cause: str = ""

    def text(self, sizes: Mapping[str, int]) -> str:
        """Returns the finding as one line; ``sizes``: axis -> size, in terms of which its factor is given."""
        name = self.unit or "the model itself"
        by = "has another shape or value"
        if isfinite(self.gap.difference):
            by = f"differs by {self.gap.difference:.3g} of its largest entry ({self.bound:g} is allowed)"
        at = f" at {list(self.gap.place)}" if self.gap.place else ""
        ranks = f", rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        cause = f". Likely: {self.cause}" if self.cause else ""
        return f"{name}: {self.what} {by}{at}{ranks}{self.gap.times(sizes)}{cause}"


def named(factor: float, sizes: Mapping[str, int]) -> str:
    """Returns ``factor`` in terms of axis sizes, such as `` = cp`` or `` = 1 / cp``; "" if there is none."""
    axes = [(name, size) for name, size in sizes.items() if size > 1]
    names = [[pair] for pair in axes] + ([axes] if len(axes) > 1 else [])
    for chosen in names:
        product = 1
        for _, size in chosen:
            product *= size
        text = " x ".join(name for name, _ in chosen)
        if abs(factor - product) < 0.01 * product:
            return f" = {text}"
        if abs(factor * product - 1) < 0.01:
            return f" = 1 / {text if len(chosen) == 1 else f'({text})'}"
    return ""


@dataclass
class Report:
    """The result of an audit.

    Attributes:
        compared: unit -> number of its tensors that were compared.
        largest: the largest difference that is no finding, divided by its bound.
        left_out: messages about what could not be compared, and why.
        findings: the tensors that differ.
        seconds: seconds that the comparison took.
        notes: messages about how the step was changed for the comparison.
    """

    compared: dict[str, int] = field(default_factory=dict)
    largest: float = 0.0
    left_out: dict[str, None] = field(default_factory=dict)  # in order, each once
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        count = sum(self.compared.values())
        lines = [
            f"audit: {count} tensors of {len(self.compared)} modules compared, in {self.seconds:.1f} s"
        ]
        lines += [f"not compared: {line}" for line in self.left_out]
        return "\n".join([*lines, *self.notes])


def message(findings: Sequence[Finding], report: Report, sizes: Mapping[str, int]) -> str:
    """Returns the text of the error that an audit with findings raises."""
    first, *rest = findings
    lines = [
        "this step does not compute what the plain model computes on the same batch. "
        + first.text(sizes)
    ]
    lines += [f"also {each.text(sizes)}" for each in rest[:4]]
    if len(rest) > 4:
        lines.append(f"and {len(rest) - 4} more: p3d.audit.report(model).findings")
    lines += [f"not compared: {line}" for line in list(report.left_out)[:3]]
    return "\n".join(lines)


# ---- the likely cause: the first that fits ----


def cause_of(
    found: Finding, ranks: tuple[int, ...], sizes: Mapping[str, int], state: Any
) -> Finding:
    """Returns a copy of ``found`` with ``ranks`` and the likely cause filled in.

    Args:
        state: the state of context parallelism of the model; None: it has none.
    """
    cp = sizes.get("cp", 1) > 1 and state is not None
    factor = found.gap.factor
    axis = "" if factor is None else named(factor, sizes)
    what = found.what
    scalar = not found.gap.place
    cause = ""
    if what.startswith("gradient of ") and axis:
        cause = f"a sum over {axis.removeprefix(' = ').removeprefix('1 / ')} that is missing or made twice"
    elif "position" in what:
        cause = "positions of this rank's part, where those of the whole sequence are needed"
    elif what.startswith("output") and scalar and cp:
        cause = (
            "a mean over this rank's part, of which ranks have other numbers of tokens; use "
            "p3d.optim.global_mean, or num_items_in_batch"
        )
    elif what.startswith("output") and cp and _skipped(found.unit, state):
        cause = (
            "the attention that was made parallel was not called: another kernel ran, which attends to this "
            "rank's part alone; call F.scaled_dot_product_attention for real tensors too"
        )
    elif cp and not what.startswith("gradient"):
        cause = (
            "positions are mixed by something else than attention, or it depends on the length or on the "
            "positions of this rank's part; compute it of what p3d.cp.positions gives, or before shard_batch"
        )
    elif cp:
        cause = "something outside attention mixes positions in the backward"
    elif what.startswith("output"):
        cause = (
            "the plan: a layer whose style does not fit what is computed around it, or other weights "
            "than the plain model's"
        )
    elif what.startswith("gradient"):
        cause = "a gradient that is partial over an axis and was not summed, or was summed twice"
    return replace(found, ranks=ranks, cause=cause)


def _skipped(unit: str, state: Any) -> bool:
    """Returns whether attention in ``unit`` was made context-parallel, but none of it was called."""
    prefix = f"{unit}." if unit else ""
    inside = [path for path in state.planned if path == unit or path.startswith(prefix)]
    return bool(inside) and not any(path in state.attended for path in inside)
