"""What ``.grad`` holds between micro-batches, and that zero_grad really clears it."""

import pytest
import torch
from _support.fsdp.beside_plain import Run, Trial
from _support.fsdp.wrapped import cpu_mesh, shard_blocks
from _support.models import Lm, lm_loss, tokens
from torch import nn
from torch.distributed.tensor import Partial, Shard

from parallel3d import MeshLayout, StateError, parallelize
from parallel3d.fsdp.inspect import units_of
from parallel3d.optim import accumulate, clip_grad_norm_
from parallel3d.testing import fake_world, local_world, record_collectives

HSDP = MeshLayout(2, 1, 2)
FSDP = MeshLayout(1, 2, 2)
REPLICAS = MeshLayout(2, 2, 1)


class TestAllReducePutOff:
    def test_clipping_too_early_is_an_error(self) -> None:
        with local_world(4) as world:
            run = Run(world, HSDP)
            run.model.set_requires_all_reduce(False)
            run.backward(0)
            with pytest.raises(StateError, match="last micro-batch"):
                clip_grad_norm_(run.model, 1.0)


class TestSyncPutOff:
    @pytest.mark.parametrize("layout", [HSDP, FSDP], ids=str)
    def test_sums_wait_in_grad(self, layout) -> None:
        with local_world(4) as world:
            run = Run(world, layout)
            run.model.set_requires_gradient_sync(False)
            run.backward(0)
            grad = run.model.layers[0].up.weight.grad
            assert grad.placements == (Partial("avg"), Partial("avg"), Shard(0))
            before = [t.clone() for t in world.per_rank(grad)]
            run.backward(0)
            for once, twice in zip(before, world.per_rank(grad), strict=True):
                torch.testing.assert_close(twice, 2 * once)
            run.model.set_requires_gradient_sync(True)
            run.backward(1)
            run.check([0, 0, 1])

    @pytest.mark.parametrize("layout", [HSDP, FSDP, MeshLayout(2, 2, 1)], ids=str)
    @pytest.mark.parametrize("kind", ["sync", "all_reduce"])
    def test_scaling_and_zeroing_reach_all_that_waits(self, layout, kind) -> None:
        """Also a gradient that was reduced before: it is not hidden behind the waiting sum."""
        with local_world(4) as world:
            run = Run(world, layout)
            switch = {
                "sync": run.model.set_requires_gradient_sync,
                "all_reduce": run.model.set_requires_all_reduce,
            }[kind]
            for scale in (0.0, 2.0):
                run.backward(0)
                switch(False)
                run.backward(1)
                for p in run.model.parameters():
                    p.grad.mul_(scale)
                switch(True)
                run.backward(2)
                run.check([2] if scale == 0 else [0, 1, 0, 1, 2])
                run.model.zero_grad()

    def test_nothing_is_communicated_over_data_axes(self) -> None:
        with fake_world(0, 4):
            mesh = cpu_mesh(2, 2)
            model = parallelize(Lm(layers=1), mesh)
            model.set_requires_gradient_sync(False)
            with record_collectives(mesh) as recorder:
                lm_loss(model, tokens(0)).backward()
            assert recorder.count("reduce_scatter") == recorder.count("all_reduce") == 0


class TestAccumulate:
    def test_all_reduces_once(self) -> None:
        with fake_world(0, 4):
            mesh = cpu_mesh(2, 2)
            model = parallelize(Lm(layers=1), mesh)
            counts = []
            for ids in accumulate(model, [tokens(i) for i in range(4)]):
                with record_collectives(mesh) as recorder:
                    lm_loss(model, ids).backward()
                counts.append((recorder.count("reduce_scatter"), recorder.count("all_reduce")))
            units = 3  # embedding, block, norm + head
            assert counts == [(units, 0)] * 3 + [(units, units)]

    def test_an_exception_puts_the_switch_back(self) -> None:
        with fake_world(0, 4):
            mesh = cpu_mesh(2, 2)
            model = parallelize(Lm(layers=1), mesh)
            iterator = accumulate(model, [tokens(i) for i in range(4)])
            next(iterator)
            iterator.close()
            with record_collectives(mesh) as recorder:
                lm_loss(model, tokens(0)).backward()
            assert recorder.count("all_reduce") == 3


def test_accumulated_gradients_add_up_in_one_kernel() -> None:
    """The second reduction adds to the first one's buffer: same gradient objects, right sums."""
    with local_world(4) as world:
        run = Run(world, FSDP)
        run.backward(0)
        objects = [id(p.grad) for p in run.model.parameters()]
        run.backward(1)
        assert [id(p.grad) for p in run.model.parameters()] == objects
        run.check([0, 1])
        run.model.layers[0].up.weight.grad = None  # one cleared by hand, the others kept
        run.backward(2)
        run.check([0, 1, 2], but={"layers.0.up.weight": [2]})


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_no_sync(sizes) -> None:
    """Samples 0 to 3: two without sync, one nested, one with."""
    with local_world(4) as world:
        run = Run(world, MeshLayout(*sizes))
        with run.model.no_sync():
            run.backward(0)
            with run.model.no_sync():
                run.backward(1)
            run.backward(2)
        run.backward(3)
        run.check([0, 1, 2, 3])


def test_no_sync_puts_switches_back_as_they_were() -> None:
    with fake_world(0, 4):
        model = parallelize(Lm(), cpu_mesh(2, 2))
        units = list(units_of(model, recurse=True))
        model.layers[0].set_requires_gradient_sync(False)
        model.layers[1].set_requires_all_reduce(False)
        before = [(unit.sync, unit.all_reduce) for unit in units]
        assert len(set(before)) == 3
        with pytest.raises(ZeroDivisionError), model.no_sync():
            assert not any(unit.sync or unit.all_reduce for unit in units)
            raise ZeroDivisionError
        assert [(unit.sync, unit.all_reduce) for unit in units] == before
        with model.layers[0].no_sync():  # of an inner unit: its own alone
            assert [unit.sync for unit in units].count(False) == 1


# -- sums that wait, and exceptions and conversions -------------------------------------------------


def test_waiting_sums_are_dropped_by_reset_and_reduced_ones_stay():
    with local_world(4) as world:
        trial = Trial(world, REPLICAS, shard_blocks)
        trial.backward(0)
        before = {n: p.grad for n, p in trial.model.named_parameters()}
        trial.model.layers[0].set_requires_gradient_sync(False)
        trial.model.layers[1].set_requires_all_reduce(False)
        trial.backward(1)
        trial.model.reset_iter_state()
        after = {n: p.grad for n, p in trial.model.named_parameters()}
        assert all(g is None for n, g in after.items() if n.startswith("layers"))
        assert after["head.weight"] is before["head.weight"]
        trial.play("clear +sync 2")
        trial.check([2])


def to_float_and_back(model: nn.Module) -> None:
    model.float().double()  # DTensor keeps a sum as it is


def clone_all(model: nn.Module) -> None:
    model._apply(torch.clone)  # DTensor sums what is partial


@pytest.mark.slow
@pytest.mark.parametrize("convert", [to_float_and_back, clone_all])
@pytest.mark.parametrize(
    "switch",
    ["set_requires_gradient_sync", "set_requires_all_reduce"],
)
def test_sums_that_wait_survive_a_conversion(switch, convert):
    """It makes new buffers and new ``.grad`` objects, which are still what they were."""
    with local_world(4) as world:
        trial = Trial(world, REPLICAS, shard_blocks)
        model = trial.model
        for unit in (*model.layers, model):
            unit.set_gradient_divide_factor(5)
        trial.backward(0)
        getattr(model, switch)(False)
        trial.backward(1)
        convert(model)
        if (switch, convert) == ("set_requires_gradient_sync", to_float_and_back):
            with pytest.raises(StateError, match="already divided by 5"):
                model.set_gradient_divide_factor(3)
        getattr(model, switch)(True)
        trial.backward(2)
        trial.check([0, 1, 2], factor=5, tolerance=1e-5)  # of float32
        model.zero_grad()
        getattr(model, switch)(False)
        trial.backward(3)
        model.zero_grad()
        convert(model)
        getattr(model, switch)(True)
        trial.backward(4)
        trial.check([4], factor=5, tolerance=1e-5)
