"""A plain model whose blocks can be told what to do, beside one whose units are replicated units."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from _support.fsdp.replicated_models import WIDTH, Model, wrapped


class Simple(nn.Module):
    """Recomputes only if told to; ``first`` is called before all else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recomputes = False
        self.first = lambda: None
        self.seen = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first()
        y = self.norm(x)
        up = checkpoint(self.up, y, use_reentrant=False) if self.recomputes else self.up(y)
        self.seen = x + torch.tanh(up)
        return self.seen


def plain() -> Model:
    torch.manual_seed(0)
    model = Model()
    model.blocks = nn.ModuleList(Simple() for _ in range(3))
    return model.double()


def pair() -> tuple[Model, Model]:
    return plain(), wrapped(1, plain())
