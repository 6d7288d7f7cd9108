"""What people call on models with packed parameters: they stay packed, with the same rows."""

import copy
from collections.abc import Callable

import pytest
import torch
from _support.packed_models import PackedLm, even_lm, packed_plan, packed_tokens, uneven_lm
from torch import nn, optim
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor, Shard

from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh, parallelize
from parallel3d._layout.packed import PackedDTensor
from parallel3d._layout.param_layout import get_param_layout
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp import fully_shard
from parallel3d.optim import GradScaler, clip_grad_norm_, step_in_backward
from parallel3d.testing import fake_world
from parallel3d.tp import resolve_plan


def parallel(build=even_lm, sizes=(1, 2, 2), **options) -> PackedLm:
    torch.manual_seed(0)
    model = build()
    mesh = build_mesh(MeshLayout(*sizes), device_type="cpu")
    return parallelize(model, mesh, tp_plan=packed_plan(model), **options)


def packed(model: nn.Module) -> dict[str, PackedDTensor]:
    found = {n: p for n, p in model.named_parameters() if isinstance(p, PackedDTensor)}
    assert all(isinstance(p, nn.Parameter) for p in found.values())
    return found


def placements(model: nn.Module) -> dict[str, tuple]:
    return {name: param.placements for name, param in packed(model).items()}


def state_of(model: nn.Module, value: float) -> dict[str, torch.Tensor]:
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {name: tensor.fill_(value) for name, tensor in state.items()}


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "assign": lambda m: m.load_state_dict(state_of(m, 0.5), assign=True),
    "assign whole": lambda m: m.load_state_dict(
        {name: torch.full(t.shape, 0.5) for name, t in m.state_dict().items()}, assign=True
    ),
    "reset_grads": lambda m: m.requires_grad_(False).requires_grad_(True),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions(name) -> None:
    with fake_world(1, 4):
        model = parallel()
        before, objects = placements(model), [id(p) for p in model.parameters()]
        CONVERSIONS[name](model)
        model(packed_tokens(0)).float().square().mean().backward()
        assert placements(model) == before and len(before) == 6
        assert [id(p) for p in model.parameters()] == objects
        for param in packed(model).values():
            assert isinstance(param.grad, PackedDTensor) and param.grad.dtype == param.dtype
            if name.startswith("assign"):
                assert bool((get_local_tensor(param) == 0.5).all())


def test_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with fake_world(1, 4):
        model = parallel(mp_policy=policy)
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            model(packed_tokens(0)).float().square().mean().backward()
            grads = [param.grad for param in packed(model).values()]
            assert all(isinstance(grad, PackedDTensor) for grad in grads)
            partial = [any(p.is_partial() for p in grad.placements) for grad in grads]
            assert all(partial) if not sync else not any(partial)
            assert all(p.grad.packing == p.packing for p in packed(model).values())
            if not sync:
                with pytest.raises(StateError, match="not reduced yet"):
                    clip_grad_norm_(model, 1.0)


@pytest.mark.full
def test_averaged_model() -> None:
    with fake_world(1, 4):
        model = parallel(uneven_lm, (1, 1, 4))
        average = optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(3)
        average.update_parameters(model)
        ours = packed(model)
        for name, param in packed(average.module).items():
            assert param.placements == ours[name].placements
            twice, thrice = get_local_tensor(param), get_local_tensor(ours[name])
            torch.testing.assert_close(twice * 1.5, thrice)


def test_copies_of_one_parameter() -> None:
    with fake_world(1, 4):
        for param in packed(parallel()).values():
            twin = copy.deepcopy(param)
            assert isinstance(twin, PackedDTensor) and isinstance(twin, nn.Parameter)
            assert twin.placements == param.placements
            assert torch.equal(get_local_tensor(twin), get_local_tensor(param))
            assert get_local_tensor(twin).data_ptr() != get_local_tensor(param).data_ptr()


def test_a_copy_made_between_tensor_parallelism_and_sharding() -> None:
    with fake_world(1, 4):
        model = uneven_lm()
        mesh = build_mesh(MeshLayout(1, 1, 4), device_type="cpu")
        resolve_plan(model, packed_plan(model), 4).apply(model, mesh)
        twin = copy.deepcopy(model)
        for name, param in packed(twin).items():
            assert get_param_layout(param).compute == "local", name
        fully_shard(twin, mesh=mesh)
        assert len(packed(twin)) == 6


def test_what_asynchronous_checkpoints_stage() -> None:
    with fake_world(1, 4):
        for model in (parallel(), parallel(uneven_lm, (1, 1, 4))):
            state = model.state_dict()
            staged = StateDictStager(pin_memory=False, share_memory=False).stage(state)
            for name, value in state.items():
                found = staged[name]
                assert type(found) is type(value) and found.placements == value.placements
                assert torch.equal(get_local_tensor(found), get_local_tensor(value))
                if isinstance(value, PackedDTensor):
                    assert found.__create_chunk_list__() == value.__create_chunk_list__()


def test_step_in_backward() -> None:
    with fake_world(1, 4):
        model = parallel()
        step_in_backward(model, optim.AdamW, lr=1e-2, fused=True)
        before = {name: get_local_tensor(p).clone() for name, p in packed(model).items()}
        model(packed_tokens(0)).square().mean().backward()
        for name, param in packed(model).items():
            assert not torch.equal(get_local_tensor(param), before[name])


def test_grad_scaler() -> None:
    with fake_world(1, 4):
        model = parallel()
        mesh = next(iter(packed(model).values())).device_mesh
        scaler = GradScaler("cpu", init_scale=8.0, mesh=mesh)
        optimizer = optim.SGD(model.parameters(), lr=1e-2, foreach=True)
        scaler.scale(model(packed_tokens(0)).square().mean()).backward()
        scaled = {name: get_local_tensor(p.grad).clone() for name, p in packed(model).items()}
        scaler.unscale_(optimizer)
        for name, param in packed(model).items():
            torch.testing.assert_close(get_local_tensor(param.grad) * 8, scaled[name])
        scaler.step(optimizer)
        scaler.update()


def test_a_checkpoint_refuses_sums_that_wait() -> None:
    with fake_world(1, 4):
        model = parallel()
        model.set_requires_gradient_sync(False)
        model(packed_tokens(0)).square().mean().backward()
        grad = next(iter(packed(model).values())).grad
        assert isinstance(grad, DTensor)
        with pytest.raises(ValueError, match="partial"):
            grad.__create_chunk_list__()


def test_a_dim_that_does_not_work_is_refused() -> None:
    with fake_world(1, 8):
        model = uneven_lm()
        mesh = build_mesh(MeshLayout(1, 2, 4), device_type="cpu")
        resolve_plan(model, packed_plan(model), 4).apply(model, mesh)
        with pytest.raises(Parallel3dError, match=r"dim 0.*Dims that work: 1"):
            fully_shard(
                model.layers[0].mlp.gate_up,
                mesh=mesh,
                shard_placement_fn=lambda p: None if p.ndim == 1 else Shard(0),
            )
