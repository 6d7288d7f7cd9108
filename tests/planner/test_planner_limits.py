"""What a fresh reader broke: groups that straddle nodes, odd arguments and files, sums one can not follow."""

import dataclasses
import json
from math import exp, nan

import pytest
import torch
from planner_runs import (
    Models,
    predict_run,
    predict_runs,
    read_models,
    write_predictions,
)
from torch import nn

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner import Cluster, Workload, plan, predict, spec_from_module, spec_from_shapes
from parallel3d.planner.cluster import (
    AxisLink,
    collective_time,
    describe_collective,
    gpu,
    gpus,
)
from parallel3d.planner.prediction import unit_terms

LLAMA = spec_from_shapes(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
WORK = Workload(seq_len=4096, micro_batch=1)
H100 = Cluster.of("h100", 3)


def test_groups_that_end_with_nodes_are_faster() -> None:
    astride = predict(LLAMA, MeshLayout(4, 6, 1), H100, WORK)
    within = predict(LLAMA, MeshLayout(4, 6, 1), Cluster.of("h100", 4, gpus_per_node=6), WORK)
    assert astride.tokens_per_second_per_gpu < within.tokens_per_second_per_gpu


ONE = Cluster.of("h100")
ZERO1 = dataclasses.replace(WORK, sharding="zero1")
SIZES = {"layers": 2, "hidden": 64, "ffn": 128, "vocab": 100}
MISTAKES = [
    (
        lambda: predict(LLAMA, MeshLayout(1, 8, 1), ONE, ZERO1),
        "zero1 shards nothing over shard, .* give replicate 8",
    ),
    (lambda: predict(LLAMA, (1, 8, 1), ONE, WORK), "it must be a MeshLayout"),
    (
        lambda: predict(LLAMA, MeshLayout(1, 24, 1), H100, Workload(2048, 3, 100)),
        "global_batch is 100; it must be a multiple of .*72: 72 or 144",
    ),
    *(
        (lambda nic=nic: Cluster.of("h100", 2, nic=nic), "nic is")
        for nic in (-1, 0, nan, float("inf"), "50")
    ),
    *((lambda nodes=nodes: Cluster.of("h100", nodes), "nodes is") for nodes in (0, 1.5, True, "2")),
    (
        lambda: Cluster(gpu="h100-80gb-sxm", nodes=2),
        r"Cluster.of\('h100-80gb-sxm', nodes=2\)",
    ),
    (lambda: gpu(None), "the GPU is None"),
    (lambda: Workload(2048, compile="false"), "compile is 'false'; it must be True or False"),
    (lambda: Workload(0), "seq_len is 0; it must be an int, 1 or more"),
    (lambda: Workload(2048, micro_batch=1.5), r"micro_batch is 1\.5"),
    (lambda: Workload(2048, optimizer="lion9"), "optimizer is 'lion9'; it must be one of adamw"),
    (
        lambda: Workload(2048, checkpointing="some"),
        "checkpointing is 'some'; it must be one of none, selective, offload, full",
    ),
    (
        lambda: plan(LLAMA, ONE, WORK, checkpointing="offlaod"),
        "must be one of none, selective, offload, full",
    ),
    (
        lambda: plan(LLAMA, ONE, Workload(2048)),
        "micro_batch and global_batch are both None",
    ),
    (lambda: plan(LLAMA, ONE, WORK, memory_limit_gib=nan), "memory_limit_gib is nan"),
    (lambda: plan(LLAMA, ONE, WORK, replicate=2.5), r"replicate is 2\.5"),
    (lambda: plan(LLAMA, ONE, WORK, tp=3), "no replicate x shard x tp of the sizes"),
    *((lambda n=n: spec_from_shapes(heads=n, **SIZES), "heads is") for n in (0, "4")),
    (
        lambda: spec_from_shapes(heads=4, **{**SIZES, "hidden": 65}),
        "heads is 4; it must divide hidden, 65",
    ),
]


def test_mistakes_are_said() -> None:
    for call, said in MISTAKES:
        with pytest.raises(PlanningError, match=said):
            call()


@pytest.mark.parametrize("reshard", [False, ()], ids=str)
def test_one_kind_and_one_setting_may_be_given_alone(reshard) -> None:
    assert plan(LLAMA, ONE, WORK, checkpointing="full", reshard_after_forward=reshard).candidates


def test_modules_whose_input_is_unknown() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    with torch.device("meta"):
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with pytest.raises(PlanningError, match="give example="):
        spec_from_module(model, tp_plan=None)


class TestNumbers:
    def test_mfu_counts_nothing_twice(self) -> None:
        rack = Cluster.of("gb200", 18)
        flops = [
            predict(LLAMA, MeshLayout(72 // tp, 1, tp), rack, WORK).time.model_flops * tp
            for tp in (1, 8, 24)
        ]
        assert flops == pytest.approx([flops[0]] * 3)

    def test_float32_is_slower_with_every_kernel(self) -> None:
        for kernel in ("naive", "flash2"):
            work = dataclasses.replace(WORK, attention=kernel)
            half, whole = (
                predict(LLAMA, MeshLayout(1, 24, 1), H100, dataclasses.replace(work, precision=p))
                for p in ("bf16", "fp32")
            )
            ratio = (
                whole.time.terms["matmul forward"].value / half.time.terms["matmul forward"].value
            )
            assert 7 < ratio < 8.1
            name = "attention forward"
            assert whole.time.terms[name].value > 2.2 * half.time.terms[name].value

    @pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all", "send"])
    @pytest.mark.parametrize("sizes", [(64, 8), (6, 2), (8, 8), (4, 1)], ids=str)
    def test_collectives_can_be_followed(self, kind: str, sizes: tuple[int, int]) -> None:
        link, cluster = AxisLink(*sizes), Cluster.of("h100", 8)
        _, inputs = describe_collective(kind, 2**28, link, cluster)
        value = {name: each.value for name, each in inputs.items()}
        if "latency" in value:
            seconds = value["latency"] * 1e-6 + 2**28 / (value["rate"] * 1e9)
        else:
            ramp = value["ramp"] * 1e6
            moved = 2**28 + ramp * (1 - exp(-(2**28) / ramp))
            seconds = value["start"] * 1e-6 + moved / (value["bandwidth"] * 1e9)
        assert seconds == pytest.approx(collective_time(kind, 2**28, link, cluster))

    def test_attention_and_elementwise_can_be_followed(self) -> None:
        work = dataclasses.replace(WORK, attention="flash2")
        found = predict(LLAMA, MeshLayout(1, 24, 1), H100, work)
        block = next(u for u in found.model.units if u.kind == "block")
        terms = {t.name: t for t in unit_terms(found, block)}
        assert "after Ampere" in dict(terms["attention forward (flash2)"].inputs)
        given = dict(terms["elementwise forward"].inputs)
        elements = sum(v for k, v in given.items() if k.startswith("elements of"))
        moved = given["tokens"] * given["bytes an element"] * elements
        assert moved / terms["elementwise forward"].value == pytest.approx(3.35e12 * 0.8)

    def test_sources_are_written_out(self) -> None:
        assert "aiconfigurator" in gpu("h100").source
        assert "ml-engineering" in gpu("mi300x").source


class TestProfiles:
    def test_names_of_any_case(self, tmp_path) -> None:
        text = (
            "[gpu.MyGpu]\npeak = 100\ncapacity_gib = 20\nbandwidth = 1\ngemm_efficiency = 0.5\n"
            "gemm_start_us = 5\nnode = 4\nlink = 10\nnic = 1\n"
        )
        file = tmp_path / "own.toml"
        file.write_text(text)
        assert gpu("MyGpu", file).peak == 100
        for extra, said in (
            ('collectives = "nope"', "there are no collectives 'nope'"),
            ("domain = 'a'", "domain is 'a'"),
            ("fp32_slowdown = inf", "fp32_slowdown is inf"),
        ):
            file.write_text(text + extra + "\n")
            with pytest.raises(PlanningError, match=said):
                gpus(file)
        file.write_text("gpu = 3\n")
        with pytest.raises(PlanningError, match="GPUs are tables"):
            gpus(file)
        with pytest.raises(PlanningError, match="can't be read"):
            gpus(tmp_path / "none.toml")


SHAPES = {"layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "head_dim": "128"}
MODELS = Models({"m": {"model": "m", **SHAPES, "ffn": "14336", "vocab": "128256"}})


class TestRuns:
    def test_what_gpu_count_leaves(self) -> None:
        row = {"id": "a", "model": "m", "gpu": "h100", "gpu_count": "64", "shard": "8"}
        assert predict_run(row, MODELS).layout.sizes == (8, 8, 1)
        with pytest.raises(PlanningError, match="run a: gpu_count is 12; it must be a multiple"):
            predict_run({**row, "gpu_count": "12"}, MODELS)
        with pytest.raises(PlanningError, match="gpu_count is 64, but"):
            predict_run({**row, "replicate": "2"}, MODELS)

    def test_zero1_in_the_column_of_shard(self) -> None:
        row = {"id": "a", "model": "m", "gpu": "h100", "shard": "8", "sharding": "ZeRO1"}
        assert predict_run(row, MODELS).layout.sizes == (8, 1, 1)

    def test_case_spaces_and_nodes_that_are_not_full(self) -> None:
        row = {
            "id": "a",
            "model": "m",
            "gpu": " H100-80GB-SXM ",
            "shard": "12",
            "precision": " BF16",
        }
        found = predict_run({**row, "sharding": "FSDP", "compile": "yes", "attention": " "}, MODELS)
        assert found.workload.compile
        assert found.cluster.world_size == 12

    @pytest.mark.parametrize("cell", [{"shard": "8.7"}, {"shard": "inf"}, {"gpus_per_node": "0"}])
    def test_numbers(self, cell: dict[str, str]) -> None:
        with pytest.raises(PlanningError, match="run a: "):
            predict_run({"id": "a", "model": "m", "gpu": "h100", **cell}, MODELS)

    def test_a_row_that_cannot_be_read_leaves_the_others(self) -> None:
        good = {"id": "a", "model": "m", "gpu": "h100", "shard": "8"}
        with pytest.warns(UserWarning, match="run b: there is no GPU 'v1000'"):
            found = predict_runs([good, {**good, "id": "b", "gpu": "v1000"}], MODELS)
        assert [row["id"] for row in found] == ["a", "b"]
        assert found[0]["fits"] == "1"
        assert found[1]["fits"] == ""

    def test_files_of_spreadsheets(self, tmp_path) -> None:
        models, runs = tmp_path / "models.csv", tmp_path / "runs.csv"
        names = ["model", *SHAPES, "ffn", "vocab"]
        cells = ["m", *SHAPES.values(), "14336", "128256"]
        models.write_text(",".join(names) + "\n" + ",".join(cells) + "\n", encoding="utf-8-sig")
        runs.write_text("id,model,gpu,shard\nx,m,h100,8\n", encoding="utf-8-sig")
        assert write_predictions(runs, models, tmp_path / "out.csv") == 1
        runs.write_text("model,gpu\nm,h100\n")
        with pytest.raises(PlanningError, match="has no column 'id'; it has model, gpu"):
            write_predictions(runs, models, tmp_path / "out.csv")
        runs.write_text("id\n", encoding="utf-16")
        with pytest.raises(PlanningError, match="can't be read"):
            read_models(runs)


def test_json_has_no_nan() -> None:
    found = predict(LLAMA, MeshLayout(1, 24, 1), H100, WORK)
    json.dumps(found.as_dict(), allow_nan=False)
