"""Torch's functions given our models, our objects given to torch's, and what torch's code asks of a unit."""

import copy
import inspect
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from _support.fsdp.beside_plain import Trial
from _support.fsdp.lifetimes import collector_off
from _support.fsdp.wrapped import at_rest, build, cpu_mesh, shard_blocks
from _support.models import Lm, lm_loss, tokens
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed import init_device_mesh
from torch.distributed._composable import replicate
from torch.distributed._composable.contract import _get_registry
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from parallel3d import MeshLayout, StateError, fsdp, parallelize
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp import FSDPModule, fully_shard
from parallel3d.fsdp.inspect import explain_mixed, unit_of
from parallel3d.testing import LocalWorld, fake_world, local_world


@pytest.mark.parity("argument: torch's own policy objects")
def test_torch_takes_our_policies() -> None:
    dtypes = []
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64)
    with fake_world(0, 2):
        model = nn.Linear(4, 4)
        torch_fsdp.fully_shard(model, mp_policy=policy, offload_policy=fsdp.OffloadPolicy())
        model.register_forward_pre_hook(
            lambda m, args: dtypes.append((m.weight.dtype, args[0].dtype))
        )
        out = model(torch.ones(2, 4))
        out.sum().backward()
        assert dtypes == [(torch.bfloat16, torch.bfloat16)] and out.dtype == torch.float64
        assert model.weight.grad.dtype == torch.float32


@pytest.mark.parity("argument: torch's own policy objects")
def test_torch_takes_our_mesh_dims() -> None:
    with fake_world(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
        placements = []
        torch_takes_dims = hasattr(torch_fsdp, "DataParallelMeshDims")  # since 2.12
        for engine in (fsdp, torch_fsdp)[: 1 + torch_takes_dims]:
            model = nn.Linear(4, 4, bias=False)
            whole = DTensor.from_local(model.weight.detach(), mesh, [Replicate()] * 2)
            model.weight = nn.Parameter(whole)
            dims = fsdp.DataParallelMeshDims(shard="parts", replicate="copies")
            engine.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
            placements.append(model.weight.placements)
        assert placements == [(Replicate(), Shard(0))] * (1 + torch_takes_dims)


def make(engine: Any, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Lm()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        engine.fully_shard(layer, mesh=mesh)
    engine.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    lm_loss(model, tokens(seed)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_dicts(full: bool) -> None:
    """Runs on every rank: torch's state of either engine's model goes into the other's."""
    options = torch_state_dict.StateDictOptions(full_state_dict=full, broadcast_from_rank0=full)
    pairs = [(make(fsdp, 0), make(torch_fsdp, 1)), (make(torch_fsdp, 2), make(fsdp, 3))]
    for (model, optimizer), (other, its_optimizer) in pairs:
        # Copied: the optimizer that loads a tensor keeps it, and would share it with the first.
        saved = copy.deepcopy(torch_state_dict.get_state_dict(model, optimizer, options=options))
        torch_state_dict.set_state_dict(
            other,
            its_optimizer,
            model_state_dict=saved[0],
            optim_state_dict=saved[1],
            options=options,
        )
        for _ in range(2):
            losses = []
            for each, stepper in ((model, optimizer), (other, its_optimizer)):
                loss = lm_loss(each, tokens(7))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
                stepper.step()
                stepper.zero_grad()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parity("behaviour: torch's state_dict functions, from either engine to the other")
@pytest.mark.parametrize("full", [True, False])
def test_states_go_from_engine_to_engine(gloo_pool, full) -> None:
    gloo_pool.run(state_dicts, full, world_size=2, timeout=60.0)


# -- the state of a unit -------------------------------------------------------------------------------


def run_of(world: LocalWorld, **options) -> Trial:
    """A model on two simulated ranks."""
    wrap = partial(shard_blocks, **options)
    return Trial(world, MeshLayout(1, 2, 1), wrap, partial(Lm, layers=2), tokens, lm_loss)


def end_step(model: nn.Module) -> None:
    """As torch.distributed.pipelining ends one."""
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = torch_fsdp.fully_shard.state(model)
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def start_step(model: nn.Module) -> None:
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)


class TestState:
    def test_torch_finds_the_state_of_every_unit(self) -> None:
        with fake_world(0, 2):
            model, _ = build()
            state = torch_fsdp.fully_shard.state(model)
            assert state is model._get_fsdp_state()
            assert state._is_root is None
            states = state._state_ctx.all_states
            assert states == [m._get_fsdp_state() for m in model.modules() if unit_of(m)]
            assert state._is_root and not states[1]._is_root
            assert [g._reshard_after_forward for s in states for g in s._fsdp_param_groups] == [
                False,
                True,
                True,
            ]
            assert torch_fsdp.fully_shard.state(model.layers[0].up) is None

    def test_what_is_not_answered_is_said(self) -> None:
        with fake_world(0, 2):
            model, _ = build()
            group = model._get_fsdp_state()._fsdp_param_group
            assert not hasattr(group, "mesh_info")
            with pytest.raises(AttributeError, match=r"'mesh_info' is a part .* post_backward"):
                _ = group.mesh_info

    def test_a_unit_without_parameters_has_no_group(self) -> None:
        with fake_world(0, 2):
            _, mesh = build()
            module = fully_shard(nn.Sequential(nn.Tanh()), mesh=mesh)
            state = module._get_fsdp_state()
            assert state._fsdp_param_groups == [] and state._fsdp_param_group is None

    def test_others_see_that_fully_shard_was_applied(self) -> None:
        with fake_world(0, 2):
            model, mesh = build()
            assert "fully_shard" in _get_registry(model)
            assert not _get_registry(model.layers[0].up)
            with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
                replicate(model)
            with pytest.raises(AssertionError, match="fully_shard has already been applied"):
                torch_fsdp.fully_shard(model.layers[0], mesh=mesh)

    def test_copies_have_their_own(self) -> None:
        with fake_world(0, 2):
            model, _ = build()
            twin = copy.deepcopy(model)
            for module, other in zip(model.modules(), twin.modules(), strict=True):
                if isinstance(module, FSDPModule):
                    assert other._get_fsdp_state()._unit is unit_of(other) is not unit_of(module)

    @pytest.mark.parity("reliability: everything freed at once")
    def test_it_keeps_nothing_alive(self) -> None:
        with fake_world(0, 2):
            model, _ = build()
            state, alive = model._get_fsdp_state(), weakref.ref(model)
            assert state.all_states
            with collector_off():
                del model
                assert alive() is None
            with pytest.raises(StateError, match="no longer exists"):
                _ = state.all_states


class TestPostBackward:
    def test_sums_over_micro_batches_are_reduced(self) -> None:
        with local_world(2) as world:
            run = run_of(world)
            start_step(run.model)
            for sample in (1, 2, 3):
                run.backward(sample)
            end_step(run.model)
            assert at_rest(run.model)
            run.check([1, 2, 3])
            run.backward(4)
            run.check([1, 2, 3, 4])

    def test_gradients_put_there_by_hand_are_taken(self) -> None:
        """Beside those that a backward has brought, as zero-bubble schedules do."""
        with local_world(2) as world:
            run = run_of(world, reshard_after_forward=False)
            start_step(run.model)
            run.backward(1)
            for module in run.model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
            for sample in (2, 3):
                loss = run.forward(sample)
                shown = list(run.model.parameters())
                for p, grad in zip(shown, torch.autograd.grad(loss, shown), strict=True):
                    p.grad = grad if p.grad is None else p.grad + grad
            end_step(run.model)
            assert at_rest(run.model)
            run.check([1, 2, 3])

    def test_gradients_that_went_nowhere_are_an_error(self) -> None:
        """torch 2.13: a zero-bubble schedule on units that reshard after forward leaves no gradient."""
        with fake_world(0, 2):
            model, _ = build()
            start_step(model)
            hidden = torch.zeros(2, 5, 12, requires_grad=True)
            model.layers[1].register_forward_pre_hook(lambda *_: (hidden,))
            torch.autograd.grad(lm_loss(model, tokens(0)), hidden)
            with pytest.raises(StateError, match=r"zero-bubble .* reshard_after_forward=False"):
                end_step(model)
            model.reset_iter_state()
            lm_loss(model, tokens(0)).backward()
            end_step(model)


class TestTorchFunctions:
    """A model whose ``fully_shard`` is ours while the rest is imported from torch."""

    @pytest.mark.parity("function: register_fsdp_forward_method")
    def test_register_fsdp_forward_method(self) -> None:
        """The method's call is a forward of the unit: its parameters are whole in it."""
        with fake_world(0, 2):
            model, _ = build()
            block = model.layers[0]
            block.widths = lambda: [p.shape[0] for p in block.up._parameters.values()]
            torch_fsdp.register_fsdp_forward_method(block, "widths")
            with torch.no_grad():
                assert block.widths() == [20, 20]
            assert at_rest(model)

    def test_a_registered_property_reads_whole_parameters(self) -> None:
        class Reads(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4, 3))

            @property
            def rows(self):
                rows = self.weight.shape[0], type(self.weight)
                return lambda: rows

        with fake_world(0, 2):
            model = fully_shard(Reads(), mesh=cpu_mesh(1, 2, 1))
            fsdp.register_fsdp_forward_method(model, "rows")
            with torch.no_grad():
                assert model.rows() == (4, nn.Parameter)

    @pytest.mark.parity("function: share_comm_ctx")
    def test_share_comm_ctx(self) -> None:
        with fake_world(0, 2):
            first, _ = build()
            second, _ = build()
            lm_loss(first, tokens(0)).backward()
            torch_fsdp.share_comm_ctx([first, second])
            lm_loss(second, tokens(0)).backward()
            assert unit_of(first).context.comm is unit_of(second.layers[1]).context.comm


class TestPrivateNames:
    """What other programs read of torch's engine."""

    def test_parameters_of_a_group(self) -> None:
        with fake_world(0, 2):
            model, _ = build()
            found = []
            for module in model.modules():
                state = getattr(module, "_get_fsdp_state", lambda: None)()
                if state is not None and state._fsdp_param_group is not None:
                    found += [p.sharded_param for p in state._fsdp_param_group.fsdp_params]
            assert {id(p) for p in found} == {id(p) for p in model.parameters()}
            weight = model.layers[0].up.weight
            params = model.layers[0]._get_fsdp_state()._fsdp_param_group.fsdp_params
            (up,) = (p for p in params if p.sharded_param is weight)
            assert up._orig_size == weight.shape
            assert up.sharded_size == model.layers[0].up.weight.to_local().shape
            assert not up.unsharded_param.is_meta

    def test_policy_is_read_only(self) -> None:
        with fake_world(0, 2):
            policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            model, _ = build(mp_policy=policy)
            state = model._get_fsdp_state()
            assert state._mp_policy.param_dtype is torch.bfloat16
            for target, name in ((state, "_mp_policy"), (state._fsdp_param_group, "fsdp_params")):
                with pytest.raises(AttributeError):
                    setattr(target, name, None)

    def test_torch_finds_the_state_of_a_module(self) -> None:
        with fake_world(0, 2):
            model, _ = build()
            assert _get_module_fsdp_state(model) is model._get_fsdp_state()
            assert _get_module_fsdp_state(model.layers[0].up) is None
            twin = copy.deepcopy(model)
            assert _get_module_fsdp_state(twin) is twin._get_fsdp_state()

    def test_zero_bubble_steps_of_other_programs(self) -> None:
        """They fold sums by torch's methods before post_backward."""
        with local_world(2) as world:
            run = run_of(world)
            start_step(run.model)
            run.backward(1)
            run.model.set_requires_gradient_sync(True)
            state = torch_fsdp.fully_shard.state(run.model)
            for each in state._state_ctx.all_states:
                for param in each._fsdp_param_group.fsdp_params:
                    param.accumulate_unsharded_grad_if_needed()
                    param.to_accumulated_grad_if_needed()
                each._fsdp_param_group.post_backward()
            state._root_post_backward_final_callback()
            run.check([1])


class TestMemoryTracker:
    """torch's fsdp2_mem_tracker: it puts itself around hooks and backward, and leaves again."""

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_it_sees_forward_and_backward(self, ranks) -> None:
        with fake_world(0, ranks):
            model, _ = build((1, ranks, 1))
            model_of_its_own = copy.deepcopy(model)
            optimizer = torch.optim.Adam(model.parameters())
            with FSDPMemTracker(model, optimizer) as tracker:
                for step in range(2):
                    lm_loss(model, tokens(step)).backward()
                    stages = {
                        tracker._mod_tracker.get_known_fqn(module): {s.name for s in stat.snapshots}
                        for module, stat in tracker.memory_tracking.items()
                    }
                    optimizer.step()
                    optimizer.zero_grad()
                    tracker.reset_mod_stats()
            assert len(stages) == 3
            wanted = {"AFT_PRE_FW", "AFT_POST_FW", "AFT_PRE_BW", "AFT_POST_BW"}
            missing = {name: wanted - found for name, found in stages.items()}
            # The root's inputs have no gradient: its backward is over when the whole one is.
            assert missing.pop("FSDPLm") <= {"AFT_POST_BW"} and not any(missing.values())
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
            assert peak["Total"] > 0
            del model_of_its_own

    def test_nothing_of_it_stays(self) -> None:
        with local_world(2) as world:
            run, other = run_of(world), run_of(world)
            with FSDPMemTracker(run.model):
                pass
            for each in (run, other):
                each.backward(1)
                each.check([1])
            for module in run.model.modules():
                unit = unit_of(module)
                if unit is not None:
                    assert not unit.tracked and "pre_backward" not in vars(unit)
            assert at_rest(copy.deepcopy(run.model)) and at_rest(run.model)


def test_programs_keep_a_unit_gathered_by_torchs_attribute() -> None:
    """They set ``post_forward_mesh_info`` to None, so that torch does not reshard the unit after forward."""
    with fake_world(0, 2):
        model = fully_shard(nn.Linear(4, 4), mesh=cpu_mesh())
        group = torch_fsdp.fully_shard.state(model)._fsdp_param_group
        with pytest.raises(ValueError, match=r"set to 2; .* module.set_reshard_after_forward"):
            group.post_forward_mesh_info = 2
        model.set_reshard_after_forward(True)
        group.post_forward_mesh_info = None
        assert unit_of(model).reshards() is False


# -- DistributedDataParallel is refused ----------------------------------------------------------------


def sharded(sizes: tuple[int, int, int]) -> nn.Module:
    plan = {"0": "colwise", "1": "rowwise"} if sizes[2] > 1 else None
    return parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), cpu_mesh(*sizes), plan)


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1), (1, 1, 2)], ids=str)
def test_parallel_models_are_refused(sizes: tuple[int, int, int]) -> None:
    with (
        fake_world(0, 2),
        pytest.raises(Parallel3dError, match=r"integrations\.transformers\.Trainer.*ParallelMixin"),
    ):
        DistributedDataParallel(sharded(sizes))


def test_a_module_of_fully_shard_is_refused() -> None:
    with fake_world(0, 2):
        model = nn.Linear(4, 4)
        fully_shard(model)
        with pytest.raises(Parallel3dError, match="reduces its gradients itself"):
            DistributedDataParallel(model)


def test_only_for_ddp() -> None:
    with fake_world(0, 2):
        model = sharded((1, 2, 1))
        name = "_ddp_params_and_buffers_to_ignore"
        assert not hasattr(model, name) and not hasattr(copy.deepcopy(model), name)
        assert name not in dict(inspect.getmembers(model))
        setattr(model, name, ["0.weight"])
        assert getattr(model, name) == ["0.weight"]


def test_accelerates_error_is_explained() -> None:
    error = ValueError("Your model contains `DTensor` parameters, which is incompatible with DDP.")
    assert "ParallelMixin" in (explain_mixed(error) or "")
    assert explain_mixed(ValueError("DTensor")) is None
