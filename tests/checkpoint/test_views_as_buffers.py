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
