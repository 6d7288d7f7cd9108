"""Tensor-parallel collectives: never more than torch's on the same plan, fewer where inputs are shared."""

import pytest
from _support.tp.tp_collective_cases import CASES, PAGE, Case, Results, collect, table

pytestmark = pytest.mark.slow(every=True)


@pytest.fixture(scope="module")
def results() -> Results:
    return collect()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_never_more_than_torchs(case: Case, results: Results) -> None:
    ours, torchs, prepared = (results[case.name][k] for k in ("ours", "torch", "torch, prepared"))
    assert set(ours) == set(torchs) == set(prepared)
    for kind, (calls, size) in ours.items():
        for their_calls, their_size in (torchs[kind], prepared[kind]):
            assert calls <= their_calls
            assert size <= their_size


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fewer_where_inputs_are_shared(case: Case, results: Results) -> None:
    ours, torchs = (results[case.name][k] for k in ("ours", "torch"))
    blocks = 2 if "Llama" in case.name else 1
    saved = blocks * sum(len(children) - 1 for children in case.readers.values())
    kinds = ("all_gather", "reduce_scatter") if case.sequence else ("all_reduce",)
    for kind in kinds:
        assert ours[kind][0] == torchs[kind][0] - saved


def test_page_is_up_to_date(results: Results) -> None:
    assert PAGE.read_text() == table(results), "run python tests/_support/collectives_table.py"
