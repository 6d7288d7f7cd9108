"""set_reduce_scatter_unused_params: parameters that some ranks have no gradient of."""

import copy

import pytest
import torch
from _support.fsdp.wrapped import buckets, cpu_mesh, shard_blocks
from torch import distributed as dist
from torch import nn

from parallel3d import MeshLayout
from parallel3d.errors import AgreementError
from parallel3d.fsdp import fully_shard
from parallel3d.testing import local_world

parity = pytest.mark.parity
FSDP, HSDP = MeshLayout(1, 4, 1), MeshLayout(2, 2, 1)


class Branches(nn.Module):
    """One of two branches is used, and by one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.common = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        x = self.common(x)
        return x if branch == "none" else getattr(self, branch)(x)


class Layers(nn.Module):
    """Several such units, so that a reduction out of order would meet the wrong one."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Branches() for _ in range(layers)])

    def forward(self, x: torch.Tensor, branches: tuple[str, ...]) -> torch.Tensor:
        for layer, branch in zip(self.layers, branches, strict=True):
            x = layer(x, branch)
        return x


def diverging_branches(rank_branches: list[tuple[str, ...]]) -> float:
    """Each rank goes its own way; the largest difference from the plain gradients."""
    torch.manual_seed(0)
    plain = Layers(len(rank_branches[0])).double()
    model = shard_blocks(copy.deepcopy(plain), cpu_mesh(1, len(rank_branches)))
    model.set_reduce_scatter_unused_params(True)
    x = torch.randn(2, 3, dtype=torch.float64)
    model(x, rank_branches[dist.get_rank()]).sum().backward()
    sum(plain(x, branches).sum() for branches in rank_branches).backward()
    worst = 0.0
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        expected = 0 if q.grad is None else q.grad / len(rank_branches)
        worst = max(worst, float((p.grad.full_tensor() - expected).abs().max()))
    return worst


class TestUnusedParameters:
    @parity("method: set_reduce_scatter_unused_params")
    @pytest.mark.parametrize(
        "branches",
        [
            [("a", "b"), ("b", "a")],
            [("none", "a"), ("b", "none")],
            [("a", "none", "b", "none"), ("none", "b", "none", "a")],
        ],
        ids=["other ones", "fewer", "of four layers"],
    )
    def test_ranks_use_different_ones(self, gloo_pool, branches):
        for difference in gloo_pool.run(diverging_branches, branches, world_size=2, timeout=30.0):
            assert difference < 1e-14

    @parity("method: set_reduce_scatter_unused_params")
    def test_zero_gradients_and_only_with_the_flag(self):
        with local_world(2) as world:
            model = shard_blocks(Layers(), cpu_mesh())
            model.layers[0].b.bias.requires_grad_(False)
            x = world.map(lambda rank: torch.ones(1, 3) * rank)
            model(x, ("a", "none")).sum().backward()
            assert model.layers[0].b.weight.grad is None
            model.zero_grad()
            model.set_reduce_scatter_unused_params(True)
            model(x, ("a", "none")).sum().backward()
            for local in world.per_rank(model.layers[0].b.weight.grad):
                assert not local.any()
            assert model.layers[0].b.bias.grad is None  # frozen
            model.zero_grad()
            model.set_reduce_scatter_unused_params(False, recurse=False)
            assert model.layers[0].b.weight.grad is None
            assert {b.settings.reduce_unused for b in buckets(model)} == {
                True
            }  # the root has no parameters


def refused(branches: str) -> str:
    """What a first backward says in which ranks use different parameters of a unit."""
    torch.manual_seed(0)
    model = fully_shard(Branches(), mesh=cpu_mesh(1, len(branches)))
    try:
        model(torch.ones(2, 3), branches[dist.get_rank()]).sum().backward()
    except AgreementError as error:
        return str(error)
    return "no error"


def test_without_it_the_first_backward_refuses(gloo_pool) -> None:
    """A gradient that is on some ranks alone would let their shards part, in silence."""
    for text in gloo_pool.run(refused, "abbb", world_size=4):
        assert "set_reduce_scatter_unused_params(True)" in text and "rank 0" in text
        assert "without gradients of b.weight, b.bias on rank 0" in text
