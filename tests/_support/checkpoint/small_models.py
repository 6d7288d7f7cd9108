"""A small plain model, and what its checkpoint must bring back."""

import copy
import struct
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6, dtype=dtype)
        self.norm = nn.BatchNorm1d(6, dtype=dtype)
        self.b = nn.Linear(6, 4, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.gelu(self.norm(self.a(x))))


class One(nn.Module):
    """With one number, in two parameters."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((3,), float(value)))
        self.more = nn.Parameter(torch.full((5,), float(value)))


def names(run: Path) -> set[str]:
    """What is in a folder."""
    return {entry.name for entry in run.iterdir()}


def net(seed: int, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net(dtype)


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 2) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(5, 4, generator=generator).to(dtype)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def values(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
    """All of them, by name, copied."""
    names = {param: name for name, param in model.named_parameters()}
    states = {
        names[param]: dict(entry)
        for optimizer in optimizers
        for param, entry in optimizer.state.items()
        if entry
    }
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    return copy.deepcopy((dict(model.state_dict()), states, groups))


def same(found: Any, want: Any, where: str = "") -> None:
    if isinstance(want, torch.Tensor):
        assert found.dtype == want.dtype and torch.equal(found, want), where
    elif isinstance(want, dict):
        assert found.keys() == want.keys(), where
        for key in want:
            same(found[key], want[key], f"{where} {key}")
    elif isinstance(want, (list, tuple)):
        assert len(found) == len(want), where
        for number, (a, b) in enumerate(zip(found, want, strict=True)):
            same(a, b, f"{where} {number}")
    else:
        assert found == want, where


def exactly(found: Any, want: Any) -> None:
    """The same types, in the same order, and bits."""
    assert type(found) is type(want)
    if isinstance(want, torch.Tensor):
        assert found.dtype == want.dtype and found.shape == want.shape
        assert (
            torch.equal(found.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
            if want.dim()
            else torch.equal(found, want) or want != want
        )
    elif isinstance(want, (list, tuple)):
        assert len(found) == len(want)
        for a, b in zip(found, want, strict=True):
            exactly(a, b)
    elif isinstance(want, dict):
        assert list(map(type, found)) == list(map(type, want))
        for (k, a), (q, b) in zip(found.items(), want.items(), strict=True):
            exactly(k, q)
            exactly(a, b)
    elif isinstance(want, float):
        assert struct.pack("d", found) == struct.pack("d", want)
    elif isinstance(want, complex):
        exactly((found.real, found.imag), (want.real, want.imag))
    else:
        assert found == want
