"""A sharded model on simulated ranks beside the plain one: the same batches, the same gradients."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from _support.models import LM_PLAN, Lm, lm_loss, tokens
from parallel3d import MeshLayout, build_mesh, parallelize
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


def features(sample: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sample)
    return torch.randn(2, 6, generator=generator, dtype=torch.float64)


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


class Trial:
    """Both models; data rank r of batch i reads sample ``100 * i + r``."""

    def __init__(
        self,
        world: LocalWorld,
        layout: MeshLayout,
        wrap: Callable[..., nn.Module],
        build: Callable[[], nn.Module] = Net,
        sample: Callable[[int], torch.Tensor] = features,
        loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = mean_square,
    ) -> None:
        self.world, self.layout, self.loss = world, layout, loss
        self.sample, self.since = sample, []
        with world.paused():
            torch.manual_seed(0)
            self.plain = build().double()
            model = copy.deepcopy(self.plain)
        self.mesh = build_mesh(layout, device_type="cpu")
        self.model: Any = wrap(model, self.mesh)

    def forward(self, batch: int) -> torch.Tensor:
        with self.world.paused():
            ranks = map(self.layout.data_rank, range(self.layout.world_size))
            samples = [self.sample(100 * batch + rank) for rank in ranks]
        return self.loss(self.model, self.world.map(lambda rank: samples[rank]))

    def backward(self, *batches: int) -> None:
        for batch in batches:
            self.forward(batch).backward()

    def play(self, script: str) -> None:
        """A number is a backward of that batch. Words: ``-sync`` and ``+sync`` turn gradient synchronisation
        off and on, so ``all`` the all-reduce, ``manual`` the end of backwards by hand, ``fin`` is that end,
        ``reshard`` the freeing after backward, ``unshard`` gathers all; ``fwd`` is a forward of batch 9, and
        ``bwd`` its backward; ``clear`` clears gradients, ``step`` is one of SGD; ``check`` compares
        the gradients of all batches since.
        """
        model = self.model
        switches = {
            "sync": "set_requires_gradient_sync",
            "all": "set_requires_all_reduce",
            "manual": "set_manual_backward_finalization",
            "reshard": "set_reshard_after_backward",
        }
        for word in script.split():
            if word[0] in "+-":
                getattr(model, switches[word[1:]])(word[0] == "+")
            elif word.isdigit():
                self.backward(int(word))
                self.since.append(int(word))
            elif word == "fwd":
                self.out = self.forward(9)
            elif word == "bwd":
                self.out.backward()
                self.since.append(9)
            elif word == "unshard":
                for unit in (*model.layers, model):
                    unit.unshard()
            elif word == "fin":
                model.finalize_backward()
            elif word == "check":
                self.check(self.since)
            else:
                {"clear": model.zero_grad, "step": self.step}[word]()
                self.since = []

    def plain_grads(
        self, batches: list[int], factor: float | None = None
    ) -> dict[str, torch.Tensor]:
        """Sums over ``batches`` and data ranks, divided by ``factor`` or the number of these."""
        self.plain.zero_grad()
        for batch in batches:
            for rank in range(self.layout.data_size):
                self.loss(self.plain, self.sample(100 * batch + rank)).backward()
        grads = {n: p.grad for n, p in self.plain.named_parameters() if p.grad is not None}
        for grad in grads.values():
            grad.div_(self.layout.data_size if factor is None else factor)
        return grads

    def check(
        self,
        batches: list[int],
        factor: float | None = None,
        tolerance: float = 1e-12,
        but: dict[str, list[int]] | None = None,
    ) -> None:
        """Every rank's shards of the gradients against the plain ones; ``but``: batches of parameters."""
        with self.world.paused():
            others = {
                name: self.plain_grads(b, factor)[name].clone() for name, b in (but or {}).items()
            }
            expected = self.plain_grads(batches, factor) | others
            for name, p in self.model.named_parameters():
                if name not in expected:
                    assert p.grad is None, name
                    continue
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


class Run(Trial):
    """A small language model by ``parallelize``."""

    def __init__(
        self, world: LocalWorld, layout: MeshLayout, plan: dict | None = LM_PLAN, **options: Any
    ) -> None:
        def wrap(model: nn.Module, mesh: Any) -> nn.Module:
            return parallelize(model, mesh, plan, **options)

        super().__init__(world, layout, wrap, partial(Lm, layers=1), tokens, lm_loss)
