"""The engine's streams in a dry run: what is put on which, what comes after what, and when it would run."""

import pytest
from _support.fsdp.noted_streams import Device
from _support.tools.dryrun.dry_programs import Training, named, recorded, train
from _support.tools.dryrun.made_runs import Program

from parallel3d._torch import groups
from parallel3d._util import dry_run
from parallel3d.fsdp import param
from parallel3d.mesh import MeshLayout
from parallel3d.testing import fake_world
from parallel3d.tools.dryrun import record, timeline
from parallel3d.tools.dryrun.result import DryRun
from parallel3d.tools.dryrun.streams import PlayedStreams

CASES = [
    pytest.param(Training((2, 2, 2), sequence=True), marks=pytest.mark.slow),
    Training((2, 4, 1), recompute=True, steps=1),
    Training((2, 2, 1), hfsdp=True),
    Training((3, 1, 2), vocabulary=259, steps=1),
]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_collectives_are_those_of_the_engine_on_streams(case, monkeypatch):
    """All fields, in order, of the same code on real tensors and streams that take notes, as on a GPU."""
    with monkeypatch.context() as patch, fake_world(1, case.world_size):
        patch.setattr(groups, "pretended_backend", "nccl")
        patch.setattr(param, "CPU_BYTES", param.ACCELERATOR_BYTES)
        patch.setattr(dry_run, "played", Device())
        calls = recorded(case)
    run = record(lambda: train(case), case.world_size, 1)
    assert list(run.collectives) == calls


def _position(run: DryRun, index: int, kind: str = "collective") -> int:
    """Where the collective at ``index`` is issued or waited for."""
    found = [
        at
        for at, operation in enumerate(run.operations)
        if operation.collective == index and operation.kind == kind
    ]
    return found[0]


def test_sum_over_replicate_is_issued_at_once_after_what_it_reads():
    """On gloo it goes behind the next unit's reduce-scatter."""
    case = Training((2, 2, 1), steps=1)
    run = record(lambda: train(case), case.world_size)
    sums = [c for c in run.collectives if c.op == "all_reduce" and c.axis == "replicate" and c.unit]
    assert len(sums) > 3
    for call in sums:
        scatter = run.collectives[call.order - 1]
        assert (scatter.op, scatter.unit) == ("reduce_scatter", call.unit)
        operation = run.operations[_position(run, call.order)]
        assert operation.stream not in (0, run.operations[_position(run, scatter.order)].stream)
        before = set(operation.after)
        while _position(run, scatter.order) not in before:  # through the division of the sum
            more = {at for each in before for at in run.operations[each].after}
            assert more - before
            before |= more


def test_computation_waits_for_each_collective_once():
    case = Training((2, 2, 1), recompute=True, steps=1)
    run = record(lambda: train(case), case.world_size)
    waits = [o.collective for o in run.operations if o.kind == "wait"]
    assert len(waits) == len(set(waits))
    reductions = {c.order for c in run.collectives if c.op == "reduce_scatter"}
    assert reductions <= set(waits)
    for index in waits:
        assert _position(run, index) < _position(run, index, "wait")


def test_gloo_has_no_streams():
    case = Training((2, 2, 1), steps=1)
    run = record(lambda: train(case), case.world_size, backend="gloo")
    assert all(o.stream == 0 and o.after == () for o in run.operations)


def test_events_bring_what_streams_have_waited_for():
    waited: list[tuple[int, tuple[int, ...]]] = []
    streams = PlayedStreams(lambda index, after: waited.append((index, after)))
    copies, sums = streams.Stream(), streams.Stream(priority=-1)
    assert (copies.name, sums.name) == ("stream 1", "stream 2")
    copies.wait_stream(streams.current_stream())
    with streams.stream(copies):
        assert streams.place(4) == (1, ())
    sums.wait_stream(copies)
    with streams.stream(sums):
        assert streams.place(5) == (2, (4,))
        streams.issue(0, "world")
        assert not streams.arrived(0)
        event = sums.record_event()
        assert streams.place(6) == (2, (5,))
    assert streams.place(7) == (0, ())
    event.wait()
    sums.record_event().wait()
    # What is waited for is not waited for again.
    assert waited == [(0, (4, 5)), (None, (6,))]
    streams.issue(1, "world")
    assert streams.arrived(1)  # by the computation itself
    with streams.stream(sums):
        for index in (2, 3):
            streams.issue(index, "world")
            streams.arrived(index)
        streams.place(8)
    sums.record_event().synchronize()
    assert waited[2:] == [(2, ()), (3, (8,))]
    other = streams.Stream()
    other.wait_event(object())  # of a real GPU, made by the program
    assert not other.clock


def _program() -> Program:
    return Program(MeshLayout(1, 8, 1))


def test_copies_run_beside_the_computation():
    """A gather begins after the copy it sends; the computation, which needs neither, is not held up."""
    program = _program()
    program.matmul(4096, 4096, 4096)
    program.elementwise(2**30, stream=1)
    program.issue("all_gather", "shard", 2**20, "layers.1", stream=2, after=(1,))
    program.matmul(4096, 4096, 4096)
    spans = timeline(program.made()).spans
    first, copy, gather, second = spans
    assert [s.stream for s in spans] == ["compute", "copies", "gather", "compute"]
    assert copy.start >= first.end
    assert gather.start == copy.end
    assert second.start < copy.end


def test_computation_waits_for_what_follows_a_collective_on_its_stream():
    program = _program()
    scatter = program.issue("reduce_scatter", "shard", 2**20, "layers.1", stream=3)
    program.elementwise(2**30, name="mul_", stream=3, after=(0,))
    program.wait(scatter, after=(1,))
    program.matmul(4096, 4096, 4096)
    spans = timeline(program.made()).spans
    assert [s.stream for s in spans] == ["reduce", "reduce", "compute", "compute"]
    division, wait, matmul = spans[1:]
    assert division.start == spans[0].end
    assert wait.kind == "wait" and wait.end == division.end == matmul.start
