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
from parallel3d.testing import fake_world

LINKS = {"nic": Link(latency=0.02), "nvlink": Link(latency=0.005)}
AXES = {"replicate": "nic", "shard": "nic", "tp": "nvlink"}


def network(clock: VirtualClock | None = None) -> EmulatedNetwork:
    return EmulatedNetwork(world_size=8, links=LINKS, axes=AXES, clock=clock)


def mesh_of_eight() -> dist.DeviceMesh:
    return p3d.build_mesh(p3d.MeshLayout(2, 2, 2), device_type="cpu")


def test_blocking_and_waiting_by_axis() -> None:
    """In real time: never less than the truth, and of what is hidden next to nothing."""
    with network():
        mesh = mesh_of_eight()
        x, y = torch.ones(8), torch.ones(16)
        with ExposedTime(mesh) as meter:
            dist.all_reduce(x, group=mesh.get_group("replicate"))  # 20 ms
            dist.all_reduce(x, group=mesh.get_group("tp"), async_op=True).wait()  # 5 ms
            hidden = all_gather_single(y, x, group=mesh.get_group("shard"), async_op=True)
            time.sleep(0.03)  # hides all of its 20 ms
            hidden.wait()
    assert meter.seconds["replicate"] >= 0.019 and meter.seconds["tp"] >= 0.004
    assert meter.seconds["shard"] < 0.019
    assert meter.total >= 0.055 and meter.own >= 0.029
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
