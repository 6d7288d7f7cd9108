"""A plain model and its parallel copy with the same gradients, for optimizers to be compared on."""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed import DeviceMesh

from _support import side_by_side
from _support.models import LM_PLAN, Lm
from parallel3d import MeshLayout, parallelize
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.testing import LocalWorld, shards_of


class Sides(side_by_side.Sides):
    """On simulated ranks. Blocks divide on every mesh used here, the 19 rows of embedding and head don't."""

    world: LocalWorld

    def __init__(self, world: LocalWorld, layout: MeshLayout, layers: int = 1, **options) -> None:
        def apply(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            return parallelize(model, mesh, LM_PLAN, **options)

        sizes = layout.replicate, layout.shard, layout.tp
        super().__init__(world, sizes, functools.partial(Lm, layers=layers), apply, torch.float64)
        self.start = [p.detach().clone() for p in self.plain.parameters()]
        self.shards = [get_local_tensor(p).clone() for p in self.model.parameters()]

    def backward(self, sample: int = 0) -> None:
        """Adds to both models' gradients."""
        with self.world.paused():
            self.plain_loss(sample).backward()
        self.loss(sample).backward()

    def reset(self) -> None:
        """Both models' weights as they were at first."""
        with torch.no_grad():
            for p, q, start, shard in zip(
                self.plain.parameters(),
                self.model.parameters(),
                self.start,
                self.shards,
                strict=True,
            ):
                p.copy_(start)
                get_local_tensor(q).copy_(shard)

    def optimizers(self, of: Callable[[nn.Module], list], plain: Callable, ours: Callable) -> None:
        """Makes one for each side; ``of`` chooses its parameters."""
        with self.world.paused():
            self.plain_optimizer = plain(of(self.plain))
        self.optimizer = ours(of(self.model))

    def step(self) -> None:
        """Of both."""
        with self.world.paused():
            self.plain_optimizer.step()
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Of both."""
        self.plain_optimizer.zero_grad()
        self.optimizer.zero_grad()

    def check(self, moved: bool = True) -> None:
        """Each shard of each weight and each state, within 1e-12 of the plain ones."""
        with self.world.paused():
            for (name, p), q, start in zip(
                self.plain.named_parameters(), self.model.parameters(), self.start, strict=True
            ):
                self.same(name, p.detach(), q.detach())
                assert not moved or p.grad is None or not torch.equal(p, start), name
                theirs, ours = self.plain_optimizer.state.get(p), self.optimizer.state.get(q)
                assert (theirs or {}).keys() == (ours or {}).keys(), name
                for key in theirs or {}:
                    self.same(f"{key} of {name}", theirs[key], ours[key])

    def same(self, name: str, whole: object, parallel: object) -> None:
        """Compares one tensor or number."""
        if not isinstance(whole, torch.Tensor):
            assert whole == parallel, name
            return
        assert parallel.shape == whole.shape, name
        for rank, box, local in shards_of(parallel):
            message = f"{name} on rank {rank}"
            torch.testing.assert_close(local, whole[box], rtol=0, atol=1e-12, msg=message)


def everything(model: nn.Module) -> list[nn.Parameter]:
    """All parameters."""
    return list(model.parameters())


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Those that Muon takes."""
    return [p for p in model.parameters() if p.dim() == 2]


class Counting(torch.optim.AdamW):
    """Notes the tensors it is given."""

    given: list[list[torch.Tensor]]

    def step(self, closure=None):
        self.closure = closure
        self.given = [
            [p for p in group["params"] if p.grad is not None] for group in self.param_groups
        ]
        self.kinds = {type(t) for group in self.given for p in group for t in (p, p.grad)}
        self.grads = [[p.grad for p in group] for group in self.given]
        return super().step(closure)
