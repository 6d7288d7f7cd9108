"""ep in the planner: what the fullest rank gets, what is sent, which layouts are proposed."""

import csv
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from planner_runs import predict_run, read_models

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner import Cluster, Workload, plan, predict, spec_from_hf_config
from parallel3d.planner.mixture import exchanges
from parallel3d.planner.planning import memory_groups, time_groups
from parallel3d.planner.report import LANES, layer_spans
from parallel3d.planner.routing import peak

MIXTRAL = spec_from_hf_config("mixtral-8x7b")
QWEN = spec_from_hf_config("qwen3-30b-a3b")
A100 = Cluster.of("a100-80gb-sxm", 4)
H200 = Cluster.of("h200", 2)
WORK = Workload(4096, micro_batch=1)
DATA = Path(__file__).parents[2] / "benchmarks" / "published"


def test_uniform_routing_fills_all_ranks_alike() -> None:
    for ep, rows in ((2, 0.25), (4, 0.45), (8, 0.67), (16, 0.82)):
        assert peak("uniform", 128, 8, ep).rows / 8 == pytest.approx(rows, abs=0.005)
        assert peak("uniform", 128, 8, ep).pairs == 1
    assert peak("uniform", 6, 2, 4) == pytest.approx((4 * (1 - 4 * 3 / 30), 4 * 2 / 6))


def test_the_fullest_rank_of_other_routing() -> None:
    """All tokens come to the rank of a hot expert, with a pair for it and some of the others."""
    assert peak("hot", 128, 8, 8) == pytest.approx((8, 8 * (1 + 7 * 15 / 127) / 8))
    assert peak("hot", 8, 1, 8) == (8, 8)
    found = [peak(f"zipf:{exponent}", 128, 8, 8).pairs for exponent in (0.5, 1.0, 1.5)]
    assert 1 < found[0] < found[1] < found[2] < 8
    assert peak("zipf:1.2", 128, 8, 1) == (1, 1)
    assert peak("zipf:1e-9", 128, 8, 8).pairs == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("routing", ["hott", "zipf", "zipf:-1", "zipf:nan", "zipf:inf", 3])
def test_routing_that_is_none(routing) -> None:
    with pytest.raises(PlanningError, match=r"routing is .*'uniform', 'hot' .*'zipf:1.2'"):
        Workload(4096, micro_batch=1, routing=routing)


def test_what_is_sent() -> None:
    """Rows in the compute dtype, a weight and two numbers a pair; back come gradients of the first two."""
    found = predict(QWEN, MeshLayout(1, 16, 1, ep=8), H200, WORK)
    unit = next(unit for unit in QWEN.units if unit.kind == "block")
    rows = 4096 * peak("uniform", 128, 8, 8).rows * 2048 * 2
    sent = [(each.way, each.name, each.nbytes) for each in exchanges(unit, found.local)]
    assert sent == [
        ("forward", "counts", 8 * 16),
        ("forward", "rows", rows),
        ("forward", "weights", 4096 * 8 * 2),
        ("forward", "pairs", 4096 * 8 * 8),
        ("forward", "outputs", rows),
        ("backward", "outputs", rows),
        ("backward", "rows", rows),
        ("backward", "weights", 4096 * 8 * 2),
    ]
    divided = predict(QWEN, MeshLayout(1, 8, 2, ep=8), H200, WORK)
    assert exchanges(unit, divided.local)[1].nbytes == rows / 2


def test_experts_are_not_padded() -> None:
    """8 experts on 32 shards are divided in another dim; with ep each rank has its part."""
    plain, divided = (predict(MIXTRAL, MeshLayout(1, 32, 1, ep=ep), A100, WORK) for ep in (1, 8))
    whole = MIXTRAL.numel * 4 / 32
    for each in (plain, divided):
        assert each.memory.terms["parameters"].value == pytest.approx(whole, rel=1e-3)


def test_what_one_full_rank_costs() -> None:
    """Its matmuls, messages and activations are more; parameters are the same."""
    layout, slow = MeshLayout(1, 16, 1, ep=8), []
    for routing in ("uniform", "zipf:1.2", "hot"):
        found = predict(QWEN, layout, H200, replace(WORK, routing=routing, checkpointing="none"))
        slow.append((found.step_seconds, found.memory.terms["activations"].value))
        assert found.as_dict()["routing"] == routing
    assert slow == sorted(slow) and slow[0][1] < slow[2][1] and slow[0][0] < slow[2][0]
    same = [
        predict(QWEN, replace(layout, ep=1), H200, replace(WORK, routing=r))
        for r in ("uniform", "hot")
    ]
    assert same[0].step_seconds == same[1].step_seconds


def test_recomputation_sends_again_but_selectively() -> None:
    waited = {}
    for kind in ("none", "selective", "full"):
        found = predict(QWEN, MeshLayout(1, 16, 1, ep=8), H200, replace(WORK, checkpointing=kind))
        waited[kind] = found.time.terms["expert parallel"].value
    assert waited["selective"] == pytest.approx(waited["none"], rel=0.05)
    assert waited["full"] > 1.4 * waited["none"]


def test_groups_add_up() -> None:
    for layout in (MeshLayout(1, 16, 1, ep=8), MeshLayout(1, 4, 2, cp=2, ep=4)):
        found = predict(QWEN, layout, H200, WORK)
        assert sum(memory_groups(found).values()) == pytest.approx(found.memory.needed)
        groups = time_groups(found)
        assert sum(groups.values()) == pytest.approx(found.step_seconds)
        assert groups["expert parallel"] > 0 and "other" not in groups
        assert "ep" in {span.lane for span in layer_spans(found)} <= set(LANES)
        assert (
            f"ep {layout.ep}" in str(found.layout) and found.as_dict()["layout"]["ep"] == layout.ep
        )


@pytest.mark.parametrize(
    ("model", "layout", "why"),
    [
        ("llama-3.1-8b", MeshLayout(1, 16, 1, ep=2), "has no experts"),
        ("mixtral-8x7b", MeshLayout(1, 16, 1, ep=16), "ep 16 is more than the 8 experts"),
    ],
)
def test_layouts_without_experts_to_divide(model: str, layout: MeshLayout, why: str) -> None:
    spec = spec_from_hf_config(model)
    with pytest.raises(PlanningError, match=why):
        predict(spec, layout, H200, WORK)
    found = plan(spec, H200, WORK, ep=layout.ep)
    assert not found.candidates and all(why in each.reason for each in found.refused)


def test_plan_tries_what_divides_the_experts() -> None:
    found = plan(QWEN, H200, WORK)
    tried = {each.layout for each in (*found.candidates, *found.refused)}
    assert {layout.ep for layout in tried} == {1, 2, 4, 8, 16}
    assert {each.layout.ep for each in plan(QWEN, H200, WORK, ep=8).candidates} == {8}
    dense = plan(spec_from_hf_config("llama-3.1-8b"), H200, WORK)
    assert {each.layout.ep for each in dense.candidates} == {1}


def test_layouts_that_experts_publish() -> None:
    """ep 8 is the first for Mixtral on 32 A100. With a micro-batch of 1 to 8 it can't be told from the first,
    nor for Qwen3-30B on 16 H200."""
    work = Workload(4096, global_batch=1024)
    assert plan(MIXTRAL, A100, work).best.layout.ep == 8
    for model, cluster in ((MIXTRAL, A100), (QWEN, H200)):
        close = plan(model, cluster, work).close
        assert any(each.layout.ep == 8 and 1 <= each.micro_batch <= 8 for each in close)


def test_published_runs_with_ep() -> None:
    """Of NVIDIA's Qwen3-30B; one release of ten was a third as fast as the next."""
    with (DATA / "runs.csv").open(newline="", encoding="utf-8") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["model"] == "qwen3-30b-a3b" and row["ep"] != "1"
        ]
    models = read_models(DATA / "models.csv")
    found = {row["id"]: predict_run(row, models) for row in rows}
    errors = sorted(
        abs(found[row["id"]].tokens_per_second_per_gpu / float(row["tokens_per_s_per_gpu"]) - 1)
        for row in rows
    )
    assert len(errors) == 10 and {each.layout.ep for each in found.values()} == {8, 16}
    assert statistics.median(errors) <= 0.25
