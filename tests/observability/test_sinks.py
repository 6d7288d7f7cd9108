"""JsonLines: a line a step; what a kill leaves can be read, and gone on with. TensorBoard: curves."""

import json
import multiprocessing
import os
import signal
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from parallel3d.errors import Parallel3dError
from parallel3d.observability import JsonLines, TensorBoard, read_json_lines
from parallel3d.observability.sinks import scalars
from parallel3d.tools.dryrun import Unknown


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    sink = JsonLines(path)
    sink.start({"mesh": {"shard": 2}})
    sink.write({"step": 0, "loss": 1.5, "waits": {"shard": 0.25}, "list": [1, None, True]})
    # Nothing is held back.
    start, step = map(json.loads, path.read_text().splitlines())
    assert start == {"event": "start", "mesh": {"shard": 2}}
    assert step == {"step": 0, "loss": 1.5, "waits": {"shard": 0.25}, "list": [1, None, True]}
    sink.write({"step": 1, "loss": float("nan"), "norm": float("inf"), "unknown": Unknown()})
    assert list(read_json_lines(path))[-1] == {
        "step": 1,
        "loss": None,
        "norm": None,
        "unknown": None,
    }
    sink.close()
    sink.close()


@pytest.mark.parametrize("left", ["", "x" * 10, "\n" * 2, '{"step": 1}\n{"st', "y" * 200_000])
def test_a_line_that_was_cut(tmp_path: Path, left: str) -> None:
    path = tmp_path / "run.jsonl"
    whole = '{"step": 0}\n' if left.strip() else ""
    path.write_text(whole + left)
    sink = JsonLines(path)
    sink.start({})
    sink.close()
    lines = [line for line in path.read_text().split("\n") if line]
    assert all(json.loads(line) for line in lines) and '"start"' in lines[-1]
    assert len(lines) == (1 if not left.strip() else 3 if '{"step": 1}' in left else 2)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    """Its last line has no newline, and would be taken for one that a kill has cut."""
    path = tmp_path / "notes.txt"
    path.write_text("first\nsecond")
    sink = JsonLines(path)
    with pytest.raises(Parallel3dError, match=r"notes.txt is there already"):
        sink.start({})
    sink.close()
    assert path.read_text() == "first\nsecond"


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, ')
    assert [line["step"] for line in read_json_lines(path)] == [0]
    path.write_text('{"step": 0}\nno\n{"step": 1}\n')
    with pytest.raises(Parallel3dError, match="line 2: no JSON"):
        list(read_json_lines(path))


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    sink = JsonLines(path)
    sink.start({})
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:7]))
        with pytest.raises(OSError, match="only 7 of"):
            sink.write({"step": 0})
    sink.write({"step": 1})
    assert [line.get("step") for line in read_json_lines(path)] == [None, 1]


def write_for_ever(path: str, written: Any) -> None:
    sink = JsonLines(path)
    sink.start({})
    step = 0
    while True:
        sink.write({"step": step, "padding": "x" * (step % 9000)})
        step += 1
        written.value = step


def test_a_kill(tmp_path: Path) -> None:
    """Killed while it writes lines of up to three pages: what was written is there, each line whole."""
    path = str(tmp_path / "run.jsonl")
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        written = context.Value("l", 0)
        process = context.Process(target=write_for_ever, args=(path, written))
        process.start()
        while written.value < 500:
            assert process.is_alive()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        lines = list(read_json_lines(path))
        last = max(i for i, line in enumerate(lines) if line.get("event"))
        steps = [line["step"] for line in lines[last + 1 :]]
        assert steps == list(range(len(steps))) and len(steps) >= written.value


def test_numbers_of_other_kinds(tmp_path: Path) -> None:
    """numpy's, say, are Python's by their abstract types only."""
    sink = JsonLines(tmp_path / "run.jsonl")
    sink.start({})
    sink.write({"step": 0, "half": Fraction(1, 2)})
    sink.close()
    assert list(read_json_lines(tmp_path / "run.jsonl"))[-1]["half"] == 0.5
    assert dict(scalars({"half": Fraction(1, 2)})) == {"half": 0.5}


# TensorBoard


def test_scalars() -> None:
    record = {
        "step": 3,
        "time": 5.0,
        "loss": 1.5,
        "exposed_seconds": {"shard": 0.25},
        "stragglers": [{"text": "x"}],
        "note": "no number",
    }
    assert dict(scalars(record)) == {"loss": 1.5, "exposed_seconds/shard": 0.25, "stragglers": 1.0}


def test_every() -> None:
    with pytest.raises(Parallel3dError, match="every is 0"):
        TensorBoard("x", every=0)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(Parallel3dError, match="needs the package tensorboard"):
        TensorBoard(tmp_path).start({})


def test_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path, every=2)
    sink.start({"mesh": {"shard": 2}})
    for step in range(3):
        sink.write(
            {"step": step, "time": 1e9 + step, "loss": 3.0 - step, "exposed_seconds": {"tp": 0.5}}
        )
    sink.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    points = found.Scalars("loss")
    assert [(p.step, p.value, p.wall_time) for p in points] == [
        (0, 3.0, 1e9),
        (1, 2.0, 1e9 + 1),
        (2, 1.0, 1e9 + 2),
    ]
    assert [p.value for p in found.Scalars("exposed_seconds/tp")] == [0.5] * 3
