"""Sharing and overlap of tensor-parallel collectives on real processes, under the engine."""

import functools
from unittest import mock

import pytest
import torch
from _support.models import lm_loss, tokens
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d import MeshLayout
from parallel3d.testing import assert_parity
from parallel3d.tp import Colwise, Rowwise, SequenceParallel, VocabParallel, overlap


class Gated(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, 20)
        self.up = nn.Linear(dim, 20)
        self.down = nn.Linear(20, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class GatedLm(nn.Module):
    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, dim)
        self.layers = nn.ModuleList(Gated(dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 19)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


PLANS = {
    "replicate": {
        "embed": VocabParallel(),
        "layers.*.gate": Colwise(),
        "layers.*.up": Colwise(),
        "layers.*.down": Rowwise(),
        "head": Colwise(output="replicate"),
    },
    "sequence": {
        "embed": VocabParallel(output="sequence"),
        "layers.*.norm": SequenceParallel(),
        "layers.*.gate": Colwise(input="sequence"),
        "layers.*.up": Colwise(input="sequence"),
        "layers.*.down": Rowwise(output="sequence"),
        "norm": SequenceParallel(),
        "head": Colwise(input="sequence", output="replicate"),
    },
}
PLANS["chunks"] = {
    **PLANS["sequence"],
    "layers.*.gate": Colwise(input="sequence", chunks=2),
    "layers.*.up": Colwise(input="sequence", chunks=3),
    "head": Colwise(input="sequence", output="replicate", chunks=2),
}


def parity(layout: str) -> dict[str, float]:
    torch.manual_seed(0)
    with mock.patch.dict(overlap.WORTHWHILE, cpu=0):
        return _parity(layout)


def _parity(layout: str) -> dict[str, float]:
    result = assert_parity(
        GatedLm,
        functools.partial(tokens, length=6),
        MeshLayout(1, 2, 2),
        loss=lm_loss,
        tp_plan=PLANS[layout],
        steps=2,
        fp32=False,
    )
    return result.grads


@pytest.mark.parametrize("layout", sorted(PLANS))
def test_parity(gloo_pool, layout: str) -> None:
    results = gloo_pool.run(parity, layout, world_size=4)
    assert all(0 <= grads["float64"] < 1e-12 for grads in results)
