"""Exposed time is what a step waits for communication, by axis; and nothing is left of measuring it."""

import _thread
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _support.emulated import EmulatedNetwork, Link, VirtualClock
from torch import distributed as dist
from torch import nn

import parallel3d as p3d
from parallel3d._torch.groups import all_gather_single
from parallel3d.observability import ExposedTime, HostClock, StreamClock
from parallel3d.observability.exposed import StreamPatch
from parallel3d.testing import fake_world

LINKS = {"nic": Link(latency=0.02), "nvlink": Link(latency=0.005)}
AXES = {"replicate": "nic", "shard": "nic", "tp": "nvlink"}


def network(clock: VirtualClock | None = None) -> EmulatedNetwork:
    return EmulatedNetwork(world_size=8, links=LINKS, axes=AXES, clock=clock)


def mesh_of_eight() -> dist.DeviceMesh:
    return p3d.build_mesh(p3d.MeshLayout(2, 2, 2), device_type="cpu")


def test_blocking_and_waiting_by_axis() -> None:
    """In real time: never less than the truth, and of what is hidden next to nothing."""
    links = {**LINKS, "slow": Link(latency=0.2)}
    with EmulatedNetwork(world_size=8, links=links, axes={**AXES, "shard": "slow"}):
        mesh = mesh_of_eight()
        x, y = torch.ones(8), torch.ones(16)
        with ExposedTime(mesh) as meter:
            dist.all_reduce(x, group=mesh.get_group("replicate"))  # 20 ms
            dist.all_reduce(x, group=mesh.get_group("tp"), async_op=True).wait()  # 5 ms
            hidden = all_gather_single(y, x, group=mesh.get_group("shard"), async_op=True)
            time.sleep(0.25)  # hides all of its 200 ms
            hidden.wait()
    assert meter.seconds["replicate"] >= 0.019 and meter.seconds["tp"] >= 0.004
    assert meter.seconds["shard"] < 0.19
    assert meter.total >= 0.275 and meter.own >= 0.249
    assert meter.own == pytest.approx(meter.total - sum(meter.seconds.values()))


class Computes(nn.Module):
    """Takes 8 ms of the clock forward, and 16 backward."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.advance(0.008)
        y = self.linear(x)
        y.register_hook(lambda grad: self.clock.advance(0.016))
        return y


class Blocks(nn.Module):
    """Four of them, each a unit."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Computes(clock) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_a_step_of_the_engine_is_what_the_network_says(tensor_parallel: bool) -> None:
    """By axis, to the microsecond, of a step that hides a part of its communication."""
    clock = VirtualClock()
    with network(clock) as emulated:
        mesh = mesh_of_eight()
        model = Blocks(clock)
        style = "colwise_gather_output" if tensor_parallel else "replicate"
        p3d.parallelize(model, mesh, tp_plan={"blocks.*.linear": style})
        for _ in range(2):  # the first step prepares
            emulated.clear()
            with ExposedTime(mesh, clock=HostClock(clock.now)) as meter:
                model(torch.ones(4, 32)).sum().backward()
        truth: dict[str, float] = {}
        for transfer in emulated.timeline:
            truth[transfer.axis] = truth.get(transfer.axis, 0.0) + transfer.waited
        busy = sum(transfer.ended - transfer.started for transfer in emulated.timeline)
    waited = {axis: seconds for axis, seconds in truth.items() if seconds}
    found = {axis: seconds for axis, seconds in meter.seconds.items() if seconds}
    assert set(waited) == {"replicate", "shard"} | ({"tp"} if tensor_parallel else set())
    assert found == pytest.approx(waited, abs=1e-6)
    assert 0 < sum(found.values()) < busy  # some of it is hidden
    assert meter.own == pytest.approx(4 * 0.024, abs=1e-6)


def test_all_is_as_before() -> None:
    with network():
        mesh = mesh_of_eight()
        group = mesh.get_group("tp")
        kinds = [type(group), dist.Work, *type(group).__mro__]
        before = [dict(vars(kind)) for kind in kinds]
        meter = ExposedTime(mesh)
        with pytest.raises(ZeroDivisionError), meter:
            assert vars(type(group))["allreduce"] is not before[0]["allreduce"]
            dist.all_reduce(torch.ones(2), group=group)
            1 / 0  # noqa: B018
        assert [dict(vars(kind)) for kind in kinds] == before
        assert set(meter.seconds) == {"tp"}


def test_a_thread_of_autograds() -> None:
    """Not one of Python's, also where Python has come to know it, as logging in a hook does."""
    done = threading.Event()

    def body() -> None:
        threading.current_thread()
        dist.all_reduce(torch.ones(2), group=group)
        done.set()

    with network():
        mesh = mesh_of_eight()
        group = mesh.get_group("shard")
        with ExposedTime(mesh) as meter:
            _thread.start_new_thread(body, ())
            assert done.wait(10)
    assert set(meter.seconds) == {"shard"}


def test_groups_within_an_axis() -> None:
    """The engine's own: a second one for the reduce-scatter, one of neighbours on the axis."""
    with network():
        mesh = mesh_of_eight()
        for axis in ("shard", "tp"):
            again = dist.new_group(dist.get_process_group_ranks(mesh.get_group(axis)))
            with ExposedTime(mesh) as meter:
                dist.all_reduce(torch.ones(2), group=again)
            assert set(meter.seconds) == {axis}


def test_a_mesh_without_names() -> None:
    with fake_world(0, 4):
        mesh = dist.DeviceMesh("cpu", torch.arange(4).view(2, 2))
        meter = ExposedTime(mesh)
        assert [meter.axes[mesh.get_group(at).group_name] for at in range(2)] == ["0", "1"]


def test_the_clock_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh: Any = SimpleNamespace(device_type="cuda", mesh_dim_names=(), ndim=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(ExposedTime(mesh).clock, StreamClock)
    mesh.device_type = "cpu"
    assert isinstance(ExposedTime(mesh).clock, HostClock)


def test_other_threads_and_other_groups() -> None:
    """A background thread's communication is no wait of the step."""
    with network():
        mesh = mesh_of_eight()
        outside = dist.new_group(list(range(8)))
        with ExposedTime(mesh) as meter:
            thread = threading.Thread(
                target=lambda: dist.all_reduce(torch.ones(2), group=mesh.get_group("shard"))
            )
            thread.start()
            thread.join()
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(2), group=outside)
    assert set(meter.seconds) == {"world", "other"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    """The stream that computes waits for a link that is busy 20 ms; what is hidden by a kernel is none."""
    with network():
        mesh = p3d.build_mesh(p3d.MeshLayout(2, 2, 2), device_type="cuda")
        x = torch.ones(8, device="cuda")
        with ExposedTime(mesh, clock=StreamClock(torch.cuda)) as meter:
            dist.all_reduce(x, group=mesh.get_group("replicate"))
            hidden = dist.all_reduce(x, group=mesh.get_group("tp"), async_op=True)
            torch.cuda._sleep(100_000_000)  # some 50 ms
            hidden.wait()
    assert 0.018 <= meter.seconds["replicate"] <= 0.03 and meter.seconds["tp"] < 0.004


# On an accelerator the waits of the stream that computes count: by stand-ins for its streams


class Device:
    """What ``torch.cuda`` is to the clock; ``now`` is the moment that a stream has come to, in ms."""

    def __init__(self) -> None:
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.enable_timing, self.at = enable_timing, -1.0

            def record(self, stream: Any) -> None:
                self.at = stream.now

            def elapsed_time(self, later: Any) -> float:
                assert self.enable_timing and later.enable_timing and later.at >= self.at >= 0
                return later.at - self.at

            def synchronize(self) -> None:
                device.synchronized = self

        class Stream:
            def __init__(self, name: str) -> None:
                self.name, self.now = name, 0.0

            def record_event(self, event: Any = None) -> Any:
                event = event if event is not None else Event()
                event.record(self)
                return event

            def wait_event(self, event: Any) -> None:
                self.now = max(self.now, event.at)

            def wait_stream(self, stream: Any) -> None:
                self.wait_event(stream.record_event())

        self.Event, self.Stream = Event, Stream
        self.synchronized: Any = None
        self.compute, self.gather, self.copy = Stream("compute"), Stream("gather"), Stream("copy")
        self.current = self.compute

    def current_stream(self) -> Any:
        return self.current


def test_waits_for_an_event_of_a_stream_that_communicates() -> None:
    device: Any = Device()
    clock, patch = StreamClock(device), StreamPatch()
    before = dict(vars(device.Stream))
    clock.patches(patch)
    clock.begin()
    device.current = device.gather  # the engine issues an all-gather there
    started = clock.start()
    clock.issued("shard")
    clock.stop(started, "shard")
    device.gather.now = 7.0
    gathered = device.gather.record_event()
    device.copy.now = 50.0
    copied = device.copy.record_event()  # nothing was communicated there
    device.current = device.compute
    device.compute.now = 4.0
    device.compute.wait_event(gathered)  # 3 ms with nothing to do
    device.compute.now = 9.0
    device.compute.wait_event(gathered)  # over already
    device.gather.wait_event(copied)
    device.compute.wait_event(copied)  # a wait, but for no collective
    patch.undo()
    total, seconds = clock.take()
    assert seconds == {"shard": pytest.approx(0.003)} and total == pytest.approx(0.05)
    assert device.synchronized is not None
    assert dict(vars(device.Stream)) == before


def test_wait_stream_and_an_event_of_the_callers() -> None:
    device: Any = Device()
    clock, patch = StreamClock(device), StreamPatch()
    clock.patches(patch)
    clock.begin()
    device.current = device.gather
    clock.issued("replicate")
    device.current = device.compute
    device.gather.now = 2.0
    device.compute.wait_stream(device.gather)
    mine = device.Event(enable_timing=True)
    assert device.gather.record_event(mine) is mine
    device.gather.now = 5.0
    device.compute.wait_event(device.gather.record_event())
    patch.undo()
    assert clock.take()[1] == {"replicate": pytest.approx(0.005)}


def test_collectives_on_the_stream_that_computes() -> None:
    device: Any = Device()
    clock = StreamClock(device)
    clock.begin()
    started = clock.start()
    device.compute.now = 6.0  # a synchronous all-reduce of tensor parallelism
    clock.stop(started, "tp")
    assert clock.take() == (pytest.approx(0.006), {"tp": pytest.approx(0.006)})
    clock.begin()
    assert clock.take()[1] == {}


def test_an_error_is_not_held_up() -> None:
    """After one the stream may wait for ever for ranks that don't come."""
    device: Any = Device()
    with pytest.raises(ZeroDivisionError), ExposedTime(clock=StreamClock(device)) as meter:
        1 / 0  # noqa: B018
    assert device.synchronized is None and meter.seconds == {}
