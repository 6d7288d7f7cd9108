"""Programs that pass cp's static check and compute something else than the plain model.

Of each kind there are several: (model, what the step does with it and a batch of parts).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parallel3d as p3d
from _support.audit.models import WIDTH, Block, Net, loss_of

Step = Callable[[nn.Module, tuple[Tensor, Tensor], Any], None]


def train(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: Any) -> None:
    loss_of(model, batch).backward()


# -- another kernel for real tensors --


class OwnSoftmax(Block):
    def attend(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return super().attend(x)
        q, k, v = (f(x).unflatten(-1, (-1, 6)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.mT / math.sqrt(6)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = scores.masked_fill(hidden, -1e9).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class LinearAttention(Block):
    """Where no gradient is asked for by a meta tensor, the sums of a linear attention."""

    def attend(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return super().attend(x)
        q, k, v = (F.elu(f(x)) + 1 for f in (self.q, self.k, self.v))
        return self.o(q * (k * v).cumsum(1) / k.cumsum(1))


class ByDtype(Block):
    def attend(self, x: Tensor) -> Tensor:
        if x.device.type == "meta":
            return super().attend(x)
        return self.o(F.avg_pool1d(self.v(x).mT, 3, 1, 1).mT)


# -- neighbours, by operations that the static check does not know --


class Smoothed(Net):
    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(F.avg_pool1d(x.mT, 3, 1, 1).mT)


class LargestOfThree(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + F.max_pool1d(x.mT, 3, 1, 1).mT)


class Sharpened(Net):
    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(2 * x - F.avg_pool1d(x.mT, 5, 1, 2, count_include_pad=False).mT)


# -- a rule that begins at a length --


class LogN(Block):
    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1] if x.is_meta else x.shape[1] + 1
        return super().forward(x * (math.log(n, 15) if n > 15 else 1.0))


class ByLength(Net):
    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(x / 2 if x.shape[1] > 20 else x)


class MeanIfLong(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True) if x.shape[1] > 15 else x)


# -- a second input, made of the part --


class Positions(Net):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Embedding(64, WIDTH)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        return self.head(self.norm(self.trunk(self.tok(ids) + self.place(places))))


def with_second(second: Callable[[Tensor], Any]) -> Step:
    """A step whose model gets another input, made of this rank's part of the ids."""

    def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: Any) -> None:
        ids, targets = batch
        F.cross_entropy(model(ids, second(ids)).flatten(0, 1), targets.flatten()).backward()

    return step


# -- evaluation of parts --


def evaluated(on: Callable[[Tensor], Tensor]) -> Step:
    """An evaluation of what is made of this rank's part."""

    @torch.no_grad()
    def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: Any) -> None:
        model.eval()(on(batch[0]))

    return step


@torch.no_grad()
def evaluate_a_part_alone(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: Any) -> None:
    model.eval()
    model(batch[0])
    x = torch.randn(
        2, 8, WIDTH, generator=torch.Generator().manual_seed(torch.distributed.get_rank())
    )
    model.layers[0](x)


# -- another argument than the one that was checked --


class Centered(Net):
    def forward(self, ids: Tensor, center: float = 0) -> Tensor:
        x = self.trunk(self.tok(ids))
        return self.head(x - center * x.mean(1, keepdim=True) if center else x)


class Rolled(Net):
    def forward(self, ids: Tensor, shift: int = 0) -> Tensor:
        return self.head(self.trunk(self.tok(ids).roll(shift, 1) if shift else self.tok(ids)))


class ByAttribute(Net):
    smooth = False

    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(x.cumsum(1) / 4 if self.smooth else x)


def smooth(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: Any) -> None:
    model.smooth = True
    p3d.audit.training.audit_of(model).skeleton.smooth = True
    train(model, batch, mesh)


# -- tables made by Python or NumPy --


class Sines(Net):
    def trunk(self, x: Tensor) -> Tensor:
        table = np.sin(np.arange(x.shape[1])[:, None] / 10 ** np.arange(WIDTH))
        return super().trunk(x + torch.tensor(table, dtype=x.dtype, device=x.device))


class Decay(Net):
    def trunk(self, x: Tensor) -> Tensor:
        rows = [0.9**i for i in range(x.shape[1])]
        return super().trunk(x * torch.tensor(rows, dtype=x.dtype, device=x.device)[:, None])


class LastOnly(Net):
    def trunk(self, x: Tensor) -> Tensor:
        flags = [float(i == x.shape[1] - 1) for i in range(x.shape[1])]
        return super().trunk(x + torch.tensor(flags, dtype=x.dtype, device=x.device)[:, None])


# -- a loss inside the model --


class MeanLoss(Net):
    """Over ranks with other numbers of targets."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(ids).flatten(0, 1), targets.flatten())


class SumLoss(Net):
    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = super().forward(ids).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")


class CountedLoss(Net):
    """Divided by the number of this rank's targets."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = super().forward(ids).flatten(0, 1)
        each = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return each.sum() / (targets != -100).sum()


def own_loss(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: Any) -> None:
    ids, targets = batch
    targets = torch.where(
        torch.arange(targets.shape[1]) < 3 + mesh.get_local_rank("cp"), -100, targets
    )
    targets.__dict__.update(vars(batch[1]))
    model(ids, targets).backward()


# -- a branch that the check does not take --


class ByBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.trunk(self.tok(ids))
        return self.head(x if self.ready > 0 else x - x.mean(1, keepdim=True))


class InEval(Net):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.trunk(self.tok(ids))
        return self.head(x if self.training else x.cumsum(1))


class ByValue(Block):
    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and bool(x.abs().max() < 1e9):
            x = x - x.mean(1, keepdim=True)
        return super().forward(x)


# -- what only backward does --


class HookedGradient(Net):
    def trunk(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda g: g - g.mean(1, keepdim=True))
        return super().trunk(x)


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(1).cumsum(1).flip(1)


class WithOwnBackward(Net):
    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(x if x.is_meta else OwnBackward.apply(x))


class HookInBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad and not y.is_meta:
            y.register_hook(lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=1e-6))
        return y


# -- what is kept on a module --


class Load(Net):
    def trunk(self, x: Tensor) -> Tensor:
        x = super().trunk(x)
        self.load = x.softmax(-1).mean((0, 1))
        return x


class LoadInBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.load = x.sigmoid().mean((0, 1))
        return x


def with_load(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: Any) -> None:
    loss = loss_of(model, batch)
    kept = [m.load for m in model.modules() if "load" in vars(m)]
    (loss + 16 * sum(each.square().sum() for each in kept)).backward()


class LoadOfBlock(Net):
    """The model leaves it on one of its blocks."""

    def trunk(self, x: Tensor) -> Tensor:
        x = super().trunk(x)
        self.layers[0].load = x.tanh().mean((0, 1))
        return x


# -- numbers and views that depend on the length, which the static check leaves to the audit --


class Before(Net):
    """``how`` is done with (B, S, WIDTH) before the blocks."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how

    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(self.how(x))


NUMBERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * torch.tensor(float(x.shape[1])),
    lambda x: x * torch.full((1,), float(x.shape[1]), device=x.device),
    lambda x: x * x.new_full((x.shape[1], 1), float(x.shape[1])),
    lambda x: x * x.shape[1] ** -0.5,
    lambda x: F.layer_norm(x.mT, x.shape[1:2]).mT,
]


class ScaleByLength(Block):
    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 6)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scale = math.log(x.shape[1])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return self.o(y.transpose(1, 2).flatten(2))


class Pooled(Net):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.trunk(self.tok(ids))).mean(1)


def classify(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: Any) -> None:
    F.cross_entropy(model(batch[0]), torch.tensor([1, 2])).backward()


class SquaredLoss(Net):
    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = super().forward(ids).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten()) ** 2


KINDS: dict[str, list[tuple[Callable[[], nn.Module], Step]]] = {
    "kernel": [(partial(Net, kind), train) for kind in (OwnSoftmax, LinearAttention, ByDtype)],
    "neighbours": [(Smoothed, train), (partial(Net, LargestOfThree), train), (Sharpened, train)],
    "length": [(partial(Net, LogN), train), (ByLength, train), (partial(Net, MeanIfLong), train)],
    "second input": [
        (Positions, with_second(lambda ids: torch.arange(ids.shape[1]).expand_as(ids))),
        (Positions, with_second(lambda ids: torch.arange(ids.shape[1]))),
        (Positions, with_second(Tensor.clone)),
    ],
    "evaluation": [
        (Net, evaluated(Tensor.clone)),
        (Net, evaluate_a_part_alone),
        (Net, evaluated(Tensor.int)),
    ],
    "argument": [
        (Centered, with_second(lambda ids: 1)),
        (Rolled, with_second(lambda ids: 1)),
        (ByAttribute, smooth),
    ],
    "tables": [(Sines, train), (Decay, train), (LastOnly, train)],
    "loss": [(MeanLoss, own_loss), (SumLoss, own_loss), (CountedLoss, own_loss)],
    "branch": [
        (ByBuffer, train),
        (InEval, evaluated(lambda ids: ids)),
        (partial(Net, ByValue), train),
    ],
    "backward": [
        (HookedGradient, train),
        (WithOwnBackward, train),
        (partial(Net, HookInBlock), train),
    ],
    "numbers": [(partial(Before, how), train) for how in NUMBERS],
    "scale of attention": [(partial(Net, ScaleByLength), train)],
    "a mean as output": [(Pooled, classify)],
    "square of a loss": [(SquaredLoss, own_loss)],
    "attribute": [
        (Load, with_load),
        (partial(Net, LoadInBlock), with_load),
        (LoadOfBlock, with_load),
    ],
}


def example_of(model: nn.Module) -> Any:
    """Of the model's forward, for parallelize."""
    ids = torch.zeros((2, 6), dtype=torch.int64)
    two = isinstance(model, (Positions, MeanLoss, SumLoss, CountedLoss, SquaredLoss))
    return ((ids, ids.clone()), {}) if two else ((ids,), {})
