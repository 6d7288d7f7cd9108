"""The methods about what communication computes: what divides the sum, and what is done to it."""

import pytest
from _support.fsdp.beside_plain import Net, Trial
from _support.fsdp.counted_collectives import Scatter
from _support.fsdp.wrapped import buckets, cpu_mesh, on_every_unit, shard_blocks
from torch import distributed as dist

from parallel3d import MeshLayout, build_mesh
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.inspect import get_unit
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

    @parity("method: set_all_reduce_hook")
    def test_stream_with_hsdp_is_refused(self):
        with fake_world(0, 4):
            model = shard_blocks(Net(), build_mesh(HSDP, device_type="cpu"))
            with pytest.raises(ValueError, match="replicate axis"):
                model.set_all_reduce_hook(lambda grad: None, stream=object())
            with pytest.raises(Parallel3dError, match="function"):
                model.set_all_reduce_hook("all_reduce")
            assert not any(bucket.settings.on_result for bucket in buckets(model))
