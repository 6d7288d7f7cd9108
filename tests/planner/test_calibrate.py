"""calibrate measures this machine, for real on a CPU; on CUDA the order of what it does, on a stub."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from parallel3d.errors import PlanningError
from parallel3d.planner import calibrate as module
from parallel3d.planner.calibrate import (
    _fit_matmuls,
    _Product,
    calibrate,
    similar_to,
    timed,
    timed_under_load,
    write_profile,
)
from parallel3d.planner.cluster import gpu
from parallel3d.planner.kernels import gemm_time, memory_rate

SIZES = [(512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 4096)]


@pytest.mark.parametrize(("start", "efficiency"), [(3.9, 0.82), (9.5, 0.6), (0.5, 0.95)])
def test_the_fit_finds_what_gemm_time_was_given(start: float, efficiency: float) -> None:
    """Small products have few FLOPs and many bytes: all of the formula is fitted, not a line."""
    each = replace(gpu("h200"), gemm_start_us=start, sustained=efficiency)
    times = [_Product(rows, n, n, 2, gemm_time(rows, n, n, each, 2)) for rows, n in SIZES]
    found, rate = _fit_matmuls(times, memory_rate(each))
    assert found == pytest.approx(start * 1e-6, rel=0.1)
    assert rate == pytest.approx(efficiency * 989e12, rel=0.02)
    # A line through the same points has a start that is a multiple of it.
    assert times[-1].rate(found, memory_rate(each)) == pytest.approx(rate, rel=0.02)


def test_products_as_fast_as_their_bytes() -> None:
    times = [_Product(64, 64, 64, 2, 1e-9), _Product(128, 128, 128, 2, 1e-9)]
    assert _fit_matmuls(times, 1e12) == (0.0, 2.0 * 128**3 / 1e-9)


@pytest.mark.parametrize(
    ("torchs", "ours"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA H20", "h20"),
        ("AMD Instinct MI355X", "mi355x"),
        ("NVIDIA GeForce RTX 4090", "a100"),
    ],
)
def test_what_isnt_measured_is_of_the_same_family(torchs: str, ours: str) -> None:
    assert similar_to(torchs) == ours


@pytest.mark.parametrize("given", [{"device": "tpu"}, {"seconds": 0.0}])
def test_mistakes(given) -> None:
    with pytest.raises(PlanningError, match=f"{next(iter(given))} is .*; it must be "):
        calibrate(**{"device": "cpu", **given})


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """(what was measured, the same read from its profile)."""
    found = calibrate("mine", device="cpu", largest=1024, seconds=1.0)
    path = write_profile(found, tmp_path_factory.mktemp("profile") / "profile.toml")
    return found, gpu("mine", path)


@pytest.mark.slow(every=True)
def test_all_of_it_is_measured_and_read_again(mine) -> None:
    found, again = mine
    assert found.family == again.family == "cpu"
    for name in ("sustained", "gemm_efficiency", "bandwidth", "gemm_start_us"):
        assert getattr(again, name) == pytest.approx(getattr(found, name), rel=1e-4)
    assert 0.05 < found.sustained <= found.gemm_efficiency <= 1
    assert found.attention_kernel == again.attention_kernel == "flash2"
    assert [each[0] for each in again.attention] == [64, 128]
    for mine_, read in zip(found.attention, again.attention, strict=True):
        assert read == pytest.approx(mine_, rel=1e-4)
        assert min(mine_[1:]) > 1e-4 and max(mine_[1:]) < 10  # TFLOP/s of a core
    host, read = found.host_times, again.host_times
    assert vars(read) == pytest.approx(vars(host), rel=1e-4)
    # us: an eager operation, the engine's hooks and copies for a unit of nine parameters, AdamW
    assert 3 < host.launch < 500
    assert 3 * host.launch < host.unit < 500 * host.launch
    assert 0.2 * host.launch < host.optimizer < 20 * host.launch
    assert host.tp > host.launch


def test_above_is_of_the_same_turn() -> None:
    """On a busy machine: the difference of the medians is negative."""
    taken = {"shard": [1.0, 3.0, 3.0], "tp": [1.16, 1.16, 3.16]}
    assert module._above(taken, "tp", "shard") == pytest.approx(0.01)
    assert module._above(taken, "replicate", "shard") == 0


class Stub:
    """torch.cuda's events, synchronisation and sleep: what was called, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, each: float) -> None:
        self.said: list[str] = []
        self.clock, self.each, self.events = 0.0, each, 0
        stub = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                stub.events += 1
                self.name = f"event {stub.events}"

            def record(self) -> None:
                self.at = stub.clock
                stub.said.append(f"record {self.name}")

            def synchronize(self) -> None:
                stub.said.append(f"wait {self.name}")

            def elapsed_time(self, other: "Event") -> float:
                return 1e3 * (other.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", partial(self.said.append, "synchronize"))
        monkeypatch.setattr(module, "cuda_sleep", lambda cycles: self.said.append("sleep"))

    def call(self) -> None:
        self.clock += self.each
        self.said.append("call")


def test_on_cuda_a_queue_is_issued_while_the_stream_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(monkeypatch, 4e-6)
    assert timed(stub.call, "cuda") == pytest.approx(4e-6)
    calls = ["call"] * 20
    assert stub.said[:23] == ["call", "call", "synchronize", *calls]
    queue = ["synchronize", "sleep", "record event 1", *calls, "record event 2", "wait event 2"]
    assert stub.said[23 : 23 + len(queue)] == queue
    assert stub.said.count("sleep") == 5


def test_under_load_the_stream_is_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(monkeypatch, 0.01)
    begun = stub.clock

    def slower() -> None:
        stub.each = 0.01 if stub.clock - begun < 3.0 else 0.02  # throttled
        stub.call()

    monkeypatch.setattr(module.time, "monotonic", lambda: stub.clock)
    assert timed_under_load(slower, "cuda", 8.0) == pytest.approx(0.02)
    said = [each for each in stub.said if "event" in each]
    first = said.index("record event 11")  # after the five queues that say how long a call takes
    assert said[first : first + 6] == [
        *("record event 11", "record event 12", "record event 13", "record event 14"),
        *("wait event 12", "record event 15"),
    ]
    assert "synchronize" not in stub.said[stub.said.index("record event 11") :]
