"""A model with one of everything that is gathered whole, a sharded copy of it, and comparisons."""

import copy
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from _support.models import LM_PLAN, Lm
from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.testing import LocalWorld


class Mixed(Lm):
    """Lm with a scalar, codes (uint8), a buffer, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.codes = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("shift", torch.randn(12))
        self.layers[0].up.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale + self.shift.mean()


def plain_model(seed: int = 0) -> Mixed:
    """In float64, but for the codes."""
    torch.manual_seed(seed)
    return Mixed().double()


def sharded(plain: nn.Module, shape: tuple[int, int, int], **options) -> nn.Module:
    """A parallel copy of ``plain`` in the present world."""
    mesh = build_mesh(MeshLayout(*shape), device_type="cpu")
    return parallelize(copy.deepcopy(plain), mesh, LM_PLAN if shape[2] > 1 else None, **options)


def equal_on_ranks(
    world: LocalWorld, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    """The same names in the same order, and each simulated rank has the same plain tensors."""
    assert list(found) == list(expected)
    for name, value in found.items():
        assert not isinstance(value, DTensor), name
        for rank, tensor in enumerate(world.per_rank(value.detach())):
            want = expected[name].detach()
            assert tensor.dtype == want.dtype and torch.equal(tensor, want), (name, rank)
