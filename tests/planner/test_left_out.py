"""benchmarks/planner_fit.py and planner_intervals.py: what is left out doesn't reach its own prediction."""

import csv
import importlib
from pathlib import Path
from types import ModuleType

import pytest
from planner_runs import read_models

from parallel3d.planner import constants

pytestmark = pytest.mark.ci

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DATA = BENCHMARKS / "published"
MODELS = read_models(DATA / "models.csv")
LF, SM = "mosaicml/llm-foundry", "MooreThreads/SimuMax"
FMS = "foundation-model-stack/fms-fsdp"


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


def test_each_source_is_a_group(modules, rows, left) -> None:
    assert list(left) == [LF, FMS, SM, "NVIDIA/dgxc-benchmarking"]
    found = [name for each in left.values() for name in each.predictions]
    assert found == [row["id"] for row in rows]


def test_what_no_other_source_moves_goes_back(modules, left) -> None:
    """Here only SimuMax has tensor parallelism among the sources of tp_wait, and only llm-foundry triton's
    attention: it is left out with all its GPUs."""
    before = modules[0].BEFORE
    assert left[SM].constants["tp_wait"] == before["tp_wait"] == 1.0
    assert left[LF].constants["tp_wait"] > 1.0
    assert left[LF].constants["attention_triton"] == before["attention_triton"] == 0.4
    # Of old matmuls on Hopper llm-foundry's H100 runs say the same as fms-fsdp's.
    old = "gemm_hopper of fsdp2-2024"
    assert left[LF].constants[old] < 1.0 and left[FMS].constants[old] < 1.0


def test_the_constants_are_put_back(modules, left) -> None:
    for each in modules[0].free_constants():
        assert each.value != each.before
    assert constants.CONSTANTS["tp_wait"].value == 1.4


def test_a_group_does_not_see_its_own_speeds(modules, rows, left) -> None:
    """Rows that are twice as fast as published: the other groups' fits move, their own doesn't."""
    group = LF
    other = [
        {**row, "tokens_per_s_per_gpu": str(2 * float(row["tokens_per_s_per_gpu"]))}
        if modules[0].source_of(row) == group
        else row
        for row in rows
    ]
    again = modules[0].left_out(other, MODELS)
    assert again[group].constants == left[group].constants
    assert again[FMS].constants != left[FMS].constants


def test_intervals_of_the_others(modules, rows, left) -> None:
    _, intervals = modules
    residuals = intervals.residuals_of(rows, left)
    levels = {(each.source, each.gpu): each.level for each in residuals}
    assert levels[SM, "b200-sxm"] == "new"
    assert (
        levels[LF, "h100-80gb-sxm"] == "new"
    )  # of the others' H100 only fms-fsdp's and NVIDIA's are there
    found = [
        intervals.Residual(f"{level} {at}", "gpu", level, value * side)
        for level, value in (("known", 0.1), ("apart", 0.2), ("new", 0.4))
        for at in range(4)
        for side in (-1, 1)
    ]
    table = intervals.table_of(found)
    assert [tuple(table[level]) for level in ("known", "apart", "new")] == [
        (-0.1, 0.1),
        (-0.2, 0.2),
        (-0.4, 0.4),
    ]
    values = [intervals.Residual("a", "b", "known", n / 100) for n in range(-50, 51)]
    assert intervals.ends_of(values) == pytest.approx((-0.4, 0.4), abs=0.011)


def test_all_sources_weigh_the_same(modules) -> None:
    _, intervals = modules
    many, one = [("many", n / 100) for n in range(100)], [("one", 5.0)]
    assert intervals.weighted(many, 0.5) == pytest.approx(0.49)
    assert intervals.weighted([*many, *one], 0.5) == pytest.approx(0.99)  # all of the first source
    assert intervals.weighted([*many, *one], 0.9) == 5.0


def test_the_spread_of_verdicts(modules) -> None:
    """Runs that all fit as predicted are sure; some that don't make it wide."""
    _, intervals = modules

    class Found:
        def __init__(self, needed: float) -> None:
            self.memory = type("Memory", (), {"needed": needed, "capacity": 80.0})

    def spread(pairs) -> float:
        rows = [{"id": str(n), "source": "a", "fits": fits} for n, (_, fits) in enumerate(pairs)]
        found = {str(n): Found(needed) for n, (needed, _) in enumerate(pairs)}
        return intervals.verdict(rows, {"g": type("Left", (), {"predictions": found})})

    sure = [(70, "1"), (60, "1"), (78, "1"), (82, "0"), (100, "0")] * 5
    assert spread(sure) == 0.02
    assert spread([*sure, *[(70, "0"), (75, "0"), (88, "1"), (92, "1")] * 3]) > 0.1
