"""A unit inside two roots, which run in turns and together; see ``test_replicated_units``."""

import copy
from collections.abc import Callable

import pytest
import torch
from _support.fsdp.replicated_models import WIDTH, Block, batch, check
from _support.fsdp.replicated_pairs import Simple
from torch import nn

from parallel3d import MeshLayout, build_mesh
from parallel3d.fsdp import fully_shard
from parallel3d.testing import fake_world


class Root(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def pair() -> tuple[nn.ModuleList, nn.ModuleList]:
    torch.manual_seed(0)
    shared = Simple()
    expected = nn.ModuleList([Root(Simple(), shared), Root(shared, Simple())]).double()
    model = copy.deepcopy(expected)
    mesh = build_mesh(MeshLayout(replicate=1, shard=1), device_type="cpu")
    for block in dict.fromkeys([*model[0].blocks, *model[1].blocks]):
        fully_shard(block, mesh=mesh)
    for root in model:
        fully_shard(root, mesh=mesh)
    return expected, model


Uses = Callable[[nn.ModuleList, torch.Tensor], list[torch.Tensor]]
USES: dict[str, Uses] = {
    "both, then their backwards": lambda roots, x: [root(x).sum() for root in roots],
    "in the other order": lambda roots, x: [root(x).sum() for root in roots][::-1],
    "one after the other": lambda roots, x: [roots[1](roots[0](x)).sum()],
    "one backward": lambda roots, x: [roots[0](x).sum() + roots[1](x).sum()],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("before", [False, True])
def test_gradients(use: str, before: bool) -> None:
    """``before``: the first root has trained before the second one."""
    with fake_world(0, 1):
        expected, model = pair()
        for roots in (expected, model):
            if before:
                roots[0](batch()).sum().backward()
            for index in range(3):
                for loss in USES[use](roots, batch(index)):
                    loss.backward()
        check(model, expected)


@pytest.mark.parametrize("kind", [Simple, Block])
def test_a_graph_from_before_an_outer_root(kind: type[nn.Module]) -> None:
    with fake_world(0, 1):
        torch.manual_seed(0)
        expected = Root(kind(), kind()).double()
        model = copy.deepcopy(expected)
        mesh = build_mesh(MeshLayout(replicate=1, shard=1), device_type="cpu")
        for each in (*model.blocks, model):
            fully_shard(each, mesh=mesh)
        for root in (expected, model):
            loss = root.blocks[0](batch()).sum()
            if root is model:
                model.reshard()  # the outer one is the root from now on
            loss.backward()
        check(model, expected)
        for root in (expected, model):
            loss = root.blocks[0](batch()).sum() + root(batch(1)).sum()
            loss.backward()
        check(model, expected)
