"""A sharded model on simulated ranks beside the plain one: the same batches, the same gradients."""

import copy
from collections.abc import Callable

import torch
from torch import nn

from parallel3d import MeshLayout, build_mesh
from parallel3d.testing import LocalWorld, shards_of


class Layer(nn.Module):
    """A linear with sizes that few axes divide, and a scalar."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, rows)
        self.back = nn.Linear(rows, 6, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.back(torch.tanh(self.linear(x)))


class Net(nn.Module):
    """Two of them, and something that uses its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(9), Layer(3)])
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Trial:
    """Both models; data rank r of batch i reads sample ``100 * i + r``."""

    def __init__(
        self,
        world: LocalWorld,
        layout: MeshLayout,
        wrap: Callable[..., nn.Module],
        build: Callable[[], nn.Module] = Net,
    ) -> None:
        self.world, self.layout = world, layout
        with world.paused():
            torch.manual_seed(0)
            self.plain = build().double()
            model = copy.deepcopy(self.plain)
        self.mesh = build_mesh(layout, device_type="cpu")
        self.model = wrap(model, self.mesh)

    def sample(self, batch: int, data_rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * batch + data_rank)
        return torch.randn(2, 6, generator=generator, dtype=torch.float64)

    def forward(self, batch: int) -> torch.Tensor:
        with self.world.paused():
            samples = [
                self.sample(batch, self.layout.data_rank(rank))
                for rank in range(self.layout.world_size)
            ]
        return loss(self.model(self.world.map(lambda rank: samples[rank])))

    def backward(self, *batches: int) -> None:
        for batch in batches:
            self.forward(batch).backward()

    def plain_grads(
        self, batches: list[int], factor: float | None = None
    ) -> dict[str, torch.Tensor]:
        """Sums over ``batches`` and data ranks, divided by ``factor`` or the number of these."""
        self.plain.zero_grad()
        for batch in batches:
            for rank in range(self.layout.data_size):
                loss(self.plain(self.sample(batch, rank))).backward()
        grads = {n: p.grad for n, p in self.plain.named_parameters() if p.grad is not None}
        for grad in grads.values():
            grad.div_(self.layout.data_size if factor is None else factor)
        return grads

    def check(
        self, batches: list[int], factor: float | None = None, tolerance: float = 1e-12
    ) -> None:
        """Every rank's shards of the gradients against the plain ones."""
        with self.world.paused():
            expected = self.plain_grads(batches, factor)
            for name, p in self.model.named_parameters():
                for rank, box, local in shards_of(p.grad):
                    torch.testing.assert_close(
                        local,
                        expected[name][box],
                        rtol=tolerance,
                        atol=tolerance,
                        msg=lambda m, at=f"{name}, rank {rank}": f"{at}: {m}",
                    )

    def step(self, lr: float = 0.1) -> None:
        """One step of both, with the gradients they have."""
        for model in (self.model, self.plain):
            torch.optim.SGD(model.parameters(), lr=lr, foreach=False).step()
            model.zero_grad()


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()
