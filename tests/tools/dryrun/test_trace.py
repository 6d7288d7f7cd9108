"""The trace is in the form that Perfetto and chrome://tracing read, and says what the timeline says."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from _support.tools.dryrun.made_runs import Llama

from parallel3d.mesh import MeshLayout
from parallel3d.tools.dryrun.timeline import timeline
from parallel3d.tools.dryrun.trace import trace_events, write_trace

RUN = Llama(layers=4).run(MeshLayout(2, 2, 2), rank=3)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(RUN, path)
    return json.loads(path.read_text())


def of_phase(trace: dict[str, Any], ph: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == ph]


def slices(trace: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    found = defaultdict(list)
    for event in of_phase(trace, "X"):
        found[event["tid"]].append(event)
    return found


def names(trace: dict[str, Any]) -> dict[str, int]:
    each = [e for e in of_phase(trace, "M") if e["name"] == "thread_name"]
    return {event["args"]["name"]: event["tid"] for event in each}


def test_every_event_has_what_its_kind_needs(trace: dict[str, Any]) -> None:
    needed = {
        "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
        "M": {"name", "pid", "tid", "args"},
        "C": {"name", "ts", "pid", "args"},
        "s": {"name", "cat", "id", "ts", "pid", "tid"},
        "t": {"name", "cat", "id", "ts", "pid", "tid"},
        "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
    }
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert {event["ph"] for event in trace["traceEvents"]} == set(needed)
    for event in trace["traceEvents"]:
        assert needed[event["ph"]] <= event.keys(), event
        assert event["pid"] == 3 and isinstance(event["name"], str) and event["name"]
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    for event in of_phase(trace, "C"):
        assert all(isinstance(value, int) for value in event["args"].values())


def test_threads_are_named_and_ordered(trace: dict[str, Any]) -> None:
    assert list(names(trace)) == [
        *("modules", "compute", "tp", "gather", "reduce", "all-reduce", "other"),
        "host: collectives issued",
    ]
    assert set(slices(trace)) == set(names(trace).values())
    (process,) = [e for e in of_phase(trace, "M") if e["name"] == "process_name"]
    assert "rank 3 of 8" in process["args"]["name"]


def test_slices_of_a_thread_do_not_overlap(trace: dict[str, Any]) -> None:
    for each in slices(trace).values():
        ordered = sorted(each, key=lambda e: e["ts"])
        for a, b in pairwise(ordered):
            assert round(1e3 * (a["ts"] + a["dur"])) <= round(1e3 * b["ts"]), (a, b)


def test_durations_are_the_timelines(trace: dict[str, Any]) -> None:
    found = timeline(RUN)
    by_thread = slices(trace)
    for name, number in names(trace).items():
        seconds = sum(s.seconds for s in found.spans if s.stream == name)
        if seconds:
            each = by_thread[number]  # of whole nanoseconds
            assert sum(e["dur"] for e in each) == pytest.approx(seconds * 1e6, abs=1e-3 * len(each))
    waits = [e for e in by_thread[names(trace)["compute"]] if e["cat"] == "wait"]
    assert waits and all(e["name"].startswith("wait for ") for e in waits)


def test_arrows_begin_and_end_in_slices(trace: dict[str, Any]) -> None:
    by_thread = slices(trace)
    ends = {"s": set(), "f": set()}
    for ph in ("s", "t", "f"):
        for arrow in of_phase(trace, ph):
            assert any(
                e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"] for e in by_thread[arrow["tid"]]
            ), arrow
            if ph in ends:
                ends[ph].add(arrow["id"])
    assert ends["s"] == ends["f"] == {call.order for call in RUN.collectives}
    compute = names(trace)["compute"]
    asynchronous = {c.order for c in RUN.collectives if c.asynchronous}
    assert {e["id"] for e in of_phase(trace, "f") if e["tid"] == compute} == asynchronous


def test_counters_have_every_kind_each_time(trace: dict[str, Any]) -> None:
    by_kind = [e for e in of_phase(trace, "C") if "kind" in e["name"]]
    assert len(by_kind) == len(RUN.memory)
    assert len({tuple(e["args"]) for e in by_kind}) == 1
    assert max(sum(e["args"].values()) for e in by_kind) == RUN.peak.bytes
    assert [e["ts"] for e in by_kind] == sorted(e["ts"] for e in by_kind)


def test_a_compressed_file_has_the_same(tmp_path: Path, trace: dict[str, Any]) -> None:
    write_trace(RUN, tmp_path / "trace.json.gz")
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        assert json.load(file) == trace


def test_another_cluster_has_other_durations(trace: dict[str, Any]) -> None:
    slow = trace_events(RUN, timeline(RUN, "a100"))
    assert slow["otherData"]["step_seconds"] > trace["otherData"]["step_seconds"]
