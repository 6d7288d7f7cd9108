"""The methods about whose memory, groups and collectives communication uses."""

import pickle

import pytest
from _support.fsdp.beside_plain import Net, Trial
from _support.fsdp.counted_collectives import Gather, Memory, Scatter
from _support.fsdp.wrapped import buckets, cpu_mesh, on_every_unit, shard_blocks
from torch import distributed as dist

from parallel3d import MeshLayout, build_mesh
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import get_unit
from parallel3d.testing import fake_world, local_world, record_collectives

parity = pytest.mark.parity
FSDP, HSDP = MeshLayout(1, 4, 1), MeshLayout(2, 2, 1)


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


class TestSeparateGroup:
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


class TestCustomCollectives:
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
            model = shard_blocks(Net(), cpu_mesh())
            for wrong in (1, dist.all_reduce, Memory()):
                with pytest.raises(Parallel3dError, match="allocate"):
                    getattr(model, method)(wrong)
