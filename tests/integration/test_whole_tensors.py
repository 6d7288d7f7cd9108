"""full_params, state dicts in all forms, chunk and gather, on four gloo processes (shard 2 x tp 2)."""

import copy
from pathlib import Path

import pytest
import torch
from _support.extended import Bf16, extend, mlp
from _support.models import lm_loss, tokens
from _support.whole_models import plain_model, sharded
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from parallel3d import AgreementError, MeshLayout, Parallel3dError, build_mesh
from parallel3d.fsdp import (
    StateDictType,
    chunk,
    full_params,
    fully_shard,
    gather,
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
)

FULL = StateDictType.FULL_STATE_DICT
SHAPE = (1, 2, 2)


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """The same names, and plain tensors of the same values."""
    return list(found) == list(expected) and all(
        not isinstance(v, DTensor) and torch.equal(v.detach(), expected[k].detach())
        for k, v in found.items()
    )


def read_and_edit() -> None:
    plain, model = plain_model(), sharded(plain_model(), SHAPE)
    lm_loss(plain, tokens(0)).backward()
    lm_loss(model, tokens(0)).backward()
    with full_params(model, with_grads=True):
        shown = dict(model.named_parameters())
        assert equal(shown, dict(plain.named_parameters()))
        assert all(isinstance(p, nn.Parameter) for p in shown.values())
        for name, p in plain.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(shown[name].grad, p.grad, rtol=1e-9, atol=1e-12)
        # Ranks 0 and 1 hold the first half, 2 and 3 the second: the first of each counts.
        model.norm.weight.data.fill_(dist.get_rank())
        model.head.weight.grad.mul_(3)
    with full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        first = dist.get_rank() == 0
        assert all(isinstance(p, DTensor) != first for p in model.parameters())
    with full_params(model, writeback=False, with_grads=True):
        assert model.norm.weight.tolist() == [0.0] * 6 + [2.0] * 6
        torch.testing.assert_close(model.head.weight.grad, 3 * plain.head.weight.grad)
    # Tensor subclasses with a gather of their own: whole values, and edits by their own copy_.
    torch.manual_seed(0)
    small = mlp(7)
    mesh = build_mesh(MeshLayout(1, 4, 1), device_type="cpu")
    extended = fully_shard(extend(copy.deepcopy(small), Bf16), mesh=mesh)
    with full_params(extended):
        assert equal(dict(extended.named_parameters()), dict(small.named_parameters()))
        extended[0].weight.data.mul_(2)
    with full_params(extended, writeback=False):
        assert torch.equal(extended[0].weight.detach(), 2 * small[0].weight.detach())
    state = model_state_dict(extended, type=FULL)
    load_model_state_dict(extended, {k: v * 2 for k, v in state.items()}, type=FULL)
    state = model_state_dict(extended, type=FULL)
    assert torch.equal(state["0.weight"], 4 * small[0].weight.detach())


def test_full_params(gloo_pool) -> None:
    gloo_pool.run(read_and_edit, world_size=4)


def stepped(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded(plain_model(seed), SHAPE)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    lm_loss(model, tokens(seed)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save_and_load(path: str) -> None:
    plain = plain_model()
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    lm_loss(plain, tokens(0)).backward()
    theirs.step()
    model, optimizer = stepped(0)
    other, others = stepped(1)
    first = dist.get_rank() == 0

    whole = model_state_dict(model, type=FULL, rank0_only=True)
    moments = optim_state_dict(model, optimizer, type=FULL, rank0_only=True)
    assert bool(whole) == bool(moments) == first
    if first:
        for name, want in plain.state_dict().items():
            torch.testing.assert_close(whole[name], want, rtol=1e-8, atol=1e-10)
        for name, p in plain.named_parameters():
            for key, want in theirs.state.get(p, {}).items():
                got = moments["state"][name][key]
                torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-12)

    def check() -> None:
        again = model_state_dict(other, type=FULL, rank0_only=True)
        state = optim_state_dict(other, others, type=FULL, rank0_only=True)
        if first:
            assert equal(again, whole)
            for name, each in moments["state"].items():
                assert equal(state["state"][name], each)

    def scramble() -> None:
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
            for state in others.state.values():
                for value in state.values():
                    value.zero_()

    # From the first rank.
    load_model_state_dict(other, whole, type=FULL, broadcast_from_rank0=True)
    load_optim_state_dict(other, others, moments, type=FULL, broadcast_from_rank0=True)
    check()
    # This rank's parts.
    kind = StateDictType.LOCAL_STATE_DICT
    parts = model_state_dict(model, type=kind), optim_state_dict(model, optimizer, type=kind)
    scramble()
    load_model_state_dict(other, parts[0], type=kind)
    load_optim_state_dict(other, others, parts[1], type=kind)
    check()
    # Shards, by torch.distributed.checkpoint.
    kind = StateDictType.SHARDED_STATE_DICT
    saved = {
        "model": model_state_dict(model, type=kind),
        "optim": optim_state_dict(model, optimizer, type=kind, offload_to_cpu=False)["state"],
    }
    dcp.save(saved, checkpoint_id=path)
    scramble()
    groups = optim_state_dict(other, others, type=kind)["param_groups"]
    into = {
        "model": model_state_dict(other, type=kind),
        "optim": optim_state_dict(other, others, type=kind, offload_to_cpu=False)["state"],
    }
    dcp.load(into, checkpoint_id=path)
    load_model_state_dict(other, into["model"], type=kind)
    load_optim_state_dict(
        other, others, {"state": into["optim"], "param_groups": groups}, type=kind
    )
    check()
    # What no unit has, an ignored DTensor too, comes from the first rank as well.
    mesh = build_mesh(MeshLayout(*SHAPE), device_type="cpu")
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9))
    tensor_parallel = copy.deepcopy(small)
    parallelize_module(tensor_parallel, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(tensor_parallel, mesh=mesh, ignored_params={tensor_parallel[0].bias})
    values = {k: v + 1 for k, v in small.state_dict().items()}
    given = values if first else {}
    load_model_state_dict(tensor_parallel, given, type=FULL, broadcast_from_rank0=True)
    assert equal(model_state_dict(tensor_parallel, type=FULL), values)
    # Ranks that would wait for each other say so.
    if dist.get_rank() == 3:
        others.state.pop(other.head.weight)
    try:
        optim_state_dict(other, others, type=FULL)
    except AgreementError as error:
        assert "head.weight" in str(error)
    else:
        raise AssertionError("no error")


@pytest.mark.slow
def test_state_dicts(gloo_pool, tmp_path: Path) -> None:
    gloo_pool.run(save_and_load, str(tmp_path), world_size=4)


def sends_what_it_cannot() -> None:
    """The first rank has shards, or nothing but shapes; it alone sees that, and all must say so."""
    model = sharded(plain_model(), SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    lm_loss(model, tokens(0)).backward()
    optimizer.step()
    shards = model_state_dict(model, type=StateDictType.SHARDED_STATE_DICT)
    moments = optim_state_dict(model, optimizer, type=StateDictType.SHARDED_STATE_DICT)
    shapes = {name: torch.empty(p.shape, device="meta") for name, p in shards.items()}
    options = {"type": FULL, "broadcast_from_rank0": True}
    first = dist.get_rank() == 0
    for given, match in ((shards, "is a DTensor"), (shapes, "is on the meta device")):
        with pytest.raises(Parallel3dError, match=match):
            load_model_state_dict(model, given if first else {}, **options)
    with pytest.raises(Parallel3dError, match=r"exp_avg.* is a DTensor"):
        load_optim_state_dict(model, optimizer, moments if first else {}, **options)


def test_what_the_first_rank_cannot_send(gloo_pool) -> None:
    gloo_pool.run(sends_what_it_cannot, world_size=4, timeout=60)


def between_layouts() -> None:
    mesh = build_mesh(MeshLayout(*SHAPE), device_type="cpu")
    whole = torch.arange(20 * 12.0).view(20, 12)
    part = chunk(whole, mesh["tp"], [Shard(0)])
    model = sharded(plain_model(), SHAPE)
    layout = model.layers[0].up.weight.placements  # tp first, then shard
    cut = chunk(part, mesh, layout)
    want = chunk(whole, mesh, layout)
    assert torch.equal(cut.to_local(), want.to_local())
    joined = gather(cut)
    assert joined.placements == (Replicate(), Replicate(), Shard(0))
    assert torch.equal(joined.to_local(), part.to_local())
    assert torch.equal(gather(joined, over="tp").to_local(), whole)
    uneven = torch.arange(19 * 5.0).view(19, 5)
    cut = chunk(uneven, mesh, [Replicate(), Shard(0), Shard(0)])
    assert torch.equal(gather(gather(cut), over="tp").to_local(), uneven)
    assert torch.equal(cut.full_tensor(), uneven)


def test_chunk_and_gather(gloo_pool) -> None:
    gloo_pool.run(between_layouts, world_size=4)
