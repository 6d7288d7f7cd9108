"""Gradients are the user's: a backward never writes what an earlier one has brought, and keeps none."""

import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support.fsdp.wrapped import shard_blocks
from _support.models import Lm, lm_loss, tokens
from torch import nn

from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.optim import step_in_backward
from parallel3d.testing import fake_world

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # reduced in bfloat16, and cast
KINDS: dict[str, tuple[MeshLayout, dict[str, Any]]] = {
    "fp32": (MeshLayout(shard=2), {}),
    "bf16": (MeshLayout(shard=2), {"mp_policy": LOW}),
    "replicated": (MeshLayout(replicate=2), {}),
}


@pytest.fixture(params=KINDS)
def model(request) -> Any:
    layout, options = KINDS[request.param]
    with fake_world(0, 2):
        mesh = build_mesh(layout, device_type="cpu")
        yield shard_blocks(Lm(), mesh, **options)


def backward(model: nn.Module) -> None:
    lm_loss(model, tokens(0)).backward()


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


def test_nothing_holds_gradients_that_the_user_has_let_go(model):
    for _ in range(2):
        backward(model)
        seen = [weakref.ref(param.grad) for param in model.parameters()]
        memory = [
            weakref.ref(get_local_tensor(p.grad).untyped_storage()) for p in model.parameters()
        ]
        assert all(ref() is not None for ref in seen + memory)
        model.zero_grad()
        assert not any(ref() is not None for ref in seen + memory)


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


def test_gradients_that_stay_are_added_to(model):
    """``zero_grad(set_to_none=False)``, accumulation, and a gradient of the user's own."""
    backward(model)
    first = [param.grad for param in model.parameters()]
    model.zero_grad(set_to_none=False)
    assert all((p.grad.to_local() == 0).all() for p in model.parameters())
    for param in model.parameters():
        get_local_tensor(param.grad).fill_(1e6)
    backward(model)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), first, strict=True))
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


def test_an_update_in_backward_frees_them_at_once(model):
    gone: list[bool] = []
    step_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1))
    first, last = model.layers[0], model.head
    first.register_full_backward_hook(lambda *_: gone.append(last.weight.grad is None))
    backward(model)
    assert all(p.grad is None for p in model.parameters())
    assert gone == [True]
