"""The report's timeline and groups say what the prediction says."""

from dataclasses import replace
from itertools import pairwise

import pytest

from parallel3d.mesh import MeshLayout
from parallel3d.planner import Cluster, Prediction, Workload, plan, predict, spec_from_shapes
from parallel3d.planner.planning import memory_groups, reasons, time_groups
from parallel3d.planner.report import LANES, layer_spans

KINDS = ("compute", "tensor parallel", "slowdown", "hidden", "exposed")
MODEL = spec_from_shapes(layers=16, hidden=2048, heads=16, kv_heads=8, ffn=5504, vocab=32000)


def predicted(layout: MeshLayout, nic: float, **work: object) -> Prediction:
    given = Workload(seq_len=2048, micro_batch=1, **work)  # type: ignore[arg-type]
    return predict(MODEL, layout, Cluster.of("a100", 4, nic=nic), given)


@pytest.mark.parametrize("nic", [1.0, 25.0, 400.0])
@pytest.mark.parametrize("layout", [MeshLayout(1, 32, 1), MeshLayout(2, 8, 2), MeshLayout(4, 1, 8)])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_spans_are_the_models_times(
    layout: MeshLayout, nic: float, sequence_parallel: bool
) -> None:
    each = predicted(layout, nic, sequence_parallel=sequence_parallel)
    ((_, times),) = [found for found in each.time.units if found[0].kind == "block"]
    spans = layer_spans(each)
    for phase, whole, tp in (
        ("forward", times.forward, times.tp_forward),
        ("backward", times.backward, times.tp_backward),
    ):
        mine = [span for span in spans if span.phase == phase]
        seconds = {kind: sum(s.seconds for s in mine if s.kind == kind) for kind in KINDS}
        assert seconds["tensor parallel"] == pytest.approx(tp)
        assert seconds["compute"] + seconds["tensor parallel"] == pytest.approx(whole)
        assert 0 <= seconds["slowdown"] <= 0.19 * seconds["compute"] * (1 + 1e-9)
        ends = {span.lane: span.start + span.seconds for span in mine}
        took = max(ends.values()) - min(span.start for span in mine)
        if phase == "forward":  # nothing but the next block's gather is beside it
            gather = sum(s.seconds for s in mine if s.lane == "gather")
            assert gather == pytest.approx(times.gather) == seconds["hidden"] + seconds["exposed"]
            assert took == pytest.approx(whole + seconds["slowdown"] + seconds["exposed"])
        assert took >= whole + seconds["slowdown"] - 1e-12


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_spans_of_cp_and_of_the_host(kind: str) -> None:
    """What attention waits for is within forward; copies to the host are beside it, on their own lane."""
    layout = MeshLayout(1, 4, 2, cp=4)
    a100 = Cluster.of("a100", 4)
    slow = replace(a100, gpu=replace(a100.gpu, host=30.0))  # copies fall behind
    work = Workload(2048, micro_batch=1, cp_attention=kind, checkpointing="offload")
    each = predict(MODEL, layout, slow, work)
    ((_, times),) = [found for found in each.time.units if found[0].kind == "block"]
    assert times.offload > 2 * times.forward
    spans = layer_spans(each)
    for phase, whole, cp in (
        ("forward", times.forward, times.cp_forward),
        ("backward", times.backward, times.cp_backward),
    ):
        mine = [span for span in spans if span.phase == phase]
        on = {lane: sum(s.seconds for s in mine if s.lane == lane) for lane in ("cp", "tp", "host")}
        assert on["cp"] == pytest.approx(cp) and cp > 0
        if phase == "forward":  # in backward the block after has more to wait for than this one
            assert on["host"] == pytest.approx(times.offload)
        busy = sum(s.seconds for s in mine if s.kind == "compute")
        assert busy + on["cp"] + on["tp"] == pytest.approx(whole)
        waited = sum(s.seconds for s in mine if (s.lane, s.kind) == ("host", "exposed"))
        slower = sum(s.seconds for s in mine if s.kind == "slowdown")
        if phase == "forward":
            assert waited == pytest.approx(max(0.0, times.offload - whole - slower))
        others = sum(s.seconds for s in mine if s.kind == "exposed") - waited
        begin, end = min(s.start for s in mine), max(s.start + s.seconds for s in mine)
        assert end - begin == pytest.approx(whole + slower + waited + others)


def test_bars_of_a_lane_do_not_lie_on_each_other() -> None:
    layout = MeshLayout(2, 4, 2, cp=2)
    spans = layer_spans(predicted(layout, 2.0, checkpointing="offload"))
    assert {span.lane for span in spans} == set(LANES) - {"ep"}
    for lane in {span.lane for span in spans}:
        mine = sorted((s for s in spans if s.lane == lane), key=lambda s: s.start)
        assert all(b.start >= a.start + a.seconds - 1e-12 for a, b in pairwise(mine)), lane


def test_groups_add_up_and_leave_nothing_over() -> None:
    for layout, kind in (
        (MeshLayout(1, 32, 1), "full"),
        (MeshLayout(2, 8, 2), "full"),
        (MeshLayout(2, 4, 2, cp=2), "offload"),
    ):
        each = predicted(layout, 25.0, checkpointing=kind)
        assert sum(memory_groups(each).values()) == pytest.approx(each.memory.needed)
        assert sum(time_groups(each).values()) == pytest.approx(each.step_seconds)
        assert "other" not in {**memory_groups(each), **time_groups(each)}


def test_refusals_are_counted_by_reason() -> None:
    found = plan(MODEL, Cluster.of("a100", 4), Workload(2048, global_batch=32))
    each = reasons(found.refused)
    assert sum(reason.count for reason in each) == len(found.refused)
    assert len(each) < len(found.refused)
