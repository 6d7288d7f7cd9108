"""Metrics on real ranks and on one: records, sinks that fail, the slow rank by its coordinates."""

import os
import re
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import parallel3d as p3d
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.observability import (
    FIELDS,
    START_FIELDS,
    JsonLines,
    Metrics,
    ModelFlops,
    OomSnapshots,
    ProfilerWindow,
    Progress,
    read_json_lines,
)
from parallel3d.observability import metrics as memory_module
from parallel3d.testing import GlooPool, fake_world


class Kept:
    """A sink that keeps what it is given, and fails when told."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.about: dict[str, Any] = {}
        self.records: list[dict[str, Any]] = []
        self.closed = 0
        self.fails_at = fails_at

    def start(self, about: Mapping[str, Any]) -> None:
        self.about = dict(about)

    def write(self, record: Mapping[str, Any]) -> None:
        if record["step"] == self.fails_at:
            raise OSError("no space left on device")
        self.records.append(dict(record))

    def close(self) -> None:
        self.closed += 1


def one(**options: Any) -> Metrics:
    mesh = p3d.build_mesh(p3d.MeshLayout(1, -1, 1), device_type="cpu")
    return Metrics(mesh, tokens_per_step=100, **options)


def test_records_of_one_rank(tmp_path: Path) -> None:
    with fake_world(0, 1):
        kept = Kept()
        flops = ModelFlops(2e9, 3e9)
        sinks = [kept, JsonLines(tmp_path / "run.jsonl")]
        metrics = one(sinks=sinks, every=2, flops=flops, peak_tflops=10, samples=1)
        with metrics:
            for number in range(4):
                with metrics.step(number):
                    with metrics.loading_data():
                        time.sleep(0.005)
                    time.sleep(0.005)
                    metrics.log(loss=4.0 - number, mine=number)
    assert kept.closed == 1 and [r["step"] for r in kept.records] == [0, 1, 2, 3]
    assert set(kept.about) < set(START_FIELDS) and kept.about["mesh"]["shard"] == 1
    for record in kept.records:
        assert set(record) <= {*FIELDS, "mine"} and record["loss"] == 4.0 - record["mine"]
        assert 0.005 <= record["data_seconds"] <= record["step_seconds"] - 0.005
        assert record["memory_peak"] > 1e7
        assert record["tokens_per_second"] == pytest.approx(100 / record["step_seconds"])
        assert record["mfu"] == pytest.approx(record["tokens_per_second"] * 2e9 / 10e12)
        assert record["mfu_6n"] == pytest.approx(record["mfu"] * 1.5)
    assert ["stragglers" in r for r in kept.records] == [False, True, False, True]
    first, *lines = read_json_lines(tmp_path / "run.jsonl")
    assert first["event"] == "start" and lines == kept.records


def test_nothing_is_left_of_an_error() -> None:
    with fake_world(0, 1):
        kept = Kept()
        allreduce = dist.ProcessGroup.allreduce
        with one(sinks=[kept], every=1) as metrics:
            with pytest.raises(ZeroDivisionError), metrics.step(0):
                1 / 0  # noqa: B018
            with metrics.step(1):
                pass
            nested = pytest.raises(StateError, match="step 3 begins within step 2")
            with nested, metrics.step(2), metrics.step(3):
                pass
        assert [r["step"] for r in kept.records] == [1]
        assert dist.ProcessGroup.allreduce is allreduce


def test_traces_of_ranks_that_are_not_there() -> None:
    with fake_world(0, 2), pytest.warns(UserWarning, match="ranks 2, 5: there are only 2"):
        one(profiler=ProfilerWindow("x", 1, 2, ranks=[0, 2, 5]))


def test_a_sink_that_fails_is_left_out() -> None:
    with fake_world(0, 1):
        bad, good = Kept(fails_at=1), Kept()
        with (
            pytest.warns(
                UserWarning, match=r"can't write and is left out .* no space left"
            ) as seen,
            one(sinks=[bad, good], every=0) as metrics,
        ):
            for number in range(4):
                with metrics.step(number):
                    pass
    assert len(seen) == 1
    assert [len(bad.records), len(good.records)] == [1, 4]
    assert [bad.closed, good.closed] == [1, 1]


def test_what_is_logged_between_steps() -> None:
    """An evaluation's result comes into the next record, also after a step that fails; or a warning."""
    with fake_world(0, 1):
        kept = Kept()
        with (
            pytest.warns(UserWarning, match="after the last step, .* no record: eval_loss"),
            one(sinks=[kept], every=0) as metrics,
        ):
            with metrics.step(0):
                metrics.log(loss=3.0)
            metrics.log(eval_loss=2.0)
            with pytest.raises(ZeroDivisionError), metrics.step(1):
                metrics.log(loss=1 / 1)
                1 / 0  # noqa: B018
            with metrics.step(2):
                pass
            metrics.log(eval_loss=1.0)
    first, second = kept.records
    assert first["loss"] == 3.0 and "eval_loss" not in first
    assert second["eval_loss"] == 2.0 and "loss" not in second


def test_what_cannot_be_logged() -> None:
    with fake_world(0, 1), one() as metrics, metrics.step(0):
        with pytest.raises(Parallel3dError, match=r"loss is a tensor.*item\(\)"):
            metrics.log(lr=0.1, loss=torch.ones(()))
        for name in ("step", "time", "event", "tokens_per_second"):
            with pytest.raises(Parallel3dError, match=f"'{name}' is a field of every record"):
                metrics.log(**{name: 1})


def test_steps_belong_within_the_run() -> None:
    """Before, nobody has said which rank writes; afterwards the sinks are closed."""
    with fake_world(0, 1):
        metrics = one(sinks=[Kept()])
        with pytest.raises(StateError, match="with metrics:"), metrics.step(0):
            pass
        with metrics, metrics.step(0):
            pass
        with pytest.raises(StateError, match="with metrics:"), metrics.step(1):
            pass


def test_memory_between_steps_is_not_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation's peak, or a checkpoint's, on CUDA."""
    device = {"allocated_bytes.all.peak": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: device)
    monkeypatch.setattr(
        torch.cuda,
        "reset_peak_memory_stats",
        lambda: device.update({"allocated_bytes.all.peak": 5}),
    )
    with fake_world(0, 1), one(every=0) as metrics:
        metrics.device_type = "cuda"
        for number in range(2):
            device["allocated_bytes.all.peak"] = 100
            with metrics.step(number):
                device["allocated_bytes.all.peak"] += 10 * (number + 1)
            assert metrics.record["memory_peak"] == 15 + 10 * number


def test_a_snapshot_when_there_is_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "dump_snapshot", lambda path: Path(path).write_text("x"))
    with fake_world(0, 1), one(snapshots=OomSnapshots(tmp_path / "new")) as metrics:
        with pytest.raises(torch.OutOfMemoryError), metrics.step(7):
            raise torch.OutOfMemoryError("none left")
        with pytest.raises(ValueError, match="other"), metrics.step(8):
            raise ValueError("other")
        assert [f.name for f in (tmp_path / "new").iterdir()] == ["oom-step-7-rank-00000.pickle"]

        def fails(path: str) -> None:
            Path(path).write_text("a part")
            raise RuntimeError("no CUDA")

        monkeypatch.setattr(memory_module, "dump_snapshot", fails)
        with (
            pytest.warns(UserWarning, match="no CUDA"),
            pytest.raises(torch.OutOfMemoryError),
            metrics.step(9),
        ):
            raise torch.OutOfMemoryError("again")
        assert len(list((tmp_path / "new").iterdir())) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": -1}, "every is -1"),
        ({"slow": 1.0}, "slow is 1.0"),
        ({"samples": 0}, "samples is 0"),
        ({"peak_tflops": 0}, "peak_tflops is 0"),
        ({"flops": 6e9}, "flops is 6000000000.0; .* model_flops"),
        ({"profiler": (1, 2)}, r"profiler is \(1, 2\); .* ProfilerWindow"),
        ({"snapshots": "traces"}, "snapshots is 'traces'; .* OomSnapshots"),
    ],
)
def test_bad_arguments(options: dict[str, Any], text: str) -> None:
    with fake_world(0, 1), pytest.raises(Parallel3dError, match=text):
        one(**options)


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_world(0, 1):
        progress = Progress(40)
        with one(sinks=[progress], every=1, flops=ModelFlops(1, 1), peak_tflops=1) as metrics:
            for number in range(20):
                with metrics.step(number):
                    metrics.log(loss=2.0 if number < 19 else 1.0, grad_norm=0.5)
        record = metrics.record
        progress.write(record | {"exposed_seconds": {"tp": record["step_seconds"] / 4}})
        assert "waits tp 25%" in progress._line(record)
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step    1/40  loss 2.0000  ") and "tokens/s  MFU " in first
    assert last.startswith("step   20/40  loss 1.0000") and " GiB" in last
    assert progress.result["steps"] == 21 and progress.result["smoothed_loss"] == 1.9


def slow(*places: int) -> dict[str, Any]:
    parts = [{"axes": {"shard": at}, "text": f"shard {at} is slow"} for at in places]
    return of_a_step(0) | {"stragglers": parts}


def test_progress_names_who_is_slow_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Once, in the third sample running; steps without a sample between them count for nothing."""
    progress = Progress(1000)
    progress.go_on_from(500)
    progress.write(of_a_step(0))
    capsys.readouterr()
    for places in ((3,), (3, 1), (1,), (3,), (3,)):
        progress.write(slow(*places))
        progress.write(of_a_step(0))
    assert capsys.readouterr().out == ""  # never three times running
    progress.write(slow(3))
    assert capsys.readouterr().out == "step  512/1000  shard 3 is slow\n"
    progress.write(slow(3))
    for _ in range(3):
        progress.write(slow(*range(7)))
    shown = [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()]
    assert shown[-1] == "and 2 more parts of the mesh are slow" and "shard 3 is slow" not in shown


def test_progress_says_nothing_of_ranks_that_share_cores(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    progress = Progress(1000)
    progress.start({"device": "cpu"})
    progress.write(of_a_step(0))
    capsys.readouterr()
    for _ in range(4):
        progress.write(slow(3))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_progress_fits_the_screen(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What matters comes first; what has no room is left out, not cut."""
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = Progress(1000)
    waits = {"exposed_seconds": {"shard": 0.1, "tp": 0.2}, "step_seconds": 1.0}
    progress.write(of_a_step(0) | waits | {"memory_peak": 2**30, "grad_norm": 1.0, "loss": 2.0})
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line) <= columns and line.startswith("step    1/1000  loss 2.0000  ")
    assert "waits tp 20%" in line and ("shard 10%" in line) == (columns >= 80)
    assert ("grad norm" in line) == (columns == 120)


def test_progress_that_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The first step of a process is shown, whichever it is."""
    progress = Progress(100)
    progress.go_on_from(50)
    for number in (50, 51):
        progress.write(of_a_step(number))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step   51/100  loss 2.0000")


def test_progress_smooths_all_speeds_alike() -> None:
    progress = Progress(100)
    for number, seconds in enumerate((0.5, 1.5)):
        progress.write(
            of_a_step(number) | {"step_seconds": seconds, "tokens_per_second": 1e3 / seconds}
        )
    line = progress._line(of_a_step(2) | {"mfu": 0.4, "tokens_per_second": 500.0})
    assert "1,000 tokens/s  MFU 80.0%" in line


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "200", **more}.items():
        monkeypatch.setenv(name, value)


def of_a_step(number: int) -> dict[str, Any]:
    return {"step": number, "step_seconds": 0.5, "tokens_per_second": 1e3, "loss": 2.0}


def test_progress_as_a_sink_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics starts and ends the live line."""
    on_a_terminal(monkeypatch)
    with fake_world(0, 1), one(sinks=[Progress(2)]) as metrics, metrics.step(0):
        metrics.log(loss=2.0)
    assert "loss 2.0000" in capsys.readouterr().out


def test_progress_on_a_terminal_that_cannot_go_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch, TERM="dumb")
    with Progress(2) as progress:
        progress.write(of_a_step(0))
        assert capsys.readouterr().out.startswith("step    1/2  loss 2.0000")


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_progress_on_a_narrow_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar and the end of the line go, not the step, the loss and the time."""
    on_a_terminal(monkeypatch, COLUMNS=str(columns))
    with Progress(300) as progress:
        progress.write(of_a_step(0) | {"grad_norm": 0.5, "mfu": 0.4, "memory_peak": 2**36})
    text = re.sub(r"\x1b\[[0-9?;]*[a-zA-Z]", "", capsys.readouterr().out)
    (line,) = [line for line in re.split(r"[\r\n]", text) if "loss 2.0000" in line]
    assert line.strip().startswith("1/300") and line.endswith("-:--:--")
    assert len(line) <= columns


def test_progress_knows_the_end_of_slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)
    progress = Progress(10)
    now = 0.0
    progress.bar.get_time = lambda: now
    for number in range(3):
        now += 100.0
        progress.write(of_a_step(number))
    assert progress.bar.tasks[0].time_remaining == 700


def test_progress_when_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of a pipe ends, as head does: the training goes on."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        progress = Progress(2)
        with pytest.warns(UserWarning, match="shown no more: nobody reads"):
            progress.print("hello")
        progress.write(of_a_step(0))
        assert progress.done == 1


def test_progress_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        progress = Progress(2)
        with pytest.warns(UserWarning, match="shown no more: .*No space left"):
            progress.print("hello")
        progress.write(of_a_step(0))
        assert progress.done == 1


# ---- on real ranks ----


def steps_with_a_slow_rank(sizes: tuple[int, int, int], slow: list[int], sink: str) -> Any:
    """Ranks of ``slow`` take five times as long for each step as the others."""
    mesh = p3d.build_mesh(p3d.MeshLayout(*sizes), device_type="cpu")
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    p3d.parallelize(model, mesh, tp_plan={"0": "colwise", "1": "rowwise"})
    kept = Kept(fails_at=1 if sink == "fails" else None)
    metrics = Metrics(mesh, tokens_per_step=8, sinks=[kept], every=1, samples=3, slow=2.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with metrics:
            for number in range(3):
                with metrics.step(number):
                    time.sleep(0.2 if dist.get_rank() in slow else 0.04)
                    model(torch.ones(2, 16)).sum().backward()
                    metrics.log(loss=1.0)
    return kept.records, metrics.record


@pytest.mark.smoke
def test_the_slow_rank_is_named(gloo_pool: GlooPool) -> None:
    """Shard 1 of (2, 2, 1), in all replicas: that axis and coordinate, once there are enough samples."""
    found = gloo_pool.run(steps_with_a_slow_rank, (2, 2, 1), [1, 3], "works", world_size=4)
    records = found[0][0]
    assert [len(record["stragglers"]) for record in records[:2]] == [0, 0]
    (hint,) = records[2]["stragglers"]
    assert hint["axes"] == {"shard": 1} and hint["cause"] == "computation" and hint["times"] > 2.5
    assert hint["text"].startswith("shard 1 is ")
    assert records[2]["own_seconds_max"] >= 0.2
    # The others wait for it, over the axis that it is slow on.
    assert records[2]["exposed_seconds"]["shard"] > 0.08
    means = records[2]["exposed_seconds_mean"]
    assert 0.04 < means["shard"] < records[2]["exposed_seconds"]["shard"]
    assert [len(kept) for kept, _ in found] == [3, 0, 0, 0]  # the first rank alone writes
    assert all("exposed_seconds" in mine for _, mine in found)


def test_a_sink_that_fails_hangs_nobody(gloo_pool: GlooPool) -> None:
    found = gloo_pool.run(steps_with_a_slow_rank, (1, 1, 2), [1], "fails", world_size=2)
    assert [len(kept) for kept, _ in found] == [1, 0]
    assert found[0][1]["stragglers"][0]["axes"] == {"tp": 1}


def on_a_part_of_the_ranks() -> Any:
    """Two meshes of two ranks each, in a world of four."""
    whole = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    kept = Kept()
    metrics = Metrics(whole["shard"], tokens_per_step=8, sinks=[kept], every=1, samples=1, slow=2.5)
    with metrics, metrics.step(0):
        time.sleep(0.5 if dist.get_rank() == 3 else 0.1)
    return [record["stragglers"] for record in kept.records]


def test_a_mesh_of_some_ranks(gloo_pool: GlooPool) -> None:
    found = gloo_pool.run(on_a_part_of_the_ranks, world_size=4)
    assert found[0] == [[]] and found[1] == found[3] == []
    assert found[2][0][0]["axes"] == {"shard": 1}
