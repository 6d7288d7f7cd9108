"""Logits as rows (one per token) whose vocabulary is split over ``tp``, views of them, and their cross
entropy; no autograd.

Rows are computed and read in chunks. The loss reads them twice. First ``CrossEntropy.see`` reads each chunk,
and ``finish`` combines the results over ``tp`` and returns the loss; then ``gradient`` returns the gradient
of each chunk. Between the two passes only the log-sum-exp of each row is kept.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from parallel3d._layout.param_layout import local_chunk
from parallel3d._torch.autograd import assert_async
from parallel3d._torch.simulated import inner_tensors
from parallel3d._util.recompute import kept
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.tp.collectives import TpAxis, copy_by_rank

Where = slice | Tensor
Op = Callable[[Tensor], Tensor]

# Elements in a chunk of logits that exist: 64 MiB in float32.
_DENSE_CHUNK = 1 << 24
# A chunk of logits to be computed has as many elements as the hidden states, but at least these rows.
_LEAST_ROWS = 256


@dataclass(frozen=True, eq=False)
class LogitsRows:
    """This rank's logits, (rows, classes), or the inputs of the linear layer that computes them when they are
    needed.

    Attributes:
        hidden: the layer's input, (rows, features); without a weight the logits.
        weight, bias: the layer's rows for this rank's classes, (classes, features) and (classes,).
        dtype: the dtype in which the layer computes under autocast.
        tokens: rows in a chunk.
        over: set when the backward has ended: the weight may be freed, or changed by an optimizer's step.
    """

    hidden: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    dtype: torch.dtype | None = None
    tokens: int | None = None
    over: Event = field(default_factory=Event)

    def chunk(self, classes: int) -> int:
        """Returns the number of rows to process at once, for so many ``classes`` on a rank."""
        if self.weight is None:
            return max(_DENSE_CHUNK // max(classes, 1), 1)
        return self.tokens or max(self.hidden.numel() // max(classes, 1), _LEAST_ROWS)

    def get(self, where: Where) -> Tensor:
        """Returns the logits of the rows ``where``; StateError if the weight may have been freed or changed
        since the forward."""
        if self.weight is None:
            return self.hidden[where]
        storages = [t.untyped_storage() for t in inner_tensors(self.weight) if t.numel()]
        if self.over.is_set() or not all(storage.size() for storage in storages):
            when = "the backward" if self.over.is_set() else "the head's weight was freed"
            raise StateError(
                f'logits were asked for after {when}, but loss_parallel="chunked" makes them only when they '
                "are asked for; do it earlier, keep the head's unit gathered until then "
                "(reshard_after_forward=False), or use loss_parallel=True"
            )
        with torch.autocast(self.hidden.device.type, enabled=False):
            bias = None if self.bias is None else self._cast(self.bias)
            return F.linear(self._cast(self.hidden[where]), self._cast(self.weight), bias)

    def _cast(self, x: Tensor) -> Tensor:
        return x if self.dtype is None else x.to(self.dtype)

    def start(self, needed: tuple[bool, ...]) -> list[Tensor | None]:
        """Returns zeros into which to sum the gradients of hidden, weight and bias, None for those not
        ``needed``. Those of parameters are at least float32."""
        sums: list[Tensor | None] = [torch.zeros_like(self.hidden) if needed[0] else None]
        for p, need in zip((self.weight, self.bias), needed[1:], strict=True):
            dtype = None if p is None else torch.promote_types(p.dtype, torch.float32)
            sums.append(torch.zeros_like(p, dtype=dtype) if p is not None and need else None)
        return sums

    def add(self, sums: list[Tensor | None], where: Where, grad: Tensor) -> None:
        """Adds to ``sums`` the gradients of hidden, weight and bias that follow from ``grad``, the gradient
        of the logits of the rows ``where``."""
        hidden, weight, bias = sums
        if hidden is not None:
            rows = grad
            if self.weight is not None:
                rows = (grad @ self._cast(self.weight)).to(self.hidden.dtype)
            if isinstance(where, slice):
                hidden[where] += rows
            else:
                hidden.index_add_(0, where, rows)
        if weight is not None:
            weight += grad.T @ self._cast(self.hidden[where])
        if bias is not None:
            bias += grad.sum(0)


@dataclass(frozen=True, eq=False)
class LogitsView:
    """A tensor of logits: some rows of a ``LogitsRows``, in some shape, after elementwise functions ``ops``.

    Attributes:
        axis: the tp axis over which the vocabulary is split; None: it is whole.
        lead: the shape without the vocabulary's dim.
        at: the place of the vocabulary's dim.
        index: the row at each place of ``lead``, of that shape; None: all rows in order.
    """

    rows: LogitsRows
    axis: TpAxis | None
    vocab_size: int
    lead: tuple[int, ...]
    at: int
    dtype: torch.dtype
    index: Tensor | None = None
    ops: tuple[Op, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits with the whole vocabulary."""
        return (*self.lead[: self.at], self.vocab_size, *self.lead[self.at :])

    @property
    def count(self) -> int:
        return self.rows.hidden.shape[0] if self.index is None else self.index.numel()

    def index_of_rows(self) -> Tensor:
        """Returns ``index``, or the tensor that it stands for if it is None."""
        if self.index is not None:
            return self.index
        return torch.arange(self.count, device=self.rows.hidden.device).view(self.lead)

    def parts(self) -> Iterator[slice]:
        """Yields slices that cut this view's rows into chunks; one empty slice if there are no rows."""
        classes = self.vocab_size if self.axis is None else self.axis.chunk(self.vocab_size)
        count, step = self.count, self.rows.chunk(classes)
        for start in range(0, max(count, 1), step):
            yield slice(start, min(start + step, count))

    def where(self, part: slice) -> Where:
        """Returns the places in ``rows`` of a chunk of this view's rows."""
        return part if self.index is None else self.index.reshape(-1)[part]

    def get(self, part: slice) -> Tensor:
        """Returns the logits of one chunk, (rows, classes of this rank)."""
        return run(self.ops, self.rows.get(self.where(part)))

    def local(self) -> Tensor:
        """Returns all logits of this rank's classes, (\\*lead, classes of this rank)."""
        if self.index is None and not self.ops and self.rows.weight is None:
            flat = self.rows.hidden
        else:
            flat = torch.cat([self.get(part) for part in self.parts()])
        return flat.view(*self.lead, flat.shape[1])


def run(ops: tuple[Op, ...], x: Tensor) -> Tensor:
    return functools.reduce(lambda y, op: op(y), ops, x)


@dataclass(frozen=True, eq=False)
class GradientSource:
    """A summand of the gradient of a view's logits, which is computed chunk by chunk.

    Attributes:
        gradient: a function of (the chunk's logits, the chunk's slice) that returns their gradient; both are
            (rows, classes of this rank).
    """

    view: LogitsView
    gradient: Callable[[Tensor, slice], Tensor]


def pull_back(source: GradientSource, x: Any, part: slice, done: int = 0) -> Tensor:
    """Returns the gradient of ``x``, the logits of one chunk after the first ``done`` of the view's
    elementwise functions: the source's gradient, propagated back through the other functions."""
    ops = source.view.ops[done:]
    if not ops:
        return source.gradient(x, part)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = run(ops, x)
    with torch.no_grad():
        grad = source.gradient(y.detach(), part)
    return torch.autograd.grad(y, x, grad)[0]


@dataclass(frozen=True, eq=False)
class LossOptions:
    """Arguments of ``vocab_parallel_cross_entropy``; raises Parallel3dError for an invalid value."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    weight: Tensor | None = None
    reduction: str = "mean"

    def __post_init__(self) -> None:
        reduction, smoothing = self.reduction, self.label_smoothing
        if reduction not in ("mean", "sum", "none"):
            raise Parallel3dError(f"reduction is {reduction!r}; it must be mean, sum or none")
        if not 0.0 <= smoothing <= 1.0:
            raise Parallel3dError(f"label_smoothing is {smoothing}; it must be from 0 to 1")
        if self.z_loss < 0.0:
            raise Parallel3dError(f"z_loss is {self.z_loss}; it must not be negative")


class CrossEntropy:
    """Computes the cross entropy of rows of logits, and its gradient, from this rank's chunk of the classes
    (that of ``torch.chunk``). It computes in float32, for float64 logits in float64.

    Args:
        target: the class ids, (rows,).
        dtype: the dtype of the logits, in which the loss is returned.
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
        self._set_weights(target)
        self._seen: list[tuple[Tensor, ...]] = []
        # Where each row's target is among this rank's classes, if it is here.
        target = target.masked_fill(~self.counted, 0)
        self.here, self.at, self.rank_without = self.counted, target, False
        if self.axis is not None:
            chunk = self.axis.chunk(vocab_size)
            start = self.axis.rank * chunk
            at = copy_by_rank(target, self.axis) - start
            self.here = self.counted & (at >= 0) & (at < chunk)
            self.at = at.masked_fill(~self.here, 0)
            self.rank_without = chunk * (self.axis.size - 1) >= vocab_size

    def _set_weights(self, target: Tensor) -> None:
        """Computes the class weights of the targets and of this rank's classes, and the sum of all."""
        weight = self.options.weight
        self.of_target = self.of_class = None
        self.weights: Any = self.vocab_size
        if weight is None:
            return
        if weight.shape != (self.vocab_size,):
            raise Parallel3dError(
                f"weight has the shape {tuple(weight.shape)}; there are {self.vocab_size} classes, "
                "and each rank gives the weights of all"
            )
        self.of_class = weight = weight.detach().to(self.number)
        self.weights = weight.sum()
        self.of_target = weight[target.masked_fill(~self.counted, 0)]
        if self.axis is not None:
            self.of_class = local_chunk(weight, 0, self.axis.size, self.axis.rank)

    # ---- forward ----

    def see(self, logits: Tensor, rows: slice) -> None:
        """Reads the next chunk of logits, (rows, classes of this rank), and keeps what the loss needs of each
        row: log-sum-exp and the target's logit."""
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
        """Returns the loss, (rows,) or a scalar, when ``see`` has read all rows. Takes two all-reduces, of
        one and of two or three numbers a row."""
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
        """Combines the ranks' log-sum-exp and sums of each row into those of the whole vocabulary."""

        def maximum() -> Tensor:
            largest = lse.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=axis.group)
            return largest.masked_fill_(largest == float("-inf"), 0)

        def totals() -> Tensor:
            joined = torch.stack([(lse - largest).exp(), *sums])
            dist.all_reduce(joined, group=axis.group)
            return joined

        largest = kept("largest of rows", maximum)
        total, *sums = kept("sums of rows", totals).unbind(0)
        return largest + total.log(), sums

    # ---- backward ----

    def gradient(self, logits: Tensor, rows: slice, grad: Tensor) -> Tensor:
        """Returns the gradient of the logits of ``rows``, in their dtype; ``grad`` is the loss's gradient."""
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
        """Returns ``values``, one a row or one for all, as (rows, 1), with zeros where ``skipped``."""
        zeros = torch.zeros_like(skipped, dtype=self.number)
        return (zeros + values).masked_fill(skipped, 0).unsqueeze(1)
