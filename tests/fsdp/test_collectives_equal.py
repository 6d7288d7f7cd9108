"""What a step communicates equals what torch's fully_shard does, or is less for a stated reason."""

import warnings
from pathlib import Path

import pytest
from collective_cases import CASES, NONE, Case, Totals, compare, table

DOCUMENT = Path(__file__).parents[2] / "docs" / "collectives.md"


@pytest.fixture(scope="module")
def results() -> dict[str, list[tuple[Totals, Totals]]]:
    with warnings.catch_warnings():
        # torch warns of a view that the model returns: its own hook, unused here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        return {case.name: compare(case) for case in CASES}


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


def test_the_documents_table_is_up_to_date(results) -> None:
    assert DOCUMENT.read_text() == table(results), "run python docs/collectives.py"
