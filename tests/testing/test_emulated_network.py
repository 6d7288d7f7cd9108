"""EmulatedNetwork: links, what a collective costs, what runs on it."""

import copy
import re
import time

import pytest
import torch
from _support.emulated import CudaLine, EmulatedNetwork, Link, Transfer, VirtualClock
from _support.fsdp.noted_streams import Device, FakeEvent, happens_before
from torch import distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import parallel3d as p3d
from parallel3d._torch.groups import all_gather_single, reduce_scatter_single
from parallel3d._util.trace import issuing
from parallel3d.errors import MeshError, Parallel3dError, StateError
from parallel3d.fsdp import fully_shard
from parallel3d.testing import fake_world, record_collectives

KIB = 1024
AXES = {"a": "nic", "b": "nic", "c": "other"}


def network(**options) -> EmulatedNetwork:
    options = {
        "world_size": 8,
        "links": {"nic": Link(latency=0.5, bandwidth=KIB), "other": Link(bandwidth=2 * KIB)},
        "axes": AXES,
        "clock": VirtualClock(),
    } | options
    return EmulatedNetwork(**options)


def kib(n: int) -> torch.Tensor:
    return torch.arange(n * KIB // 4, dtype=torch.float32)


def cube():
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))


class TestCosts:
    """Of group a (2 ranks, 1 KiB/s, half a second of latency), in the virtual clock's seconds."""

    @pytest.mark.parametrize(
        ("call", "op", "sent"),
        [
            (lambda g: all_gather_single(kib(8), kib(4), group=g, async_op=True), "all_gather", 4),
            (lambda g: reduce_scatter_single(kib(4), kib(8), group=g, async_op=True), "reduce_scatter", 4),
            (lambda g: dist.all_reduce(kib(8), group=g, async_op=True), "all_reduce", 8),
            (lambda g: dist.all_to_all_single(kib(8), kib(8), group=g, async_op=True), "all_to_all", 4),
            (lambda g: dist.broadcast(kib(8), group=g, group_src=0, async_op=True), "broadcast", 8),
            (lambda g: dist.isend(kib(8), group=g, group_dst=1), "send", 8),
            (lambda g: dist.irecv(kib(8), group=g, group_src=1), "recv", 8),
            (lambda g: dist.barrier(group=g, async_op=True), "barrier", 0),
        ],
    )  # fmt: skip
    def test_what_a_ring_sends(self, call, op, sent):
        with network() as net:
            work = call(cube().get_group("a"))
            assert not work.is_completed()
            work.wait()
            (transfer,) = net.timeline
            assert (transfer.op, transfer.axis, transfer.link) == (op, "a", "nic")
            assert transfer.bytes == sent * KIB
            assert transfer.ended == net.clock.now() == transfer.waited == 0.5 + sent
            assert work.is_completed() and work.is_success()

    def test_four_ranks(self):
        with network(axes={"x": "nic", "y": "nic"}) as net:
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("x", "y"))
            all_gather_single(kib(16), kib(4), group=mesh.get_group("y"))
            dist.all_reduce(kib(16), group=mesh.get_group("y"))
            assert [t.bytes // KIB for t in net.timeline] == [12, 24]

    def test_synchronous_calls_block(self):
        with network() as net:
            dist.all_reduce(kib(2), group=cube().get_group("a"))
            assert net.clock.now() == 2.5

    def test_lists_and_coalesced_calls(self):
        with network() as net:
            group, coalescing = cube().get_group("a"), dist.distributed_c10d._coalescing_manager
            dist.all_gather([kib(2), kib(2)], kib(2), group=group)
            with coalescing(group, async_ops=True) as works:
                all_gather_single(kib(4), kib(2), group=group)
                all_gather_single(kib(8), kib(4), group=group)
            works.wait()
            with coalescing(group, torch.device("cpu"), async_ops=True) as works:
                dist.broadcast(kib(1), group=group, group_src=0)
            works.wait()
            sent = [(t.op, t.bytes // KIB) for t in net.timeline]
            assert sent == [("all_gather", 2), ("all_gather", 6), ("broadcast", 1)]
            assert net.clock.now() == 1.5 + 9

    def test_functional_collectives(self):
        with network() as net:
            mesh = cube()["c"]
            whole = distribute_tensor(torch.ones(4, 256), mesh, [Shard(0)], src_data_rank=None)
            assert whole.full_tensor().shape == (4, 256)
            (transfer,) = net.timeline
            assert (transfer.op, transfer.bytes, transfer.axis) == ("all_gather", 2 * KIB, "c")
            assert net.clock.now() == 1.0


class TestLinks:
    def test_first_come_first_served_and_shared(self, monkeypatch):
        monkeypatch.setattr(issuing, "unit", "")  # an earlier test may have left another
        with network() as net:
            mesh = cube()
            works = [
                dist.all_reduce(kib(2), group=mesh.get_group(axis), async_op=True) for axis in "abc"
            ]
            net.clock.advance(1.0)
            works[1].wait()
            a, b, c = net.timeline
            assert (a.started, a.ended, a.waited) == (0.0, 2.5, 0.0)
            assert (b.issued, b.started, b.ended, b.waited) == (0.0, 2.5, 5.0, 4.0)
            assert (c.started, c.ended) == (0.0, 1.0)  # on its own link
            works[0].wait(), works[2].wait()
            assert net.clock.now() == 5.0
            assert (net.busy("nic"), net.busy("other")) == (5.0, 1.0)
            assert "nic b all_reduce 2,048 -" in str(net)

    def test_a_link_may_be_replaced(self):
        with network() as net:
            net.links["nic"] = Link(bandwidth=float("inf"))
            dist.all_reduce(kib(2), group=cube().get_group("a"))
            assert net.clock.now() == 0.0
            net.clear()
            assert net.timeline == []

    def test_an_axis_of_one_costs_nothing(self):
        with network(axes={"a": "nic"}) as net:
            mesh = init_device_mesh("cpu", (8, 1), mesh_dim_names=("a", "tp"))
            dist.all_reduce(kib(2), group=mesh.get_group("tp"))
            assert net.timeline == []

    def test_an_axis_as_long_as_the_world(self):
        with network() as net:
            mesh = init_device_mesh("cpu", (1, 8), mesh_dim_names=("a", "c"))
            dist.all_reduce(kib(2), group=mesh.get_group("c"), async_op=True)
            net.attach(mesh)
            dist.all_reduce(kib(2), group=mesh.get_group("c"), async_op=True)
            assert [(t.axis, t.link) for t in net.timeline] == [("world", "nic"), ("c", "other")]

    def test_no_axes_means_one_link(self):
        with network(axes=None) as net:
            dist.all_reduce(kib(2), group=cube().get_group("c"))
            assert net.timeline[0].link == "nic"

    def test_real_time(self):
        """A transfer takes its time and, sleeping, hardly any of the CPU's."""
        with network(clock=None, links={"nic": Link(bandwidth=1e6)}, axes=None) as net:
            x = torch.zeros(25_000)
            group = cube().get_group("a")
            start, cpu = time.perf_counter(), time.process_time()
            dist.all_reduce(x, group=group)
            took, cpu = time.perf_counter() - start, time.process_time() - cpu
            (transfer,) = net.timeline
            assert transfer.ended - transfer.started == pytest.approx(0.1)
            assert took >= 0.1
            assert cpu < 0.05

    def test_a_clock_that_runs_with_something(self):
        seconds = [5.0]
        clock = VirtualClock(lambda: seconds[0])
        assert clock.now() == 0.0
        seconds[0] += 1.0
        clock.sleep_until(3.0)
        seconds[0] += 1.0
        clock.sleep_until(3.5)
        assert clock.now() == 4.0
        clock.rewind_to(3.25)
        assert clock.now() == 3.25


def net_of(model, x, mesh, kind):
    """This rank's gradients in the second step."""
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    elif mesh is not None:
        apply = fully_shard if kind == "ours" else fsdp.fully_shard
        where = mesh if kind == "ours" else mesh["replicate", "shard"]
        for block in model:
            apply(block, mesh=where)
        apply(model, mesh=where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).sum().backward()
        if mesh is None:  # a mean over 8 ranks that hear nothing of each other
            for param in model.parameters():
                param.grad /= 8
        optimizer.step()
    grads = [p.grad for p in model.parameters()]
    return [g.to_local() if hasattr(g, "to_local") else g for g in grads]


@pytest.mark.parametrize("kind", ["ours", "torch", "ddp"])
@pytest.mark.parametrize("real", [False, True], ids=["virtual", "real"])
def test_engines_compute_what_they_do_on_the_fake_group(kind, real):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    x = torch.randn(4, 64)
    layout = p3d.MeshLayout(2, 4, 1)
    with fake_world(0, 8):  # where DDP does not run
        mesh = None if kind == "ddp" else p3d.build_mesh(layout, device_type="cpu")
        expected = net_of(copy.deepcopy(model), x, mesh, "" if kind == "ddp" else kind)
    links = {"nic": Link(latency=1e-3, bandwidth=1e8)}
    clock = None if real else VirtualClock()
    with EmulatedNetwork(world_size=8, links=links, clock=clock) as net:
        mesh = p3d.build_mesh(layout, device_type="cpu")
        for got, want in zip(net_of(model, x, mesh, kind), expected, strict=True):
            assert torch.equal(got, want)
        ops = {t.op for t in net.timeline}
    assert ops >= (
        {"all_reduce"} if kind == "ddp" else {"all_gather", "reduce_scatter", "all_reduce"}
    )
    assert "all_to_all" not in ops  # gloo's way round its blocking reduce-scatter


def test_the_recorder_sees_the_same_calls():
    with network() as net:
        mesh = cube()
        with record_collectives(mesh) as recorder:
            all_gather_single(kib(8), kib(4), group=mesh.get_group("a"))
            dist.all_reduce(kib(2), group=mesh.get_group("c"), async_op=True)
        assert [(c.op, c.axis, c.bytes // KIB) for c in recorder.calls] == [
            ("all_gather", "a", 8),
            ("all_reduce", "c", 2),
        ]
        assert [t.op for t in net.timeline] == ["all_gather", "all_reduce"]


class TestWithoutValues:
    def test_outputs_stay_as_they_are(self):
        """The same transfers at the same times; only the tensors are not written."""
        times = []
        for values in (True, False):
            with network(values=values) as net:
                group, full = cube().get_group("a"), torch.full((2 * KIB,), 7.0)
                all_gather_single(full, kib(4), group=group)
                part = torch.full((KIB,), 7.0)
                reduce_scatter_single(part, kib(8), group=group, async_op=True).wait()
                times.append([(t.op, t.bytes, t.started, t.ended) for t in net.timeline])
                assert bool((full == 7.0).all()) == bool((part == 7.0).all()) == (not values)
        assert times[0] == times[1]

    def test_may_be_changed(self):
        with network(values=False) as net:
            full, group = torch.full((2 * KIB,), 7.0), cube().get_group("a")
            all_gather_single(full, kib(4), group=group)
            net.values = True
            assert full[0] == 7.0
            all_gather_single(full, kib(4), group=group)
            assert full[1] == 1.0

    @pytest.mark.parametrize("kind", ["ours", "torch"])
    def test_engines_send_the_same(self, kind):
        sent = []
        for values in (True, False):
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
            with network(axes=None, values=values) as net:
                mesh = p3d.build_mesh(p3d.MeshLayout(2, 4, 1), device_type="cpu")
                net_of(model, torch.randn(4, 64), mesh, kind)
                sent.append([(t.op, t.axis, t.bytes) for t in net.timeline])
        assert sent[0] == sent[1]


def test_units_are_named():
    with network(axes=None) as net:
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=8), device_type="cpu")
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.ones(1, 8)).sum().backward()
        assert {t.unit for t in net.timeline} == {"0", "1"}


def test_ends_when_the_body_raises():
    with pytest.raises(KeyError), network():
        raise KeyError
    assert not dist.is_initialized()
    with network():
        assert dist.get_backend() == "emulated"


def test_bad_arguments():
    no_link = "'a' is on link 'nick', but the links are 'nic', 'other'"
    for options, error, message in (
        ({"links": {}}, Parallel3dError, "at least one"),
        ({"axes": {"a": "nick"}}, Parallel3dError, no_link),
        ({"rank": 8}, MeshError, "from 0 to 7"),
        ({"world_size": 0}, MeshError, "positive integer"),
    ):
        with pytest.raises(error, match=message):
            network(**options)


def test_bad_links():
    for name, value in (
        ("bandwidth", 0), ("bandwidth", -1.0), ("latency", -1e-6), ("latency", float("nan"))
    ):  # fmt: skip
        with pytest.raises(Parallel3dError, match=rf"{name}={re.escape(str(value))}"):
            Link(**{name: value})


def test_an_axis_without_a_link():
    with network(axes={"a": "nic", "bee": "nic"}) as net:
        with pytest.raises(
            Parallel3dError, match=r"'b' is on no link: axes names 'a', 'bee'; add 'b'"
        ):
            cube()
        with pytest.raises(Parallel3dError, match="the links are 'nic', 'other'"):
            net.busy("nick")


def test_within_another_world():
    with fake_world(0, 2), pytest.raises(StateError, match="EmulatedNetwork"), network():
        pass


class Timed(FakeEvent):
    def elapsed_time(self, end: FakeEvent) -> float:
        return 20.0


class Gpu(Device):
    """The streams of a GPU on which any two events are 20 ms apart."""

    def Event(self, **_: object) -> FakeEvent:
        return Timed(self)

    def sleep(self, cycles: int) -> None:
        self.now.put(f"sleeps {cycles}")


def test_on_a_gpu_a_stream_is_busy():
    """The line waits for the input, sleeps, and the reader waits for the line."""
    device = Gpu()
    line = CudaLine(VirtualClock(), device, device.sleep)
    assert line.cycles_per_second == 1e9  # 20 million cycles in 20 ms
    device.log.clear()
    transfer = Transfer("all_gather", "", "a", "nic", 1, 0.0, 0.0, 0.0)
    device.compute.put("input")
    with line.values():
        device.now.put("values")
    device.compute.put("computes")
    line.begin(transfer, 2e-6)
    line.wait(transfer)
    device.compute.put("reads")
    on = [(what, stream) for what, stream, _ in device.log]
    assert on == [
        ("input", "compute"),
        ("values", "stream"),
        ("computes", "compute"),
        ("sleeps 2000", "stream"),
        ("reads", "compute"),
    ]
    made, values, computes, sleeps, reads = device.log
    assert happens_before(made, values) and happens_before(sleeps, reads)
    assert not happens_before(values, computes) and not happens_before(computes, sleeps)
    line.resolve(transfer)
    assert (transfer.started, transfer.ended) == (0.02, 0.02)
