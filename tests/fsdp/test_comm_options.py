"""The methods about communication: what divides the sum, what is done to it, whose memory and groups."""

import copy
import pickle

import pytest
import torch
from beside_plain import Net, Trial
from torch import distributed as dist
from torch import nn
from wrapped import shard_blocks

from parallel3d import MeshLayout, build_mesh
from parallel3d._compat import all_gather_single, reduce_scatter_single
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.running.members import the_unit, units_of
from parallel3d.testing import fake_world, local_world, record_collectives

parity = pytest.mark.parity
FSDP, HSDP = MeshLayout(1, 4, 1), MeshLayout(2, 2, 1)


def units(model):
    """The modules whose methods set something on every unit, one by one."""
    return [*model.layers, model]


def on_every_unit(model, method, *args, **kwargs):
    for module in units(model):
        getattr(module, method)(*args, **kwargs)


def buckets(model):
    return [bucket for unit in units_of(model, True) for bucket in unit.group.buckets]


class TestDivideFactor:
    @parity("method: set_gradient_divide_factor")
    @pytest.mark.parametrize("layout", [FSDP, HSDP], ids=str)
    def test_sum_over_ranks_is_divided_by_it(self, layout):
        with local_world(4) as world:
            trial = Trial(world, layout, shard_blocks)
            on_every_unit(trial.model, "set_gradient_divide_factor", 3)
            trial.backward(0)
            trial.check([0], factor=3)
            on_every_unit(trial.model, "set_gradient_divide_factor", None)
            trial.model.zero_grad()
            trial.backward(1)
            trial.check([1])

    @parity("method: set_gradient_divide_factor")
    @pytest.mark.parametrize("layout", [FSDP, HSDP], ids=str)
    def test_whatever_waits(self, layout):
        """Reduced, put off over all axes or over replicate: ``.grad`` is the sum of all, divided once."""
        with local_world(4) as world:
            trial = Trial(world, layout, shard_blocks)
            on_every_unit(trial.model, "set_gradient_divide_factor", 5.0)
            trial.backward(0)
            trial.model.set_requires_gradient_sync(False)
            trial.backward(1)
            trial.model.set_requires_gradient_sync(True)
            trial.model.set_requires_all_reduce(False)
            trial.backward(2)
            trial.model.set_requires_gradient_sync(False)
            trial.backward(3)
            trial.model.set_requires_gradient_sync(True)
            trial.backward(4)
            trial.check([0, 1, 2, 3, 4], factor=5.0)

    def test_known_at_the_last_micro_batch_only(self):
        """As with a loss per token: own sums are divided when they are reduced."""
        with local_world(2) as world:
            trial = Trial(world, MeshLayout(1, 2, 1), shard_blocks)
            trial.model.set_requires_gradient_sync(False)
            trial.backward(0)
            trial.model.set_requires_gradient_sync(True)
            on_every_unit(trial.model, "set_gradient_divide_factor", 7)
            trial.backward(1)
            trial.check([0, 1], factor=7)

    def test_too_late_is_an_error_and_not_a_wrong_number(self):
        with local_world(2) as world:
            trial = Trial(world, MeshLayout(1, 2, 1), shard_blocks)
            trial.backward(0)
            trial.model.set_requires_gradient_sync(False)
            trial.backward(1)  # into it the first one's gradient, divided by 2, is folded
            with pytest.raises(StateError, match="divided by 2 already"):
                trial.model.set_gradient_divide_factor(7)
            trial.model.zero_grad()
            on_every_unit(trial.model, "set_gradient_divide_factor", 7)
            trial.model.set_requires_gradient_sync(True)
            trial.backward(2)
            trial.check([2], factor=7)

    @parity("method: set_gradient_divide_factor")
    def test_not_recursive(self):
        with fake_world(0, 2):
            model = shard_blocks(Net(), build_mesh(MeshLayout(1, 2, 1), device_type="cpu"))
            model.set_gradient_divide_factor(3)
            assert {b.divide_factor for b in the_unit(model).group.buckets} == {3}
            assert {b.divide_factor for b in the_unit(model.layers[0]).group.buckets} == {None}

    @parity("method: set_reduce_scatter_divide_factor")
    def test_old_name(self):
        with fake_world(0, 2):
            model = shard_blocks(Net(), build_mesh(MeshLayout(1, 2, 1), device_type="cpu"))
            with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
                model.set_reduce_scatter_divide_factor(3.0)
            assert the_unit(model).group.buckets[0].divisor == 3.0

    @pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), True, "2"])
    def test_no_number(self, wrong):
        with fake_world(0, 2):
            model = shard_blocks(Net(), build_mesh(MeshLayout(1, 2, 1), device_type="cpu"))
            with pytest.raises(Parallel3dError, match="positive number"):
                model.set_gradient_divide_factor(wrong)


def divided_on_gloo(dtype: torch.dtype) -> float:
    """The largest difference between a gradient and the sum over ranks / 3."""
    mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
    torch.manual_seed(0)
    plain = Net().to(dtype)
    model = shard_blocks(copy.deepcopy(plain), mesh)
    on_every_unit(model, "set_gradient_divide_factor", 3)
    inputs = [torch.randn(2, 6, dtype=dtype) for _ in range(2)]
    model(inputs[dist.get_rank()]).square().mean().backward()
    sum(plain(x).square().mean() for x in inputs).backward()
    return max(
        float((p.grad.full_tensor() - q.grad / 3).abs().max())
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )


@parity("behaviour: gradient divide on gloo")
@parity("method: set_force_sum_reduction_for_comms")
def test_divide_factor_on_gloo(gloo_pool):
    """torch 2.13: "Cannot use ReduceOp.PREMUL_SUM with Gloo", unless sums are forced."""
    for difference in gloo_pool.run(divided_on_gloo, torch.float64, world_size=2):
        assert difference < 1e-14


class TestForceSum:
    @parity("method: set_force_sum_reduction_for_comms")
    def test_collectives_are_sums_with_and_without(self):
        with local_world(2) as world:
            trial = Trial(world, MeshLayout(1, 2, 1), shard_blocks)
            ops = []
            trial.model.layers[0].set_custom_reduce_scatter(Scatter(ops=ops))
            trial.backward(0)
            trial.model.layers[0].set_force_sum_reduction_for_comms(True)
            trial.backward(0)
            assert ops == [dist.ReduceOp.SUM] * 2
            trial.check([0, 0])
            with pytest.raises(Parallel3dError, match="True or False"):
                trial.model.set_force_sum_reduction_for_comms("yes")


class TestAllReduceHook:
    @parity("method: set_all_reduce_hook")
    def test_gets_the_averaged_gradient_and_may_change_it(self):
        with local_world(2) as world:
            trial = Trial(world, MeshLayout(1, 2, 1), shard_blocks)
            seen = []

            def double(grad):
                seen.append(grad.shape)
                grad.mul_(2)

            on_every_unit(trial.model, "set_all_reduce_hook", double)
            trial.backward(0)
            trial.check([0], factor=1)  # doubled: the mean over two ranks is the sum
            assert all(len(shape) == 1 for shape in seen)
            assert len(seen) == len(buckets(trial.model))
            on_every_unit(trial.model, "set_all_reduce_hook", None)
            trial.model.zero_grad()
            trial.backward(1)
            trial.check([1])

    @parity("method: set_all_reduce_hook")
    def test_with_hsdp_it_follows_the_all_reduce(self):
        """Not called for a sum that waits; then for all of it together."""
        with local_world(4) as world:
            trial = Trial(world, HSDP, shard_blocks)
            calls = []
            on_every_unit(
                trial.model, "set_all_reduce_hook", lambda grad: calls.append(grad.mul_(2))
            )
            trial.model.set_requires_all_reduce(False)
            trial.backward(0)
            scalars = [b for b in buckets(trial.model) if b.shard_group is None]
            assert not calls and len(scalars) == 2  # they are all-reduced over shard: put off too
            trial.model.set_requires_all_reduce(True)
            trial.backward(1)
            trial.check([0, 1], factor=2)
            assert len(calls) == len(buckets(trial.model))

    @parity("behaviour: own HSDP by set_all_reduce_hook")
    @parity("method: set_all_reduce_hook")
    def test_own_hsdp(self):
        """FSDP over one axis of a mesh, and the user's all-reduce over the other."""
        with local_world(4) as world:

            def wrap(model, mesh):
                return shard_blocks(model, mesh["shard"])

            trial = Trial(world, HSDP, wrap)
            group = trial.mesh["replicate"].get_group()

            def average(grad):
                dist.all_reduce(grad, group=group)
                grad.div_(2)

            on_every_unit(trial.model, "set_all_reduce_hook", average)
            trial.backward(0)
            trial.check([0])

    @parity("method: set_all_reduce_hook")
    def test_stream_with_hsdp_is_refused(self):
        with fake_world(0, 4):
            model = shard_blocks(Net(), build_mesh(HSDP, device_type="cpu"))
            with pytest.raises(ValueError, match="replicate axis"):
                model.set_all_reduce_hook(lambda grad: None, stream=object())
            with pytest.raises(Parallel3dError, match="function"):
                model.set_all_reduce_hook("all_reduce")
            assert all(bucket.all_reduce_hook is None for bucket in buckets(model))


class Branches(nn.Module):
    """One of two branches is used, and by one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.common = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        x = self.common(x)
        return x if branch == "none" else getattr(self, branch)(x)


class TwoLayers(nn.Module):
    """Two such units, so that a reduction out of order would meet the wrong one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Branches(), Branches()])

    def forward(self, x: torch.Tensor, branches: tuple[str, str]) -> torch.Tensor:
        for layer, branch in zip(self.layers, branches, strict=True):
            x = layer(x, branch)
        return x


def diverging_branches(rank_branches: list[tuple[str, str]]) -> float:
    """Each rank goes its own way; the largest difference from the plain gradients."""
    mesh = build_mesh(MeshLayout(1, len(rank_branches), 1), device_type="cpu")
    torch.manual_seed(0)
    plain = TwoLayers().double()
    model = shard_blocks(copy.deepcopy(plain), mesh)
    model.set_reduce_scatter_unused_params(True)
    x = torch.randn(2, 3, dtype=torch.float64)
    model(x, rank_branches[dist.get_rank()]).sum().backward()
    sum(plain(x, branches).sum() for branches in rank_branches).backward()
    worst = 0.0
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        expected = 0 if q.grad is None else q.grad / len(rank_branches)
        worst = max(worst, float((p.grad.full_tensor() - expected).abs().max()))
    return worst


class TestUnusedParameters:
    @parity("method: set_reduce_scatter_unused_params")
    @pytest.mark.parametrize(
        "branches",
        [[("a", "b"), ("b", "a")], [("none", "a"), ("b", "none")]],
        ids=["other ones", "fewer"],
    )
    def test_ranks_use_different_ones(self, gloo_pool, branches):
        for difference in gloo_pool.run(diverging_branches, branches, world_size=2, timeout=30.0):
            assert difference < 1e-14

    @parity("method: set_reduce_scatter_unused_params")
    def test_zero_gradients_and_only_with_the_flag(self):
        with local_world(2) as world:
            mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
            model = shard_blocks(TwoLayers(), mesh)
            model.layers[0].b.bias.requires_grad_(False)
            x = world.map(lambda rank: torch.ones(1, 3) * rank)
            model(x, ("a", "none")).sum().backward()
            assert model.layers[0].b.weight.grad is None
            model.zero_grad()
            model.set_reduce_scatter_unused_params(True)
            model(x, ("a", "none")).sum().backward()
            for local in world.per_rank(model.layers[0].b.weight.grad):
                assert not local.any()
            assert model.layers[0].b.bias.grad is None  # frozen
            model.zero_grad()
            model.set_reduce_scatter_unused_params(False, recurse=False)
            assert model.layers[0].b.weight.grad is None
            assert {b.reduce_unused for b in buckets(model)} == {True}  # the root has no parameters


class TestInputBuffers:
    @parity("method: set_reduce_scatter_max_input_buffers")
    @pytest.mark.parametrize("limit", [1, 2, 10])
    def test_so_many_are_in_flight(self, limit):
        with local_world(2) as world:
            trial = Trial(world, MeshLayout(1, 2, 1), shard_blocks)
            trial.model.set_reduce_scatter_max_input_buffers(limit)
            trial.forward(0)  # makes the comm
            comm = the_unit(trial.model).context.comm
            depths = []
            reduce = comm.reduce

            def noted(bucket, *, all_reduce):
                reduce(bucket, all_reduce=all_reduce)
                depths.append(len(comm.scattering))

            comm.reduce = noted
            trial.backward(1)
            trial.check([1])
            # The first, a scalar's bucket, scatters nothing and goes on at once.
            assert depths[0] == 0
            assert max(depths) == min(limit, len(buckets(trial.model)) - 1)

    @parity("method: set_reduce_scatter_max_input_buffers")
    def test_the_largest_of_the_units_counts(self):
        with local_world(2) as world:
            trial = Trial(world, MeshLayout(1, 2, 1), shard_blocks)
            trial.model.layers[0].set_reduce_scatter_max_input_buffers(3)
            trial.backward(0)
            comm = the_unit(trial.model).context.comm
            assert comm.max_inputs == 3
            trial.model.set_reduce_scatter_max_input_buffers(2, recurse=False)
            assert comm.max_inputs == 3
            trial.model.set_reduce_scatter_max_input_buffers(2)
            assert comm.max_inputs == 2

    @parity("method: set_reduce_scatter_max_input_buffers")
    @pytest.mark.parametrize("wrong", [0, -1, True, 1.5])
    def test_no_number_of_buffers(self, wrong):
        with fake_world(0, 2):
            model = shard_blocks(Net(), build_mesh(MeshLayout(1, 2, 1), device_type="cpu"))
            with pytest.raises(Parallel3dError, match="at least 1"):
                model.set_reduce_scatter_max_input_buffers(wrong)


def separate_group_on_gloo() -> tuple[int, bool]:
    """(number of groups made, whether gradients are those of the shared group) on a (2, 2) mesh."""
    mesh = build_mesh(HSDP, device_type="cpu")
    grads = []
    for separate in (True, False):
        torch.manual_seed(0)
        model = shard_blocks(Net(), mesh)
        if separate:
            model.set_separate_reduce_scatter_group()
            groups = {id(b.scatter_group) for b in buckets(model) if b.shard_group is not None}
            assert all(b.scatter_group is not b.shard_group for b in buckets(model) if b.parts > 1)
        torch.manual_seed(dist.get_rank())
        model(torch.randn(2, 6)).square().mean().backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    return len(groups), all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class TestSeparateGroup:
    @parity("method: set_separate_reduce_scatter_group")
    def test_on_processes(self, gloo_pool):
        assert gloo_pool.run(separate_group_on_gloo, world_size=4) == [(1, True)] * 4

    @parity("method: set_separate_reduce_scatter_group")
    def test_on_simulated_ranks_and_back(self):
        with local_world(4) as world:
            trial = Trial(world, HSDP, shard_blocks)
            trial.model.set_separate_reduce_scatter_group()
            trial.model.layers[0].set_separate_reduce_scatter_group()  # already there
            with record_collectives(trial.mesh) as recorder:
                trial.backward(0)
            trial.check([0])
            scatters = recorder.select("reduce_scatter")
            assert len(scatters) == 3 and {call.axis for call in scatters} == {None}
            trial.model.set_separate_reduce_scatter_group(False)
            with record_collectives(trial.mesh) as recorder:
                trial.backward(1)
            assert {call.axis for call in recorder.select("reduce_scatter")} == {"shard"}
            trial.check([0, 1])

    def test_mesh_is_copied_and_pickled_without_it(self):
        with fake_world(0, 4):
            mesh = build_mesh(HSDP, device_type="cpu")
            model = shard_blocks(Net(), mesh)
            model.set_separate_reduce_scatter_group()
            assert pickle.loads(pickle.dumps(mesh)) == mesh


class Memory:
    """Allocates, and remembers what."""

    def __init__(self, ops: list | None = None) -> None:
        self.made: list[torch.Tensor] = []
        self.ops = [] if ops is None else ops

    def allocate(self, size, *, dtype, device):
        self.made.append(torch.zeros(size, dtype=dtype, device=device))
        return self.made[-1]

    def made_here(self, tensor: torch.Tensor) -> bool:
        return any(tensor is each for each in self.made)


class Gather(Memory):
    """An all-gather of the user's, complete when the call returns."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        assert self.made_here(output_tensor)
        self.ops.append(group.size())
        all_gather_single(output_tensor, input_tensor, group=group)


class Scatter(Memory):
    """A reduce-scatter of the user's that returns a work."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        assert self.made_here(output_tensor) and self.made_here(input_tensor)
        self.ops.append(op)
        return reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


def custom_on_gloo() -> tuple[float, int, int]:
    """(largest difference from the default's gradients, gathers, reductions)."""
    mesh = build_mesh(FSDP, device_type="cpu")
    gather, scatter = Gather(), Scatter()
    grads = []
    for custom in (True, False):
        torch.manual_seed(0)
        model = shard_blocks(Net().double(), mesh)
        if custom:
            model.layers[0].set_custom_all_gather(gather)
            model.layers[0].set_custom_reduce_scatter(scatter)
        torch.manual_seed(dist.get_rank())
        model(torch.randn(2, 6, dtype=torch.float64)).square().mean().backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    worst = max(float((a - b).abs().max()) for a, b in zip(*grads, strict=True))
    return worst, len(gather.ops), len(scatter.ops)


class TestCustomCollectives:
    @parity("method: set_custom_all_gather")
    @parity("method: set_custom_reduce_scatter")
    def test_on_processes(self, gloo_pool):
        for worst, gathers, scatters in gloo_pool.run(custom_on_gloo, world_size=4):
            assert worst < 1e-14 and (gathers, scatters) == (2, 1)

    @parity("method: set_custom_all_gather")
    @parity("method: set_custom_reduce_scatter")
    def test_on_simulated_ranks_and_back(self):
        with local_world(4) as world:
            trial = Trial(world, FSDP, shard_blocks)
            gather, scatter = Gather(), Scatter()
            on_every_unit(trial.model, "set_custom_all_gather", gather)
            on_every_unit(trial.model, "set_custom_reduce_scatter", scatter)
            trial.backward(0)
            trial.check([0])
            assert len(gather.ops) == 5 and len(scatter.ops) == 3
            on_every_unit(trial.model, "set_custom_all_gather", None)
            on_every_unit(trial.model, "set_custom_reduce_scatter", None)
            trial.backward(1)
            trial.check([0, 1])
            assert len(gather.ops) == 5 and len(scatter.ops) == 3

    @parity("method: set_custom_all_gather")
    def test_gathers_the_parts_of_a_smaller_world_too(self):
        with local_world(4) as world:

            def wrap(model, mesh):
                for layer in model.layers:
                    fully_shard(layer, mesh=mesh, reshard_after_forward=2)
                return fully_shard(model, mesh=mesh)

            trial = Trial(world, FSDP, wrap)
            gather = Gather()
            on_every_unit(trial.model, "set_custom_all_gather", gather)
            trial.backward(0)
            trial.check([0])
            assert gather.ops == [4, 4, 4, 2, 2]

    @parity("method: set_custom_all_gather")
    @parity("method: set_custom_reduce_scatter")
    def test_torchs_interfaces(self):
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
            DefaultAllGather,
            DefaultReduceScatter,
        )

        with local_world(2) as world:
            trial = Trial(world, MeshLayout(1, 2, 1), shard_blocks)
            on_every_unit(trial.model, "set_custom_all_gather", DefaultAllGather())
            on_every_unit(trial.model, "set_custom_reduce_scatter", DefaultReduceScatter())
            trial.backward(0)
            trial.check([0])

    @pytest.mark.parametrize("method", ["set_custom_all_gather", "set_custom_reduce_scatter"])
    def test_what_is_no_collective_is_refused(self, method):
        with fake_world(0, 2):
            model = shard_blocks(Net(), build_mesh(MeshLayout(1, 2, 1), device_type="cpu"))
            for wrong in (1, dist.all_reduce, Memory()):
                with pytest.raises(Parallel3dError, match="allocate"):
                    getattr(model, method)(wrong)
