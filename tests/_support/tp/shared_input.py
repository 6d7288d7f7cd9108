"""Linears that read one tensor."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _support.tp.tp_world import check_parity
from parallel3d.tp import Colwise, Rowwise


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 12)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def plan(layout: str) -> dict:
    output = "replicate" if layout == "replicate" else "sequence"
    return {
        "gate": Colwise(input=layout),
        "up": Colwise(input=layout),
        "down": Rowwise(output=output),
    }


LAYOUTS = ("replicate", "sequence")


def with_length(model: nn.Module, length: int) -> nn.Module:
    """The model, told of how long a sequence it gets parts, if it is parallel."""
    state = getattr(model.down, "_parallel3d_tp", None)
    if state is not None:
        state.sequence.length = length
    return model


def check_equal(
    layout: str,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
    *,
    model: nn.Module | None = None,
    tp: int = 2,
    batch: int = 2,
    length: int = 5,
) -> None:
    """``call(model, x)`` of the parallel model equals that of the plain one; ``x`` is (batch, length, 8)."""
    sequence = layout == "sequence"
    split: dict[str, Any] = {"sequence_in": sequence, "sequence_out": sequence}
    x = torch.randn(batch, length, 8, dtype=torch.float64)

    def called(model: nn.Module, x: Tensor) -> Tensor:
        return call(with_length(model, length), x)

    check_parity(model or Gated(), plan(layout), tp, x, call=called, **split)
