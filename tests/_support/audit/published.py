"""Published faults of other libraries, and one that a plan of ours can have, each made again as a small
change of a right engine or program, and what ``testing.audit`` must say of it.

A fault of experts on an axis of their own is made on the shard axis here. ``NAMES`` says where each was
reported: tf is huggingface/transformers, acc accelerate, trl, pt pytorch/pytorch, tt pytorch/torchtitan, mlm
NVIDIA/Megatron-LM, mb NVIDIA-NeMo/Megatron-Bridge, am NVIDIA-NeMo/Automodel, ao pytorch/ao.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from parallel3d import MeshLayout, MixedPrecisionPolicy
from parallel3d.testing import Engine
from parallel3d.testing.relations.engines import Ours, Torchs, named

VOCABULARY, WIDTH, LENGTH = 29, 16, 7
SHARD, TP = MeshLayout(1, 2), MeshLayout(1, 1, 2)


class Mixture(nn.Module):
    """A router and two experts, both of which see all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        shares = logits.softmax(-1)
        mixed = sum(shares[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return mixed, logits.square().mean()


class Block(nn.Module):
    """A gated feed-forward with an adapter, and a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.lora_a = nn.Linear(WIDTH, 4, bias=False)
        self.lora_b = nn.Linear(4, WIDTH, bias=False)
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        x = x + self.down(F.gelu(self.up(y))) + self.lora_b(self.lora_a(y))
        mixed, penalty = self.mixture(self.norm2(x))
        return x + mixed, penalty


class Net(nn.Module):
    """Returns logits and the mean penalty of its routers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.extra, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, penalties = self.embed(ids), []
        for block in self.blocks:
            x, penalty = block(x)
            penalties.append(penalty)
        marked = (ids[:, 0] == 0)[:, None, None]
        if marked.any():
            x = x + marked * self.extra(x)
        return self.head(x), torch.stack(penalties).mean()


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def tokens(index: int) -> Tensor:
    """Two sequences; those of odd samples are marked, so that they use ``extra``."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)
    ids[:, 0] = 0 if index % 2 else 1
    return ids


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits, penalty = model(ids)
    return cross_entropy(logits, ids) + 0.1 * penalty


def masked_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Odd samples have few targets: the mean over a micro-batch's own."""
    targets = ids[:, 1:].masked_fill((ids[:, :1] == 0) & (torch.arange(1, LENGTH) > 2), -100)
    return F.cross_entropy(model(ids)[0][:, :-1].flatten(0, 1), targets.flatten())


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# -- engines with a fault ------------------------------------------------------------------------------


class Faulty(Ours):
    """Ours; ``spoil`` changes gradients before the optimizer sees them."""

    pattern = ""
    """The parameters that ``spoil`` is of; all if ""."""

    def make(self, model: nn.Module) -> None:
        super().make(model)
        self.optimizer.register_step_pre_hook(lambda *_: self.spoil() if self.in_step else None)

    def chosen(self) -> Iterator[Tensor]:
        """This rank's parts of the gradients of the chosen parameters."""
        for name, param in named(self.model):
            if re.search(self.pattern, name) and param.grad is not None:
                yield local(param.grad)

    def spoil(self) -> None:
        for grad in self.chosen():
            self.change(grad)

    def change(self, grad: Tensor) -> None:
        """In place."""


class LossTimesTp(Faulty):
    def backward(self, loss: Tensor, count: int) -> None:
        super().backward(loss * self.program.layout.tp, count)


class LossTimesData(Faulty):
    def backward(self, loss: Tensor, count: int) -> None:
        super().backward(loss * self.program.layout.data_size, count)


class LossOverTp(Faulty):
    def backward(self, loss: Tensor, count: int) -> None:
        super().backward(loss / self.program.layout.tp, count)


class TwiceEachMicroBatch(Faulty):
    def change(self, grad: Tensor) -> None:
        grad.mul_(self.variant.micro_batches)


class PenaltyUndivided(Faulty):
    def take_step(self, batches: Sequence[Any]) -> Any:
        total = torch.zeros((), dtype=torch.float64)
        for (ids,) in self.accumulate(batches):
            logits, penalty = self.model(ids)
            main = cross_entropy(logits, ids)
            (main / len(batches) + 0.1 * penalty).backward()
            total += main.detach() / len(batches)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class NormOfOwnPart(Faulty):
    def norm(self) -> float | None:
        return float(torch.stack([grad.norm() for grad in self.chosen()]).norm())


class NormWithoutExperts(Faulty):
    pattern = r"^(?!.*experts)"

    def norm(self) -> float | None:
        squares = torch.stack([grad.square().sum() for grad in self.chosen()]).sum()
        dist.all_reduce(squares)
        return float(squares.sqrt())


class ExpertsTimesShard(Faulty):
    pattern = "experts"

    def change(self, grad: Tensor) -> None:
        grad.mul_(self.program.layout.shard)


class RouterOverShard(Faulty):
    pattern = "router"

    def change(self, grad: Tensor) -> None:
        grad.div_(self.program.layout.shard)


class DenseOfOneRank(Faulty):
    """What is no expert gets the first rank's part of each gradient and zeros."""

    pattern = r"^(?!.*experts)"

    def change(self, grad: Tensor) -> None:
        grad.mul_(dist.get_rank() == 0)


class OnlyTheLast(Faulty):
    def accumulate(self, batches: Sequence[Any]) -> Iterator[Any]:
        for batch in batches:  # as a model that is made anew for each micro-batch
            self.optimizer.zero_grad()
            yield batch


class AdapterUntrained(Faulty):
    pattern = "lora_b"

    def change(self, grad: Tensor) -> None:
        grad.zero_()


class NormsSummedInBf16(Faulty):
    pattern = r"norm.*weight"

    def change(self, grad: Tensor) -> None:
        grad.copy_(grad.bfloat16())


class SummedTwice(Faulty):
    def make(self, model: nn.Module) -> None:
        plan = {**PLAN, "blocks.*.norm2": "replicated_with_grad_allreduce"}
        object.__setattr__(self.program, "tp_plan", plan)
        object.__setattr__(self.program, "options", {"audit": False})
        super().make(model)


class ExportsTheBase(Faulty):
    def export(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(value) if "lora" in name else value
            for name, value in super().export().items()
        }


class SometimesWrong(Faulty):
    pattern = "experts"

    def spoil(self) -> None:
        if self.variant.again:
            next(self.chosen()).add_(1e-6)


class AdapterOfOwnRankResumed(Faulty):
    def load(self, folder: Path) -> None:
        super().load(folder)
        with torch.no_grad():
            for name, param in named(self.model):
                if "lora" in name and dist.get_rank() != 0:
                    local(param).zero_()


class OptimizerForgotten(Faulty):
    def load(self, folder: Path) -> None:
        super().load(folder)
        self.optimizer.state.clear()


class RecomputedFromOtherMemory(Faulty):
    pattern = r"blocks\.0\.up"

    def change(self, grad: Tensor) -> None:
        grad.flatten()[:1].add_(0.5 * self.variant.recomputed)


class CapturedWrong(Faulty):
    pattern = "experts"

    def make(self, model: nn.Module) -> None:
        self.captured = self.variant.compiled
        self.variant = type(self.variant)()  # the same without a compiler
        super().make(model)

    def change(self, grad: Tensor) -> None:
        grad.mul_(not self.captured)


class ShardByShard(torch.optim.SGD):
    """Divides each gradient by its norm; of a DTensor each rank by that of its own part."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad = local(param.grad)
                    grad.div_(grad.norm() + 1e-12)
        super().step()


def by_shard(params: Any) -> torch.optim.Optimizer:
    return ShardByShard(params, lr=0.05)


def states_by_size(params: Any) -> torch.optim.Optimizer:
    """Momentum of small tensors only, as of 8-bit states; of a DTensor by the size of its part."""
    small, large = [], []
    for param in params:
        (small if local(param).numel() < 200 else large).append(param)
    return torch.optim.SGD(
        [{"params": small, "momentum": 0.9}, {"params": large, "momentum": 0.0}], lr=0.05
    )


# -- the list ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A published fault, and the program that shows it."""

    where: str  # the report
    relation: str  # what it must break
    engine: type[Engine] = Ours
    group: str = ""  # the parameters that must be named, a pattern of all of them
    factor: float | None = None  # that must be said; None: they are no multiple
    axes: str = ""
    layout: MeshLayout = SHARD
    loss: Callable[..., Tensor] = loss_of
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    what: str = ""  # a part of what must be said


_ALL = r"embed\.weight, blocks\.\*\.norm\.weight, blocks\.\*\.norm\.bias and \d+ more"
_NORMS = r"blocks\.\*\.norm\.weight, blocks\.\*\.norm2\.weight"
_EXPERTS = r"blocks\.\*\.mixture\.experts\.\*\.weight, blocks\.\*\.mixture\.experts\.\*\.bias"
_ROUTER = r"blocks\.\*\.mixture\.router\.weight, blocks\.\*\.mixture\.router\.bias"
_MIXED = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)}

FAULTS = [
    Fault("tf 46775: loss times sp", "plain", LossTimesTp, _ALL, 2.0, "tp", TP),
    Fault("tf 45994: loss times data ranks", "plain", LossTimesData, _ALL, 2.0, "shard"),
    Fault("trl 7100: tokens counted tp times", "plain", LossOverTp, _ALL, 0.5, "1 / tp", TP),
    Fault(
        "mlm 6660: doubled by micro-batch",
        "accumulation",
        TwiceEachMicroBatch,
        _ALL,
        2.0,
        "micro_batches",
    ),
    Fault(
        "am 3359: auxiliary loss times micro-batches",
        "accumulation",
        PenaltyUndivided,
        r"embed.*and \d+ more",
    ),
    Fault(
        "am 3530: only the last micro-batch", "accumulation", OnlyTheLast, r"embed.*and \d+ more"
    ),
    Fault(
        "tf 34191: means of unequal micro-batches",
        "accumulation",
        Ours,
        r"embed.*and \d+ more",
        loss=masked_loss,
    ),
    Fault("am 3817: each group's own norm", "norm", NormOfOwnPart),
    Fault("mlm 5916: a norm without experts", "norm", NormWithoutExperts),
    Fault(
        "mlm 5956: experts' gradients times ep", "plain", ExpertsTimesShard, _EXPERTS, 2.0, "shard"
    ),
    Fault("tf 48687: the router's gradient", "plain", RouterOverShard, _ROUTER, 0.5, "1 / shard"),
    Fault(
        "tf 48205: most of dense gradients lost", "plain", DenseOfOneRank, r"embed.*and \d+ more"
    ),
    Fault(
        "mb 5634: an adapter that isn't trained",
        "plain",
        AdapterUntrained,
        r"blocks\.\*\.lora_b\.weight",
        0.0,
    ),
    Fault("pt 190626: norms summed in bf16", "plain", NormsSummedInBf16, _NORMS),
    Fault(
        "ours: norms summed twice over tp",
        "plain",
        SummedTwice,
        r"blocks\.\*\.norm2\.weight, blocks\.\*\.norm2\.bias",
        2.0,
        "tp",
        TP,
    ),
    Fault(
        "verl 7014: the base model exported",
        "exported",
        ExportsTheBase,
        r"blocks\.\*\.lora_a\.weight, blocks\.\*\.lora_b\.weight",
        0.0,
    ),
    Fault(
        "mlm 7400: gradients wrong at times",
        "repeated",
        SometimesWrong,
        r"blocks\.\*\.mixture\.experts\.\*\.weight",
    ),
    Fault(
        "acc 4206: a part of each adapter resumed",
        "resumed",
        AdapterOfOwnRankResumed,
        r"blocks\.\*\.lora_a\.weight, blocks\.\*\.lora_b\.weight",
    ),
    Fault("axolotl 2744: states lost on resume", "resumed", OptimizerForgotten, _ALL),
    Fault(
        "tt 2581: memory offloaded too early",
        "recomputed",
        RecomputedFromOtherMemory,
        r"blocks\.\*\.up\.weight, blocks\.\*\.up\.bias",
    ),
    Fault("tt 4588: capture is not eager", "compiled", CapturedWrong, _EXPERTS, 0.0),
    Fault("tt 4353: a matrix optimizer by shard", "plain", Ours, _ALL, optimizer=by_shard),
    Fault("ao 4912: states by the shard's size", "plain", Ours, r".+", optimizer=states_by_size),
    Fault(
        "pt 196996: first used in the last micro-batch",
        "accumulation",
        Torchs,
        options=_MIXED,
        what="AssertionError",
    ),
    Fault(
        "pt 186998: frozen, forward, thawed", "frozen", Torchs, options=_MIXED, what="RuntimeError"
    ),
]
