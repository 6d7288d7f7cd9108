"""Whose memory and whose collectives: what is refused, and that allocators are used where they are there."""

import pytest
import torch
from _support.fsdp.beside_plain import Net, Trial
from _support.fsdp.wrapped import cpu_mesh, shard_blocks
from torch import nn

from parallel3d import MeshLayout
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import get_unit, units_of
from parallel3d.fsdp.options import comm_hooks
from parallel3d.testing import fake_world, local_world

parity = pytest.mark.parity
FROM_GROUP = "set_allocate_memory_from_process_group_for_comm"
CUSTOM = ["set_custom_all_gather", "set_custom_reduce_scatter"]


class Custom:
    """An object of the right form."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False): ...


def small_model(shard: int = 2) -> nn.Module:
    return shard_blocks(Net(), cpu_mesh(1, shard))


def each_unit(model, method, *args):
    for module in (*model.layers, model):
        getattr(module, method)(*args)


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
            each_unit(trial.model, FROM_GROUP, True)
            each_unit(trial.model, FROM_GROUP, True)  # not a custom collective of the user's
            trial.backward(0)
            trial.check([0])
            assert len(group_memory.made) == 5 + 2 * 3  # gathers; inputs and outputs of reductions
            each_unit(trial.model, FROM_GROUP, False)
            trial.backward(1)
            trial.check([0, 1])
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
            each_unit(model, FROM_GROUP, True)
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
            trial.backward(0)
            trial.check([0])
            assert symmetric.log == ["NCCL", "rendezvous 14", "all_gather_single 14"]
            trial.model.set_custom_all_gather(None)
            trial.backward(1)
            trial.check([0, 1])
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
