"""Faults planted in plans, in hand-written tensor parallelism, in models and in what seeds them.

Each is what people do; ``module`` is where it was planted, which verify must name.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.nn import functional as F

from _support.testing.verify_models import (
    PLAN,
    SEQUENCE,
    Attention,
    ColumnLinear,
    Copy,
    Decoder,
    Loss,
    RowEmbedding,
    RowLinear,
    Sum,
    average_over,
    by_hand,
    ids,
    on_each,
    part,
)
from parallel3d import parallelize
from parallel3d.tp import Colwise, Replicated


class NoReduction(RowLinear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class ReducedTwice(RowLinear):
    def forward(self, x: Tensor) -> Tensor:
        return _sum_both_ways(super().forward(x), self.tp)


class BiasOnEveryRank(RowLinear):
    def forward(self, x: Tensor) -> Tensor:
        return _sum_both_ways(F.linear(x, self.weight, self.bias), self.tp)


class SummedAgainInBackward(RowLinear):
    """As torch.distributed.nn.functional.all_reduce does it."""

    def forward(self, x: Tensor) -> Tensor:
        return _sum_both_ways(F.linear(x, self.weight), self.tp)


def _sum_both_ways(x: Tensor, tp: DeviceMesh) -> Tensor:
    """The sum; its gradients summed."""
    return Copy.apply(Sum.apply(x, tp.get_group()), tp.get_group())


class NoSumOfInputGradient(ColumnLinear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class NoMask(RowEmbedding):
    def mask(self, found: Tensor, elsewhere: Tensor) -> Tensor:
        return found


class WholeHeadCount(Attention):
    """Divides its features by the number of heads that the plain model has."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (4, -1)) for w in (self.wq, self.wk, self.wv))
        return self.attend(q, k, v)


class PlainHeadCount(Attention):
    """The same where the heads are not split."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 4)) for w in (self.wq, self.wk, self.wv))
        return self.attend(q, k, v)


class QueryAndKeySwapped(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 4)) for w in (self.wq, self.wk, self.wv))
        return self.attend(self.rope(k), self.rope(q), v)


class QueriesByRows(Attention):
    """Each tp rank attends with its part of the sequence as queries; all of them begin at position 0."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 4)) for w in (self.wq, self.wk, self.wv))
        rank, rows = self.tp.get_local_rank(), x.shape[1] // self.tp.size()
        q, k = self.rope(q.narrow(1, rank * rows, rows)), self.rope(k)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        before = rank * rows
        y = F.pad(y, (0, 0, before, x.shape[1] - rows - before))
        return self.wo(_sum_both_ways(y, self.tp))


class ResidualAgain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + x + self.drop(self.mlp(self.norm2(x)))


class SummedLoss(Loss):
    def forward(self, logits: Tensor, ids: Tensor) -> Tensor:
        return _sum_both_ways(super().forward(logits, ids), self.tp)


class LowPrecision(RowLinear):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype)
        return _sum_both_ways(y, self.tp)


Mesh = tuple[int, int, int]


@dataclass(frozen=True)
class Fault:
    """One of them."""

    title: str  # what is wrong, for the docs
    module: str  # which must be named
    kind: str  # what it must be found by
    mesh: Mesh
    build: Callable[[], nn.Module]  # the plain model
    options: dict[str, Any] = field(default_factory=dict)  # for ``verify``
    batch: Callable[[int], Any] = ids


FAULTS: list[Fault] = []
build = functools.partial(Decoder, vocab=20)
biased = functools.partial(Decoder, vocab=20, bias=True)
tied = functools.partial(Decoder, tied=True)
Planted = Callable[[nn.Module, DeviceMesh], nn.Module | None]


def planted(title: str, module: str, kind: str, mesh: Mesh, make: Any = build) -> Any:
    """Registers a function that makes the model parallel, wrongly."""

    def register(fn: Planted) -> Planted:
        def apply(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            return fn(model, mesh) or model

        FAULTS.append(Fault(title, module, kind, mesh, make, {"apply": apply}))
        return fn

    return register


def in_plan(title: str, module: str, kind: str, mesh: Mesh, plan: dict, changes: dict) -> None:
    """Registers a plan with other rules for some modules."""
    rules = {name: style for name, style in plan.items() if not name.startswith(tuple(changes))}
    FAULTS.append(Fault(title, module, kind, mesh, build, {"tp_plan": changed(rules, changes)}))


def changed(plan: dict, changes: dict) -> dict:
    """``plan`` spelled out for two layers, with ``changes``."""
    spelled = {}
    for name, style in plan.items():
        for i in "01" if "*" in name else [""]:
            head, brace, rest = name.replace("*", i).partition("{")
            inside, _, tail = rest.partition("}")
            for each in inside.split(",") if brace else [""]:
                spelled[head + each + tail] = style
    return spelled | changes


# ---- plans ----

in_plan(
    "a norm's gradient not summed over tp under sequence parallelism",
    "layers.1.norm2",
    "gradient",
    (1, 1, 2),
    SEQUENCE,
    {"layers.1.norm2": Replicated()},
)
in_plan(
    "a norm's gradient summed over tp though every rank has all of it",
    "layers.0.norm1",
    "gradient",
    (1, 1, 2),
    PLAN,
    {"layers.0.norm1": Replicated(tp_grad="partial")},
)
in_plan(
    "the output of a colwise layer gathered, the next one still expecting a part",
    "layers.0.mlp.down",
    "error",
    (1, 1, 2),
    PLAN,
    {"layers.0.mlp.up": Colwise(output="replicate")},
)


# ---- hand-written layers ----


def replaced(name: str, cls: type[nn.Module]) -> Planted:
    """Megatron's layers, but for one of another class."""

    def apply(model: nn.Module, mesh: DeviceMesh) -> None:
        by_hand(model, mesh)
        model.get_submodule(name).__class__ = cls

    return apply


for title, module, cls in (
    ("no all-reduce after a rowwise layer", "layers.1.attn.wo", NoReduction),
    ("all-reduced twice after a rowwise layer", "layers.0.mlp.down", ReducedTwice),
    ("an MLP computed in bfloat16 in the parallel model only", "layers.0.mlp.down", LowPrecision),
    ("token ids of other ranks' rows not masked", "embed", NoMask),
    ("query and key swapped", "layers.1.attn", QueryAndKeySwapped),
    ("a residual added twice", "layers.1", ResidualAgain),
    ("the loss summed over tp", "criterion", SummedLoss),
):  # fmt: skip
    kind = "input" if module.endswith(".attn") else "output"
    planted(title, module, kind, (1, 1, 2))(replaced(module, cls))

for title, module, kind, mesh, make, cls in (
    ("the bias of a rowwise layer added on every tp rank",
     "layers.0.mlp.down", "output", (1, 1, 2), biased, BiasOnEveryRank),
    ("the gradient of a rowwise layer's output all-reduced too",
     "layers.1.mlp.down", "gradient", (1, 1, 2), build, SummedAgainInBackward),
    ("the input's gradient of one colwise layer not all-reduced",
     "layers.1.attn.wk", "gradient", (1, 1, 2), build, NoSumOfInputGradient),
    ("the input's gradient of an MLP's colwise layer not all-reduced",
     "layers.0.mlp.up", "gradient", (2, 1, 2), build, NoSumOfInputGradient),
):  # fmt: skip
    planted(title, module, kind, mesh, make)(replaced(module, cls))


def plain_heads() -> nn.Module:
    model = build()
    for layer in model.layers:
        layer.attn.__class__ = PlainHeadCount
    return model


@planted("heads counted as in the whole model", "layers.0.attn", "input", (1, 1, 2), plain_heads)
def _(model, mesh):
    by_hand(model, mesh)
    for layer in model.layers:
        layer.attn.__class__ = WholeHeadCount


@planted(
    "rotary positions of a part of the sequence without its offset",
    "layers.0.attn.rope",
    "output",
    (1, 1, 2),
)
def _(model, mesh):
    by_hand(model, mesh, whole="layers.0.attn.")
    model.layers[0].attn.__class__ = QueriesByRows


@planted("tp ranks hold each other's parts of a weight", "layers.1.mlp.up", "output", (1, 1, 2))
def _(model, mesh):
    up = model.layers[1].mlp.up
    whole = up.weight.detach().clone()
    by_hand(model, mesh)
    tp = mesh["tp"]
    up.weight = part(whole.requires_grad_(), 0, tp, tp.size() - 1 - tp.get_local_rank())


@planted(
    "a gradient averaged over tp instead of the data ranks",
    "layers.0.mlp.down",
    "gradient",
    (2, 1, 2),
)
def _(model, mesh):
    whole = model.layers[0].mlp.down.weight
    by_hand(model, mesh)
    down = model.layers[0].mlp.down
    down.weight = part(whole, 1, mesh["tp"])
    down.weight.register_post_accumulate_grad_hook(average_over(mesh, "tp"))


# ---- around parallelize ----


@planted(
    "the mean over the data ranks divided once too often",
    "layers.1.mlp.down",
    "gradient",
    (2, 2, 1),
)
def _(model, mesh):
    parallelize(model, mesh)
    model.layers[1].set_gradient_divide_factor(8.0)


@planted(
    "a tied head given a weight of its own",
    "head",
    "structure",
    (1, 2, 2),
    functools.partial(Decoder, tied=True),
)
def _(model, mesh):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    parallelize(model, mesh, PLAN)


@planted("a parameter frozen by accident", "layers.0.attn.wk", "structure", (1, 2, 1))
def _(model, mesh):
    model.layers[0].attn.wk.requires_grad_(False)
    parallelize(model, mesh)


@planted("a table of rotary angles cut over tp", "layers.1.attn.rope", "output", (1, 1, 2))
def _(model, mesh):
    parallelize(model, mesh, PLAN)
    rope, rank = model.layers[1].attn.rope, mesh["tp"].get_local_rank()
    for name in ("cos", "sin"):
        table = on_each(getattr(rope, name)).narrow(1, rank, 1)
        setattr(rope, name, table.clone())


@planted("weights kept from the first step", "layers.1.mlp.up", "output", (1, 2, 1))
def _(model, mesh):
    up = model.layers[1].mlp.up
    kept = []

    class Stale(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not kept:
                kept.append(self.weight.detach().clone())
            return F.linear(x, self.weight + (kept[0] - self.weight).detach())

    up.__class__ = Stale
    parallelize(model, mesh)


@planted("a gradient clipped before it is reduced", "layers.0.mlp.up", "gradient", (2, 2, 1))
def _(model, mesh):
    up = model.layers[0].mlp.up

    class Clipped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight.view_as(self.weight)
            weight.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
            return F.linear(x, weight)

    up.__class__ = Clipped
    parallelize(model, mesh)


class Seen(nn.Module):
    """Keeps the mean of what it has seen, as a statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x


def watching() -> nn.Module:
    model = build()
    model.layers[0].drop = Seen()
    return model


@planted(
    "a running statistic not synchronised over the data ranks",
    "layers.0.drop",
    "buffer",
    (2, 1, 1),
    watching,
)
def _(model, mesh):
    parallelize(model, mesh)


# ---- dropout ----

dropping = functools.partial(Decoder, drop=0.2)


SEEDS = {
    "all data ranks seeded alike: they drop the same elements": (
        lambda layout, rank, step: 1234 + step
    ),
    "tp ranks seeded by their global rank: they drop other elements of the same tensor": (
        lambda layout, rank, step: 1234 + rank
    ),
}
for title, seed_of in SEEDS.items():
    options = {"tp_plan": PLAN, "steps": 1, "seed_of": seed_of}
    FAULTS.append(Fault(title, "drop", "dropout", (2, 1, 2), dropping, options))
planted(
    "tp ranks drop the same elements of their parts of the hidden features",
    "layers.0.mlp.drop",
    "dropout",
    (1, 1, 2),
    functools.partial(Decoder, drop=0.2, vocab=20),
)(by_hand)


def table() -> str:
    """For docs/verify.md."""
    rows = [f"| {f.title} | `{f.module}` | {f.kind} |" for f in FAULTS]
    return "\n".join(["| fault | module that is named | found by |", "| --- | --- | --- |", *rows])
