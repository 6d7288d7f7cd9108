"""Gradients that torch's own parallel styles leave partial over tp: summed once per bucket."""

import functools

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh, shard_blocks
from _support.models import Lm, lm_loss, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh
from parallel3d.fsdp import DataParallelMeshDims, fully_shard
from parallel3d.testing import assert_parity, fake_world, local_world, record_collectives, shards_of

PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm": SequenceParallel(),
    "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
build = functools.partial(Lm, vocab=20)
batch = functools.partial(tokens, length=4, vocab=20)  # tp shares it evenly


def apply(model: nn.Module, mesh, **options) -> nn.Module:
    parallelize_module(model, mesh["tp"], PLAN, src_data_rank=None)
    return shard_blocks(model, mesh, **options)


LAYOUTS = [MeshLayout(1, 2, 2), MeshLayout(2, 1, 2)]


@pytest.mark.parametrize("defer", ["nothing", "sync"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_are_the_plain_models(layout, defer):
    micro_batches = 1 if defer == "nothing" else 3
    options = {"defer": defer, "micro_batches": micro_batches, "steps": 2, "fp32": False}
    result = assert_parity(build, batch, layout, loss=lm_loss, apply=apply, **options)
    assert result.grads["float64"] < 1e-12


@pytest.mark.parametrize("sync", [True, False])
def test_one_collective_per_bucket_in_the_reduce_dtype(sync):
    """Of shards, after the reduce-scatter; none for a micro-batch whose reduction is put off."""
    with fake_world(0, 8):
        mesh = cpu_mesh(2, 2, 2)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = apply(build(), mesh, mp_policy=policy)
        model.set_requires_gradient_sync(sync)
        loss = lm_loss(model, batch(0))
        with record_collectives(mesh) as recorder:
            loss.backward()
    sums = recorder.select("all_reduce", "tp")
    if not sync:
        assert not sums
        return
    assert [call.unit for call in sums] == ["layers.1", "layers.0", "Lm"]
    # Of each unit a norm's two vectors of 12, halved over shard, in float32. Biases come whole.
    assert [call.bytes for call in sums] == [48, 48, 48]
    norm, down = model.layers[0].norm, model.layers[0].down
    assert all(p.grad.dtype is torch.float32 for p in (norm.weight, norm.bias, down.bias))


class Uses(nn.Module):
    """Each parameter multiplies rows that tp ranks share ("p": its gradient is a part), or that all have."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(5)) for _ in range(4))

    def forward(self, x: torch.Tensor, uses: str) -> torch.Tensor:
        total = x.new_zeros(())
        for use, p in zip(uses, (self.a, self.b, self.c, self.d), strict=True):
            if use == "-":
                continue
            if not isinstance(p, DTensor):
                total = total + (x * p).square().sum()
                continue
            rows = DTensor.from_local(x, p.device_mesh, [Replicate()])
            if use == "p":
                rows = rows.redistribute(placements=[Shard(0)])
            product = (rows * p).square().sum().redistribute(placements=[Replicate()])
            total = total + product.to_local()
        return total


def test_one_collective_for_parts_that_are_no_neighbours():
    with fake_world(0, 4):
        mesh = cpu_mesh(1, 2, 2)
        model = Uses()
        for name, p in list(model.named_parameters()):
            whole = DTensor.from_local(p.detach(), mesh["tp"], [Replicate()], run_check=False)
            setattr(model, name, nn.Parameter(whole))
        fully_shard(model, mesh=mesh)
        loss = model(torch.randn(6, 5), "pwpw")
        with record_collectives(mesh) as recorder:
            loss.backward()
    # Of the first and third of four vectors of 5, three elements a segment on two shard ranks.
    assert [call.bytes for call in recorder.select("all_reduce", "tp")] == [2 * 3 * 4]


class Twin:
    """``Uses`` beside the plain one; data rank r of backward i reads sample 10 * i + r."""

    def __init__(self, world, layout: MeshLayout) -> None:
        self.world, self.layout, self.count = world, layout, 0
        with world.paused():
            torch.manual_seed(0)
            self.plain, model = Uses().double(), Uses().double()
            model.load_state_dict(self.plain.state_dict())
        self.mesh = build_mesh(layout, device_type="cpu")
        for name, p in list(model.named_parameters()):
            whole = DTensor.from_local(p.detach(), self.mesh["tp"], [Replicate()])
            setattr(model, name, nn.Parameter(whole))
        self.model = fully_shard(model, mesh=self.mesh)

    def sample(self, data_rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * self.count + data_rank)
        return torch.randn(6, 5, generator=generator, dtype=torch.float64)

    def backward(self, uses: str, *, lost: bool = False) -> None:
        with self.world.paused():
            samples = [self.sample(self.layout.data_rank(r)) for r in range(self.layout.world_size)]
            for rank in range(0 if lost else self.layout.data_size):
                (self.plain(self.sample(rank), uses) / self.layout.data_size).backward()
        self.model(self.world.map(lambda rank: samples[rank]), uses).backward()
        self.count += 1

    def check(self, tolerance: float = 1e-12) -> None:
        with self.world.paused():
            for name, p in self.model.named_parameters():
                whole = self.plain.get_parameter(name).grad
                for rank, box, local in shards_of(p.grad):
                    torch.testing.assert_close(
                        local,
                        whole[box],
                        rtol=tolerance,
                        atol=tolerance,
                        msg=f"{name}, rank {rank}",
                    )


@pytest.mark.parametrize("layout", [*LAYOUTS, MeshLayout(1, 2, 3)], ids=str)
def test_parts_and_whole_gradients_add_up(layout):
    """In one bucket, in one sum, in whatever order they come; a part apart from its neighbours too."""
    with local_world(layout.world_size) as world:
        twin = Twin(world, layout)
        twin.backward("pwpw")
        twin.check()
        twin.model.set_requires_gradient_sync(False)
        twin.backward("pwwp")  # onto a reduced gradient
        assert twin.model.a.grad.placements[-1] == Partial()
        assert twin.model.b.grad.placements[-1] == Replicate()
        twin.backward("wpwp")  # whole onto a part, a part onto whole
        assert twin.model.b.grad.placements[-1] == Partial()
        twin.model.set_requires_gradient_sync(True)
        with record_collectives(twin.mesh) as recorder:
            twin.backward("ppww")  # and both with what has been waiting
        twin.check()
        sums = recorder.select("all_reduce", "tp")  # of one number: the loss
        assert len([call for call in sums if call.bytes > 8]) == 1


def test_parts_survive_a_conversion():
    with local_world(4) as world:
        twin = Twin(world, MeshLayout(1, 2, 2))
        twin.model.set_requires_gradient_sync(False)
        twin.backward("pwpw")
        twin.model.float().double()  # new buffers
        assert twin.model.a.grad.placements[-1] == Partial()
        twin.model.set_requires_gradient_sync(True)
        twin.backward("wppw")
        twin.check(tolerance=1e-6)  # of float32


def test_a_part_that_was_cleared_leaves_nothing():
    layout = MeshLayout(1, 2, 2)
    with local_world(4) as world:
        twin = Twin(world, layout)
        twin.model.set_requires_gradient_sync(False)
        twin.backward("pppp", lost=True)
        twin.model.zero_grad()
        twin.backward("wwww")
        twin.model.set_requires_gradient_sync(True)
        twin.backward("pwpw")
        twin.check()


def test_where_ranks_use_different_parameters():
    """What one data rank has a part of, another has nothing of: all sum it over tp."""
    layout = MeshLayout(2, 1, 2)
    with local_world(4) as world:
        twin = Twin(world, layout)
        twin.model.set_reduce_scatter_unused_params(True)
        twin.backward("pw-p")
        twin.backward("wpp-")
        twin.check()


def by_turns() -> list[float]:
    """The same for real: rank by rank other parameters, one backward."""
    mesh = cpu_mesh(2, 1, 2)
    model = Uses()
    for name in ("a", "b", "c", "d"):
        whole = DTensor.from_local(torch.ones(5), mesh["tp"], [Replicate()])
        setattr(model, name, nn.Parameter(whole))
    fully_shard(model, mesh=mesh).set_reduce_scatter_unused_params(True)
    data_rank = mesh["replicate"].get_local_rank()
    model(torch.ones(2, 5), ("pw--", "p-p-")[data_rank]).backward()
    return [p.grad.full_tensor()[0].item() for p in model.parameters()]


def test_where_processes_use_different_parameters(gloo_pool):
    assert gloo_pool.run(by_turns, world_size=4) == [[4.0, 2.0, 2.0, 0.0]] * 4


def test_one_collective_per_bucket_with_dp_mesh_dims():
    """Where parameters, and the batch, are DTensors on the data axes too; tp outside of them."""
    with fake_world(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "fsdp"))
        model = nn.LayerNorm(6)
        for name, p in list(model.named_parameters()):
            made = distribute_tensor(p.detach(), mesh, [Replicate()] * 2, src_data_rank=None)
            setattr(model, name, nn.Parameter(made))
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="fsdp"))
        x = DTensor.from_local(torch.randn(3, 6), mesh, [Shard(0)] * 2, run_check=False)
        loss = model(x).to_local().square().mean()
        with record_collectives(mesh) as recorder:
            loss.backward()
    # The norm's two vectors of 6, halved over the data axis.
    assert [(call.op, call.axis, call.bytes) for call in recorder.calls[-2:]] == [
        ("reduce_scatter", "fsdp", 48),
        ("all_reduce", "tp", 24),
    ]
    assert recorder.count("all_reduce") == 1
