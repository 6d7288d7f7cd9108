"""Exposed time is what a step waits for communication, by axis; and nothing is left of measuring it."""

import threading
import time

import pytest
import torch
from torch import distributed as dist
from torch import nn

import parallel3d as p3d
from parallel3d._compat import all_gather_single
from parallel3d.observability import ExposedTime
from parallel3d.testing.emulated_network import EmulatedNetwork, Link

LINKS = {"nic": Link(latency=0.02), "nvlink": Link(latency=0.005)}
AXES = {"replicate": "nic", "shard": "nic", "tp": "nvlink"}


def network(**links: Link) -> EmulatedNetwork:
    return EmulatedNetwork(world_size=8, links={**LINKS, **links}, axes=AXES)


def mesh_of_eight() -> dist.DeviceMesh:
    return p3d.build_mesh(p3d.MeshLayout(2, 2, 2), device_type="cpu")


def test_blocking_and_waiting_by_axis() -> None:
    with network():
        mesh = mesh_of_eight()
        x, y = torch.ones(8), torch.ones(16)
        with ExposedTime(mesh) as meter:
            dist.all_reduce(x, group=mesh.get_group("replicate"))  # 20 ms
            work = dist.all_reduce(x, group=mesh.get_group("tp"), async_op=True)  # 5 ms
            work.wait()
            hidden = all_gather_single(y, x, group=mesh.get_group("shard"), async_op=True)
            time.sleep(0.03)  # hides all of its 20 ms
            hidden.wait()
    assert meter.seconds["replicate"] == pytest.approx(0.02, abs=0.01)
    assert meter.seconds["tp"] == pytest.approx(0.005, abs=0.01)
    assert meter.seconds["shard"] < 0.01
    assert meter.total >= 0.055 and meter.own >= 0.03
    assert meter.own == pytest.approx(meter.total - sum(meter.seconds.values()))


def test_a_step_of_the_engine_beside_the_networks_own_account() -> None:
    """What it finds is what the emulated network says that it was waited for, in forward and backward."""
    with network() as emulated:
        mesh = mesh_of_eight()
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
        plan = {"0": "colwise", "1": "rowwise"}
        p3d.parallelize(model, mesh, tp_plan=plan)
        x = torch.ones(4, 32)
        model(x).sum().backward()  # the first step prepares
        emulated.clear()
        with ExposedTime(mesh) as meter:
            model(x).sum().backward()
        waited = dict.fromkeys(AXES, 0.0)
        for transfer in emulated.timeline:
            waited[transfer.axis] += transfer.waited
    assert waited["shard"] > 0.02 and waited["replicate"] > 0.015
    for axis, truth in waited.items():
        assert truth <= meter.seconds.get(axis, 0) + 1e-4
        assert meter.seconds.get(axis, 0) <= truth + 0.015 + 0.2 * truth, axis


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
