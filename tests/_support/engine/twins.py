"""A plain model and its sharded copy, side by side on real ranks: the oracle of the engine tests.

Runs inside the ranks. Each data rank computes on samples of its own; the plain model on all of them, and
its loss is their mean. In float64, so that what differs is a mistake and no rounding.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from _support.models import lm_loss, tokens
from parallel3d._torch.dtensor import dtensor_shard_box

Loss = Callable[[nn.Module, Any], torch.Tensor]


def device_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh over all ranks; by default of one axis."""
    shape = shape or (dist.get_world_size(),)
    if names is None and len(shape) == 2:
        names = ("replicate", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard_layers(engine: Any, model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Each of ``model.layers`` a unit, then the model."""
    for layer in model.layers:
        engine.fully_shard(layer, mesh=mesh, **options)
    return engine.fully_shard(model, mesh=mesh, **options)


def floats(index: int, rows: int = 3, dim: int = 12) -> torch.Tensor:
    """Sample ``index`` as features instead of tokens."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(rows, dim, generator=generator, dtype=torch.float64)


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(got: torch.Tensor, want: torch.Tensor, what: str, tolerance: float = 1e-12) -> None:
    """Equal up to ``tolerance`` of the largest magnitude in ``want``."""
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
    if want.numel():
        error = (got - want).abs().max() / largest(want)
        assert error <= tolerance, f"{what}: differs by {error:.1e}"


def same_shards(got: torch.Tensor, want: torch.Tensor, what: str, tolerance: float) -> None:
    """``same`` on what this rank holds of ``got``: every rank checks its own, without a collective."""
    if isinstance(got, DTensor):
        if any(type(placement) not in (Replicate, Shard) for placement in got.placements):
            got = got.full_tensor()
        else:
            assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
            mesh = got.device_mesh
            box = dtensor_shard_box(want.shape, mesh.shape, mesh.get_coordinate(), got.placements)
            whole, got = want, got.to_local()
            for dim, (size, offset) in enumerate(zip(*box, strict=True)):
                want = want.narrow(dim, min(offset, want.shape[dim]), size)
            tolerance *= float(largest(whole) / largest(want))
    same(got, want, what, tolerance)


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """What differences are measured against."""
    return tensor.abs().max().clamp(min=1e-3) if tensor.numel() else torch.tensor(1e-3)


def sample_of(index: int, rank: int) -> int:
    """The sample that ``rank`` reads in step or micro-batch ``index``."""
    return index * dist.get_world_size() + rank


class Twins:
    """``plain`` and ``sharded``, which ``wrap`` makes of a copy of ``plain``.

    Args:
        plain: the plain model; converted to ``dtype``.
        wrap: shards the copy in place.
        loss: of a model and a sample.
        batch: sample by number.
        optimizer: made for each of the two; by default the quickest, of which a mistake shows best.
    """

    def __init__(
        self,
        plain: nn.Module,
        wrap: Callable[[nn.Module], Any],
        loss: Loss = lm_loss,
        batch: Callable[[int], Any] = tokens,
        dtype: torch.dtype = torch.float64,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        self.plain = plain.to(dtype)
        self._tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        self.sharded = copy.deepcopy(self.plain)
        wrap(self.sharded)
        self.loss, self.batch = loss, batch
        self.optimizers = [
            optimizer(model.parameters(), lr=0.1) for model in (self.plain, self.sharded)
        ]

    def backward_plain(self, index: int = 0) -> torch.Tensor:
        """The plain model's loss over all ranks' samples, after its backward."""
        world = dist.get_world_size()
        losses = [
            self.loss(self.plain, self.batch(sample_of(index, r))) / world for r in range(world)
        ]
        total = torch.stack(losses).sum()
        total.backward()
        return total.detach()

    def backward_sharded(self, index: int = 0) -> torch.Tensor:
        """The mean of the ranks' losses, after this rank's backward."""
        loss = self.loss(self.sharded, self.batch(sample_of(index, dist.get_rank())))
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    def backward(self, index: int = 0) -> None:
        """Both, with equal losses."""
        got, want = self.backward_sharded(index), self.backward_plain(index)
        same(got, want, f"loss {index}", self._tolerance)

    def check_grads(self) -> None:
        """Equal gradients, whole; and none where the plain model has none."""
        pairs = zip(self.plain.named_parameters(), self.sharded.parameters(), strict=True)
        for (name, want), got in pairs:
            assert (got.grad is None) == (want.grad is None), f"{name}.grad is {got.grad}"
            if want.grad is not None:
                same_shards(got.grad, want.grad, f"{name}.grad", self._tolerance)

    def check_weights(self, tolerance: float = 1e-10) -> None:
        got_state, want_state = self.sharded.state_dict(), self.plain.state_dict()
        assert list(got_state) == list(want_state)
        for name, want in want_state.items():
            same_shards(got_state[name], want, name, tolerance)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def train(self, steps: Iterable[int] = range(3)) -> None:
        """Losses, gradients and, at last, weights are equal."""
        for index in steps:
            self.backward(index)
            self.check_grads()
            self.step()
        self.check_weights()


def train(*args: Any, **kwargs: Any) -> Twins:
    """Trains new twins for three steps."""
    twins = Twins(*args, **kwargs)
    twins.train()
    return twins
