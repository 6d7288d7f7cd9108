"""Buffers without values, after ``to_empty`` or on meta: an error that names them, unless they are filled."""

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh
from torch import nn

import parallel3d as p3d
from parallel3d import StateError
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import unit_of
from parallel3d.testing import fake_world

X = torch.linspace(-1, 1, 8).view(2, 4)


class Tables(nn.Module):
    """Buffers of three dtypes that no state dict has, and one that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.register_buffer("order", torch.arange(4), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)
        self.register_buffer("mean", torch.ones(4))

    def reset_parameters(self) -> None:
        for name, value in (("scale", 1), ("order", 0), ("mask", True), ("mean", 1)):
            getattr(self, name).fill_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x[:, self.order]) * self.scale - self.mean
        return torch.where(self.mask, x, 0.0)


def on_meta(root_alone: bool = False) -> nn.Module:
    """A sharded model on meta."""
    with torch.device("meta"):
        model = nn.Sequential(Tables(), nn.Linear(4, 2))
    mesh = cpu_mesh()
    for unit in (model,) if root_alone else (model[0], model):
        fully_shard(unit, mesh=mesh)
    return model


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(t, device="cpu") for n, t in model.state_dict().items()}


@pytest.mark.parametrize("root_alone", [False, True])
@pytest.mark.parametrize("runs", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_to_empty_and_a_state_dict(root_alone: bool, runs) -> None:
    with fake_world(0, 2):
        model = on_meta(root_alone)
        model.to_empty(device="cpu")
        model.load_state_dict(state_of(model))
        for _ in range(2):
            with (
                runs(),
                pytest.raises(StateError, match=r"buffers 0\.scale, 0\.order, 0\.mask have memory"),
            ):
                model(X)
        model[0].scale.data.copy_(torch.ones(4))  # which no version counter shows
        with pytest.raises(StateError, match=r"buffers 0\.order, 0\.mask have memory"):
            model(X)
        model[0].reset_parameters()
        assert torch.isfinite(model(X)).all()
        options = unit_of(model).context.options
        assert "BuffersAreFilled" not in {type(option).__name__ for option in options}


def test_a_module_alone_and_a_new_buffer() -> None:
    """The unit inside is converted before there is a root; its buffers are made anew, as torchtitan does."""
    with fake_world(0, 2):
        model = on_meta()
        model[0].to_empty(device="cpu")
        model[1].to_empty(device="cpu")
        nn.init.zeros_(model[0].linear.weight)
        with pytest.raises(
            StateError, match=r"buffers .*scale, .*order, .*mask, .*mean have memory"
        ):
            model(X)
        for name, buffer in Tables().named_buffers():
            setattr(model[0], name, buffer)
        model(X)


def test_persistent_ones_that_nothing_has_loaded() -> None:
    with fake_world(0, 2):
        model = on_meta()
        model.to_empty(device="cpu")
        for name in ("scale", "order", "mask"):
            getattr(model[0], name).fill_(1)
        with pytest.raises(StateError, match=r"buffers 0\.mean have memory from to_empty"):
            model(X)
        model.load_state_dict(state_of(model))
        model(X)


def test_still_on_meta() -> None:
    """``load_state_dict(assign=True)`` gives parameters their values and leaves the other buffers on meta."""
    with fake_world(0, 2):
        model = on_meta()
        model.load_state_dict(state_of(model), assign=True)
        with pytest.raises(StateError, match=r"buffers scale, order, mask are still on the meta"):
            model(X)
        for name, buffer in Tables().named_buffers():
            setattr(model[0], name, buffer)
        model(X)


def test_what_has_values_is_left_alone() -> None:
    with fake_world(0, 2):
        model = on_meta()
        p3d.materialize(model)
        model.double().float()
        model(X)
        assert all(not hasattr(b, "_parallel3d_no_values") for b in model.buffers())
