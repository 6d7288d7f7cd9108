"""benchmarks/planner_fit.py and planner_intervals.py: what is left out doesn't reach its own prediction."""

import csv
import importlib
from pathlib import Path
from types import ModuleType

import pytest
from planner_runs import read_models

from parallel3d.planner import constants

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DATA = BENCHMARKS / "published"
MODELS = read_models(DATA / "models.csv")
LF, SM = "mosaicml/llm-foundry", "MooreThreads/SimuMax"


@pytest.fixture(scope="module")
def modules() -> tuple[ModuleType, ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("planner_fit"), importlib.import_module("planner_intervals")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    """Two of each of five (source, GPU)."""
    with (DATA / "runs.csv").open(newline="", encoding="utf-8") as file:
        known = {row["id"]: row for row in csv.DictReader(file)}
    names = "lf-a-019 lf-a-026 lf-h-006 lf-h-012 fms-7b-h100 fms-13b-h100 sm-70b12l-tp2-m8 sm-70b12l-tp8-m8"
    return [known[name] for name in f"{names} dg-n15-tp2-16 dg-n15-tp4-16".split()]


@pytest.fixture(scope="module")
def left(modules, rows):
    return modules[0].left_out(rows, MODELS)


def test_each_source_and_gpu_is_a_group(modules, rows, left) -> None:
    assert list(left) == [
        *((LF, "a100-80gb-sxm"), (LF, "h100-80gb-sxm")),
        *(("foundation-model-stack/fms-fsdp", "h100-80gb-sxm"), (SM, "b200-sxm")),
        ("NVIDIA/dgxc-benchmarking", "h100-80gb-sxm"),
    ]
    found = [name for each in left.values() for name in each.predictions]
    assert found == [row["id"] for row in rows]


def test_what_no_other_source_moves_goes_back(modules, left) -> None:
    """Here only SimuMax has tensor parallelism among the sources of tp_wait."""
    before = modules[0].BEFORE["tp_wait"]
    assert left[SM, "b200-sxm"].constants["tp_wait"] == before == 1.0
    assert left[LF, "h100-80gb-sxm"].constants["tp_wait"] > before
    # Of Hopper's matmuls llm-foundry's A100 says nothing, fms-fsdp's H100 does.
    assert left[LF, "h100-80gb-sxm"].constants["gemm_hopper"] < 1.0


def test_the_constants_are_put_back(modules, left) -> None:
    for each in modules[0].free_constants():
        assert each.value != each.before or each.name == "attention_triton"
    assert constants.CONSTANTS["tp_wait"].value == 1.4


def test_a_group_does_not_see_its_own_speeds(modules, rows, left) -> None:
    """Rows that are twice as fast as published: the other groups' fits move, their own doesn't."""
    group = (LF, "h100-80gb-sxm")
    other = [
        {**row, "tokens_per_s_per_gpu": str(2 * float(row["tokens_per_s_per_gpu"]))}
        if modules[0].group_of(row) == group
        else row
        for row in rows
    ]
    again = modules[0].left_out(other, MODELS)
    assert again[group].constants == left[group].constants
    fms = ("foundation-model-stack/fms-fsdp", "h100-80gb-sxm")
    assert again[fms].constants != left[fms].constants


def test_intervals_of_the_others(modules, rows, left) -> None:
    _, intervals = modules
    residuals = intervals.residuals_of(rows, left)
    levels = {each.group: each.level for each in residuals}
    assert levels[SM, "b200-sxm"] == "new"
    assert levels[LF, "h100-80gb-sxm"] == "apart"
    table = intervals.table_of(residuals)
    low, high = table["new"]
    assert low < table["apart"].low <= table["known"].low < table["known"].high < high
    assert 0 <= intervals.coverage(residuals) <= 1
    values = [intervals.Residual(("a", "b"), "known", n / 100) for n in range(-50, 51)]
    assert intervals.ends_of(values) == (-0.4, 0.4)


def test_the_spread_of_verdicts(modules) -> None:
    """Runs that all fit as predicted are sure; some that don't make it wide."""
    _, intervals = modules

    class Found:
        def __init__(self, needed: float) -> None:
            self.memory = type("Memory", (), {"needed": needed, "capacity": 80.0})

    def spread(pairs) -> float:
        rows = [{"id": str(n), "fits": fits} for n, (_, fits) in enumerate(pairs)]
        found = {str(n): Found(needed) for n, (needed, _) in enumerate(pairs)}
        return intervals.verdict(rows, {"g": type("Left", (), {"predictions": found})})

    sure = [(70, "1"), (60, "1"), (78, "1"), (82, "0"), (100, "0")] * 5
    assert spread(sure) == 0.02
    assert spread([*sure, *[(70, "0"), (75, "0"), (88, "1"), (92, "1")] * 3]) > 0.1
