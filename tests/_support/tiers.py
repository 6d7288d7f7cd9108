"""Which tests run when: a few cases at once, more of them in CI, all with ``-m full``.

``pytest -n auto`` runs the first case of each test function and one that changes from day to day; ``.ci/run``
all of them, but of those that are marked

- ``slow``: the first ``IN_CI`` cases of a function and one that changes,
- ``slow(turns=True)``, whole programs, which take a minute each: ``TURNS`` of all these, others each day,
- ``slow(every=True)``: all.

The others are marked ``slow`` and ``full``; a test's own marks stay. A command that names its tests (a file,
``::`` or ``-k``) runs all cases but those with marks of their own.
"""

import os
from collections import defaultdict
from collections.abc import Iterable
from datetime import date

import pytest

__all__ = ["DAY", "IN_CI", "TURNS", "all_are_asked_for", "mark"]

IN_CI = 2
"""The first slow cases of one function, which ``.ci/run`` runs each day."""
TURNS = 6
"""Programs that ``.ci/run`` runs each day."""
DAY = "PARALLEL3D_TESTS_DAY"
"""The environment variable with the number of the day: all workers collect the same, at midnight too."""


def all_are_asked_for(config: pytest.Config) -> bool:
    """Whether the command line names its tests."""
    return bool(config.option.keyword) or any(".py" in given for given in config.args)


def today() -> int:
    return int(os.environ.setdefault(DAY, str(date.today().toordinal())))


def mark(items: Iterable[pytest.Item], day: int | None = None) -> None:
    """Adds ``slow`` to the cases that a quick run leaves out, ``full`` to those that CI leaves out too."""
    day = today() if day is None else day
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    programs: list[pytest.Item] = []
    for item in items:
        if item.get_closest_marker("full") is not None:
            continue
        own = item.get_closest_marker("slow")
        if own is not None and own.kwargs.get("turns"):
            programs.append(item)
        else:
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        fast = [case for case in cases if case.get_closest_marker("slow") is None]
        marks = ((case, case.get_closest_marker("slow")) for case in cases)
        slow = [case for case, own in marks if own is not None and not own.kwargs.get("every")]
        mark_all_but(1, fast[1:], pytest.mark.slow, day)
        mark_all_but(1, slow[IN_CI:], pytest.mark.full, day)
    mark_all_but(TURNS, programs, pytest.mark.full, day)


def mark_all_but(n: int, cases: list[pytest.Item], tier: pytest.MarkDecorator, day: int) -> None:
    """Marks all cases but the ``n`` whose turn it is."""
    for place, case in enumerate(cases):
        if (place - n * day) % len(cases) >= n:
            case.add_marker(tier)
