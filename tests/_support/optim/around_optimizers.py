"""Schedulers, averages of weights and wrappers, with optimizers on DTensors and on local tensors.

Each trains a small model for twenty steps, plain and on two gloo processes; compared are the weights, and the
averaged ones, with the plain ones in float64, in parts of the largest weight.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytorch_optimizer
import torch
from torch import distributed as dist
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim import swa_utils

import parallel3d as p3d

STEPS = 20
RIGHT = 1e-9

Base = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Base] = {
    "`AdamW`": lambda params: torch.optim.AdamW(params, lr=0.02),
    "`local(AdamW)`": lambda params: p3d.optim.local(torch.optim.AdamW, params, lr=0.02),
    "`AdaBelief`": lambda params: pytorch_optimizer.AdaBelief(params, lr=0.02),
    "`local(Lion, elementwise=True)`": lambda params: p3d.optim.local(
        pytorch_optimizer.Lion, params, lr=0.02, elementwise=True
    ),
    "`local(Lamb, matrix=True)`": lambda params: p3d.optim.local(
        pytorch_optimizer.Lamb, params, lr=0.02, matrix=True
    ),
}


def plain_bases() -> dict[str, Base]:
    """The same classes as one process has them."""
    lion, lamb = pytorch_optimizer.Lion, pytorch_optimizer.Lamb
    own: dict[str, Base] = {
        "`local(AdamW)`": OPTIMIZERS["`AdamW`"],
        "`local(Lion, elementwise=True)`": lambda params: lion(params, lr=0.02),
        "`local(Lamb, matrix=True)`": lambda params: lamb(params, lr=0.02),
    }
    return OPTIMIZERS | own


class Program:
    """A training of the model with one optimizer: what a scheduler or an average adds to it."""

    def __init__(self, model: nn.Module, base: Base) -> None:
        self.model, self.optimizer = model, base(model.parameters())
        self.begin()

    def begin(self) -> None:
        """Makes what is around the optimizer."""

    def step(self, backward: Callable[[], torch.Tensor]) -> None:
        """One step; ``backward`` computes gradients and returns the loss of the whole batch."""
        loss = backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after(loss)

    def after(self, loss: torch.Tensor) -> None:
        """What the user calls after a step."""

    def end(self) -> list[torch.Tensor]:
        """Returns what is compared beside the weights."""
        return []


def _scheduled(make: Callable[[Any], Any], *, takes_loss: bool = False) -> type[Program]:
    class Scheduled(Program):
        def begin(self) -> None:
            self.scheduler = make(self.optimizer)

        def after(self, loss: torch.Tensor) -> None:
            self.scheduler.step(*[loss] * takes_loss)

    return Scheduled


def _averaged(**options: Any) -> type[Program]:
    class Averaged(Program):
        def begin(self) -> None:
            self.average = swa_utils.AveragedModel(self.model, **options)

        def after(self, loss: torch.Tensor) -> None:
            self.average.update_parameters(self.model)

        def end(self) -> list[torch.Tensor]:
            return list(self.average.module.parameters())

    return Averaged


class _WithStatistics(_averaged()):  # type: ignore[misc]
    def end(self) -> list[torch.Tensor]:
        loader = [torch.randn(8, 12, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        swa_utils.update_bn([x.double() for x in loader], self.average)
        return [*super().end(), *self.average.module.buffers()]


class _Ema(Program):
    def begin(self) -> None:
        self.ema = p3d.optim.EMA(self.model, decay=0.9)

    def after(self, loss: torch.Tensor) -> None:
        self.ema.update()

    def end(self) -> list[torch.Tensor]:
        return [self.ema.state_dict()["average"][name] for name, _ in self.model.named_parameters()]


class _Wrapped(Program):
    wrapper: Any = None

    def begin(self) -> None:
        self.optimizer = self.wrapper(self.optimizer)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()


class _Lookahead(_Wrapped):
    wrapper = pytorch_optimizer.Lookahead


class _ScheduleFree(_Wrapped):
    wrapper = pytorch_optimizer.ScheduleFreeWrapper


class _Sam(Program):
    def __init__(self, model: nn.Module, base: Base) -> None:
        def made(params: Any, **_: Any) -> torch.optim.Optimizer:
            return base(params)

        self.model = model
        self.optimizer = pytorch_optimizer.SAM(model.parameters(), base_optimizer=made)

    def step(self, backward: Callable[[], torch.Tensor]) -> None:
        backward()
        self.optimizer.first_step(zero_grad=True)
        backward()
        self.optimizer.second_step(zero_grad=True)


def _warmed_up(optimizer: Any) -> schedulers.SequentialLR:
    parts = [
        schedulers.LinearLR(optimizer, 0.1, total_iters=5),
        schedulers.CosineAnnealingLR(optimizer, STEPS - 5),
    ]
    return schedulers.SequentialLR(optimizer, parts, milestones=[5])


AROUND: dict[str, type[Program]] = {
    "`OneCycleLR`": _scheduled(lambda o: schedulers.OneCycleLR(o, 0.05, total_steps=STEPS + 1)),
    "`ReduceLROnPlateau`": _scheduled(
        lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=0.1), takes_loss=True
    ),
    "`CosineAnnealingLR`": _scheduled(lambda o: schedulers.CosineAnnealingLR(o, STEPS)),
    "`CosineAnnealingWarmRestarts`": _scheduled(
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 6)
    ),
    "`SequentialLR`": _scheduled(_warmed_up),
    "`LambdaLR`": _scheduled(lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step)),
    "`SWALR`": _scheduled(lambda o: swa_utils.SWALR(o, swa_lr=0.005, anneal_epochs=5)),
    "`AveragedModel`": _averaged(),
    "`AveragedModel`, `get_ema_multi_avg_fn`": _averaged(
        multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)
    ),
    "`AveragedModel`, `update_bn`": _WithStatistics,
    "`parallel3d.optim.EMA`": _Ema,
    "`Lookahead`": _Lookahead,
    "`ScheduleFreeWrapper`": _ScheduleFree,
    "`SAM`": _Sam,
}


def model() -> nn.Sequential:
    """With a norm whose statistics ``update_bn`` computes; in training it uses those it has."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16)
    made = nn.Sequential(nn.Linear(12, 16, bias=False), norm, nn.ReLU(), nn.Linear(16, 6))
    return made.double().eval()


def train(made: nn.Module, program: Program, ranks: int, rank: int) -> list[torch.Tensor]:
    """The weights after training on this rank's share of each batch, and what the program adds."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 12, generator=generator, dtype=torch.float64).chunk(ranks)[rank]
        y = torch.randint(0, 6, (8,), generator=generator).chunk(ranks)[rank]

        def backward(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            loss = nn.functional.cross_entropy(made(x), y)
            loss.backward()
            loss = loss.detach() / ranks
            if ranks > 1:
                dist.all_reduce(loss)
            return loss

        program.step(backward)
    found: list[Any] = [*made.parameters(), *program.end()]
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach() for t in found]


def outcome(around: str, optimizer: str, mesh: Any) -> str:
    """``right``, ``wrong ...``, ``refused``, or the error's name, of the plain run ``(plain)``."""
    try:
        made = model()
        want = train(made, AROUND[around](made, plain_bases()[optimizer]), 1, 0)
    except Exception as error:
        return f"{type(error).__name__} (plain)"
    made, start = model(), list(model().parameters())
    try:
        p3d.parallelize(made, mesh, units=["0", "3"])
        got = train(made, AROUND[around](made, OPTIMIZERS[optimizer]), mesh.size(), dist.get_rank())
    except p3d.Parallel3dError:
        return "refused"
    except Exception as error:
        return type(error).__name__
    assert any(not torch.equal(a, b) for a, b in zip(want, start, strict=False))
    apart = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want, strict=True)
    )
    return "right" if apart <= RIGHT else f"wrong ({apart:.0e})"


def outcomes(around: list[str]) -> dict[str, dict[str, str]]:
    """Run by every rank: name -> optimizer -> the outcome, of a rank where it is not right if any."""
    mesh = p3d.build_mesh(p3d.MeshLayout(shard=dist.get_world_size()), device_type="cpu")
    table: dict[str, dict[str, str]] = {}
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        for name in around:
            table[name] = {}
            for optimizer in OPTIMIZERS:
                everyones: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everyones, outcome(name, optimizer, mesh))
                others = [found for found in everyones if found != "right"]
                table[name][optimizer] = (others or everyones)[0]
    return table


def faults(table: dict[str, dict[str, str]]) -> list[str]:
    """What of ``table`` must not be: other numbers, without an error."""
    cells = ((a, o, found) for a, row in table.items() for o, found in row.items())
    return [f"{a} with {o}: {found}" for a, o, found in cells if found.startswith("wrong")]


def table_lines(table: dict[str, dict[str, str]]) -> list[str]:
    """The table as Markdown."""
    rows = [f"| {name} | {' | '.join(row.values())} |\n" for name, row in table.items()]
    head = f"\n| | {' | '.join(OPTIMIZERS)} |\n|{' --- |' * (1 + len(OPTIMIZERS))}\n"
    return [head, *rows]
