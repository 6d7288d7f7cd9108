"""finalize_backward and set_manual_backward_finalization: on simulated ranks, beside the plain model."""

import copy
import weakref

import pytest
import torch
from _support.fsdp.beside_plain import Trial
from _support.fsdp.lifetimes import collector_off
from _support.fsdp.wrapped import at_rest, shard_blocks
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from parallel3d import MeshLayout, Parallel3dError, build_mesh
from parallel3d.errors import StateError
from parallel3d.fsdp import GradientReductionHandle, share_comm_ctx
from parallel3d.fsdp.inspect import get_unit
from parallel3d.optim import GradScaler, clip_grad_norm_, step_in_backward
from parallel3d.testing import fake_world, local_world, record_collectives

parity = pytest.mark.parity("method: finalize_backward")
FSDP, HSDP, REPLICATE = MeshLayout(1, 2, 1), MeshLayout(2, 2, 1), MeshLayout(2, 1, 1)
LAYOUTS = pytest.mark.parametrize("layout", [FSDP, HSDP, REPLICATE], ids=["fsdp", "hsdp", "ddp"])


def manual(world, layout=FSDP, **options) -> Trial:
    trial = Trial(world, layout, lambda m, mesh: shard_blocks(m, mesh, **options))
    trial.model.set_manual_backward_finalization(True)
    return trial


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def scatters_and_sums(recorder) -> tuple[int, int]:
    scatters = recorder.count("reduce_scatter") + recorder.count("all_to_all")
    return scatters, recorder.count("all_reduce")


@parity
@pytest.mark.parity("method: set_manual_backward_finalization")
@LAYOUTS
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_gradients_come_with_it(layout, asynchronous) -> None:
    with local_world(layout.world_size) as world:
        trial = manual(world, layout)
        for step in range(3):
            trial.backward(step)
            assert at_rest(trial.model)
            assert not gradients(trial.model)
            handle = trial.model.finalize_backward(async_op=asynchronous)
            if asynchronous:
                assert not gradients(trial.model)
                handle.wait()
                handle.wait()
            else:
                assert handle is None
            trial.check([step])
            trial.step()


@parity
@LAYOUTS
@pytest.mark.parametrize(
    "script",
    [
        "+manual 0 1 fwd fin check 3 fin check fin check",
        # As pipeline schedules have it: units gathered by hand stay so until the end of the step.
        "+manual " + "-reshard -sync unshard 0 1 +reshard +sync fin check step " * 2,
        "+manual -all 0 1 fin +all fin check",
        "0 -sync 1 +sync +manual fin check -manual 2 check",
        "0 fwd +manual bwd fin check fwd -manual bwd check",
    ],
    ids=["several", "kept", "over shard alone", "put off before", "between forward and backward"],
)
def test_gradients_are_the_plain_models(layout, script) -> None:
    with local_world(layout.world_size) as world:
        trial = Trial(world, layout, shard_blocks)
        trial.play(script)
        assert at_rest(trial.model)


@parity
def test_it_takes_gradients_put_by_hand() -> None:
    """Zero-bubble schedules compute those of the weights apart, where the unsharded parameters are."""
    with local_world(2) as world:
        trial = manual(world, reshard_after_forward=False)
        unit = get_unit(trial.model.layers[0])
        trial.play("-reshard -sync")
        trial.forward(0)
        bucket = unit.group.buckets[0]
        unsharded = bucket.precision.compute_params[0]
        unsharded.grad = torch.ones_like(unsharded)
        trial.play("+reshard +sync fin")
        assert unsharded.grad is None
        for got in world.per_rank(bucket.params[0].sharded.grad.full_tensor()):
            assert torch.equal(got, torch.ones_like(got))
        assert at_rest(trial.model)


@parity
@LAYOUTS
@pytest.mark.parametrize("unused", [False, True], ids=["", "unused"])
def test_of_backwards_that_did_not_reduce(layout, unused) -> None:
    """The reductions come with it, once each, with what is set by then."""
    with local_world(layout.world_size) as world:
        trial = manual(world, layout)
        model = trial.model
        model.set_reduce_scatter_unused_params(unused)
        for _ in range(2):
            with record_collectives(trial.mesh) as before:
                trial.play("-sync 0 1 +sync")
            assert scatters_and_sums(before) == (0, 0)
            with record_collectives(trial.mesh) as recorder:
                trial.play("fin")
            # Each unit, and each of the blocks' scalars, which are whole on every rank of shard.
            assert (
                scatters_and_sums(recorder)
                == {FSDP: (3, 2), HSDP: (3, 7), REPLICATE: (0, 3)}[layout]
            )
            trial.play("check fin check step")


@parity
@LAYOUTS
def test_whoever_would_use_gradients_that_are_not_there(layout) -> None:
    with local_world(layout.world_size) as world:
        trial = manual(world, layout)
        model = trial.model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        trial.backward(0)
        weight = "layers.0.linear.weight|linear.weight|scale"
        for _ in range(2):
            with pytest.raises(StateError, match=f"SGD.*({weight}).*finalize_backward"):
                optimizer.step()
        other.step()
        with pytest.raises(StateError, match=r"clip_grad_norm_.*finalize_backward"):
            clip_grad_norm_(model, 1.0)
        scaler = GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(StateError, match=r"unscaling.*finalize_backward"):
            scaler.unscale_(optimizer)
        with pytest.raises(StateError, match="deep-copy it after finalize_backward"):
            copy.deepcopy(model)
        with pytest.raises(StateError, match="before finalize_backward"):
            model.set_manual_backward_finalization(False)
        handle = model.finalize_backward(async_op=True)
        with pytest.raises(StateError, match=r"SGD.*wait\(\)"):
            optimizer.step()
        with pytest.raises(StateError, match=r"a forward.*wait\(\)"):
            trial.forward(1)
        with pytest.raises(StateError, match=r"wait\(\)"):
            model.finalize_backward()
        handle.wait()
        trial.check([0])
        clip_grad_norm_(model, 1e9)
        trial.play("step 1 fin check")


@parity
def test_a_backward_of_an_older_graph_ends_what_nobody_waited_for() -> None:
    with local_world(2) as world:
        trial = manual(world)
        out = trial.forward(0)
        trial.backward(1)
        handle = trial.model.finalize_backward(async_op=True)
        out.backward()
        handle.wait()  # nothing to do
        trial.model.finalize_backward()
        trial.check([0, 1])


@parity
def test_where_there_is_nothing_to_finalize() -> None:
    with local_world(2) as world:
        trial = Trial(world, FSDP, shard_blocks)
        model = trial.model
        assert model.finalize_backward() is None
        handle = model.finalize_backward(async_op=True)
        handle.wait()
        assert isinstance(handle, GradientReductionHandle)
        if hasattr(torch_fsdp, "GradientReductionHandle"):
            assert isinstance(handle, torch_fsdp.GradientReductionHandle)
        trial.backward(0)
        with pytest.raises(StateError, match="set_manual_backward_finalization"):
            model.finalize_backward()
        with pytest.raises(StateError, match=r"layers\.0.*outermost"):
            model.layers[0].finalize_backward()
        with pytest.raises(StateError, match=r"layers\.0.*outermost"):
            model.layers[0].set_manual_backward_finalization(True)
        with pytest.raises(Parallel3dError, match="enabled"):
            model.set_manual_backward_finalization("on")
        with pytest.raises(Parallel3dError, match="async_op"):
            model.finalize_backward(async_op="yes")
        trial.check([0])


def test_set_on_an_inner_unit_before_the_first_forward() -> None:
    with fake_world(0, 2):
        mesh = build_mesh(FSDP, device_type="cpu")
        model = nn.Sequential(nn.Linear(4, 4))
        model.layers = [model[0]]
        model = shard_blocks(model, mesh)
        model[0].set_manual_backward_finalization(True)
        with pytest.raises(StateError, match=r"inside.*outermost"):
            model(torch.ones(1, 4))
        model[0].set_manual_backward_finalization(False)
        model(torch.ones(1, 4))


@parity
def test_within_a_backward() -> None:
    with local_world(2) as world:
        trial = manual(world)
        errors = []

        def call(*_) -> None:
            for method in (
                trial.model.finalize_backward,
                lambda: trial.model.set_manual_backward_finalization(False),
            ):
                with pytest.raises(StateError, match="during a backward") as caught:
                    method()
                errors.append(caught)

        trial.model.layers[0].register_full_backward_hook(call)
        trial.backward(0)
        assert len(errors) == 2
        trial.model.finalize_backward()
        trial.check([0])


def test_not_with_updates_in_backward() -> None:
    with local_world(2) as world:
        trial = manual(world)
        with pytest.raises(StateError, match="set_manual_backward_finalization"):
            step_in_backward(trial.model, torch.optim.SGD, lr=0.1)
        trial.model.set_manual_backward_finalization(False)
        step_in_backward(trial.model, torch.optim.SGD, lr=0.1)
        with pytest.raises(StateError, match="updated in backward"):
            trial.model.set_manual_backward_finalization(True)


class Boom(Exception):
    pass


@parity
@LAYOUTS
@pytest.mark.parametrize("finalized", [False, True])
def test_a_backward_that_fails_loses_its_own_gradients_only(layout, finalized) -> None:
    with local_world(layout.world_size) as world:
        trial = manual(world, layout)
        trial.play("0 fin" if finalized else "0")

        def explode(*_) -> None:
            raise Boom

        handle = trial.model.layers[0].register_full_backward_hook(explode)
        with pytest.raises(Boom):
            trial.backward(1)
        handle.remove()
        trial.play("2 fin")
        trial.check([0, 2])


@parity
@LAYOUTS
def test_reset_drops_what_is_not_finalized(layout) -> None:
    with local_world(layout.world_size) as world:
        trial = manual(world, layout)
        trial.backward(0)
        trial.model.reset_iter_state()
        assert not gradients(trial.model)
        trial.backward(1)
        handle = trial.model.finalize_backward(async_op=True)
        trial.model.reset_iter_state()
        with pytest.raises(StateError, match="reset_iter_state"):
            handle.wait()
        trial.play("2 fin")
        trial.check([2])


@parity
def test_roots_that_share_a_comm() -> None:
    with local_world(2) as world:
        first, second = (manual(world), Trial(world, FSDP, shard_blocks))
        share_comm_ctx([first.model, second.model])
        first.backward(0)
        second.model.reset_iter_state()
        second.backward(1)
        second.check([1])
        first.model.finalize_backward()
        first.check([0])


@parity
def test_guards_and_hooks_come_with_it() -> None:
    with local_world(2) as world:
        trial = manual(world)
        seen = []
        weight = trial.model.head.weight
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
        trial.backward(0)
        assert seen == []
        trial.model.finalize_backward()
        assert seen == [True]


@parity
def test_a_model_that_goes_before_it() -> None:
    with collector_off(), local_world(2) as world:
        trial = manual(world)
        trial.backward(0)
        root = weakref.ref(get_unit(trial.model))
        del trial.model
        assert root() is None
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
