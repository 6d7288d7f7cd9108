"""The predicted timeline: who runs when, who waits for whom, and what it costs."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from _support.tools.dryrun.made_runs import Llama, Program

from parallel3d._util.recorder import Collective
from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner import Cluster
from parallel3d.planner.cluster import AxisLink, collective_time
from parallel3d.planner.cluster import link_of as planners_link
from parallel3d.planner.kernels import gemm_time, memory_rate
from parallel3d.tools.dryrun.result import Operation
from parallel3d.tools.dryrun.timeline import (
    Timeline,
    calls_of,
    cluster_of,
    collective_seconds,
    kernel_seconds,
    latency_of,
    link_of,
    stream_of,
    timeline,
    unit_of,
)

GB = 10**9


def small(replicate: int = 2, shard: int = 4, tp: int = 1) -> Program:
    return Program(MeshLayout(replicate, shard, tp))


def spans(found: Timeline, stream: str) -> list[tuple[float, float]]:
    return [(s.start, s.end) for s in found.spans if s.stream == stream]


def test_a_collective_runs_beside_the_computation_until_it_is_waited_for() -> None:
    program = small()
    index = program.issue("all_gather", "shard", GB)
    program.elementwise(GB)
    program.wait(index)
    program.elementwise(GB)
    run = program.made()
    found = timeline(run)
    gather = collective_seconds(run.collectives[0], AxisLink(4, 4), found.cluster)
    kernel = GB / memory_rate(found.cluster.gpu)
    slowed = 1.19 * kernel  # under a collective all the time
    assert gather > slowed
    (start, end), (wait, waited), (second, _) = spans(found, "compute")
    (issued, ended) = spans(found, "gather")[0]
    launch = 6e-6
    assert issued == pytest.approx(launch)
    assert ended - issued == pytest.approx(gather)
    assert (start, end - start) == (pytest.approx(2 * launch), pytest.approx(slowed))
    assert (wait, waited) == (end, ended)
    assert second == ended
    assert found.exposed() == {"shard": pytest.approx(ended - end)}
    (call,) = calls_of(run, found)
    assert call.exposed == pytest.approx(ended - end)
    assert call.beside == pytest.approx(slowed)
    assert (call.issued, call.waited) == (0, 2)


def test_a_collective_that_has_ended_is_not_waited_for() -> None:
    program = small()
    index = program.issue("all_gather", "shard", 10**6)
    program.elementwise(10 * GB)
    program.wait(index)
    found = timeline(program.made())
    assert found.exposed() == {}
    assert [s.kind for s in found.spans] == ["all_gather", "elementwise"]


def test_what_blocks_holds_the_computation() -> None:
    program = small(1, 1, 8)
    program.elementwise(GB)
    program.issue("all_reduce", "tp", GB, asynchronous=False)
    program.elementwise(GB)
    found = timeline(program.made())
    first, wait, second = spans(found, "compute")
    assert first[1] == wait[0] == spans(found, "tp")[0][0]
    assert second[0] == wait[1] == spans(found, "tp")[0][1]
    assert found.exposed() == {"tp": pytest.approx(wait[1] - wait[0])}


def test_collectives_of_one_axis_follow_each_other_and_others_overlap() -> None:
    program = small()
    program.issue("reduce_scatter", "shard", GB, "layers.2")
    program.issue("all_reduce", "replicate", GB, "layers.1")
    program.issue("all_gather", "shard", GB, "layers.0")
    found = timeline(program.made())
    (reduce,), (all_reduce,), (gather,) = (
        spans(found, name) for name in ("reduce", "all-reduce", "gather")
    )
    assert gather[0] == reduce[1]
    assert all_reduce[0] < reduce[1]
    assert found.seconds == max(gather[1], all_reduce[1])  # also what nobody waits for


def test_a_sum_over_replicate_comes_after_its_own_reduce_scatter() -> None:
    program = small()
    program.issue("reduce_scatter", "shard", GB, "layers.2")
    program.issue("all_reduce", "replicate", GB // 4, "layers.2")
    found = timeline(program.made())
    assert spans(found, "all-reduce")[0][0] == spans(found, "reduce")[0][1]


def test_small_kernels_wait_for_the_host() -> None:
    program = small()
    for _ in range(100):
        program.elementwise(1000)
    found = timeline(program.made())
    assert found.seconds == pytest.approx(100 * 6e-6, rel=0.01)
    assert found.host[0] == pytest.approx(found.seconds, rel=0.01)
    program = small()
    for _ in range(100):
        program.elementwise(GB)
    assert timeline(program.made()).host[0] == pytest.approx(6e-6)  # the first kernel's


def test_every_stream_does_one_thing_at_a_time_and_steps_follow_each_other() -> None:
    run = Llama(layers=6, steps=3).run(MeshLayout(2, 8, 2))
    found = timeline(run)
    by_stream = defaultdict(list)
    for span in found.spans:
        assert span.end >= span.start >= 0
        by_stream[span.stream].append(span)
    assert {"compute", "tp", "gather", "reduce", "all-reduce", "other"} == set(by_stream)
    for each in by_stream.values():
        assert all(b.start >= a.end - 1e-12 for a, b in pairwise(each))
    assert len(found.times) == len(run.operations)
    assert list(found.times) == sorted(found.times)
    assert len(found.starts) == 4 and list(found.starts) == sorted(found.starts)
    assert (found.complete, found.step) == (3, 2)
    assert found.step_seconds == pytest.approx(found.bounds(1)[1] - found.bounds(1)[0], rel=0.05)
    busy, exposed = found.busy(), found.exposed()
    assert busy["compute"] + sum(exposed.values()) == pytest.approx(
        found.step_seconds - found.host[2], rel=1e-3
    )
    assert sum(found.busy(step)["tp"] for step in range(3)) == pytest.approx(
        sum(span.seconds for span in by_stream["tp"])
    )
    assert [found.step_at(start) for start in found.starts[:-1]] == [0, 1, 2]


def test_a_run_without_a_whole_step_and_one_without_anything() -> None:
    program = small()
    program.elementwise(GB)
    found = timeline(program.made())
    assert (found.step, found.step_seconds) == (0, found.seconds)
    empty = timeline(replace(program.made(), operations=(), memory=()))
    assert empty.seconds == empty.step_seconds == 0 and empty.exposed() == {}


def test_prefetching_hides_gathers_and_its_lack_exposes_them() -> None:
    layout = MeshLayout(1, 8, 1)
    ahead = timeline(Llama(layers=8).run(layout)).exposed()["shard"]
    behind = timeline(Llama(layers=8, prefetch=False).run(layout)).exposed()["shard"]
    assert behind > 3 * ahead


def test_a_faster_cluster_is_faster_and_an_unknown_one_an_error() -> None:
    run = Llama().run(MeshLayout(1, 8, 1))
    assert timeline(run, "b200").seconds < timeline(run).seconds < timeline(run, "a100").seconds
    own = Cluster.of("h100", nic=10)
    assert timeline(run, own).cluster is own
    with pytest.raises(PlanningError, match="h10"):
        timeline(run, "h1OO")


def test_kernels_are_the_planners() -> None:
    cluster = Cluster.of("h100")
    gpu = cluster.gpu

    def seconds(kind: str, **more: object) -> float:
        operation = Operation(kind, "", "", "forward", 0, **more)  # type: ignore[arg-type]
        return kernel_seconds(operation, cluster)

    sizes = (8192, 4096, 4096)
    flops = 2.0 * 8192 * 4096 * 4096
    half = seconds("matmul", flops=flops, sizes=sizes, dtype="bfloat16")
    assert half == gemm_time(*sizes, gpu, 2)
    assert seconds("matmul", flops=flops, sizes=sizes, dtype="float32") > 5 * half
    assert seconds("matmul", flops=flops, dtype="bfloat16") == pytest.approx(half, rel=0.1)
    assert seconds("elementwise", moved=GB, dtype="float32") == GB / memory_rate(gpu)
    assert seconds("attention", flops=1e12, dtype="bfloat16") == pytest.approx(
        1e12 / (0.6 * 989e12 * 0.9),
        rel=0.1,  # the power limit leaves 0.9 of its clock
    )
    assert seconds("attention", flops=0.0, moved=GB, dtype="bfloat16") == GB / memory_rate(gpu)
    short = seconds("attention", flops=1e12, sizes=(32, 128, 128), dtype="bfloat16")
    assert short > 2 * seconds("attention", flops=1e12, sizes=(32, 4096, 128), dtype="bfloat16")
    assert seconds("matmul") == 0.0


@pytest.mark.parametrize("layout", [MeshLayout(2, 8, 2), MeshLayout(4, 1, 8), MeshLayout(1, 32, 1)])
@pytest.mark.parametrize("axis", ["replicate", "shard", "tp"])
def test_links_are_the_planners(layout: MeshLayout, axis: str) -> None:
    run = Llama().run(layout, rank=5)
    cluster = cluster_of(run)
    call = Collective(0, "all_gather", axis, "", 8, getattr(layout, axis), True)
    assert link_of(run, call, cluster) == planners_link(layout, axis, cluster)


def test_links_of_groups_without_an_axis() -> None:
    run = Llama().run(MeshLayout(2, 8, 2))
    cluster = cluster_of(run)
    for size, per_node in ((32, 8), (4, 4)):
        call = Collective(0, "all_reduce", None, "", 8, size, False)
        assert link_of(run, call, cluster) == AxisLink(size, per_node)
        assert stream_of(call) == "other"


@pytest.mark.parametrize("link", [AxisLink(8, 8), AxisLink(16, 8), AxisLink(4, 1)])
def test_collectives_that_the_planner_does_not_know_have_sensible_times(link: AxisLink) -> None:
    cluster = Cluster.of("h100", 4)

    def seconds(op: str, size: int = GB) -> float:
        call = Collective(0, op, "shard", "", size, link.size, True)
        assert 0 < latency_of(call, link, cluster) <= collective_seconds(call, link, cluster)
        return collective_seconds(call, link, cluster)

    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        assert seconds(op) == collective_time(op, GB, link, cluster)
    assert seconds("broadcast") == seconds("all_gather")
    assert seconds("reduce") == seconds("reduce_scatter")
    assert seconds("barrier", 0) < 1e-3 < seconds("all_reduce")
    assert seconds("new_of_a_later_torch") == seconds("all_reduce")
    each_way = GB * (link.size - link.per_node) / link.size / (cluster.nic * GB)
    if link.nodes > 1:
        assert each_way < seconds("all_to_all") < 2 * each_way
        assert GB / (cluster.nic * GB) < seconds("send") < 2 * GB / (cluster.nic * GB)
    else:
        assert seconds("all_to_all") == pytest.approx(seconds("all_gather"), rel=0.01)
        assert GB / (cluster.gpu.link * GB) < seconds("send") < 3 * GB / (cluster.gpu.link * GB)


@pytest.mark.parametrize(
    ("module", "unit"),
    [
        ("layers.3.attention.wq", "layers.3"),
        ("model.layers.11", "model.layers.11"),
        ("output", "output"),
        ("encoder.norm", "encoder"),
        ("", ""),
    ],
)
def test_units_of_modules(module: str, unit: str) -> None:
    assert unit_of(module) == unit
