"""Pipelines of other software: schedules against a simulation, stages, published runs."""

import csv
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from planner_runs import predict_run, read_models
from typer.testing import CliRunner

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner import (
    Cluster,
    Pipeline,
    Workload,
    compare_pipelines,
    plan,
    predict,
    spec_from_hf_config,
)
from parallel3d.planner.memory import memory_of
from parallel3d.planner.pipeline import blocks_of_stages, stage_model
from parallel3d.planner.stages import stages_of
from parallel3d.tools.cli.app import app

DATA = Path(__file__).parents[2] / "benchmarks" / "published"
MODELS = read_models(DATA / "models.csv")
with (DATA / "pipelines.csv").open(newline="", encoding="utf-8") as file:
    RUNS = {row["id"]: row for row in csv.DictReader(file)}
LLAMA = spec_from_hf_config("llama-3.1-70b")
H100 = Cluster.of("h100-80gb-sxm", 8)
MEGATRON = Workload(8192, 1, 128, stack="megatron-te", sharding="zero1", reduce_dtype="bf16")

# A simulation of schedules: the operations of each stage in their order, each begun when its input is there.

Operation = tuple[str, int, int]  # "F" or "B", chunk, micro-batch


def order_of(pipeline: Pipeline, stage: int, micro: int) -> Iterator[Operation]:
    """The operations of one stage as Megatron-LM runs them."""
    p, v = pipeline.stages, pipeline.virtual
    group = p * v

    def numbered(index: int, forward: bool) -> Operation:
        chunk = index % group // p if forward else v - 1 - index % group // p
        return "F" if forward else "B", chunk * p + stage, index // group * p + index % p

    total = micro * v
    warm_up = {
        "gpipe": total,
        "1f1b": p - stage - 1,
        "interleaved": 2 * (p - stage - 1) + (v - 1) * p,
    }[pipeline.schedule]
    warm_up = min(warm_up, total)
    yield from (numbered(i, True) for i in range(warm_up))
    for i in range(total - warm_up):
        yield numbered(i + warm_up, True)
        yield numbered(i, False)
    yield from (numbered(i, False) for i in range(total - warm_up, total))


def simulate(pipeline: Pipeline, seconds: list[float], micro: int) -> tuple[float, list[float]]:
    """Seconds of a step whose micro-batch takes ``seconds`` on each stage, a third of them forward; and the
    micro-batches in flight on each at most."""
    p, v, chunks = pipeline.stages, pipeline.virtual, pipeline.chunks
    queues = [list(order_of(pipeline, stage, micro)) for stage in range(p)]
    clock, done, flight, most = [0.0] * p, {}, [0] * p, [0] * p
    while any(queues):
        before = len(done)
        for stage, queue in enumerate(queues):
            while queue:
                kind, chunk, at = queue[0]
                need = ("F", chunk - 1, at) if kind == "F" else ("B", chunk + 1, at)
                if kind == "B" and chunk == chunks - 1:
                    need = ("F", chunk, at)
                is_first = kind == "F" and chunk == 0
                if not is_first and need not in done:
                    break
                begin = max(clock[stage], 0.0 if is_first else done[need])
                clock[stage] = begin + seconds[stage] / v * (1 / 3 if kind == "F" else 2 / 3)
                done[queue.pop(0)] = clock[stage]
                flight[stage] += 1 if kind == "F" else -1
                most[stage] = max(most[stage], flight[stage])
        assert len(done) > before, "the schedule hangs"
    return max(clock), [count / v for count in most]


PIPELINES = [
    *(Pipeline(p, kind) for p in (2, 4, 7) for kind in ("1f1b", "gpipe")),
    *(Pipeline(p, "interleaved", v) for p, v in ((2, 2), (4, 5), (8, 3))),
]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
@pytest.mark.parametrize("rounds", [1, 4])
def test_bubble_and_activations_are_those_of_the_schedule(pipeline: Pipeline, rounds: int) -> None:
    p, micro = pipeline.stages, rounds * pipeline.stages
    whole, flight = simulate(pipeline, [3.0] * p, micro)
    assert micro * 3 + pipeline.bubble([(3.0, 1.0)] * (p - 1)) == pytest.approx(whole)
    assert flight == [pipeline.in_flight(stage, micro) for stage in range(p)]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_a_slow_stage(pipeline: Pipeline) -> None:
    """The last one, which has the head."""
    p, micro = pipeline.stages, 4 * pipeline.stages
    whole, _ = simulate(pipeline, [*[3.0] * (p - 1), 4.0], micro)
    assert micro * 4 + pipeline.bubble([(3.0, 1.0)] * (p - 1)) == pytest.approx(whole, rel=0.01)


def test_zero_bubble_has_the_least() -> None:
    """Of arXiv:2401.10241: forward, input and weight gradients of equal length leave a third."""
    others = [(3.0, 1.0)] * 3
    assert Pipeline(4, "zero_bubble").bubble(others) == 3
    assert Pipeline(4, "1f1b").bubble(others) == 9
    assert [Pipeline(4, "zero_bubble").in_flight(stage, 8) for stage in range(4)] == [4] * 4


@pytest.mark.parametrize(
    ("model", "pipeline", "counts"),
    [
        ("llama-3.1-70b", Pipeline(4), [20, 20, 20, 20]),
        ("llama-3.1-70b", Pipeline(8, "interleaved", 5), [10] * 8),
        ("llama-3.1-405b", Pipeline(8), [15, *[16] * 6, 15]),
        ("llama-3.1-405b", Pipeline(8, "interleaved", 8), [15, *[16] * 6, 15]),
        ("llama-3.1-405b", Pipeline(16, "interleaved", 8), [7, *[8] * 14, 7]),
        ("llama-3.1-8b", Pipeline(5), [6, 7, 7, 7, 5]),
    ],
)
def test_blocks_are_divided(model: str, pipeline: Pipeline, counts: list[int]) -> None:
    spec = spec_from_hf_config(model)
    found = blocks_of_stages(spec, pipeline)
    assert [sum(each.counts) for each in found] == counts
    parts = [stage_model(spec, each) for each in found]
    assert sum(part.numel for part in parts) == spec.numel
    kinds = [{unit.kind for unit in part.units} for part in parts]
    assert [("embedding" in each, "tail" in each) for each in kinds] == [
        (n == 0, n == len(kinds) - 1) for n in range(len(kinds))
    ]


def test_tied_weights_are_on_both_ends() -> None:
    spec = spec_from_hf_config("llama-3.2-1b")
    parts = [stage_model(spec, each) for each in blocks_of_stages(spec, Pipeline(4))]
    table = next(unit for unit in spec.units if unit.kind == "root")
    assert sum(part.numel for part in parts) == spec.numel + table.numel
    assert [part.vocab > 0 for part in parts] == [False, False, False, True]


def test_what_a_stage_does() -> None:
    """The work of all stages is that of the model; the first one keeps most, if there is no head."""
    found = predict(LLAMA, MeshLayout(4, 1, 4), H100, MEGATRON, Pipeline(4))
    whole = predict(LLAMA, MeshLayout(16, 1, 4), H100, replace(MEGATRON, global_batch=16))
    assert found.time.model_flops * 4 / 32 == pytest.approx(whole.time.model_flops)
    assert found.tokens_per_gpu == 128 * 8192 / 64
    stages = stages_of(found)
    assert {each.cluster.world_size for each in stages} == {16}
    one, more = (
        predict(LLAMA, MeshLayout(4, 1, 4), H100, MEGATRON, pipeline).memory.terms["activations"]
        for pipeline in (Pipeline(4), Pipeline(4, "interleaved", 5))
    )
    ratio = (
        (2 * 3 + 4 * 4 + 1) / 5 / 4
    )  # arXiv:2104.04473's 1 + (p - 1) / (p v), and one chunk more
    assert more.value / one.value == pytest.approx(ratio, rel=0.02)
    assert "bubble" in found.explain() and "pipeline" in found.as_dict()


def test_fsdp_in_a_pipeline_gathers_once() -> None:
    """As ZeRO-1: torch's stages keep parameters until the step's end."""
    fsdp, zero1 = (
        predict(LLAMA, layout, H100, replace(MEGATRON, sharding=sharding), Pipeline(4))
        for sharding, layout in (("fsdp", MeshLayout(1, 4, 4)), ("zero1", MeshLayout(4, 1, 4)))
    )
    assert fsdp.step_seconds == pytest.approx(zero1.step_seconds)
    assert fsdp.memory.needed == zero1.memory.needed


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Pipeline(4, "zbv"), "schedule is 'zbv'; it must be one of 1f1b, interleaved"),
        (lambda: Pipeline(0), "stages is 0"),
        (lambda: Pipeline(4, "1f1b", 2), "virtual is 2 with schedule '1f1b'; it must be 1"),
        (lambda: Pipeline(4, "interleaved"), "virtual is 1 .* it must be 2 or more"),
        (lambda: predict(LLAMA, MeshLayout(), H100, MEGATRON, 4), "pipeline is 4; it must be a"),
        (lambda: pipelined(Pipeline(3)), "3 stages don't divide 64 GPUs"),
        (lambda: pipelined(Pipeline(8, "interleaved", 12)), "10 chunks a stage are the most"),
        (lambda: pipelined(Pipeline(4), sharding="fsdp", layout=MeshLayout(4, 1, 4)), "give shard 4"),
    ],
)  # fmt: skip
def test_pipelines_that_can_not_be(make, said: str) -> None:
    with pytest.raises(PlanningError, match=said):
        make()


def pipelined(pipeline: Pipeline, layout: MeshLayout | None = None, sharding: str = "zero1"):
    layout = layout or MeshLayout(-1, 1, 4)
    return predict(LLAMA, layout, H100, replace(MEGATRON, sharding=sharding), pipeline)


def test_zero1_is_sharded_over_cp_and_of_experts_over_what_ep_leaves() -> None:
    """Megatron's distributed optimizer."""
    work = replace(MEGATRON, global_batch=16)
    found = [
        predict(LLAMA, MeshLayout(16 // cp, 1, 4, cp=cp), H100, work).memory.terms for cp in (1, 4)
    ]
    assert found[0]["optimizer"] == found[1]["optimizer"]
    qwen, nodes = spec_from_hf_config("qwen3-30b-a3b"), Cluster.of("h100", 2)
    experts = sum(u.count * p.numel for u in qwen.units for p in u.parameters if p.experts)
    found = predict(qwen, MeshLayout(1, 16, 1, ep=8), nodes, replace(work, seq_len=4096))
    dense = qwen.numel - experts
    state = found.memory.terms["optimizer"].value
    assert state == pytest.approx(8 * (dense / 16 + experts / 8 / 2), rel=1e-6)
    assert found.memory.terms["gradients"].value == 2 * (dense + experts // 8)


class TestPublished:
    """Of pipelines.csv; no constant was fitted to them."""

    def speed(self, name: str) -> float:
        """Predicted beside measured."""
        row = RUNS[name]
        found = predict_run(row, MODELS).tokens_per_second_per_gpu
        return found / float(row["tokens_per_s_per_gpu"])

    def test_each_has_its_source(self) -> None:
        assert len(RUNS) == 74
        assert all(row["url"].startswith("https://") and row["notes"] for row in RUNS.values())

    def test_what_a_pipeline_costs(self) -> None:
        """NVIDIA's proxies of 405B: one, three and nine stages of the same software."""
        for kind in ("bf16", "fp8"):
            one, *others = (self.speed(f"dg-405b-{kind}-{count}") for count in (32, 96, 192, 576))
            assert all(abs(each / one - 1) < 0.04 for each in others)

    def test_schedules(self) -> None:
        """torchtitan's 1F1B and interleaved 1F1B."""
        assert self.speed("tt-405b-int") / self.speed("tt-405b-1f1b") == pytest.approx(1, abs=0.03)

    def test_fewer_micro_batches(self) -> None:
        for model in ("70b12l", "405b4l"):
            few, many = (self.speed(f"sm-{model}-pp2-m{count}") for count in (4, 32))
            assert few / many == pytest.approx(1, abs=0.04)

    def test_memory(self) -> None:
        for name, row in RUNS.items():
            if name.startswith("sm-"):
                found = predict_run(row, MODELS).memory.allocated / 2**30
                assert found / float(row["memory_gib"]) == pytest.approx(1, abs=0.07)

    def test_speeds(self) -> None:
        bf16 = [self.speed(name) - 1 for name, row in RUNS.items() if row["precision"] == "bf16"]
        assert len(bf16) == 28
        assert statistics.median(map(abs, bf16)) < 0.12


class TestBesideAPlan:
    """What a pipeline of other software would do."""

    def test_one_that_is_better(self) -> None:
        """70B on 64 H100 with 50 Gb/s each between nodes, over which a pipeline sends least."""
        found = plan(LLAMA, replace(H100, nic=6.25), Workload(8192, global_batch=128))
        beside = compare_pipelines(found)
        assert beside is not None and beside.is_better and beside.best is found.best
        assert beside.pipeline not in found.candidates and beside.pipeline.fits
        assert beside.pipeline.pipeline.stages > 1
        assert beside.gain > 0.05 > beside.own
        assert f"would be {beside.gain:.0%} faster" in str(beside)
        assert json.loads(json.dumps(beside.as_dict()))["gain"] == beside.gain

    def test_one_that_is_not(self) -> None:
        """Long sequences, whose attention hides all else."""
        beside = compare_pipelines(plan(LLAMA, H100, Workload(131072, global_batch=32)))
        assert beside is not None and not beside.is_better
        assert str(beside).startswith("No pipeline is faster by more than predictions")

    def test_one_that_alone_fits(self) -> None:
        beside = compare_pipelines(plan(LLAMA, H100, Workload(8192, global_batch=128), tp=64))
        assert beside is not None and beside.gain is None and "would fit" in str(beside)

    def test_none(self) -> None:
        """One GPU has no stages; a little memory has no room."""
        tiny = spec_from_hf_config("llama-3.2-1b")
        assert compare_pipelines(plan(tiny, Cluster.of("h100", 1, 1), Workload(2048, 1))) is None
        found = plan(LLAMA, H100, Workload(8192, global_batch=128))
        assert compare_pipelines(found, memory_limit_gib=5) is None


def test_on_the_command_line() -> None:
    words = (
        "predict --model llama-3.1-70b --gpu h100 --nodes 8 --seq-len 8192 --micro-batch 1 "
        "--global-batch 128 --replicate 2 --shard 1 --cp 2 --tp 4 "
        "--sharding zero1 --stack nemo-te --pp 4 --virtual 5"
    )
    found = json.loads(CliRunner().invoke(app, f"{words} --json").stdout)
    assert found["pipeline"] == {"stages": 4, "schedule": "interleaved", "virtual": 5}
    assert found["seconds"]["bubble"] > 0
    assert found["refused"] == "parallelize has no pipelines; this one is nemo-te's"
    assert "4 stages, interleaved 5" in CliRunner().invoke(app, words).stdout
    planned = CliRunner().invoke(
        app,
        "plan --model llama-3.1-8b --gpu h100 --nodes 1 --seq-len 8192 --global-batch 128 --json",
    )
    assert json.loads(planned.stdout)["pipeline"]["pipeline"]["stages"] > 1
    failed = CliRunner().invoke(app, f"{words} --schedule 1f1b")
    assert failed.exit_code and "virtual is 5" in failed.output


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(4),
        Pipeline(4, "interleaved", 5),
        Pipeline(4, "gpipe"),
        Pipeline(4, "zero_bubble"),
        Pipeline(3),  # 80 blocks: stages that differ
    ],
    ids=str,
)
def test_the_fullest_stage_counts(pipeline: Pipeline) -> None:
    """Whichever it is, though only the first of those with the same blocks is looked at."""
    work = Workload(4096, 1, 48, sharding="zero1", stack="nemo-te")
    layout, cluster = MeshLayout(2, 1, 4), Cluster.of("h100", pipeline.stages)
    found = predict(spec_from_hf_config("llama-2-70b"), layout, cluster, work, pipeline)
    each = [
        memory_of(own, pipeline.in_flight(stage, found.accumulation)).needed
        for stage, own in enumerate(stages_of(found))
    ]
    assert len(each) == pipeline.stages and found.memory.needed == max(each)
