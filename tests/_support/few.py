"""few: the first cases of a parametrized test run with the quick tests, the rest with the slow ones."""

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["few"]


def few(cases: Iterable[Any], quick: int = 1, slow: int | None = None, by: str = "") -> list[Any]:
    """``cases`` with the mark ``slow`` from the ``quick``-th on, and ``full`` after ``slow`` more of them.

    Args:
        cases: values; of a ``pytest.param`` its marks stay.
        by: the test's argument names, if a case is a tuple of values for several of them.
    """
    made = []
    for place, case in enumerate(cases):
        marks = [pytest.mark.slow] * (place >= quick)
        if slow is not None and place >= quick + slow:
            marks.append(pytest.mark.full)
        if isinstance(case, type(pytest.param())):
            made.append(case._replace(marks=[*case.marks, *marks]))
        else:
            made.append(pytest.param(*(case if by else (case,)), marks=marks))
    return made
