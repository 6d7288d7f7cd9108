"""Optimizer state dicts under names: the plain optimizer's, on any mesh and into any order of groups."""

import copy

import pytest
import torch
from _support.fsdp.lifetimes import PeakBytes, deep_model
from _support.fsdp.wrapped import cpu_mesh, shard_blocks
from _support.models import Lm, lm_loss, tokens
from _support.whole_models import plain_model, sharded
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d import Parallel3dError
from parallel3d.fsdp import (
    FullOptimStateDictConfig,
    StateDictType,
    full_params,
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
    state_dict_type,
)
from parallel3d.testing import fake_world, local_world, record_collectives

FULL = StateDictType.FULL_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT
SHARDED = StateDictType.SHARDED_STATE_DICT


def adamw(model: nn.Module, *, turned: bool = False) -> torch.optim.Optimizer:
    """Two groups with their own rates; ``turned``: in another order, with other rates."""
    params = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
    if turned:
        groups = [{"params": vectors[::-1], "lr": 1.0}, {"params": matrices[::-1], "lr": 1.0}]
    else:
        groups = [{"params": matrices, "lr": 0.01}, {"params": vectors, "lr": 0.02}]
    return torch.optim.AdamW(groups, amsgrad=True)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    lm_loss(model, tokens(index)).backward()
    optimizer.step()
    optimizer.zero_grad()


def step(world, model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    with world.paused():
        ids = tokens(index)
    lm_loss(model, world.map(lambda r: ids)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2), (1, 3, 2)], ids=str)
def test_round_trips(shape) -> None:
    plain = plain_model()
    theirs = adamw(plain)
    plain_step(plain, theirs, 0)
    names = {id(p): name for name, p in plain.named_parameters()}
    expected = {names[id(p)]: state for p, state in theirs.state.items()}
    with local_world(shape[0] * shape[1] * shape[2]) as world:
        model = sharded(plain_model(), shape)
        optimizer = adamw(model)
        step(world, model, optimizer, 0)
        full = optim_state_dict(model, optimizer, type=FULL)
        assert set(full["state"]) == set(expected)
        for name, state in full["state"].items():
            assert list(state) == list(expected[name])
            for key, value in state.items():
                for tensor in world.per_rank(value):
                    torch.testing.assert_close(tensor, expected[name][key], rtol=1e-9, atol=1e-12)
        for group, want in zip(full["param_groups"], theirs.param_groups, strict=True):
            assert group["params"] == [names[id(p)] for p in want["params"]]
            assert group["lr"] == want["lr"] and group["amsgrad"]
        local = optim_state_dict(model, optimizer, type=LOCAL)
        assert not any(isinstance(v, DTensor) for s in local["state"].values() for v in s.values())
        shards = optim_state_dict(model, optimizer, type=SHARDED)
        # The plain optimizer's own state, the three forms, and a broadcast, into another order.
        by_name = {"state": expected, "param_groups": full["param_groups"]}
        for kind, saved in ((FULL, by_name), (FULL, full), (LOCAL, local), (SHARDED, shards)):
            new = adamw(model, turned=True)
            broadcast = saved is full
            load_optim_state_dict(
                model, new, saved, type=kind, broadcast_from_rank0=broadcast and kind is FULL
            )
            assert [group["lr"] for group in new.param_groups] == [0.02, 0.01]
            for p, state in optimizer.state.items():
                assert list(new.state[p]) == list(state)
                for key, value in state.items():
                    got = new.state[p][key]
                    assert isinstance(got, DTensor) == isinstance(value, DTensor)
                    if isinstance(value, DTensor):
                        assert got.placements == value.placements
                    for a, b in zip(world.per_rank(got), world.per_rank(value), strict=True):
                        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        # The next step is the plain one's.
        step(world, model, new, 1)
        with world.paused():
            plain_step(plain, theirs, 1)
        state = model_state_dict(model, type=FULL)
        for name, want in plain.state_dict().items():
            for tensor in world.per_rank(state[name]):
                torch.testing.assert_close(tensor, want, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_a_whole_checkpoint_on_another_mesh() -> None:
    """Saved on shard 2 x tp 2 and continued under HFSDP, whose shards are cut over replicate too."""
    build = lambda: Lm(dim=16, hidden=24, layers=1, vocab=20).double()  # noqa: E731
    torch.manual_seed(0)
    plain = build()
    start = copy.deepcopy(plain)
    theirs = adamw(plain)
    plain_step(plain, theirs, 0)
    with local_world(4) as world:
        model = sharded(start, (1, 2, 2))
        optimizer = adamw(model)
        step(world, model, optimizer, 0)
        weights = model_state_dict(model, type=FULL)
        moments = optim_state_dict(model, optimizer, type=FULL)
        model = shard_blocks(build(), cpu_mesh(2, 2), shard_optimizer_over_replicate=True)
        optimizer = adamw(model)
        load_model_state_dict(model, weights, type=FULL)
        load_optim_state_dict(model, optimizer, moments, type=FULL)
        step(world, model, optimizer, 1)
        with world.paused():
            plain_step(plain, theirs, 1)
        with full_params(model, writeback=False):
            for name, p in model.named_parameters():
                for tensor in world.per_rank(p.detach()):
                    want = plain.get_parameter(name).detach()
                    torch.testing.assert_close(tensor, want, rtol=1e-8, atol=1e-10)


def test_one_bucket_and_kind_at_a_time() -> None:
    """One gather for each bucket and each of exp_avg and exp_avg_sq; ranks that keep nothing hold one."""
    with fake_world(3, 4):
        mesh = cpu_mesh(1, 4)
        model = deep_model(mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 32)).sum().backward()
        optimizer.step()
        with PeakBytes() as memory, record_collectives(mesh) as recorder:
            assert optim_state_dict(model, optimizer, type=FULL, rank0_only=True) == {}
        assert len(recorder.calls) == 16 and memory.peak <= 2.5 * model[0].weight.nbytes
        config = FullOptimStateDictConfig(rank0_only=True)
        with state_dict_type(model, FULL, optim_config=config):
            assert optim_state_dict(model, optimizer) == {}


def test_refusals() -> None:
    with fake_world(0, 2):
        model = shard_blocks(Lm(layers=1), cpu_mesh())
        optimizer = adamw(model)
        stranger = torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=1.0)
        with pytest.raises(Parallel3dError, match=r"shape \(3, 2\) that the FSDPLm doesn't have"):
            optim_state_dict(model, stranger)
        with pytest.raises(Parallel3dError, match="it must be an optimizer"):
            optim_state_dict(model, model)
        lm_loss(model, tokens(0)).backward()
        optimizer.step()
        saved = optim_state_dict(model, optimizer, type=FULL)
        name = "head.weight"

        def changed(**moments: torch.Tensor) -> dict:
            state = {**saved["state"], name: {**saved["state"][name], **moments}}
            return {**saved, "state": state}

        strange = {**saved, "state": {**saved["state"], "tail.weight": {}}}
        fewer = {**saved, "param_groups": saved["param_groups"][:1]}
        before = copy.copy(optimizer.state[model.head.weight])
        for given, options, match in (
            ({}, {"type": FULL}, "it must have 'state'"),
            (strange, {"type": FULL}, "has state of tail.weight"),
            (fewer, {"type": FULL}, "has no group with .* and 3 more"),
            (
                changed(exp_avg=torch.ones(3, 12)),
                {"type": FULL},
                "exp_avg of head.weight has shape",
            ),
            (saved, {"type": LOCAL}, "exp_avg of .* in a LOCAL_STATE_DICT"),
            (saved, {"type": SHARDED}, "exp_avg of .* in a SHARDED_STATE_DICT"),
            (saved, {"broadcast_from_rank0": True}, "FULL_STATE_DICT"),
        ):
            with pytest.raises(Parallel3dError, match=match):
                load_optim_state_dict(model, optimizer, given, **options)
        after = optimizer.state[model.head.weight]
        assert all(after[key] is value for key, value in before.items())
        with pytest.raises(Parallel3dError, match="rank0_only=True with LOCAL_STATE_DICT"):
            optim_state_dict(model, optimizer, type=LOCAL, rank0_only=True)
