"""Full checkpoints go from FSDP1 to us and back.

But for FSDP1's optimizer state, which torch 2.13 gathers wrongly on gloo (its own shards are right).
"""

import copy
import warnings

import torch
from _support.models import LM_PLAN, Block, Lm, lm_loss, tokens
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from parallel3d import MeshLayout, build_mesh, fsdp, parallelize
from parallel3d.fsdp import StateDictType

FULL = StateDictType.FULL_STATE_DICT


def step(model: nn.Module, optimizer: torch.optim.Optimizer, sample: int) -> None:
    lm_loss(model, tokens(sample)).backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def ours(model: nn.Module) -> nn.Module:
    return parallelize(model, build_mesh(MeshLayout(1, 2, 2), device_type="cpu"), tp_plan=LM_PLAN)


def fsdp1(model: nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def there_and_back() -> None:
    """A step of ours on (1, 2, 2), the next of FSDP1 on 4 ranks; beside the plain model."""
    warnings.simplefilter("ignore", FutureWarning)  # that FSDP1's state_dict_type is deprecated
    plain = Lm().double()
    first, second = ours(copy.deepcopy(plain)), fsdp1(copy.deepcopy(plain))
    optimizer = adamw(first)
    step(first, optimizer, 0)
    weights = fsdp.model_state_dict(first, type=FULL)
    moments = fsdp.optim_state_dict(first, optimizer, type=FULL)

    optimizer = adamw(second)
    with FullyShardedDataParallel.state_dict_type(second, FULL):
        second.load_state_dict(weights)
        state = FullyShardedDataParallel.optim_state_dict_to_load(second, optimizer, moments)
        optimizer.load_state_dict(state)
        step(second, optimizer, 1)
        weights = second.state_dict()

    optimizer = adamw(plain)
    for sample in range(2):
        step(plain, optimizer, sample)
    assert list(weights) == list(plain.state_dict())
    fsdp.load_model_state_dict(first, weights, type=FULL)
    for got in (weights, fsdp.model_state_dict(first, type=FULL)):
        for name, want in plain.state_dict().items():
            torch.testing.assert_close(got[name], want, rtol=0, atol=1e-12, msg=name)


def test_there_and_back(gloo_pool) -> None:
    gloo_pool.run(there_and_back, world_size=4)
