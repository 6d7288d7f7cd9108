"""What programs around torch's fully_shard do to models: meta devices, state dicts, conversions, TP."""

import copy

import pytest
import torch
from _support.engine.twins import Twins, device_mesh, full, same, shard_layers
from _support.models import Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

FULL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def with_weights_of(plain: nn.Module, fill) -> Twins:
    """Twins whose sharded one starts on the meta device and is filled by ``fill(sharded, plain)``."""
    twins = Twins(plain, lambda m: None)
    with torch.device("meta"):
        sharded = Lm().double()
    fill(sharded, twins.plain)
    twins.sharded = sharded
    twins.optimizers = [
        torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (twins.plain, twins.sharded)
    ]
    return twins


def from_meta(engine, how: str) -> None:
    """Sharded on the meta device; then memory and weights by one of the three usual ways."""
    mesh = device_mesh()

    def by_parameter(sharded: nn.Module, plain: nn.Module) -> None:
        shard_layers(engine, sharded, mesh)
        sharded.to_empty(device="cpu")
        with torch.no_grad():
            for p, value in zip(sharded.parameters(), plain.parameters(), strict=True):
                p.copy_(distribute_tensor(value, p.device_mesh, p.placements))

    def by_assignment(sharded: nn.Module, plain: nn.Module) -> None:
        shard_layers(engine, sharded, mesh)
        state = {
            name: distribute_tensor(plain.get_parameter(name), p.device_mesh, p.placements)
            for name, p in sharded.named_parameters()
        }
        sharded.load_state_dict(state, assign=True)

    def by_broadcast(sharded: nn.Module, plain: nn.Module) -> None:
        shard_layers(engine, sharded, mesh)
        sharded.to_empty(device="cpu")
        state = plain.state_dict() if dist.get_rank() == 0 else {}
        set_model_state_dict(sharded, copy.deepcopy(state), options=FULL)

    fills = {"copy": by_parameter, "assign": by_assignment, "broadcast": by_broadcast}
    with_weights_of(Lm(), fills[how]).train()


@pytest.mark.parity("behaviour: meta device initialisation")
@pytest.mark.parametrize("how", ["copy", "assign", "broadcast"])
def test_from_the_meta_device(on_ranks, how) -> None:
    on_ranks(from_meta, how)


def state_dicts(engine) -> None:
    """Sharded and whole, of model and optimizer; loaded into another model, which trains on alike."""
    first = Twins(
        Lm(), lambda m: shard_layers(engine, m, device_mesh()), optimizer=torch.optim.AdamW
    )
    first.train(range(2))
    state = first.sharded.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    whole = get_model_state_dict(first.sharded, options=StateDictOptions(full_state_dict=True))
    for name, want in first.plain.state_dict().items():
        same(whole[name], want, name, 1e-10)
    optimizer = first.optimizers[1]
    moments = get_optimizer_state_dict(
        first.sharded, optimizer, options=StateDictOptions(full_state_dict=True)
    )

    second = Twins(
        first.plain,
        lambda m: shard_layers(engine, m, device_mesh(1, 2)),
        optimizer=torch.optim.AdamW,
    )
    with torch.no_grad():
        for p in second.sharded.parameters():
            p.zero_()
    set_model_state_dict(second.sharded, whole, options=FULL)
    set_optimizer_state_dict(second.sharded, second.optimizers[1], moments, options=FULL)
    second.optimizers[0] = first.optimizers[0]
    second.train(range(2, 4))

    third = Twins(first.plain, lambda m: shard_layers(engine, m, device_mesh()))
    third.sharded.load_state_dict(state)
    for name, want in state.items():
        same(full(third.sharded.state_dict()[name]), full(want), name, 0.0)


@pytest.mark.parity("behaviour: state dicts")
def test_state_dicts(on_ranks) -> None:
    on_ranks(state_dicts)


def conversions(engine, dtypes: list[torch.dtype]) -> None:
    mesh = device_mesh()
    plain = Lm()
    model = shard_layers(engine, copy.deepcopy(plain), mesh)
    for dtype in dtypes:
        for each in (plain, model):
            each.to(dtype)
        for each in (plain, model):
            each.zero_grad()
            lm_loss(each, tokens(0)).backward()
        for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert got.dtype == got.grad.dtype == dtype
            same(full(got), want, name, 1e-7)
            same(full(got.grad), want.grad, name, 1e-12 if dtype == torch.float64 else 1e-5)
    assert model.state_dict()["head.weight"].dtype == dtypes[-1]


@pytest.mark.parity("behaviour: conversions of the whole model")
@pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param([torch.float64], id="before the first forward"),
        pytest.param(
            [torch.float64, torch.float32, torch.float64],
            id="between steps",
            marks=pytest.mark.torch_fails("found: conversion", match="Expected out tensor to have"),
        ),
    ],
)
def test_conversions(on_ranks, dtypes) -> None:
    on_ranks(conversions, dtypes)


def tensor_parallel(engine, shape, options) -> None:
    """torch's parallelize_module under fully_shard, as torchtitan has it: on slices of one mesh."""
    names = ("replicate", "shard", "tp")[-len(shape) :]
    mesh = device_mesh(*shape, names=names)
    data = mesh[names[:-1]] if len(shape) == 3 else mesh["shard"]
    plain = Lm().double()
    model = copy.deepcopy(plain)
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
    shard_layers(engine, model, data, **options)
    optimizers = [
        torch.optim.AdamW(list(m.parameters()), lr=1e-2, foreach=False) for m in (plain, model)
    ]
    ranks, rank = dist.get_world_size() // 2, dist.get_rank() // 2
    for step in range(3):
        lm_loss(model, tokens(step * ranks + rank)).backward()
        for r in range(ranks):
            (lm_loss(plain, tokens(step * ranks + r)) / ranks).backward()
        for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
            same(full(got.grad), want.grad, f"{name}.grad")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        same(full(got), want, name, 1e-10)


@pytest.mark.parity("behaviour: torch's parallelize_module under it")
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)], ids=str)
def test_tensor_parallel(on_ranks, shape) -> None:
    on_ranks(tensor_parallel, shape, {}, size=4)


@pytest.mark.slow
@pytest.mark.parity("argument: reshard_after_forward=int")
@pytest.mark.torch_fails("refused", match="not finished after")
def test_reshard_to_a_smaller_world_with_tensor_parallelism(on_ranks) -> None:
    on_ranks(tensor_parallel, (4, 2), {"reshard_after_forward": 2}, size=8)
