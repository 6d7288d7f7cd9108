"""benchmarks/played_against_predict.py: what predict says of a step, and what its streams take, played."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("played_against_predict")


def check(sweep: ModuleType, cases: list[Any]) -> None:
    """Within 5 %, or as far apart as its reason allows."""
    wrong = []
    for case in cases:
        found = sweep.compare(case)
        if abs(found.apart) > sweep.allowed(case):
            wrong.append(f"{found.apart:+.1%}  {case}")
    assert not wrong, "\n".join(wrong)


def test_the_sweep_has_every_setting(sweep: ModuleType) -> None:
    cases = list(sweep.cases())
    assert len(set(cases)) >= 200
    assert {case.layout for case in cases} == set(sweep.LAYOUTS)
    for kind in sweep.KINDS:
        assert {case.machine for case in cases if case.checkpointing == kind} == set(sweep.MACHINES)


def test_one(sweep: ModuleType) -> None:
    check(sweep, list(sweep.cases())[8:9])


@pytest.mark.slow
def test_a_few(sweep: ModuleType) -> None:
    check(sweep, list(sweep.cases())[3::37])


@pytest.mark.full
@pytest.mark.parametrize("part", range(6))
def test_all(sweep: ModuleType, part: int) -> None:
    check(sweep, list(sweep.cases())[part::6])
