"""Where logits come from, row by row, and what became of them since: what ``VocabLogits`` refers to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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

# Numbers in a chunk of logits that are there already: 64 MiB in float32.
_DENSE_CHUNK = 1 << 24
# A chunk of logits to be made has as many numbers as the hidden states, but some rows for the matmul.
_LEAST_ROWS = 256


@dataclass(frozen=True, eq=False)
class DenseRows:
    """This rank's chunk of the logits, (rows, classes)."""

    local: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What gradients go to."""
        return (self.local,)

    def of(self, *inputs: Any) -> "DenseRows":
        """The same of other inputs."""
        return DenseRows(*inputs)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.local.shape[0]

    def chunk(self, classes: int) -> int:
        """Rows to take at a time."""
        return max(_DENSE_CHUNK // max(classes, 1), 1)

    def get(self, where: Where) -> Tensor:
        """The logits of some rows."""
        return self.local[where]

    def end(self) -> None:
        """Called when the backward is over."""

    def start(self, needed: tuple[bool, ...]) -> list[Tensor | None]:
        """Where gradients are summed."""
        return [torch.zeros_like(self.local) if needed[0] else None]

    def add(self, sums: list[Tensor | None], where: Where, grad: Tensor) -> None:
        """Adds what the gradient of some rows' logits gives."""
        _add_rows(sums[0], where, grad)


@dataclass(frozen=True, eq=False)
class LinearRows:
    """Logits that a linear layer makes when they are needed.

    Attributes:
        hidden: (rows, features).
        weight: this rank's rows of the layer's, (classes, features).
        bias: (classes,) or None.
        dtype: in which the layer computes, where autocast was on.
        tokens: rows to take at a time, or None.
        over: set when the backward is over: the weight may be freed, or hold what a step has made of it.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    dtype: torch.dtype | None = None
    tokens: int | None = None
    over: Event = field(default_factory=Event)

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """What gradients go to."""
        return self.hidden, self.weight, self.bias

    def of(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> "LinearRows":
        """The same of other inputs."""
        return replace(self, hidden=hidden, weight=weight, bias=bias)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.hidden.shape[0]

    def chunk(self, classes: int) -> int:
        """Rows to take at a time."""
        if self.tokens is not None:
            return self.tokens
        return max(self.hidden.numel() // max(classes, 1), _LEAST_ROWS)

    def get(self, where: Where) -> Tensor:
        """The logits of some rows.

        Raises:
            StateError: the weight is no longer what it was in the head's forward.
        """
        freed = (t.numel() and not t.untyped_storage().size() for t in inner_tensors(self.weight))
        if self.over.is_set() or any(freed):
            when = (
                "after the backward" if self.over.is_set() else "after the head's weight was freed"
            )
            raise StateError(
                f'logits were asked for {when}, but loss_parallel="chunked" makes them only when they are '
                "asked for; do it earlier, keep the head's unit gathered until then "
                "(reshard_after_forward=False), or use loss_parallel=True"
            )
        with torch.autocast(self.hidden.device.type, enabled=False):
            return F.linear(
                self._cast(self.hidden[where]),
                self._cast(self.weight),
                None if self.bias is None else self._cast(self.bias),
            )

    def _cast(self, x: Tensor) -> Tensor:
        return x if self.dtype is None else x.to(self.dtype)

    def end(self) -> None:
        """Called when the backward is over."""
        self.over.set()

    def start(self, needed: tuple[bool, ...]) -> list[Tensor | None]:
        """Where gradients are summed: of parameters in float32, as one matmul sums within."""
        hidden = torch.zeros_like(self.hidden) if needed[0] else None
        wanted = zip((self.weight, self.bias), needed[1:], strict=True)
        return [
            hidden,
            *(
                torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
                if p is not None and need
                else None
                for p, need in wanted
            ),
        ]

    def add(self, sums: list[Tensor | None], where: Where, grad: Tensor) -> None:
        """Adds what the gradient of some rows' logits gives."""
        if sums[0] is not None:
            _add_rows(sums[0], where, (grad @ self._cast(self.weight)).to(self.hidden.dtype))
        if sums[1] is not None:
            sums[1] += grad.T @ self._cast(self.hidden[where])
        if sums[2] is not None:
            sums[2] += grad.sum(0)


def _add_rows(into: Tensor | None, where: Where, grad: Tensor) -> None:
    if into is None:
        return
    if isinstance(where, slice):
        into[where] += grad
    else:
        into.index_add_(0, where, grad)


@dataclass(frozen=True, eq=False)
class LogitsView:
    """Logits of some rows, after some functions of single logits.

    Attributes:
        rows: where they come from.
        axis: the tp axis over which the vocabulary is split; None: it is whole.
        vocab_size: number of classes.
        lead: the shape without the vocabulary.
        at: place of the vocabulary among the dims.
        dtype: of the logits.
        index: of each place of ``lead`` its row, of that shape; None: all rows in order.
        ops: the functions, elementwise.
    """

    rows: Any
    axis: TpAxis | None
    vocab_size: int
    lead: tuple[int, ...]
    at: int
    dtype: torch.dtype
    index: Tensor | None = None
    ops: tuple[Op, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole logits."""
        return (*self.lead[: self.at], self.vocab_size, *self.lead[self.at :])

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.rows.count if self.index is None else self.index.numel()

    def index_of_rows(self) -> Tensor:
        """``index``, also where it is None."""
        if self.index is not None:
            return self.index
        device = self.rows.inputs[0].device
        return torch.arange(self.count, device=device).view(self.lead)

    def parts(self) -> Iterator[slice]:
        """The rows in chunks; a chunk's logits are made at a time. At least one, also of no rows."""
        classes = self.vocab_size if self.axis is None else self.axis.chunk(self.vocab_size)
        count, step = self.count, self.rows.chunk(classes)
        for start in range(0, max(count, 1), step):
            yield slice(start, min(start + step, count))

    def where(self, part: slice) -> Where:
        """The rows' places in ``rows``."""
        return part if self.index is None else self.index.reshape(-1)[part]

    def get(self, part: slice) -> Tensor:
        """(rows, local classes): the logits of a part."""
        return run(self.ops, self.rows.get(self.where(part)))

    def local(self) -> Tensor:
        """(\\*lead, local classes): all of them."""
        if self.index is None and not self.ops and isinstance(self.rows, DenseRows):
            flat = self.rows.local
        else:
            flat = torch.cat([self.get(part) for part in self.parts()])
        return flat.view(*self.lead, flat.shape[1])


def run(ops: tuple[Op, ...], x: Tensor) -> Tensor:
    """``x`` after all of ``ops``."""
    for op in ops:
        x = op(x)
    return x


@dataclass(frozen=True, eq=False)
class GradientSource:
    """A gradient of ``view``'s logits, given part by part.

    Attributes:
        gradient: of (the part's logits, the part) -> their gradient, both (rows, local classes).
    """

    view: LogitsView
    gradient: Callable[[Tensor, slice], Tensor]


def pull_back(source: GradientSource, x: Tensor, part: slice, done: int = 0) -> Tensor:
    """The gradient of ``x``, the part's logits before all but the first ``done`` functions."""
    ops = source.view.ops[done:]
    if not ops:
        return source.gradient(x, part)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = run(ops, x)
    with torch.no_grad():
        grad = source.gradient(y.detach(), part)
    return torch.autograd.grad(y, x, grad)[0]
