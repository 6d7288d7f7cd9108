"""Objects of ours given to torch's ``fully_shard``, and torch's functions given our models."""

import copy
from typing import Any

import pytest
import torch
from _support.models import Lm, lm_loss, tokens
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel3d import fsdp
from parallel3d.testing import fake_world


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
