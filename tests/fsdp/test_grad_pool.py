"""Gradients' tensors are used again, and nobody can tell."""

import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Lm, lm_loss, tokens
from torch import nn
from wrapped import shard_blocks

from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh
from parallel3d._compat import get_local_tensor
from parallel3d.fsdp.running.members import units_of
from parallel3d.optim import step_in_backward
from parallel3d.testing import fake_world

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # reduced in bfloat16, and cast


@pytest.fixture(params=[None, LOW], ids=["fp32", "bf16"])
def model(request) -> Any:
    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(shard=2), device_type="cpu")
        options = {} if request.param is None else {"mp_policy": request.param}
        yield shard_blocks(Lm(), mesh, **options)


def backward(model: nn.Module) -> None:
    lm_loss(model, tokens(0)).backward()


def pools(model: nn.Module) -> list:
    return [bucket.grads.pool for unit in units_of(model, True) for bucket in unit.group.buckets]


def bytes_of(model: nn.Module) -> int:
    held = [pool.flat for pool in pools(model) if pool.flat is not None]
    return sum(flat.untyped_storage().nbytes() for flat in held)


def ids(model: nn.Module) -> list[int]:
    return [id(param.grad) for param in model.parameters()]


def test_the_same_tensors_serve_each_step(model):
    backward(model)
    first = ids(model)
    storages = {get_local_tensor(p.grad).untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == len(pools(model))
    for _ in range(3):
        model.zero_grad()
        backward(model)
        assert ids(model) == first


def test_memory_is_free_when_the_next_forward_begins(model):
    seen = []
    model.layers[0].register_forward_pre_hook(lambda *_: seen.append(bytes_of(model)))
    backward(model)
    held = bytes_of(model)
    assert held > 0
    model.zero_grad()
    with torch.no_grad():
        lm_loss(model, tokens(0))
    assert seen[-1] == 0  # also that of units to come
    backward(model)
    assert bytes_of(model) == held


def test_of_a_unit_that_runs_alone(model):
    backward(model)
    model.zero_grad()
    layer = model.layers[0]
    with torch.no_grad():
        layer(torch.randn(1, 4, model.head.weight.shape[1]))
    pool = units_of(layer, False).__next__().group.buckets[0].grads.pool
    assert pool.flat.untyped_storage().nbytes() == 0


KEEP: dict[str, Callable[[torch.Tensor], Any]] = {
    "gradient": lambda grad: grad,
    "local": lambda grad: grad.to_local(),
    "detached": lambda grad: grad.detach(),
    "view": lambda grad: get_local_tensor(grad).view(-1),
    "array": lambda grad: get_local_tensor(grad).numpy(),
    "dlpack": lambda grad: torch.from_dlpack(get_local_tensor(grad)),
    "storage": lambda grad: get_local_tensor(grad).untyped_storage(),
}


@pytest.mark.parametrize("kind", KEEP)
def test_what_the_user_keeps_stays_as_it_is(model, kind):
    backward(model)
    backward_again = ids(model)
    for param in model.parameters():
        get_local_tensor(param.grad).fill_(7.0)
    kept = [KEEP[kind](param.grad) for param in model.parameters()]
    for _ in range(2):
        model.zero_grad()
        backward(model)
        for value in kept:
            held = torch.as_tensor(value.tolist()) if kind == "array" else value
            if kind == "storage":
                held = torch.empty(0).set_(value)
            local = held.to_local() if kind in ("gradient", "detached") else held
            assert (local == 7.0).all()
    assert not set(ids(model)) & set(backward_again)
    del kept, value, held, local
    model.zero_grad()
    backward(model)
    if kind != "array":  # memory that numpy has had can't be freed, but for good
        assert ids(model) == backward_again


def test_what_is_put_on_a_gradient_does_not_come_back(model):
    for change in (
        lambda grad: setattr(grad, "mine", 1),
        lambda grad: grad.requires_grad_(),
    ):
        backward(model)
        change(model.head.weight.grad)
        model.zero_grad()
        backward(model)
        assert not hasattr(model.head.weight.grad, "mine")
        assert not model.head.weight.grad.requires_grad


def test_weak_references_die_with_the_gradient_s_use(model):
    backward(model)
    seen = weakref.ref(model.head.weight.grad)
    model.zero_grad()
    backward(model)
    assert seen() is not model.head.weight.grad


def test_gradients_that_stay_are_added_to(model):
    """``zero_grad(set_to_none=False)``, accumulation, and a gradient of the user's own."""
    backward(model)
    model.zero_grad(set_to_none=False)
    same = ids(model)
    assert all((p.grad.to_local() == 0).all() for p in model.parameters())
    for param in model.parameters():
        get_local_tensor(param.grad).fill_(1e6)
    backward(model)
    assert ids(model) == same
    own = torch.ones_like(model.head.weight.grad).mul_(1e6)
    model.head.weight.grad = own
    backward(model)
    assert model.head.weight.grad is own
    assert all((p.grad.to_local() > 1e5).all() for p in model.parameters())


def test_copies_are_independent(model):
    backward(model)
    model.head.weight.grad.to_local().fill_(7.0)
    copied = model.head.weight.grad.clone()
    file = io.BytesIO()
    torch.save(model.head.weight.grad.to_local(), file)
    model.zero_grad()
    backward(model)
    assert (copied.to_local() == 7.0).all()
    file.seek(0)
    assert (torch.load(file) == 7.0).all()


def test_an_exception_leaves_new_tensors(model):
    backward(model)
    model.zero_grad()

    def explode(_: torch.Tensor) -> None:
        raise KeyError("the user's own")

    x = model.layers[0].register_full_backward_pre_hook(lambda *_: explode(None))
    with pytest.raises(KeyError):
        backward(model)
    x.remove()
    model.reset_iter_state()
    model.zero_grad()
    backward(model)
    assert all(p.grad is not None for p in model.parameters())
    assert not any(pool.lent for pool in pools(model))


def test_an_update_in_backward_frees_them_at_once(model):
    step_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1))
    backward(model)
    assert all(p.grad is None for p in model.parameters())
    assert bytes_of(model) == 0
