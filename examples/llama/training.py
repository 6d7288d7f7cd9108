"""One optimizer step of a language model, the same for a parallel model and a plain one."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["WARMUP_STEPS", "Schedule", "Trainer", "mean_loss"]

WARMUP_STEPS = 20

Cut = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Schedule:
    """The learning rate: linear warm-up to ``lr``, then half a cosine down to a tenth of it.

    ``steps``: all there are. ``warmup``: until the peak.
    """

    lr: float
    steps: int
    warmup: int = WARMUP_STEPS

    def factor(self, step: int) -> float:
        """What part of ``lr`` step number ``step`` takes."""
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / self.steps)
        return min((step + 1) / max(self.warmup, 1), cosine)


class Trainer:
    """A model, its optimizer and the learning rate's schedule.

    Args:
        clip: ``clip(parameters, norm)``: clips the gradients, returns their norm.
        schedule: of the learning rate.
        micro_batch: sequences per forward and backward; None: all that ``step`` is given.
        accumulate: ``accumulate(model, micro_batches)`` yields these: ``p3d.optim.accumulate`` for a model
            on a mesh, so that replicas exchange gradients once.
        cut: gives a rank of cp its part of (inputs, targets, positions): ``p3d.cp.shard_batch`` with a mesh;
            None: all of them.
        before_micro_batch: called with the number of each micro-batch before its forward.
        optimizer: makes it, of parameters and AdamW's options: ``partial(p3d.optim.local, AdamW)`` for a
            model on a mesh, so that it steps on a few plain tensors instead of all DTensors.
    """

    def __init__(
        self,
        model: nn.Module,
        clip: Callable[..., Tensor],
        schedule: Schedule,
        *,
        micro_batch: int | None = None,
        accumulate: Callable[[nn.Module, Iterable[Tensor]], Iterator[Tensor]] | None = None,
        cut: Cut | None = None,
        before_micro_batch: Callable[[int], object] | None = None,
        optimizer: Callable[..., Optimizer] = torch.optim.AdamW,
    ) -> None:
        self.model, self.clip = model, clip
        self.micro_batch, self.accumulate = micro_batch, accumulate
        self.cut, self.before_micro_batch = cut, before_micro_batch
        self.optimizer = optimizer(
            model.parameters(), lr=schedule.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule.factor)

    @property
    def state(self) -> tuple[nn.Module, Optimizer, LRScheduler]:
        """What a checkpoint holds of it."""
        return self.model, self.optimizer, self.schedule

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, seq + 1) token ids -> (mean loss over them, gradient norm over all ranks)."""
        loss = self.forward_backward(tokens)
        norm = self.clip(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss, norm

    def forward_backward(self, tokens: Tensor) -> Tensor:
        """Adds the gradients of the mean loss, micro-batch after micro-batch. Returns that loss."""
        parts: Iterable[Tensor] = tokens.split(self.micro_batch or len(tokens))
        if self.accumulate is not None:
            parts = self.accumulate(self.model, parts)
        losses = []
        for number, part in enumerate(parts):
            if self.before_micro_batch is not None:
                self.before_micro_batch(number)
            loss = mean_loss(self.model, part, self.cut) * (len(part) / len(tokens))
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()


def mean_loss(model: nn.Module, tokens: Tensor, cut: Cut | None = None) -> Tensor:
    """(batch, seq + 1) token ids -> the mean cross entropy of the next tokens, in float64.

    With ``cut`` it is that of this rank's part of every sequence, and the mean over the ranks the batch's.

    Each token's loss is computed in float32 at least, also of bfloat16 logits. Under loss parallel the
    logits are split over ``tp``, or never whole, and so is what is made of them here.
    """
    inputs, targets, places = tokens[:, :-1], tokens[:, 1:], ()
    if cut is not None:
        positions = torch.arange(inputs.shape[1], device=tokens.device)[None]
        inputs, targets, *places = cut((inputs, targets, positions))
    logits = model(inputs, *places)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.double().mean()  # a sum in float32 would depend on how many ranks share it
