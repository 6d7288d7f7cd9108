"""Ranks that diverge, fail or hang: each kind ends on every rank, in time, with the cause named."""

from pathlib import Path

import pytest
from _support.guards import jobs
from _support.guards.jobs import CASES, WATCH, Case, table
from _support.launch import launch

ALIKE = {
    "one micro-batch less",
    "fewer steps",
    "a unit skipped",
    "another size",
}  # another case shows the same
QUICK = {"a rank raises"}
DOCS = Path(__file__).parents[2] / "docs" / "guards.md"


def check(case: Case, endings: list[jobs.Ending | None]) -> None:
    for rank, ending in enumerate(endings):
        if rank == case.dying:
            assert ending is None
            continue
        assert ending is not None
        assert ending.seconds < jobs.LIMIT
        told = (rank, ending.error, ending.message)
        if rank == jobs.ODD and case.odd is not None:
            error, text = case.odd
            assert ending.error == error and text in ending.message, told
            continue
        assert ending.error == case.error, told
        for text in case.texts:
            assert text in ending.message, told


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.kind, marks=[pytest.mark.slow] * (c.kind in ALIKE))
        for c in CASES
        if c.finder != WATCH
    ],
)
def test_divergence_is_named_on_every_rank(gloo_pool, case: Case) -> None:
    limit = 2 * jobs.LIMIT
    check(case, gloo_pool.run(jobs.ending, case.job, world_size=jobs.RANKS, timeout=limit))


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.kind, marks=[pytest.mark.slow] * (c.kind not in QUICK))
        for c in CASES
        if c.finder == WATCH
    ],
)
def test_failure_is_named_on_every_rank(case: Case) -> None:
    """In processes of their own, which end as those of a job do; the others need seconds to be sure."""
    dying = () if case.dying is None else (case.dying,)
    found = launch(jobs.ending, case.job, ranks=jobs.RANKS, timeout=2 * jobs.LIMIT, dying=dying)
    check(case, [ending for ending, _ in found])


def test_the_table_in_the_documentation() -> None:
    assert table() in DOCS.read_text()
