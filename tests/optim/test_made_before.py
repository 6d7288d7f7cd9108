"""An optimizer that was made before the model was sharded is an error at its first step."""

import copy
import gc
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import nn, optim

from parallel3d import MeshLayout, Parallel3dError, StateError, build_mesh, parallelize
from parallel3d._util import replaced_params
from parallel3d.fsdp import fully_shard
from parallel3d.optim import local
from parallel3d.testing import fake_world


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_world(0, 2):
        yield


def mesh_of(shard: int, tp: int = 1):
    return build_mesh(MeshLayout(1, shard, tp), device_type="cpu")


def sharded(plan=None, make=optim.AdamW) -> tuple[optim.Optimizer, nn.Module]:
    """An optimizer that is too early, and its model."""
    model = Lm(vocab=20)
    optimizer = make([p for p in model.parameters() if p.ndim == 2])
    parallelize(model, mesh_of(1 if plan else 2, 2 if plan else 1), plan)
    return optimizer, model


@pytest.mark.parametrize("plan", [None, LM_PLAN], ids=["fsdp", "tp"])
@pytest.mark.parametrize(
    "make",
    [optim.AdamW, partial(local, optim.AdamW), partial(local, optim.Muon)],
    ids=["", "local", "matrix"],
)
def test_it_is_an_error(make, plan) -> None:
    optimizer, model = sharded(plan, make)
    lm_loss(model, tokens(0)).backward()
    for _ in range(2):
        with pytest.raises(
            StateError, match=r"(AdamW|Muon) was made before.*\(20, \d+\).*after parallelize"
        ):
            optimizer.step()
    right = optim.AdamW(model.parameters())
    right.step()
    right.add_param_group({"params": optimizer.param_groups[0]["params"][:1]})
    with pytest.raises(StateError, match="made before"):
        right.step()


def put_by_attribute(module: nn.Module, given: nn.Parameter) -> None:
    module.weight = given


def put_by_register(module: nn.Module, given: nn.Parameter) -> None:
    module.register_parameter("weight", given)


def put_into_dict(module: nn.Module, given: nn.Parameter) -> None:
    module._parameters["weight"] = given


@pytest.mark.parametrize("runs_before", [False, True])
@pytest.mark.parametrize("put", [put_by_attribute, put_by_register, put_into_dict])
def test_of_a_parameter_assigned_to_the_sharded_model(put, runs_before: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh_of(2))
    if runs_before:
        model(torch.ones(2, 4)).sum().backward()
    given = nn.Parameter(torch.randn(4, 4))
    put(model[0], given)
    optimizer = optim.SGD([given], lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(StateError, match=r"SGD has a Parameter.*weight of unit .*kept its own"):
        optimizer.step()
    right = optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.to_local().clone()
    right.step()
    assert not torch.equal(model[0].weight.to_local(), before)
    # What another model uses is trained by it.
    given.grad = torch.ones(4, 4)
    optimizer.step()


def test_by_hand_and_with_a_closure() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh_of(2))
    optimizer = optim.SGD(model.parameters(), lr=0.1)  # too early for the second
    fully_shard(model, mesh=mesh_of(2))

    def closure():
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    with pytest.raises(StateError, match=r"parameter 1.weight of unit .* of shape \(4, 4\)"):
        optimizer.step(closure)


def test_gradients_from_before() -> None:
    model = nn.Linear(4, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()  # of the plain model: right
    fully_shard(model, mesh=mesh_of(2))
    with pytest.raises(StateError, match="made before"):
        optimizer.step()


def test_others_are_left_alone() -> None:
    early, model = sharded()
    other = nn.Linear(4, 4)
    theirs = optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 4)).sum().backward()
    theirs.step()
    lm_loss(model, tokens(0)).backward()
    optim.SGD(model.parameters(), lr=0.1).step()
    # A plain model that has the same Parameters still computes with them.
    shared = nn.Linear(4, 4)
    plain = nn.Sequential(shared, nn.ReLU())
    both = nn.Sequential(nn.Linear(4, 4))
    both[0].weight = shared.weight
    fully_shard(both, mesh=mesh_of(2))
    keeps = optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        plain(torch.ones(1, 4)).sum().backward()
        keeps.step()
        keeps.zero_grad()
    del early


def test_a_model_that_is_gone_or_was_restored() -> None:
    model = nn.Linear(4, 4)
    weights = list(model.parameters())
    optimizer = optim.SGD(weights, lr=0.1)
    twin = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    kept = optim.SGD(twin.parameters(), lr=0.1)
    twin[1].weight.register_hook(lambda grad: grad)
    with pytest.raises(Parallel3dError, match="hook"):
        fully_shard(twin, mesh=mesh_of(2))
    kept.step()
    fully_shard(model, mesh=mesh_of(2))
    del model
    gc.collect()
    optimizer.step()


def test_nothing_is_left() -> None:
    """In the ordinary case no old Parameter is alive, and a step looks no further."""
    gc.collect()
    before = len(replaced_params._alive)
    early, model = sharded()
    assert len(replaced_params._alive) > before
    copies = copy.deepcopy(early.param_groups[0]["params"])
    del early
    gc.collect()
    assert len(replaced_params._alive) == before
    assert all(getattr(p, "_parallel3d_replaced", None) is None for p in copies)
    assert all(getattr(p, "_parallel3d_replaced", None) is None for p in model.parameters())


@pytest.mark.parametrize("alive", [False, True], ids=["none", "alive"])
def test_a_compiled_step(alive) -> None:
    early, _ = sharded()
    if not alive:
        del early
        gc.collect()
    plain = nn.Linear(4, 4)
    plain(torch.ones(1, 4)).sum().backward()
    optimizer = optim.SGD(plain.parameters(), lr=0.1)
    before = plain.weight.detach().clone()
    torch.compile(optimizer.step, backend="eager")()
    assert not torch.equal(plain.weight, before)
