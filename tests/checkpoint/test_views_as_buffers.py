"""Buffers that are views: their values are not those in memory, or several elements share one place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallel3d import checkpoint
from parallel3d.errors import CheckpointError

KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ours": (lambda p, m: checkpoint.save(p, m, step=1), checkpoint.load),
    "ours, async": (
        lambda p, m: checkpoint.save(p, m, step=1, async_=True).result(),
        checkpoint.load,
    ),
    "torch": (checkpoint.save_torch, checkpoint.load_torch),
    "dcp": (checkpoint.save_dcp, checkpoint.load_dcp),
    "hf": (checkpoint.save_hf, checkpoint.load_hf),
}
VALUES = torch.tensor([[1 + 2j, 3 - 1j], [-1j, 2]])


class Model(nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("buffer", buffer)


def conjugate(values: torch.Tensor) -> torch.Tensor:
    """Of these values, with the conjugate bit."""
    return values.conj().resolve_conj().conj()


def negative(values: torch.Tensor) -> torch.Tensor:
    """Of these values, with the negative bit."""
    return torch.complex(torch.zeros_like(values), -values).conj().imag


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("rows", [2, 1])
def test_conjugate_and_negative_bit(
    tmp_path: Path, kind: str, saved: bool, loaded: bool, rows: int
) -> None:
    """Values are stored and read, not memory."""
    save, load = KINDS[kind]
    for number, (of, values) in enumerate(((conjugate, VALUES), (negative, VALUES.real))):
        values = values[:rows].clone()
        old = of(values) if saved else values
        new = of(torch.zeros_like(values)) if loaded else torch.zeros_like(values)
        assert (new.is_conj() or new.is_neg()) == loaded
        assert (old.is_conj() or old.is_neg()) == saved and torch.equal(old, values)
        model = Model(new)
        save(tmp_path / str(number), Model(old))
        load(tmp_path / str(number), model)
        assert torch.equal(model.get_buffer("buffer"), values)


@pytest.mark.parametrize("kind", KINDS)
def test_elements_in_one_place(tmp_path: Path, kind: str) -> None:
    """An expanded buffer is saved; to load into it, whose rows can't differ, is refused first."""
    save, load = KINDS[kind]
    expanded = torch.ones(3).expand(4, 3)
    first = Model(expanded)
    nn.init.ones_(first.weight)
    save(tmp_path / "x", first)
    model = Model(torch.zeros(4, 3))
    load(tmp_path / "x", model)
    assert torch.equal(model.get_buffer("buffer"), expanded)
    model = Model(torch.zeros(3).expand(4, 3))
    with pytest.raises(CheckpointError, match=r"buffer.* share"):
        load(tmp_path / "x", model)
    assert not model.weight.any() and not model.get_buffer("buffer").any()
    save(tmp_path / "y", Model(torch.ones(1).expand(1, 1)))
    load(tmp_path / "y", Model(torch.zeros(1, 1).expand(1, 1)))  # one element: nothing is shared


@pytest.mark.parametrize("kind", ["ours", "torch", "dcp"])
def test_expanded_state_of_an_optimizer(tmp_path: Path, kind: str) -> None:
    """It is made anew."""

    def made(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        (param,) = model.parameters()
        optimizer.state[param]["momentum_buffer"] = torch.full((1, 2), value).expand(2, 2)
        return model, optimizer

    model, optimizer = made(1.0)
    optimizer.state[model.weight]["momentum_buffer"] = torch.arange(4.0).view(2, 2)
    if kind == "ours":
        checkpoint.save(tmp_path / "x", model, optimizer, step=1)
    else:
        getattr(checkpoint, f"save_{kind}")(tmp_path / "x", model, optimizer)
    other, its = made(2.0)
    KINDS[kind][1](tmp_path / "x", other, its)
    assert torch.equal(its.state[other.weight]["momentum_buffer"], torch.arange(4.0).view(2, 2))


def test_extra_to_read_into_is_expanded(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, nn.Linear(1, 1), step=1, extra={"x": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match=r"extra\['x'\].* share"):
        checkpoint.load(tmp_path, nn.Linear(1, 1), extra={"x": torch.zeros(2).expand(2, 2)})
