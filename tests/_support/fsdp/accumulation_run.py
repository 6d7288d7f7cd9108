"""A model over micro-batches, beside the plain one."""

import torch
from torch import nn

from _support.models import LM_PLAN, Lm, lm_loss, tokens
from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.testing import shards_of


def plain_grads(samples: list[int], data_size: int) -> dict[str, torch.Tensor]:
    """Gradients of the plain model: mean over data ranks, sum over ``samples``."""
    torch.manual_seed(0)
    model = Lm(layers=1).double()
    for sample in samples:
        for rank in range(data_size):
            (lm_loss(model, tokens(10 * sample + rank)) / data_size).backward()
    return {n: p.grad for n, p in model.named_parameters()}


class Run:
    """A parallel Lm on simulated ranks and its backwards."""

    def __init__(self, world, layout: MeshLayout) -> None:
        torch.manual_seed(0)
        self.world = world
        self.layout = layout
        with world.paused():
            model = Lm(layers=1).double()
        self.model = self.parallel(model)

    def parallel(self, model: Lm) -> nn.Module:
        return parallelize(model, build_mesh(self.layout, device_type="cpu"), LM_PLAN)

    def backward(self, sample: int) -> None:
        """One micro-batch: data rank r reads sample 10 * sample + r."""
        with self.world.paused():
            ids = [
                tokens(10 * sample + self.layout.data_rank(r))
                for r in range(self.layout.world_size)
            ]
        lm_loss(self.model, self.world.map(lambda r: ids[r])).backward()

    def check(self, samples: list[int], **others: list[int]) -> None:
        """Every rank's gradient shards against the plain gradients of ``samples``."""
        with self.world.paused():
            size = self.layout.data_size
            expected = plain_grads(samples, size)
            for name, other in others.items():
                expected[name.replace("__", ".")] = plain_grads(other, size)[
                    name.replace("__", ".")
                ]
            for name, p in self.model.named_parameters():
                for rank, box, local in shards_of(p.grad):
                    message = f"{name} on rank {rank}"
                    torch.testing.assert_close(local, expected[name][box], msg=message)
