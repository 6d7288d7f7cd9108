"""Parameters gathered into their place and reduced from where autograd has put their gradients."""

import pytest
import torch
from _support.fsdp.beside_plain import Layer, Trial
from _support.fsdp.counted_collectives import Gather
from _support.fsdp.lifetimes import deep_model
from _support.fsdp.wrapped import at_rest, cpu_mesh
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel3d import MeshLayout, MixedPrecisionPolicy
from parallel3d._torch.autograd import TorchDispatchMode
from parallel3d.fsdp import fully_shard, param
from parallel3d.fsdp.inspect import get_unit
from parallel3d.fsdp.reduction import CpuComm
from parallel3d.testing import assert_parity, fake_world, local_world, record_collectives

ALL, SOME, NONE = 0, 300, 2**20
"""Bytes from which on parameters travel in place: all that are even, the largest, none."""


@pytest.fixture
def least(monkeypatch):
    """Sets them."""
    return lambda size: monkeypatch.setattr(param, "CPU_BYTES", size)


class EvenNet(nn.Module):
    """On 4 ranks: weights and biases of 8 rows that divide, between others of 6 that don't, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(8), Layer(8), Layer(8)])
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def wrap(model, mesh, **options):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def buckets_of(layer):
    """Those that are sharded: the scalar is not."""
    return [b for b in get_unit(layer).group.buckets if b.shard_group is not None]


def two_linears():
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


def trial(world, layout, **options):
    return Trial(world, layout, lambda model, mesh: wrap(model, mesh, **options), EvenNet)


@pytest.mark.parametrize(("size", "count"), [(ALL, 2), (SOME, 1), (NONE, 0)])
@pytest.mark.parametrize("layout", [MeshLayout(1, 4, 1), MeshLayout(2, 4, 1)], ids=str)
def test_numbers_are_the_plain_models(least, layout, size, count):
    """Beside uneven and packed neighbours; two steps, so that the order of the first is used."""
    least(size)
    with local_world(layout.world_size) as world:
        run = trial(world, layout)
        assert [b.layout.zero_copy for b in buckets_of(run.model.layers[0])] == [count]
        for batch in (0, 1):
            run.backward(batch)
            run.check([batch])
            run.step()
        assert at_rest(run.model)


@pytest.mark.parametrize("method", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_accumulation(least, method):
    least(ALL)
    layout = MeshLayout(2, 4, 1)
    with local_world(layout.world_size) as world:
        run = trial(world, layout)
        for last in (False, True):
            getattr(run.model, method)(last)
            run.backward(int(last))
        run.check([0, 1])
        run.backward(2)  # on top of a reduced gradient
        run.check([0, 1, 2])


@pytest.mark.parametrize("custom", [False, True])
def test_resharded_to_fewer_ranks(least, custom):
    """What is kept lies as the next all-gather sends it; a custom one sends rows of all parameters."""
    least(ALL)

    with local_world(4) as world:
        run = trial(world, MeshLayout(1, 4, 1), reshard_after_forward=2)
        for batch in (0, 1):
            run.backward(batch)
            run.check([batch])
            run.step()
            if custom:
                for layer in run.model.layers:
                    layer.set_custom_all_gather(Gather())


def test_own_gather_put_in_and_taken_out_between_forward_and_backward(least):
    least(ALL)
    with local_world(4) as world:
        run = trial(world, MeshLayout(1, 4, 1), reshard_after_forward=2)
        buckets = [b for layer in run.model.layers for b in buckets_of(layer)]
        for before, after in ((None, Gather()), (Gather(), None)):
            for bucket in buckets:
                bucket.change(gather_comm=before)
            loss = run.forward(0)
            for bucket in buckets:
                bucket.change(gather_comm=after)
            loss.backward()
            run.check([0])
            run.model.zero_grad()


def test_second_gradient_of_one_backward_is_added(least):
    """Each part that is recomputed on its own brings one."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 6)])

        def once(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.layers[1](torch.tanh(self.layers[0](x)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.once, x, use_reentrant=True)
            return x

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.twice = nn.Linear(6, 6), Twice()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.twice(self.first(x))

    def both(model, mesh):
        fully_shard(model.twice, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    least(ALL)
    with local_world(4) as world:
        run = Trial(world, MeshLayout(1, 4, 1), both, Root)
        run.backward(0)
        run.check([0])


@pytest.mark.parametrize("layout", [MeshLayout(1, 2, 2), MeshLayout(2, 2, 2)], ids=str)
def test_with_tensor_parallelism(least, layout):
    least(ALL)
    assert_parity(
        Lm, tokens, layout, loss=lm_loss, tp_plan=LM_PLAN, steps=2, micro_batches=2, fp32=False
    )


def test_low_precision_gradients_are_summed_in_the_reduce_dtype(least):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    grads = []
    for size in (NONE, ALL):
        least(size)
        with local_world(4) as world:
            run = trial(world, MeshLayout(1, 4, 1), mp_policy=policy)
            run.backward(0, 1)
            grads.append([p.grad.full_tensor() for p in run.model.parameters()])
            with world.paused():
                grads[-1] = [world.per_rank(g) for g in grads[-1]]
    for packed, placed in zip(*grads, strict=True):
        for a, b in zip(packed, placed, strict=True):
            assert torch.equal(a, b)


class CopiedElements(TorchDispatchMode):
    """Elements that copying operations have written."""

    names = ("copy_", "_foreach_copy_", "cat", "_chunk_cat", "_to_copy", "clone")

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") in self.names:
            self.number += 1
        return result


def test_nothing_is_copied_and_a_bucket_has_one_call(least):
    least(ALL)
    with fake_world(0, 4):
        mesh = cpu_mesh(1, 4)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8, bias=False))
        fully_shard(model, mesh=mesh)
        x = torch.randn(2, 8)
        model(x).sum().backward()
        with record_collectives(mesh) as recorder, CopiedElements() as copied:
            model(x).sum().backward()
        assert copied.number == 0
        size = sum(p.numel() for p in model.parameters()) * 4
        assert [(c.op, c.bytes) for c in recorder.calls] == [
            ("all_gather", size),
            ("reduce_scatter", size),
        ]


class TestHalfWay:
    """A large unit's backward gathers the next one when half of its gradients are there."""

    @pytest.mark.parametrize("size", [ALL, NONE])
    def test_no_reduce_input_is_held_then(self, least, monkeypatch, size):
        least(size)
        held, issue = [], CpuComm.issue_gather

        def noting(comm, bucket, compute=None):
            held.append((bucket.unit, sum(len(running.job.inputs) for running in comm.holding)))
            issue(comm, bucket, compute)

        with fake_world(0, 4):
            mesh = cpu_mesh(1, 4)
            model = nn.Sequential(*(two_linears() for _ in range(4)))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            x = torch.randn(2, 8, requires_grad=True)
            loss = model(x).sum()
            monkeypatch.setattr(CpuComm, "issue_gather", noting)
            loss.backward()
        # One input where they are packed. Of the last unit's backward there is none before it.
        packed = int(size == NONE)
        assert held == [("3", 0), ("2", 0), ("1", packed), ("0", packed)]

    def test_gathers_come_before_the_reduction(self, least):
        """As they do usually: the order of calls is the same on every rank, whatever is large there."""
        orders = []
        for size in (ALL, NONE):
            least(size)
            with fake_world(0, 4):
                mesh = cpu_mesh(1, 4)
                model = deep_model(mesh, layers=4)
                x = torch.randn(2, 32, requires_grad=True)
                with record_collectives(mesh) as recorder:
                    model(x).sum().backward()
                orders.append([(c.op, c.unit) for c in recorder.calls])
        assert orders[0] == orders[1]

    def test_gradients_that_never_come(self, least):
        """The gather that waited for them is dropped: the next unit gathers itself."""

        class Unused(Layer):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.scale * x

        class Holed(EvenNet):
            def __init__(self) -> None:
                super().__init__()
                self.layers[1] = Unused(8)

        least(ALL)
        with local_world(4) as world:
            run = Trial(world, MeshLayout(1, 4, 1), wrap, Holed)
            for batch in (0, 1):
                run.backward(batch)
                with world.paused():
                    expected = run.plain_grads([batch])
                for name, p in run.model.named_parameters():
                    assert (p.grad is None) == (name not in expected)
                    if p.grad is not None:
                        whole = world.per_rank(p.grad.full_tensor())[0]
                        torch.testing.assert_close(whole, expected[name])
                run.step()
            assert at_rest(run.model)
