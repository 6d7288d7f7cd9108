"""Which modules parallelize makes units of."""

import torch
from torch import Tensor, nn

from parallel3d._units import find_units
from parallel3d.mesh import MeshLayout
from parallel3d.testing import assert_parity


class ReadsWeights(nn.Module):
    """Looks its tokens up, and slices its table of positions and its head without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.positions = nn.Embedding(5, 6)
        nn.init.normal_(self.tokens.weight)  # no reading
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x).relu()
        return self.norm(x) @ self.head.weight.t()


def test_modules_whose_weight_is_read_directly_stay_with_the_root() -> None:
    found = find_units(ReadsWeights())
    assert [name for name, _ in found.embeddings] == ["tokens"]
    assert [name for name, _ in found.tail] == ["norm"]


def test_a_model_that_reads_weights_directly_trains_as_the_plain_one() -> None:
    ids = torch.arange(8).view(2, 4) % 7
    assert_parity(ReadsWeights, lambda i: (ids + i) % 7, MeshLayout(1, 2, 1), fp32=False)
