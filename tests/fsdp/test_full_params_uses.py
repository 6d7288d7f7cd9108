"""Whole tensors of unusual models: ties, lists, meshes of other kinds, precisions, ignored parts."""

import copy

import torch
from _support.fsdp.wrapped import at_rest, cpu_mesh, held_bytes, shard_blocks
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from _support.whole_models import equal_on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from parallel3d import MixedPrecisionPolicy, parallelize
from parallel3d.fsdp import (
    DataParallelMeshDims,
    StateDictType,
    full_params,
    fully_shard,
    gather,
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
)
from parallel3d.fsdp.options import offload as offload_module
from parallel3d.testing import fake_world, local_world, record_collectives

FULL = StateDictType.FULL_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def test_hybrid_shards_with_tensor_parallelism() -> None:
    """Three axes that cut one dim: tp, then shard, then replicate."""
    torch.manual_seed(0)
    plain = Lm(dim=16, hidden=24, layers=1, vocab=24).double()
    with local_world(8) as world:
        mesh = cpu_mesh(2, 2, 2)
        model = parallelize(
            copy.deepcopy(plain), mesh, LM_PLAN, shard_optimizer_over_replicate=True
        )
        weight = model.head.weight
        assert sum(p.is_shard() or hasattr(p, "split_factor") for p in weight.placements) == 3
        with full_params(model):
            equal_on_ranks(world, named(model), named(plain))
            model.norm.weight.data.fill_(2)
        for over in mesh.mesh_dim_names:
            joined = gather(weight, over)
            for tensor in world.per_rank(joined.full_tensor()):
                assert torch.equal(tensor, plain.head.weight.detach())
        load_model_state_dict(model, plain.state_dict(), type=FULL)
        equal_on_ranks(world, model_state_dict(model, type=FULL), plain.state_dict())


def test_tied_across_units() -> None:
    """One Parameter under two names, replaced under one of them; one state of the optimizer."""
    plain = Lm(layers=1, tied=True)
    with local_world(2) as world:
        mesh = cpu_mesh()
        model = copy.deepcopy(plain)
        for unit in (model.embed, model.head, model):
            fully_shard(unit, mesh=mesh)
        with full_params(model):
            equal_on_ranks(world, named(model), named(plain))
            assert model.embed.weight is model.head.weight
            model.head.weight = nn.Parameter(model.head.weight.detach() * 2)
        assert model.embed.weight is model.head.weight
        state = model_state_dict(model, type=FULL)
        assert list(state) == list(plain.state_dict())
        for name in ("embed.weight", "head.weight"):
            assert torch.equal(world.per_rank(state[name])[1], 2 * plain.embed.weight.detach())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        lm_loss(model, world.map(lambda r: tokens(0))).backward()
        optimizer.step()
        saved = optim_state_dict(model, optimizer, type=FULL)
        assert set(saved["state"]) == set(dict(plain.named_parameters()))
        load_optim_state_dict(model, optimizer, saved, type=FULL)


def test_a_list_of_modules_cut_along_another_dim() -> None:
    plain = Lm(layers=1)
    with local_world(4) as world:
        mesh = cpu_mesh(2, 2)
        model = copy.deepcopy(plain)
        tail = [model.norm, model.head]
        fully_shard(tail, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        fully_shard(model, mesh=mesh)
        with record_collectives(mesh) as recorder:
            state = model_state_dict(model, type=FULL)
        equal_on_ranks(world, state, plain.state_dict())
        # What each module has of their unit is gathered when it is its turn, and nothing twice.
        assert sum(call.bytes for call in recorder.calls) <= 1.1 * sum(
            p.nbytes for p in plain.parameters()
        )
        with full_params(model.norm, recurse=False):
            assert not isinstance(model.head.weight, DTensor)
            assert isinstance(model.embed.weight, DTensor)


def test_dp_mesh_dims() -> None:
    plain = nn.Linear(5, 7)
    with local_world(4) as world:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = copy.deepcopy(plain)
        for name, own in (("weight", Shard(0)), ("bias", Replicate())):
            value = distribute_tensor(getattr(model, name).detach(), mesh, [Replicate(), own])
            setattr(model, name, nn.Parameter(value))
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        with full_params(model):
            equal_on_ranks(world, named(model), named(plain))
            model.bias.data.add_(1)
        load_model_state_dict(model, plain.state_dict(), type=FULL)
        equal_on_ranks(world, model_state_dict(model, type=FULL), plain.state_dict())


def test_torchs_styles_and_an_ignored_part() -> None:
    """An ignored DTensor stays as it is in full_params; a full state dict has it whole, and loads it."""
    plain = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 4))
    with local_world(4) as world:
        mesh = cpu_mesh(1, 2, 2)
        model = copy.deepcopy(plain)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh, ignored_params={model[0].bias})
        with full_params(model):
            assert isinstance(model[0].bias, DTensor) and not isinstance(model[0].weight, DTensor)
        local = {k: v.clone() for k, v in model_state_dict(model, type=LOCAL).items()}
        load_model_state_dict(model, {k: v * 2 for k, v in plain.state_dict().items()}, type=FULL)
        found = model_state_dict(model, type=FULL)
        equal_on_ranks(world, found, {k: v * 2 for k, v in plain.state_dict().items()})
        load_model_state_dict(model, local, type=LOCAL)
        equal_on_ranks(world, model_state_dict(model, type=FULL), plain.state_dict())


def test_torchs_checkpoint_wrapper() -> None:
    """Its hooks rename what is saved and loaded; the optimizer's names follow."""
    plain = Lm(layers=2)
    with local_world(2) as world:
        model = copy.deepcopy(plain)
        model.layers[0] = checkpoint_wrapper(model.layers[0])
        model.layers[1].up = checkpoint_wrapper(model.layers[1].up)
        shard_blocks(model, cpu_mesh())
        load_model_state_dict(model, {k: v * 2 for k, v in plain.state_dict().items()}, type=FULL)
        load_model_state_dict(model, plain.state_dict(), type=FULL, broadcast_from_rank0=True)
        equal_on_ranks(world, model_state_dict(model, type=FULL), plain.state_dict())
        optimizer = torch.optim.AdamW(model.parameters())
        lm_loss(model, world.map(lambda r: tokens(0))).backward()
        optimizer.step()
        saved = optim_state_dict(model, optimizer, type=FULL)
        assert list(saved["state"]) == [name for name, _ in plain.named_parameters()]
        load_optim_state_dict(model, optimizer, saved, type=FULL)


def test_low_precision() -> None:
    """Values in the parameters' own dtype, gradients in that which they have."""
    plain = Lm(layers=1)
    low = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, keep_low_precision_grads=True
    )
    with local_world(2) as world:
        model = shard_blocks(copy.deepcopy(plain), cpu_mesh(), mp_policy=low)
        lm_loss(model, world.map(lambda r: tokens(0))).backward()
        with full_params(model, with_grads=True):
            equal_on_ranks(world, named(model), named(plain))
            assert model.head.weight.grad.dtype is torch.bfloat16
            first, second = world.per_rank(model.head.weight.grad)
            assert torch.equal(first, second)
        assert model.head.weight.grad.dtype is torch.bfloat16


def test_cpu_offload(monkeypatch) -> None:
    """Gathered where the model computes, written back to shards and gradients in the CPU's memory."""
    elsewhere, storage_device = (
        torch.device("cpu", 0),
        torch.device("cpu"),
    )  # two names for two devices
    monkeypatch.setattr(
        offload_module.CpuOffload,
        "places",
        lambda self, given, mesh: (elsewhere, storage_device, False),
    )
    torch.manual_seed(0)
    plain = Lm(layers=1).double()
    with local_world(4) as world:
        model = shard_blocks(
            copy.deepcopy(plain), cpu_mesh(2, 2), offload_policy=CPUOffloadPolicy()
        )
        lm_loss(model, world.map(lambda r: tokens(0))).backward()
        with full_params(model, with_grads=True):
            equal_on_ranks(world, named(model), named(plain))
            model.head.weight.data.mul_(2)
            model.head.weight.grad.zero_()
        assert all(not tensor.any() for tensor in world.per_rank(model.head.weight.grad))
        with world.paused(), torch.no_grad():
            plain.head.weight.mul_(2)
        equal_on_ranks(world, model_state_dict(model, type=FULL), plain.state_dict())
        load_model_state_dict(model, plain.state_dict(), type=FULL)
        assert at_rest(model)
        got = lm_loss(model, world.map(lambda r: tokens(0)))
        with world.paused():
            want = lm_loss(plain, tokens(0))
        for value in world.per_rank(got.detach()):
            torch.testing.assert_close(value, want.detach())


def test_memory_of_their_own_and_inference_mode() -> None:
    """torch.save of one tensor saves it alone; what inference mode makes can be trained."""
    with fake_world(0, 4):
        model = parallelize(Lm(layers=1), cpu_mesh(1, 2, 2), LM_PLAN)
        with torch.inference_mode():
            state = model_state_dict(model, type=FULL)
            with full_params(model):
                model.norm.weight.add_(1)
        for name, value in state.items():
            assert held_bytes(value) == value.nbytes, name
        lm_loss(model, tokens(0)).backward()
        assert at_rest(model)
