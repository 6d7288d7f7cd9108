"""In which form tp ranks hold a tensor: fitted to values, without any process group."""

import math

import pytest
import torch
from torch import Tensor

from parallel3d.testing.differences.fit import WHOLE, Comparison, Fit, FitGap, FitGroup

GROUPS = [FitGroup(0, (0, 1)), FitGroup(1, (2, 3))]
torch.manual_seed(0)
PLAIN = {d: torch.randn(3, 6, 10, dtype=torch.float64) for d in (0, 1)}


def held(*cuts) -> dict[int, Tensor]:
    """Each group's ranks hold what ``cuts`` make of its tensor."""
    return {
        rank: cut(PLAIN[group.data_rank])
        for group in GROUPS
        for rank, cut in zip(group.ranks, cuts, strict=True)
    }


def columns(*indices: int):
    return lambda x: x[..., list(indices)]


FORMS = {
    "whole": (held(torch.clone, torch.clone), Fit("whole"), ""),
    "uneven shard": (held(lambda x: x[:, :4], lambda x: x[:, 4:]), Fit("shard", 1), ""),
    "packed": (held(columns(0, 1, 5, 6, 7), columns(2, 3, 4, 8, 9)), Fit("slices", 2), ""),
    "shared heads": (held(columns(*range(6)), columns(*range(4, 10))), Fit("slices", 2), ""),
    "exchanged": (held(columns(*range(5, 10)), columns(*range(5))), Fit("slices", 2), "order"),
    "missing": (held(columns(*range(5)), columns(*range(5))), Fit("slices", 2), "no tp rank has"),
    "sum": (held(lambda x: x * 0.25, lambda x: x * 0.75), Fit("partial"), "not reduced"),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    parallel, want, odd = FORMS[name]
    fit = Comparison(PLAIN, parallel, GROUPS, 1e-9).fit()
    assert isinstance(fit, Fit), fit
    assert (fit.kind, fit.dim) == (want.kind, want.dim)
    assert odd in fit.odd and bool(odd) == bool(fit.odd)


def test_all_groups_must_fit() -> None:
    parallel = held(lambda x: x[:, :3], lambda x: x[:, 3:])
    parallel[2] = parallel[2] * 1.5
    gap = Comparison(PLAIN, parallel, GROUPS, 1e-9).fit()
    assert isinstance(gap, FitGap) and gap.rank == 2 and 0.1 < gap.difference < 1


@pytest.mark.parametrize(
    ("cuts", "hint"),
    [
        ((lambda x: 2 * x, lambda x: 2 * x), "2 times the plain model's (tp is 2)"),
        ((lambda x: x * (1 + 1e-7), torch.clone), "float32"),
        ((torch.clone, lambda x: x + 1), "different values"),
        ((lambda x: x[:, :2], lambda x: x[:, :2, :5]), "shape"),
    ],
)
def test_hints(cuts, hint: str) -> None:
    gap = Comparison(PLAIN, held(*cuts), GROUPS, 1e-9).fit()
    assert isinstance(gap, FitGap) and hint in gap.hint, gap


def test_a_known_form_is_required() -> None:
    """A sum that a style says is whole."""
    parallel = FORMS["sum"][0]
    gap = Comparison(PLAIN, parallel, GROUPS, 1e-9).fit(WHOLE)
    assert isinstance(gap, FitGap) and "a reduction is missing" in gap.hint


def test_gradients_of_shared_heads() -> None:
    """Each rank's own copy has a part of it, or all of it."""
    fit = Comparison(PLAIN, FORMS["shared heads"][0], GROUPS, 1e-9).fit()
    assert isinstance(fit, Fit)
    whole = FORMS["shared heads"][0]
    parts = {r: t.clone() for r, t in whole.items()}
    for rank in (1, 3):
        parts[rank][..., :2] = 0  # columns 4 and 5, which the other rank has
    assert Comparison(PLAIN, whole, GROUPS, 1e-9).fit_gradient(fit) == "whole"
    assert Comparison(PLAIN, parts, GROUPS, 1e-9).fit_gradient(fit) == "partial"
    parts[0] *= 2
    assert isinstance(Comparison(PLAIN, parts, GROUPS, 1e-9).fit_gradient(fit), FitGap)


def test_infinities_and_nans_in_the_same_places_are_equal() -> None:
    mask = torch.full((4, 4), -math.inf).triu(1)
    mask[3, 3] = math.nan
    one = [FitGroup(0, (0, 1))]
    assert Comparison({0: mask}, {0: mask.clone(), 1: mask.clone()}, one, 1e-9).fit() == Fit(
        "whole"
    )
    other = mask.clone()
    other[0, 1] = 0.0
    assert isinstance(Comparison({0: mask}, {0: mask, 1: other}, one, 1e-9).fit(), FitGap)


def test_biases_of_one_dim() -> None:
    bias = torch.arange(6.0)
    exchanged = {0: bias[3:], 1: bias[:3]}
    fit = Comparison({0: bias}, exchanged, [FitGroup(0, (0, 1))], 1e-9).fit()
    assert isinstance(fit, Fit) and fit.odd
