"""Cross entropy of rows of logits whose vocabulary is split over ``tp``: the numbers, without autograd.

A loss reads the rows twice, in chunks: ``see`` takes from each row what the loss needs, ``finish`` combines
that over ``tp`` and returns the loss, ``gradient`` returns the gradient of a chunk's rows. Between the two
passes only the log-sum-exp of each row is kept.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from parallel3d._layout.param_layout import local_chunk
from parallel3d._torch.autograd import assert_async
from parallel3d.errors import Parallel3dError
from parallel3d.tp.collectives import TpAxis

_REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True, eq=False)
class LossOptions:
    """Options of ``vocab_parallel_cross_entropy``; raises Parallel3dError for an invalid value."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    weight: Tensor | None = None
    reduction: str = "mean"

    def __post_init__(self) -> None:
        if self.reduction not in _REDUCTIONS:
            raise Parallel3dError(f"reduction is {self.reduction!r}; it is one of {_REDUCTIONS}")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise Parallel3dError(f"label_smoothing is {self.label_smoothing}; it is from 0 to 1")
        if self.z_loss < 0.0:
            raise Parallel3dError(f"z_loss is {self.z_loss}; it must not be negative")


class CrossEntropy:
    """The loss of ``n`` rows, computed in float32, or for float64 logits in float64.

    Args:
        target: (n,) class ids.
        vocab_size: the number of classes; this rank has the chunk of them that ``torch.chunk`` cuts.
        dtype: of the logits, and of the loss.
    """

    def __init__(
        self,
        target: Tensor,
        vocab_size: int,
        axis: TpAxis | None,
        options: LossOptions,
        dtype: torch.dtype,
    ) -> None:
        self.axis = None if axis is None or axis.size == 1 else axis
        self.options, self.vocab_size, self.dtype = options, vocab_size, dtype
        self.number = torch.promote_types(dtype, torch.float32)  # the dtype of the computation
        self.counted = target != options.ignore_index
        valid = (target >= 0) & (target < vocab_size) | ~self.counted
        assert_async(valid.all(), f"a target is outside the vocabulary of {vocab_size}")
        self._weigh(target)
        self._seen: list[tuple[Tensor, ...]] = []
        # Where each row's target is among this rank's classes, if it is here.
        target = target.masked_fill(~self.counted, 0)
        self.here, self.at, self.rank_without = self.counted, target, False
        if self.axis is not None:
            chunk = self.axis.chunk(vocab_size)
            start = self.axis.rank * chunk
            # A factory call makes one tensor per simulated rank.
            if isinstance(start, torch.SymInt):
                own = torch.empty(target.shape, dtype=target.dtype, device=target.device)
                target = own.copy_(target)
            at = target - start
            self.here = self.counted & (at >= 0) & (at < chunk)
            self.at = at.masked_fill(~self.here, 0)
            self.rank_without = chunk * (self.axis.size - 1) >= vocab_size

    def _weigh(self, target: Tensor) -> None:
        """Sets the class weights of the targets and of this rank's classes, and the sum of all."""
        weight = self.options.weight
        self.of_target = self.of_class = None
        self.weights: Any = self.vocab_size
        if weight is not None:
            if weight.shape != (self.vocab_size,):
                raise Parallel3dError(
                    f"weight has the shape {tuple(weight.shape)}; there are {self.vocab_size} classes, "
                    "and each rank gives the weights of all"
                )
            weight = weight.detach().to(self.number)
            self.weights = weight.sum()
            self.of_target = weight[target.masked_fill(~self.counted, 0)]
            self.of_class = weight
            if self.axis is not None:
                self.of_class = local_chunk(weight, 0, self.axis.size, self.axis.rank)

    # ---- forward ----

    def see(self, logits: Tensor, rows: slice) -> None:
        """Takes the logits, (rows, local classes), of the next rows."""
        numbers = logits.to(self.number)
        # A rank without a class gets one of probability zero. Simulated ranks must run the same code.
        x = F.pad(numbers, (0, 1), value=float("-inf")) if self.rank_without else numbers
        of_target = x.gather(1, self.at[rows].unsqueeze(1)).squeeze(1)
        seen = [x.logsumexp(1), of_target.masked_fill(~self.here[rows], 0)]
        if self.options.label_smoothing:
            weighted = numbers if self.of_class is None else numbers * self.of_class
            seen.append(weighted.sum(1))
        self._seen.append(tuple(seen))

    def finish(self) -> Tensor:
        """Returns the loss, (n,) or a scalar, after all-reduces of one and of two or three numbers a row."""
        lse, *sums = (torch.cat(c) if len(c) > 1 else c[0] for c in zip(*self._seen, strict=True))
        self._seen = []
        if self.axis is not None:
            lse, sums = self._join(lse, sums, self.axis)
        self.lse = lse
        options = self.options
        loss = lse - sums[0]
        if self.of_target is not None:
            loss = loss * self.of_target
        if smoothing := options.label_smoothing:
            uniform = (lse * self.weights - sums[1]) / self.vocab_size
            loss = loss * (1 - smoothing) + uniform * smoothing
        if options.z_loss:
            z = options.z_loss * lse.square()
            loss = loss + (z if self.of_target is None else z * self.of_target)
        loss = loss.masked_fill(~self.counted, 0)
        self.divisor: Tensor | None = None
        if options.reduction == "mean":
            counted = self.counted.to(self.number)
            self.divisor = (counted if self.of_target is None else self.of_target * counted).sum()
            loss = loss.sum() / self.divisor
        elif options.reduction == "sum":
            loss = loss.sum()
        return loss.to(self.dtype)

    def _join(self, lse: Tensor, sums: Any, axis: TpAxis) -> tuple[Tensor, Any]:
        """Combines the numbers of the ranks' chunks of the vocabulary."""
        largest = lse.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=axis.group)
        largest.masked_fill_(largest == float("-inf"), 0)
        joined = torch.stack([(lse - largest).exp(), *sums])
        dist.all_reduce(joined, group=axis.group)
        total, *sums = joined.unbind(0)
        return largest + total.log(), sums

    # ---- backward ----

    def gradient(self, logits: Tensor, rows: slice, grad: Tensor) -> Tensor:
        """Returns the gradient of the logits of ``rows``, in their dtype; ``grad`` is that of the loss."""
        options, smoothing = self.options, self.options.label_smoothing
        grad = grad.to(self.number)
        scale = grad[rows] if grad.dim() else grad / (1 if self.divisor is None else self.divisor)
        lse, weight = self.lse[rows], None if self.of_target is None else self.of_target[rows]
        on_target: Any = (1 - smoothing) * (1 if weight is None else weight)
        of_lse = on_target
        if options.z_loss:
            of_lse = of_lse + 2 * options.z_loss * lse * (1 if weight is None else weight)
        if smoothing:
            of_lse = of_lse + smoothing / self.vocab_size * self.weights
        skipped = ~self.counted[rows]
        result = (logits.to(self.number) - lse.unsqueeze(1)).exp_()
        result *= self._per_row(scale * of_lse, skipped)
        if smoothing:
            each = self._per_row(scale * (smoothing / self.vocab_size), skipped)
            result -= each if self.of_class is None else each * self.of_class
        taken = self._per_row(scale * on_target, ~self.here[rows])
        if self.rank_without:
            result = F.pad(result, (0, 1))
        result.scatter_add_(1, self.at[rows].unsqueeze(1), -taken)
        if self.rank_without:
            result = result.narrow(1, 0, logits.shape[1])
        return result.to(logits.dtype)

    def _per_row(self, values: Tensor, skipped: Tensor) -> Tensor:
        """Returns ``values`` (one a row, or one for all) as a column, zero where ``skipped``."""
        zeros = torch.zeros_like(skipped, dtype=self.number)
        return (zeros + values).masked_fill(skipped, 0).unsqueeze(1)
