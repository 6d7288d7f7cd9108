"""The recorder: every collective once, with its axis, unit and size, on every kind of world."""

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from parallel3d._torch.groups import all_gather_single, reduce_scatter_single
from parallel3d._util.trace import issuing
from parallel3d.testing import (
    Collective,
    GlooPool,
    Recorder,
    fake_world,
    local_world,
    record_collectives,
)

AXES = ("replicate", "shard", "tp")


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=AXES)


def one_of_each(mesh: DeviceMesh) -> None:
    """Every blocking collective of torch.distributed, on groups of two."""
    groups = {axis: mesh.get_group(axis) for axis in AXES}
    one, two = torch.zeros(4), torch.zeros(8)
    all_gather_single(two, one, group=groups["shard"])
    dist.all_gather([torch.zeros(4), torch.zeros(4)], one, group=groups["shard"])
    reduce_scatter_single(one, two, group=groups["shard"])
    dist.all_reduce(one, group=groups["replicate"])
    dist.all_to_all_single(torch.zeros(8), two, group=groups["tp"])
    dist.broadcast(one, group_src=0, group=groups["tp"])
    dist.barrier(group=groups["replicate"])


OF_EACH = [
    ("all_gather", "shard", 32),
    ("all_gather", "shard", 32),
    ("reduce_scatter", "shard", 32),
    ("all_reduce", "replicate", 16),
    ("all_to_all", "tp", 32),
    ("broadcast", "tp", 16),
    ("barrier", "replicate", 0),
]


def brief(recorder: Recorder) -> list[tuple[str, str | None, int]]:
    return [(call.op, call.axis, call.bytes) for call in recorder.calls]


def record_one_of_each() -> list[Collective]:
    mesh = make_mesh()
    with record_collectives(mesh) as recorder:
        one_of_each(mesh)
    assert brief(recorder) == OF_EACH
    assert {call.group_size for call in recorder.calls} == {2}
    assert [call.order for call in recorder.calls] == list(range(len(OF_EACH)))
    assert not any(call.asynchronous for call in recorder.calls)
    return recorder.calls


IN_ONE_PROCESS = pytest.mark.parametrize(
    "make_world", [lambda: fake_world(0, 8), lambda: fake_world(5, 8), lambda: local_world(8)]
)


@IN_ONE_PROCESS
def test_in_one_process(make_world: Any) -> None:
    with make_world():
        record_one_of_each()


def test_on_gloo(gloo_pool: GlooPool) -> None:
    calls, *others = gloo_pool.run(record_one_of_each)
    assert others == [calls] * 7


class Identity(torch.autograd.Function):
    """All-gathers forward, reduce-scatters backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        out = torch.empty(2 * x.shape[0])
        issuing.unit = "layer"
        all_gather_single(out, x.detach(), group=mesh.get_group("shard"))
        issuing.unit = ""
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = torch.empty(grad.shape[0] // 2)
        issuing.unit = "layer"
        reduce_scatter_single(out, grad.contiguous(), group=ctx.mesh.get_group("shard"))
        issuing.unit = ""
        dist.all_reduce(out, group=ctx.mesh.get_group("tp"))
        return out, None


def record_backward(x: torch.Tensor) -> list[Collective]:
    mesh = make_mesh()
    with record_collectives(mesh) as recorder:
        Identity.apply(x, mesh).sum().backward()
    assert recorder.by_unit().keys() == {"layer", ""}
    return recorder.calls


BACKWARD = [
    Collective(0, "all_gather", "shard", "layer", 24, 2, False),
    Collective(1, "reduce_scatter", "shard", "layer", 24, 2, False),
    Collective(2, "all_reduce", "tp", "", 12, 2, False),
]


def test_backward_on_simulated_ranks() -> None:
    with local_world(8) as world:
        x = world.map(lambda rank: torch.full((3,), float(rank))).requires_grad_()
        assert record_backward(x) == BACKWARD
        # Recording changes no number: the sum over shard (2) and tp (2) of ones.
        assert [t.tolist() for t in world.per_rank(x.grad)] == [[4.0] * 3] * 8


def backward_on_gloo() -> tuple[list[Collective], torch.Tensor]:
    x = torch.full((3,), float(dist.get_rank()), requires_grad=True)
    return record_backward(x), x.grad


def test_backward_on_gloo(gloo_pool: GlooPool) -> None:
    for calls, grad in gloo_pool.run(backward_on_gloo):
        assert calls == BACKWARD
        assert grad.tolist() == [4.0] * 3


def use_functional(mesh: DeviceMesh) -> None:
    x = torch.zeros(4)
    group = mesh.get_group("tp")
    functional.all_reduce(x, "sum", group).sum()
    functional.all_gather_tensor(x, 0, group).sum()
    functional.reduce_scatter_tensor(x, "sum", 0, group).sum()
    functional.all_to_all_single(x, None, None, group).sum()
    # On the result of a collective nobody has waited for yet.
    functional.all_reduce(functional.all_reduce(x, "sum", group), "sum", group).sum()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # the names torch 2.11 has
@IN_ONE_PROCESS
def test_functional_collectives(make_world: Any) -> None:
    with make_world():
        mesh = make_mesh()
        with record_collectives(mesh) as recorder:
            use_functional(mesh)
    assert brief(recorder) == [
        ("all_reduce", "tp", 16),
        ("all_gather", "tp", 32),
        ("reduce_scatter", "tp", 16),
        ("all_to_all", "tp", 16),
        ("all_reduce", "tp", 16),
        ("all_reduce", "tp", 16),
    ]
    assert all(call.asynchronous for call in recorder.calls)


@IN_ONE_PROCESS
def test_a_coalesced_call_counts_once(make_world: Any) -> None:
    with make_world():
        mesh = make_mesh()
        group = mesh.get_group("shard")
        with record_collectives(mesh) as recorder:
            with dist._coalescing_manager(group=group):
                for n in (4, 8):
                    all_gather_single(torch.zeros(2 * n), torch.zeros(n), group=group)
            with dist._coalescing_manager(group=group):
                for n in (4, 8):
                    dist.all_reduce(torch.zeros(n), group=group)
    assert brief(recorder) == [("all_gather", "shard", 96), ("all_reduce", "shard", 48)]


def test_asynchronous_calls() -> None:
    with fake_world(0, 8), record_collectives() as recorder:
        dist.all_reduce(torch.zeros(1), async_op=True).wait()
        dist.all_reduce(torch.zeros(1))
    assert [call.asynchronous for call in recorder.calls] == [True, False]
    assert [call.axis for call in recorder.calls] == [None, None]


def test_a_collective_that_raises_is_not_recorded() -> None:
    plain = torch.zeros(2)
    with local_world(2), record_collectives() as recorder:
        with pytest.raises(ValueError, match="plain tensor"):
            dist.all_reduce(plain)
        dist.all_reduce(torch.zeros(2))
    assert recorder.count() == 1


def test_sizes_are_of_the_largest_simulated_rank() -> None:
    with local_world(4) as world:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        with record_collectives(mesh) as recorder:  # the second group of b has more to reduce
            x = world.map(lambda rank: torch.zeros(4 if rank < 2 else 6, dtype=torch.float64))
            dist.all_reduce(x, group=mesh.get_group("b"))
    assert brief(recorder) == [("all_reduce", "b", 48)]


@IN_ONE_PROCESS
def test_collectives_of_distributed_tensors(make_world: Any) -> None:
    with make_world():
        mesh = make_mesh()
        d = distribute_tensor(torch.zeros(8, 6), mesh, [Replicate(), Shard(0), Shard(1)])
        with record_collectives(mesh) as recorder:
            d.redistribute(placements=[Replicate(), Shard(0), Replicate()])
            d.sum(dim=1).redistribute(placements=[Replicate(), Shard(0), Replicate()])
    assert [(call.op, call.axis) for call in recorder.calls] == [
        ("all_gather", "tp"),
        ("all_reduce", "tp"),
    ]


def test_axis_of_several_meshes_and_flattened_axes() -> None:
    with fake_world(0, 8):
        mesh = make_mesh()
        flat = mesh["replicate", "shard"]._flatten("data")
        other = dist.new_group([0, 1, 2])
        with record_collectives(mesh, flat) as recorder:
            for group in (mesh.get_group("tp"), flat.get_group(), other):
                dist.all_reduce(torch.zeros(1), group=group)
    assert [call.axis for call in recorder.calls] == ["tp", "data", None]
    assert [call.group_size for call in recorder.calls] == [2, 4, 3]


def test_recorders_nest() -> None:
    with fake_world(0, 2), record_collectives() as outer:
        dist.all_reduce(torch.zeros(1))
        with record_collectives() as inner:
            dist.all_reduce(torch.zeros(2))
        dist.all_reduce(torch.zeros(3))
    assert inner.count() == 1
    assert outer.count() == 3


def test_questions_and_table() -> None:
    recorder = Recorder(
        [
            Collective(0, "all_gather", "shard", "layers.0", 4096, 4, True),
            Collective(1, "all_gather", "shard", "layers.1", 4096, 4, True),
            Collective(2, "all_reduce", "tp", "", 16, 2, False),
        ]
    )
    assert recorder.count() == 3
    assert recorder.count("all_gather") == recorder.count(axis="shard") == 2
    assert recorder.count("all_gather", unit="layers.1") == 1
    assert recorder.count("all_gather", axis="tp") == recorder.count(unit="layers.9") == 0
    assert recorder.count(unit="") == 1
    assert recorder.select(axis="tp") == [recorder.calls[2]]
    by_unit = {unit: len(calls) for unit, calls in recorder.by_unit().items()}
    assert by_unit == {"layers.0": 1, "layers.1": 1, "": 1}
    assert str(recorder).splitlines() == [
        "order  op          axis   unit      bytes  ranks",
        "    0  all_gather  shard  layers.0  4,096      4  async",
        "    1  all_gather  shard  layers.1  4,096      4  async",
        "    2  all_reduce  tp     -            16      2",
    ]
    recorder.clear()
    assert recorder.count() == 0


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def test_torchs_fsdp() -> None:
    """Known: per unit one all-gather forward, one backward, one reduce-scatter, one all-reduce."""
    with fake_world(3, 8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = two_layers()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with record_collectives(mesh) as recorder:
            loss = model(torch.randn(4, 16)).sum()
            forward = recorder.count()
            loss.backward()
    assert forward == 2
    assert recorder.count("all_gather", axis="shard") == 4
    assert recorder.count("reduce_scatter", axis="shard") == 2
    assert recorder.count("all_reduce", axis="replicate") == 2
    assert recorder.count() == 8
    parameters = 16 * 16 + 16
    assert {call.bytes for call in recorder.select(axis="shard")} == {4 * parameters}
    assert {call.bytes for call in recorder.select(axis="replicate")} == {parameters}  # a quarter


def test_torchs_tensor_parallel() -> None:
    with fake_world(1, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(two_layers(), mesh, plan)
        x = torch.randn(4, 16, requires_grad=True)
        with record_collectives(mesh) as recorder:
            out = model(x).sum()
            assert brief(recorder) == [("all_reduce", "tp", 256)]
            out.backward()
    assert brief(recorder) == [("all_reduce", "tp", 256)] * 2


def record_ddp() -> list[tuple[str, str | None, int]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    model = nn.parallel.DistributedDataParallel(two_layers(), process_group=mesh.get_group())
    with record_collectives(mesh) as recorder:
        model(torch.randn(4, 16)).sum().backward()
    return brief(recorder)


def test_torchs_ddp(gloo_pool: GlooPool) -> None:
    one_bucket = [("all_reduce", "data", 4 * 2 * (16 * 16 + 16))]
    assert gloo_pool.run(record_ddp, world_size=2) == [one_bucket] * 2


def test_compiled_code_is_recorded() -> None:
    @torch.compile(backend="aot_eager")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    with fake_world(0, 2):
        doubled(torch.ones(2))
        with record_collectives() as recorder:
            doubled(torch.ones(2))
    assert brief(recorder) == [("all_reduce", None, 8)]
