"""What test_verify_cli.py names on the command line."""

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from _support.testing.verify_models import Decoder, RowLinear, by_hand, ids

WRONG = {"layers.*.nothing": "colwise"}


def build() -> nn.Module:
    return Decoder(layers=1, bias=True, vocab=20)


def batch(index: int) -> Tensor:
    return ids(index)


def fails() -> nn.Module:
    raise RuntimeError("no such size")


def number(index: int = 0) -> int:
    return 3


def vector(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids) + torch.zeros(2)


class NoBias(RowLinear):
    def forward(self, x: Tensor) -> Tensor:
        bias, self.bias = self.bias, None
        y = super().forward(x)
        self.bias = bias
        return y


def forgets(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    by_hand(model, mesh)
    model.layers[0].mlp.down.__class__ = NoBias
    return model


def nothing(model: nn.Module, mesh: DeviceMesh) -> None:
    """Forgets to return it."""
