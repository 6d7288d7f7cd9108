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
    (
        lambda: Workload(4096, float8_scaling="rowwise"),
        "is 'rowwise' and float8 False; give float8=True",
    ),
    (lambda: Workload(2048, compile="false"), "compile is 'false'; it must be True or False"),
    (lambda: Workload(0), "seq_len is 0; it must be an int, 1 or more"),
    (lambda: Workload(2048, micro_batch=1.5), r"micro_batch is 1\.5"),
    (lambda: Workload(2048, optimizer="lion9"), "optimizer is 'lion9'; it must be one of adamw"),
    (
        lambda: Workload(2048, checkpointing="some"),
        "checkpointing is 'some'; it must be one of none, selective, offload, full",
    ),
    (
        lambda: Workload(2048, wire_dtype="fp16"),
        "wire_dtype is 'fp16'; it must be one of None, bf16",
    ),
    (
        lambda: Workload(2048, reduce_dtype="bf16", wire_dtype="fp32"),
        "wire_dtype is 'fp32' and reduce_dtype 'bf16'.*use reduce_dtype=\"fp32\"",
    ),
    (lambda: dataclasses.replace(ZERO1, wire_dtype="bf16"), "wire_dtype is 'bf16' with sharding="),
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


def test_all_to_alls_pay_within_a_node() -> None:
    """Over shard on several nodes each rank's own card carries what a ring shares among a node's."""
    wired = dataclasses.replace(WORK, wire_dtype="bf16")
    seconds = [
        [predict(LLAMA, layout, Cluster.of("h100", nodes), w).step_seconds for w in (WORK, wired)]
        for layout, nodes in ((MeshLayout(4, 8, 1), 4), (MeshLayout(1, 32, 1), 4))
    ]
    assert seconds[0][1] < seconds[0][0] and seconds[1][1] > seconds[1][0]


class TestNumbers:
    def test_mfu_counts_nothing_twice(self) -> None:
        rack = Cluster.of("gb200", 18)
        flops = [
            predict(LLAMA, MeshLayout(72 // tp, 1, tp), rack, WORK).time.model_flops * tp
            for tp in (1, 8, 24)
        ]
        assert flops == pytest.approx([flops[0]] * 3)

    @pytest.mark.parametrize("kernel", ["naive", "flash2"])
    def test_float32_is_slower_with_every_kernel(self, kernel: str) -> None:
        half, whole = (
            predict(
                *(LLAMA, MeshLayout(1, 24, 1), H100),
                dataclasses.replace(WORK, attention=kernel, precision=precision),
            ).time.terms
            for precision in ("bf16", "fp32")
        )
        assert 7 < whole["matmul forward"].value / half["matmul forward"].value < 8.1
        assert whole["attention forward"].value > 2.2 * half["attention forward"].value

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


SHAPES = {"layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "head_dim": "128"}
MODELS = Models({"m": {"model": "m", **SHAPES, "ffn": "14336", "vocab": "128256"}})

ROW = {"id": "a", "model": "m", "gpu": "h100", "shard": "8"}


class TestRuns:
    def test_case_spaces_and_nodes_that_are_not_full(self) -> None:
        cells = {"gpu": " H100-80GB-SXM ", "shard": "12", "precision": " BF16", "sharding": "FSDP"}
        found = predict_run({**ROW, **cells, "compile": "yes", "attention": " "}, MODELS)
        assert found.workload.compile
        assert found.cluster.world_size == 12

    @pytest.mark.parametrize(
        ("cells", "said"),
        [
            *(({"shard": n}, "") for n in ("8.7", "inf")),
            ({"gpus_per_node": "0"}, ""),
            ({"gpu_count": "12"}, r"gpu_count is 12, but replicate \* shard \* tp is 8"),
            ({"gpu_count": "64", "replicate": "2"}, "gpu_count is 64, but"),
        ],
    )
    def test_numbers(self, cells: dict[str, str], said: str) -> None:
        with pytest.raises(PlanningError, match=f"run a: {said}"):
            predict_run({**ROW, **cells}, MODELS)

    def test_a_row_that_cannot_be_read_leaves_the_others(self) -> None:
        with pytest.warns(UserWarning, match="run b: there is no GPU 'v1000'"):
            found = predict_runs([ROW, {**ROW, "id": "b", "gpu": "v1000"}], MODELS)
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
    json.dumps(predict(LLAMA, MeshLayout(1, 24, 1), H100, WORK).as_dict(), allow_nan=False)
