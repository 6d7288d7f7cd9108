"""The methods about communication: what it computes, and whose memory, groups and collectives it uses."""

import pickle

import pytest
import torch
from _support.fsdp.beside_plain import Net, Trial
from _support.fsdp.counted_collectives import Gather, Memory, Scatter
from _support.fsdp.wrapped import buckets, cpu_mesh, on_every_unit, shard_blocks
from torch import distributed as dist
from torch import nn

from parallel3d import MeshLayout, build_mesh
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import get_unit, units_of
from parallel3d.fsdp.options import comm_hooks
from parallel3d.testing import fake_world, local_world

parity = pytest.mark.parity
FSDP, HSDP = MeshLayout(1, 4, 1), MeshLayout(2, 2, 1)


class TestDivideFactor:
    @parity("method: set_gradient_divide_factor")
    @pytest.mark.parametrize("layout", [FSDP, HSDP], ids=str)
    def test_whatever_waits(self, layout):
        """Reduced, put off over all axes or over replicate: ``.grad`` is the sum of all, divided once."""
        with local_world(4) as world:
            trial = Trial(world, layout, shard_blocks)
            on_every_unit(trial.model, "set_gradient_divide_factor", 5.0)
            trial.play("0 -sync 1 +sync -all 2 -sync 3 +sync 4")
            trial.check([0, 1, 2, 3, 4], factor=5.0)

    def test_known_at_the_last_micro_batch_only(self):
        """As with a loss per token: own sums are divided when they are reduced."""
        with local_world(2) as world:
            trial = Trial(world, MeshLayout(1, 2, 1), shard_blocks)
            trial.play("-sync 0 +sync")
            on_every_unit(trial.model, "set_gradient_divide_factor", 7)
            trial.backward(1)
            trial.check([0, 1], factor=7)

    def test_too_late_is_an_error_and_not_a_wrong_number(self):
        with local_world(2) as world:
            trial = Trial(world, MeshLayout(1, 2, 1), shard_blocks)
            trial.backward(0)
            trial.model.set_requires_gradient_sync(False)
            trial.backward(1)  # into it the first one's gradient, divided by 2, is folded
            with pytest.raises(StateError, match="already divided by 2"):
                trial.model.set_gradient_divide_factor(7)
            trial.model.zero_grad()
            on_every_unit(trial.model, "set_gradient_divide_factor", 7)
            trial.model.set_requires_gradient_sync(True)
            trial.backward(2)
            trial.check([2], factor=7)

    @parity("method: set_gradient_divide_factor")
    def test_not_recursive(self):
        with fake_world(0, 2):
            model = shard_blocks(Net(), cpu_mesh())
            model.set_gradient_divide_factor(3)
            assert {b.settings.divide_factor for b in get_unit(model).group.buckets} == {3}
            assert {b.settings.divide_factor for b in get_unit(model.layers[0]).group.buckets} == {
                None
            }

    @pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), True, "2"])
    def test_no_number(self, wrong):
        with fake_world(0, 2):
            model = shard_blocks(Net(), cpu_mesh())
            with pytest.raises(Parallel3dError, match="positive number"):
                model.set_gradient_divide_factor(wrong)


@parity("method: set_force_sum_reduction_for_comms")
def test_collectives_are_sums_with_and_without():
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

    @parity("method: set_all_reduce_hook")
    def test_stream_with_hsdp_is_refused(self):
        with fake_world(0, 4):
            model = shard_blocks(Net(), build_mesh(HSDP, device_type="cpu"))
            with pytest.raises(ValueError, match="replicate axis"):
                model.set_all_reduce_hook(lambda grad: None, stream=object())
            with pytest.raises(Parallel3dError, match="function"):
                model.set_all_reduce_hook("all_reduce")
            assert not any(bucket.settings.on_result for bucket in buckets(model))


# -- groups and collectives ----------------------------------------------------------------------------


class TestInputBuffers:
    @parity("method: set_reduce_scatter_max_input_buffers")
    @pytest.mark.parametrize("limit", [1, 2, 10])
    def test_so_many_are_in_flight(self, limit):
        with local_world(2) as world:
            trial = Trial(world, MeshLayout(1, 2, 1), shard_blocks)
            trial.model.set_reduce_scatter_max_input_buffers(limit)
            trial.forward(0)  # makes the comm
            comm = get_unit(trial.model).context.comm
            depths = []
            reduce = comm.reduce

            def noted(bucket, *, all_reduce):
                reduce(bucket, all_reduce=all_reduce)
                depths.append(len(comm.holding))

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
            comm = get_unit(trial.model).context.comm
            assert comm.max_inputs == 3
            trial.model.set_reduce_scatter_max_input_buffers(2, recurse=False)
            assert comm.max_inputs == 3
            trial.model.set_reduce_scatter_max_input_buffers(2)
            assert comm.max_inputs == 2


def test_a_mesh_is_pickled_without_its_separate_group():
    with fake_world(0, 4):
        mesh = build_mesh(HSDP, device_type="cpu")
        model = shard_blocks(Net(), mesh)
        model.set_separate_reduce_scatter_group()
        model.layers[0].set_separate_reduce_scatter_group()  # already there
        assert pickle.loads(pickle.dumps(mesh)) == mesh


class TestCustomCollectives:
    @parity("method: set_custom_all_gather")
    @parity("method: set_custom_reduce_scatter")
    def test_on_simulated_ranks_and_back(self):
        with local_world(4) as world:
            trial = Trial(world, FSDP, shard_blocks)
            gather, scatter = Gather(), Scatter()
            on_every_unit(trial.model, "set_custom_all_gather", gather)
            on_every_unit(trial.model, "set_custom_reduce_scatter", scatter)
            trial.play("0 check")
            assert len(gather.ops) == 5 and len(scatter.ops) == 3
            on_every_unit(trial.model, "set_custom_all_gather", None)
            on_every_unit(trial.model, "set_custom_reduce_scatter", None)
            trial.play("1 check")
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
            model = shard_blocks(Net(), cpu_mesh())
            for wrong in (1, dist.all_reduce, Memory()):
                with pytest.raises(Parallel3dError, match="allocate"):
                    getattr(model, method)(wrong)


# -- memory --------------------------------------------------------------------------------------------


FROM_GROUP = "set_allocate_memory_from_process_group_for_comm"
CUSTOM = ["set_custom_all_gather", "set_custom_reduce_scatter"]


class Custom:
    """An object of the right form."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False): ...


def small_model(shard: int = 2) -> nn.Module:
    return shard_blocks(Net(), cpu_mesh(1, shard))


class Allocator:
    """In place of NCCL's: takes notes."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []
        self.log: list[str] = []

    def __call__(self, *args) -> torch.Tensor:
        *_, numel, dtype, device = args
        self.made.append(torch.empty(numel, dtype=dtype, device=device))
        return self.made[-1]

    def made_here(self, tensor: torch.Tensor) -> bool:
        return any(tensor is each for each in self.made)


@pytest.fixture
def group_memory(monkeypatch) -> Allocator:
    """Process groups with an allocator."""
    allocator = Allocator()
    monkeypatch.setattr(comm_hooks, "has_group_memory", lambda group, device: True)
    monkeypatch.setattr(comm_hooks, "group_memory", allocator)
    return allocator


@pytest.fixture
def symmetric(monkeypatch) -> Allocator:
    """Groups and a device with symmetric memory."""
    allocator = Allocator()

    def rendezvous(tensor, group):
        assert allocator.made_here(tensor)
        allocator.log.append(f"rendezvous {tensor.numel()}")

    def noted(name):
        collective = getattr(comm_hooks, name)

        def wrapper(output, *args, **kwargs):
            allocator.log.append(f"{name} {output.numel()}")
            return collective(output, *args, **kwargs)

        monkeypatch.setattr(comm_hooks, name, wrapper)

    monkeypatch.setattr(comm_hooks, "check_symmetric", lambda bucket: None)
    monkeypatch.setattr(comm_hooks, "use_symmetric_memory", allocator.log.append)
    monkeypatch.setattr(comm_hooks, "symmetric_memory", allocator)
    monkeypatch.setattr(comm_hooks, "make_symmetric", rendezvous)
    noted("all_gather_single")
    noted("reduce_scatter_single")
    return allocator


class TestGroupMemory:
    @parity("method: set_allocate_memory_from_process_group_for_comm")
    def test_all_buffers_come_from_the_group_until_it_is_off(self, group_memory):
        with local_world(2) as world:
            trial = Trial(world, MeshLayout(1, 2, 1), shard_blocks)
            on_every_unit(trial.model, FROM_GROUP, True)
            on_every_unit(trial.model, FROM_GROUP, True)  # not a custom collective of the user's
            trial.play("0 check")
            assert len(group_memory.made) == 5 + 2 * 3  # gathers; inputs and outputs of reductions
            on_every_unit(trial.model, FROM_GROUP, False)
            trial.play("1 check")
            assert len(group_memory.made) == 11

    @parity("method: set_allocate_memory_from_process_group_for_comm")
    @pytest.mark.parametrize("method", CUSTOM)
    def test_not_together_with_custom_collectives(self, group_memory, method):
        """torch 2.13 refuses one order, and lets the other switch it off without a word."""
        with fake_world(0, 2):
            model = small_model()
            getattr(model, method)(Custom())
            with pytest.raises(StateError, match="Custom"):
                getattr(model, FROM_GROUP)(True)
            getattr(model, method)(None)
            getattr(model, FROM_GROUP)(True)
            with pytest.raises(StateError, match="allocator"):
                getattr(model, method)(Custom())

    @pytest.mark.parametrize("method", CUSTOM)
    def test_nor_on_one_rank(self, method):
        """An AssertionError too, as torch's."""
        with fake_world(0, 1):
            model = fully_shard(nn.Linear(4, 4))
            getattr(model, FROM_GROUP)(True)
            getattr(model, method)(Custom())
            for setter in (FROM_GROUP, "set_symm_mem_for_comm"):
                arguments = (True,) if setter == FROM_GROUP else ()
                for kind in (AssertionError, StateError):
                    with pytest.raises(kind, match="Custom"):
                        getattr(model, setter)(*arguments)

    def test_follows_a_group_of_its_own(self, group_memory):
        with fake_world(0, 2):
            model = small_model()
            on_every_unit(model, FROM_GROUP, True)
            model.set_separate_reduce_scatter_group()
            for bucket in get_unit(model).group.buckets:
                assert bucket.settings.reducer.comm.group is bucket.scatter_group
                assert (
                    bucket.settings.gather_comm.group
                    is bucket.shard_group
                    is not bucket.scatter_group
                )


class TestSymmetricMemory:
    @parity("method: set_symm_mem_for_comm")
    def test_gathers_into_memory_that_others_know(self, symmetric):
        with local_world(2) as world:
            trial = Trial(world, MeshLayout(1, 2, 1), shard_blocks)
            trial.model.set_symm_mem_for_comm()  # the root: one bucket of 14 elements, 7 a rank
            trial.play("0 check")
            assert symmetric.log == ["NCCL", "rendezvous 14", "all_gather_single 14"]
            trial.model.set_custom_all_gather(None)
            trial.play("1 check")
            assert len(symmetric.log) == 3

    @parity("method: set_symm_mem_for_comm")
    def test_reduces_in_it_if_sums_are_forced(self, symmetric):
        with local_world(2) as world:
            trial = Trial(world, MeshLayout(1, 2, 1), shard_blocks)
            trial.model.set_force_sum_reduction_for_comms(True)
            trial.model.set_symm_mem_for_comm()
            trial.backward(0)
            trial.check([0])
            assert symmetric.log[-3:] == [
                "rendezvous 14",
                "rendezvous 7",
                "reduce_scatter_single 7",
            ]

    @parity("method: set_symm_mem_for_comm")
    def test_other_backends_and_other_collectives_are_refused(self, symmetric):
        with fake_world(0, 2):
            model = small_model()
            with pytest.raises(Parallel3dError, match="NVSHMEM"):
                model.set_symm_mem_for_comm("NVSHMEM")
            model.set_custom_all_gather(Custom())
            with pytest.raises(StateError, match="Custom"):
                model.set_symm_mem_for_comm()

    @parity("method: set_reduce_scatter_max_input_buffers")
    def test_one_input_at_a_time(self, symmetric):
        with fake_world(0, 2):
            model = small_model()
            model.set_force_sum_reduction_for_comms(True)
            model.set_reduce_scatter_max_input_buffers(2)
            with pytest.raises(StateError, match="max_input_buffers=1"):
                model.set_symm_mem_for_comm()
            model.set_reduce_scatter_max_input_buffers(1)
            model.set_symm_mem_for_comm()
            with pytest.raises(StateError, match="max_input_buffers=1"):
                model.set_reduce_scatter_max_input_buffers(2)
            assert {
                b.settings.max_inputs for u in units_of(model, True) for b in u.group.buckets
            } == {1}
