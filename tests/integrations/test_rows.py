"""Every row of docs/integrations.md: another library's program, as far from the plain run as rounding."""

import pytest

pytest.importorskip("lightning")  # what the rows' files import
import torch
from _support.integrations.rows import Difference, Result, Row, Run, check, difference
from _support.integrations.table import rows

from parallel3d.testing import GlooPool


# timm has an extra of its own, which .ci/run installs last; it runs those rows by table.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.id) for row in rows() if "timm" not in row.packages]
)
def test_row(gloo_pool: GlooPool, row: Row) -> None:
    for result in gloo_pool.run(row.run, *row.arguments, world_size=row.world_size, timeout=300):
        check(row, result)


def test_what_is_too_far_is_found() -> None:
    """The check of a row."""
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
