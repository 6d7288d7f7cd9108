"""The check of docs/integrations.md's rows finds what is too far."""

import pytest
import torch
from _support.integrations.rows import Difference, Result, Row, Run, check, difference


def test_what_is_too_far_is_found() -> None:
    plain = Run([2.0] * 10, {"w": torch.tensor([4.0]), "zero": torch.zeros(1)})
    other = Run([2.0] * 9 + [2.2], {"w": torch.tensor([4.4]), "zero": torch.tensor([0.1])})
    assert difference(other, plain) == pytest.approx((0.1, 0.1))
    row = Row("x", (), 0, (1, 1, 1), "plain", difference)
    check(row, Result(Difference(1e-10, 1e-10), None))
    for far in (Difference(1e-8, 0), Difference(0, 1e-8)):
        with pytest.raises(AssertionError):
            check(row, Result(far, None))
    with pytest.raises(AssertionError):
        difference(Run([2.0] * 10, {"w": torch.ones(1)}), plain)
