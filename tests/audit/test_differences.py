"""Differences, their factors and causes: numbers only."""

from math import inf

import pytest
import torch

from parallel3d.audit.findings import (
    BOUNDS,
    Finding,
    Gap,
    Report,
    bound_of,
    cause_of,
    gap_between,
    message,
    named,
)

SIZES = {"replicate": 2, "shard": 3, "cp": 4, "tp": 1}
X = torch.linspace(-1, 2, 30, dtype=torch.float64).view(5, 6)


@pytest.mark.parametrize(
    ("factor", "name"),
    [
        (2.0, " = replicate"),
        (1 / 3, " = 1 / shard"),
        (4.0, " = cp"),
        (24.0, " = replicate x shard x cp"),
        (1 / 24, " = 1 / (replicate x shard x cp)"),
        (5.0, ""),
        (-2.0, ""),
    ],
)
def test_factors_of_axes(factor: float, name: str) -> None:
    assert named(factor, SIZES) == name


def test_equal_within_rounding() -> None:
    for dtype in BOUNDS:
        gap = gap_between((X * 3).to(dtype), X.to(dtype) * 3, bound_of(dtype))
        assert gap.difference <= bound_of(dtype) and gap.factor is None


def test_a_multiple() -> None:
    gap = gap_between(X, X * 0.5, 1e-9)
    assert gap.factor == pytest.approx(0.5) and gap.difference == pytest.approx(0.5)


def test_one_entry() -> None:
    other = X.clone()
    other[3, 4] += 0.1
    gap = gap_between(X, other, 1e-9)
    assert gap.place == (3, 4) and gap.difference == pytest.approx(0.05) and gap.factor is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite(bad: float) -> None:
    other = X.clone()
    other[0, 1] = bad
    assert gap_between(X, other, 1e-9) == Gap(inf, (0, 1))
    assert gap_between(other, other, 1e-9).difference == 0


def test_integers_and_shapes() -> None:
    ids = torch.arange(6)
    assert gap_between(ids, ids, 1.0).difference == 0
    assert gap_between(ids, ids.flip(0), 1.0).difference == inf
    assert gap_between(X, X[:2], 1.0).difference == inf
    assert gap_between(X[:0], X[:0], 1.0).difference == 0


def test_relative_to_the_floor() -> None:
    zero = torch.zeros(3)
    assert gap_between(zero, zero + 1e-7, 1e-4, floor=1.0).difference == pytest.approx(1e-7)
    assert gap_between(zero, zero + 1e-7, 1e-4).difference == inf


def found(what: str, factor: float | None = None, place: tuple[int, ...] = (0,)) -> Finding:
    return Finding("layers.0", what, Gap(0.5, place, factor), 1e-4)


class State:
    planned, attended = frozenset({"layers.0.attn"}), frozenset[str]()


class Attended(State):
    attended = frozenset({"layers.0.attn"})


@pytest.mark.parametrize(
    ("finding", "state", "words"),
    [
        (
            found("gradient of weight", 0.25),
            Attended(),
            "sum over cp that is missing or made twice",
        ),
        (found("gradient of weight", 2.0), None, "sum over replicate"),
        (found("input position_ids"), Attended(), "positions of this rank's part"),
        (found("output loss", place=()), Attended(), "global_mean"),
        (found("output"), State(), "another kernel ran"),
        (found("output"), Attended(), "mixed by something else than attention"),
        (found("gradient of its input 0"), Attended(), "in the backward"),
        (found("output"), None, "the plan"),
        (found("gradient of weight"), None, "partial over an axis"),
    ],
)
def test_causes(finding: Finding, state: object, words: str) -> None:
    named_one = cause_of(finding, (1, 3), SIZES, state)
    assert words in named_one.cause and named_one.ranks == (1, 3)
    assert "ranks 1, 3" in named_one.text(SIZES)


def test_a_message_has_the_first_and_counts_the_rest() -> None:
    report = Report(left_out={"head: its class is not torch's own": None})
    text = message([found("output")] * 7, report, SIZES)
    assert text.count("also layers.0") == 4 and "and 2 more" in text
    assert "not compared: head" in text
