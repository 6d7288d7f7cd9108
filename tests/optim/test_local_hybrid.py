"""optim.local where optimizer states are cut over replicate too (HFSDP)."""

import functools

import pytest
import torch
from _support.optim.local_sides import Sides, everything
from _support.optim.normed import Normed
from torch import optim

from parallel3d import MeshLayout
from parallel3d.optim import local
from parallel3d.testing import local_world


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2)], ids=str)
def test_elementwise_and_whole(sizes) -> None:
    with local_world(4) as world:
        sides = Sides(world, MeshLayout(*sizes), shard_optimizer_over_replicate=True)
        for cls in (functools.partial(optim.AdamW, lr=1e-2), Normed):
            base = getattr(cls, "func", cls)
            sides.reset()
            sides.optimizers(everything, cls, functools.partial(local, base, lr=1e-2))
            for step in range(2):
                sides.backward(step)
                sides.step()
                sides.zero_grad()
            sides.check()
        up = sides.model.layers[0].up.weight
        momentum = sides.optimizer.state[up]["momentum"]
        assert all(not placement.is_replicate() for placement in momentum.placements[:1])
        parts = world.per_rank(momentum)
        assert {tuple(part.shape) for part in parts} == {(5, 12)}
        assert not torch.equal(parts[0], parts[2])  # of the two replicas
