"""Intervals, the probability that a layout fits, and layouts that can't be told apart."""

import dataclasses
import json
from math import exp, log

import pytest

from parallel3d.mesh import MeshLayout
from parallel3d.planner import Cluster, Workload, plan, predict, spec_from_hf_config
from parallel3d.planner.stacks import stack_of, stacks
from parallel3d.planner.uncertainty import (
    FAMILIARITY,
    Interval,
    count_close,
    familiarity,
    fits_probability,
    residuals,
)

LLAMA = spec_from_hf_config("llama-3.1-8b")
WORK = Workload(seq_len=4096, micro_batch=1)
PAIRS = [("a", "a100-80gb-sxm"), ("b", "a100-80gb-sxm"), ("c", "h100-80gb-sxm")]


def found(work: Workload = WORK, name: str = "h100", shard: int = 8):
    return predict(LLAMA, MeshLayout(1, shard, 1), Cluster.of(name, shard // 8), work)


def width(interval: Interval) -> float:
    return log(interval.high / interval.low)


@pytest.mark.parametrize(
    ("stack", "gpu", "level"),
    [
        ("a", "a100-80gb-sxm", "known"),
        ("a", "a100-40gb-sxm", "apart"),
        ("c", "a100-80gb-sxm", "apart"),
        ("d", "a100-80gb-sxm", "new"),
        ("a", "h100-80gb-sxm", "new"),  # of which only c is known
        ("a", "mi300x", "new"),
    ],
)
def test_familiarity(stack: str, gpu: str, level: str) -> None:
    assert familiarity(PAIRS, stack, gpu) == level
    assert level in FAMILIARITY


def test_a_stack_or_gpu_that_no_run_has_gets_a_wide_interval() -> None:
    known = found(dataclasses.replace(WORK, stack="fsdp1-2023"))
    other = found(dataclasses.replace(WORK, stack="fsdp1-2023"), "mi300x")
    assert (known.familiarity, other.familiarity) == ("known", "new")
    assert found().familiarity == "new"  # there are no published runs of this library
    assert width(other.speed_interval) > 1.5 * width(known.speed_interval)
    for each in (known, other):
        assert each.tokens_per_second_per_gpu in each.speed_interval
        assert each.speed_interval.low < each.speed_interval.high


def test_a_stack_that_was_measured_on_the_gpu() -> None:
    measured = dataclasses.replace(stack_of("parallel3d"), measured_on="h100-80gb-sxm")
    work = dataclasses.replace(WORK, stack=measured)
    assert found(work).familiarity == "measured"
    assert found(work, "a100").familiarity == "new"
    assert width(found(work).speed_interval) < width(found().speed_interval)


def test_the_table_is_of_stacks_that_exist_and_less_familiar_is_wider() -> None:
    table = residuals()
    assert {stack for stack, _ in table.pairs} < set(stacks())
    widths = [
        table.speed[level].high - table.speed[level].low for level in ("known", "apart", "new")
    ]
    assert widths == sorted(widths)
    assert set(table.speed) == set(FAMILIARITY)
    assert all(ends.low < 0 < ends.high for ends in (*table.speed.values(), table.memory))


def test_fits_is_a_probability_with_the_reserve_stated() -> None:
    assert fits_probability(80.0, 80.0) == pytest.approx(0.5)
    parts = [fits_probability(needed, 80.0) for needed in (40, 70, 79, 81, 90, 160)]
    assert parts == sorted(parts, reverse=True)
    assert parts[0] > 0.95 and parts[-1] < 0.05
    small, large = found(), found(dataclasses.replace(WORK, micro_batch=8))
    assert small.fits and not large.fits
    assert small.fits_probability > 0.9 > 0.1 > large.fits_probability
    assert small.reserve == small.memory.capacity - small.memory.needed > 0 > large.reserve
    low, high = small.memory_interval
    assert low < small.memory.reserved < high


def test_json_has_them() -> None:
    data = json.loads(json.dumps(found().as_dict()))
    low, high = data["tokens_per_second_per_gpu_interval"]
    assert low < data["tokens_per_second_per_gpu"] < high
    assert data["reserved_gib_interval"][0] < data["reserved_gib"]
    assert 0.5 < data["fits_probability"] <= 1
    assert data["reserve_gib"] == pytest.approx(data["capacity_gib"] - data["needed_gib"])
    assert (data["stack"], data["familiarity"]) == ("parallel3d", "new")


def test_speeds_that_cannot_be_told_apart() -> None:
    part = residuals().within
    speeds = [100.0, 100 * exp(-0.9 * part), 100 * exp(-1.1 * part), 10.0]
    assert count_close(speeds) == 2
    assert count_close(speeds[3:]) == 1
    assert count_close([]) == 0


def test_plan_says_which_are_close() -> None:
    work = Workload(seq_len=4096, global_batch=64)
    planned = plan(LLAMA, Cluster.of("h100", 2), work, checkpointing=("selective",))
    close = planned.close
    assert close == planned.layouts[: len(close)]
    speeds = [each.tokens_per_second_per_gpu for each in planned.layouts]
    assert log(speeds[0] / speeds[len(close) - 1]) <= residuals().within
    assert len(close) == len(speeds) or log(speeds[0] / speeds[len(close)]) > residuals().within
    assert planned.as_dict(1)["close"] == len(close)
