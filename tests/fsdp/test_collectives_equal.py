"""What a step communicates equals what torch's fully_shard does, or is less for a stated reason."""

import pytest
from _support.fsdp.collective_cases import (
    CASES,
    IN_REDUCE_DTYPE,
    NONE,
    PAGE,
    Case,
    Results,
    collect,
    table,
)

from parallel3d._torch.autograd import follows_grad_dtype

pytestmark = pytest.mark.slow(every=True)


@pytest.fixture(scope="module")
def results() -> Results:
    return collect()


@pytest.mark.parity("show: the recorder's list of collectives equals torch's")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torchs(case: Case, results) -> None:
    for ours, torchs in results[case.name]:
        assert ours, "nothing was recorded"
        smaller, faults = set(), set()
        for key in {*ours, *torchs}:
            (calls, size), (their_calls, their_size) = ours.get(key, NONE), torchs.get(key, NONE)
            assert calls <= their_calls, f"{key}: {calls} calls, torch makes {their_calls}"
            if size > their_size:
                faults.add(key)
            elif (calls, size) != (their_calls, their_size):
                smaller.add(key)
        # A reason for each difference, and none that is no longer one.
        assert smaller == set(case.smaller)
        assert faults == set(case.torchs_fault)


def test_second_step_is_as_the_first(results) -> None:
    assert all(first == second for first, second in results.values())


def test_page_is_up_to_date(results) -> None:
    page, now = PAGE.read_text().splitlines(), table(results).splitlines()
    other = [line for line, found in zip(page, now, strict=True) if line != found]
    if follows_grad_dtype:  # the page is of torch 2.13; 2.15 has mended this
        other = [line for line in other if IN_REDUCE_DTYPE not in line]
    assert not other, "run python tests/_support/collectives_table.py"
