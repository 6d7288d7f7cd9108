"""Rows of logits, and views of them: the data of ``VocabLogits``."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d._torch.simulated import inner_tensors
from parallel3d.errors import StateError
from parallel3d.tp.collectives import TpAxis

Where = slice | Tensor
Op = Callable[[Tensor], Tensor]

# Elements in a chunk of logits that exist: 64 MiB in float32.
_DENSE_CHUNK = 1 << 24
# A chunk of logits to be computed has as many elements as the hidden states, but at least these rows.
_LEAST_ROWS = 256


@dataclass(frozen=True, eq=False)
class LogitsRows:
    """This rank's logits, (rows, classes), or the linear layer that computes them when they are needed.

    Attributes:
        hidden: (rows, features); without a weight the logits.
        weight, bias: this rank's rows of the layer's, (classes, features) and (classes,).
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

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """The tensors that get gradients."""
        return self.hidden, self.weight, self.bias

    def chunk(self, classes: int) -> int:
        """Returns the number of rows in a chunk."""
        if self.weight is None:
            return max(_DENSE_CHUNK // max(classes, 1), 1)
        return self.tokens or max(self.hidden.numel() // max(classes, 1), _LEAST_ROWS)

    def get(self, where: Where) -> Tensor:
        """Returns the logits of some rows; StateError if the weight is no longer that of the forward."""
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
        """Returns zeros for the gradients' sums, those of parameters in float32, as a matmul sums."""
        sums: list[Tensor | None] = [torch.zeros_like(self.hidden) if needed[0] else None]
        for p, need in zip((self.weight, self.bias), needed[1:], strict=True):
            dtype = None if p is None else torch.promote_types(p.dtype, torch.float32)
            sums.append(torch.zeros_like(p, dtype=dtype) if p is not None and need else None)
        return sums

    def add(self, sums: list[Tensor | None], where: Where, grad: Tensor) -> None:
        """Adds the gradients of the inputs for the gradient of some rows' logits."""
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
    """Logits of some rows, after some elementwise functions, ``ops``.

    Attributes:
        axis: the tp axis over which the vocabulary is split; None: it is whole.
        lead: the shape without the vocabulary.
        at: the vocabulary's dim.
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
        """The shape of the whole logits."""
        return (*self.lead[: self.at], self.vocab_size, *self.lead[self.at :])

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.rows.hidden.shape[0] if self.index is None else self.index.numel()

    def index_of_rows(self) -> Tensor:
        """Returns ``index``, also where it is None."""
        if self.index is not None:
            return self.index
        return torch.arange(self.count, device=self.rows.hidden.device).view(self.lead)

    def parts(self) -> Iterator[slice]:
        """Yields the rows in chunks, whose logits are computed at a time. At least one, also of no rows."""
        classes = self.vocab_size if self.axis is None else self.axis.chunk(self.vocab_size)
        count, step = self.count, self.rows.chunk(classes)
        for start in range(0, max(count, 1), step):
            yield slice(start, min(start + step, count))

    def where(self, part: slice) -> Where:
        """Returns the indices of a chunk's rows in ``rows``."""
        return part if self.index is None else self.index.reshape(-1)[part]

    def get(self, part: slice) -> Tensor:
        """Returns the logits of a chunk, (rows, local classes)."""
        return run(self.ops, self.rows.get(self.where(part)))

    def local(self) -> Tensor:
        """Returns all logits, (\\*lead, local classes)."""
        if self.index is None and not self.ops and self.rows.weight is None:
            flat = self.rows.hidden
        else:
            flat = torch.cat([self.get(part) for part in self.parts()])
        return flat.view(*self.lead, flat.shape[1])


def run(ops: tuple[Op, ...], x: Tensor) -> Tensor:
    """Applies ``ops`` to ``x``, one after another."""
    return functools.reduce(lambda y, op: op(y), ops, x)


@dataclass(frozen=True, eq=False)
class GradientSource:
    """A gradient of ``view``'s logits, computed chunk by chunk: ``gradient`` is a function of (a chunk's
    logits, the chunk) that returns their gradient, both (rows, local classes)."""

    view: LogitsView
    gradient: Callable[[Tensor, slice], Tensor]


def pull_back(source: GradientSource, x: Any, part: slice, done: int = 0) -> Tensor:
    """Returns the gradient of ``x``, a chunk's logits before all but the first ``done`` functions."""
    ops = source.view.ops[done:]
    if not ops:
        return source.gradient(x, part)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = run(ops, x)
    with torch.no_grad():
        grad = source.gradient(y.detach(), part)
    return torch.autograd.grad(y, x, grad)[0]
