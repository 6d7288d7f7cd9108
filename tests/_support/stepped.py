"""A model that is updated in backward, and that something about it is refused."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from _support.models import Lm
from parallel3d import (
    MeshLayout,
    StateError,
    build_mesh,
    optim,
    parallelize,
)
from parallel3d._torch.dtensor import get_local_tensor


def local(value: torch.Tensor) -> torch.Tensor:
    return get_local_tensor(value) if isinstance(value, DTensor) else value


def build(layers: int = 2, sizes: tuple[int, int, int] = (1, 2, 1), **kwargs):
    """A model that is updated in backward, and its optimizer, in the present world."""
    mesh = build_mesh(MeshLayout(*sizes), device_type="cpu")
    torch.manual_seed(0)
    model = parallelize(Lm(layers=layers), mesh)
    return model, optim.step_in_backward(model, torch.optim.SGD, lr=0.1, **kwargs)


@contextlib.contextmanager
def refused(match: str, model: nn.Module | None = None):
    """A StateError, before any weight of ``model`` has changed."""
    params = list(model.parameters()) if model is not None else []
    before = [local(p).clone() for p in params]
    with pytest.raises(StateError, match=match):
        yield
    for p, old in zip(params, before, strict=True):
        assert torch.equal(local(p), old)
