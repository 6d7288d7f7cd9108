"""VocabLogits: what a model's head returns under loss parallel, in place of the logits themselves.

It is a tensor of the plain logits' shape that holds this rank's classes only, or nothing but what the head
reads. Cross entropy takes it as it is; views of its rows and functions of single logits go on being one;
everything else gets the plain logits, gathered, and so computes what it would without loss parallel.

Autograd sees ordinary nodes on tensors of the plain shape, so hooks, ``retain_grad`` and functions that know
nothing of this work. Only the gradient that travels between our own nodes is lazy, a ``VocabGrad``: it is
made part by part where it is turned into that of what the head read.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch

from parallel3d._compat import graph_is_kept, no_torch_function, untraced
from parallel3d._layout import local_chunk
from parallel3d._tree import map_tensors
from parallel3d.errors import StateError
from parallel3d.tp.collectives import TpAxis, gather_from_tp
from parallel3d.tp.logits.cross_entropy import CrossEntropy, LossOptions
from parallel3d.tp.logits.rows import (
    DenseRows,
    GradientSource,
    LinearRows,
    LogitsView,
    pull_back,
    run,
)

__all__ = ["VocabLogits", "lazy_logits", "loss_of", "next_logits", "sharded_logits"]


def sharded_logits(local: Tensor, vocab_size: int, axis: TpAxis | None) -> "VocabLogits":
    """Logits of which each rank has a chunk of the classes.

    Args:
        local: (..., classes on this rank), the chunk that ``torch.chunk`` cuts.
        vocab_size: number of classes.
        axis: the tp axis; None: ``local`` has all classes.
    """
    lead = tuple(local.shape[:-1])
    flat = local.reshape(_product(lead), local.shape[-1])
    rows = DenseRows(flat.detach())
    view = LogitsView(rows, axis, vocab_size, lead, len(lead), local.dtype)
    return _Make.apply(view, flat)


def lazy_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    vocab_size: int,
    axis: TpAxis | None,
    *,
    tokens: int | None = None,
) -> "VocabLogits":
    """The logits ``linear(hidden, weight, bias)``, made when they are needed, some rows at a time.

    Args:
        hidden: (..., features), one copy per rank: its gradients are parts to be summed over tp.
        weight: (classes on this rank, features).
        bias: (classes on this rank,) or None.
        vocab_size: number of classes.
        axis: the tp axis; None: ``weight`` has all classes.
        tokens: rows to take at a time.
    """
    lead = tuple(hidden.shape[:-1])
    flat = hidden.reshape(_product(lead), hidden.shape[-1])
    device = hidden.device.type
    computes = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    rows = LinearRows(
        flat.detach(),
        weight.detach(),
        None if bias is None else bias.detach(),
        computes,
        tokens,
    )
    view = LogitsView(rows, axis, vocab_size, lead, len(lead), computes or hidden.dtype)
    return _Make.apply(view, flat, weight, bias)


def next_logits(logits: "VocabLogits", view: LogitsView) -> "VocabLogits":
    """``view``, of the same rows as ``logits``, made of it differentiably."""
    return _Step.apply(logits, view)


def loss_of(logits: "VocabLogits", target: Tensor, options: LossOptions) -> Tensor:
    """The cross entropy of ``logits``, whose classes may be at any dim; ``target`` has the other dims."""
    return _Loss.apply(logits, target, options)


class VocabLogits(Tensor):
    """See the module. Whatever gathers is a collective of the tp group: all its ranks must do it alike,
    also in an evaluation. ``repr`` does not gather.
    """

    _view: LogitsView
    # Once something may write to the plain logits, or has: they, which then stand for this tensor.
    _full: Tensor | None
    # The tensor this one is a view of, and how: writing to either must show in the other.
    _parent: "VocabLogits | None"
    _remake: Callable[[Tensor], Tensor] | None

    @staticmethod
    def __new__(cls, view: LogitsView) -> "VocabLogits":
        """A tensor without a graph."""
        self = _wrapper(cls, view)
        self._full = self._parent = self._remake = None
        return self

    @untraced
    def full_tensor(self) -> Tensor:
        """The plain logits, differentiably. A collective, unless they are there."""
        return self.shared_full() if self.is_settled() else _Full.apply(self)

    def holds_classes_last(self) -> bool:
        """Whether the vocabulary is the last dim."""
        return self._view.at == len(self._view.lead)

    def is_settled(self) -> bool:
        """Whether plain logits stand for this tensor, or for one it is a view of."""
        return self._full is not None or (self._parent is not None and self._parent.is_settled())

    def shared_full(self) -> Tensor:
        """The plain logits that stand for this tensor and all its views from now on."""
        if self._full is not None:
            return self._full
        # They outlive the caller's mode: who only looks, without gradients, takes none from the loss.
        with torch.inference_mode(self.is_inference()), torch.set_grad_enabled(self.requires_grad):
            if self._parent is None or self._remake is None:
                self._full = _Full.apply(self)
            else:
                self._full = self._remake(self._parent.shared_full())
            return self._full

    def view_of(self, parent: "VocabLogits", remake: Callable[[Tensor], Tensor]) -> "VocabLogits":
        """Notes that this tensor shares memory with ``parent``, where that is plain."""
        self._parent, self._remake = parent, remake
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Does not gather: it may run on one rank only."""
        view = self._view
        over = "" if view.axis is None else f", vocabulary split over tp={view.axis.size}"
        return f"VocabLogits(shape={view.shape}, dtype={view.dtype}{over}; full_tensor() has the values)"

    def __format__(self, format_spec: str) -> str:
        """As ``repr``."""
        return repr(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See ``_logits_functions``."""
        from parallel3d.tp.logits.functions import call  # which needs this module

        return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """What comes here has passed ``__torch_function__`` by: autograd's own work, functions in C++."""
        if func is torch.ops.aten.detach.default and not args[0].is_settled():
            return VocabLogits(args[0]._view)
        return _dispatch_plain(func, args, kwargs, VocabLogits, _plain_values)


class VocabGrad(Tensor):
    """A gradient of ``VocabLogits``, made part by part where it is used; see the module."""

    _view: LogitsView
    _sources: tuple[GradientSource, ...]

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, view: LogitsView, sources: tuple[GradientSource, ...]) -> "VocabGrad":
        """A tensor of ``view``'s shape: the sum of the sources, which lie after ``view``."""
        self = _wrapper(cls, view)
        self._sources = sources
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Does not gather."""
        return f"VocabGrad(shape={self._view.shape}, dtype={self._view.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Sums stay lazy; whatever else reads the gradient gets it whole."""
        if func is torch.ops.aten.detach.default:
            return VocabGrad(args[0]._view, args[0]._sources)
        if func is torch.ops.aten.add.Tensor and not kwargs and len(args) == 2:
            a, b = args
            if isinstance(a, VocabGrad) and isinstance(b, VocabGrad) and a._view is b._view:
                return VocabGrad(a._view, a._sources + b._sources)
        with enable_reentrant_dispatch():  # autograd takes us back through functions of logits
            return _dispatch_plain(func, args, kwargs, VocabGrad, _whole_gradient)


# ---- the nodes ----


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses ``create_graph=True``: the gradients are made by formulas that have no graph."""

    @functools.wraps(backward)
    def checked(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise StateError(
                "create_graph=True through logits under loss parallel, whose gradients can't be "
                "differentiated again; use loss_parallel=False"
            )
        return backward(ctx, grad)

    return checked


def _kept(ctx: Any) -> Any:
    """What a node has kept for its backward; like saved tensors it goes with the first."""
    kept = ctx.kept
    if kept is None:
        raise RuntimeError(
            "backward a second time through logits under loss parallel; the first needs retain_graph=True"
        )
    if not graph_is_kept():
        ctx.kept = None
    return kept


class _Make(torch.autograd.Function):
    """Of what the head gives, or reads, logits."""

    @staticmethod
    def forward(ctx: Any, view: LogitsView, *inputs: Tensor | None) -> VocabLogits:
        ctx.kept = view
        ctx.save_for_backward(*inputs)  # so that autograd notices when they are written to
        return VocabLogits(view)

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        view: LogitsView = _kept(ctx)
        rows = view.rows.of(*ctx.saved_tensors)
        found = _collect(rows, _sources_of(grad, view), ctx.needs_input_grad[1:])
        if not graph_is_kept():
            view.rows.end()
        return None, *found


class _Step(torch.autograd.Function):
    """Another view of the same rows."""

    @staticmethod
    def forward(ctx: Any, logits: VocabLogits, view: LogitsView) -> VocabLogits:
        ctx.kept = logits._view, view
        return VocabLogits(view)

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        before, after = _kept(ctx)
        return VocabGrad(before, _sources_of(grad, after)), None


class _Full(torch.autograd.Function):
    """The plain logits."""

    @staticmethod
    def forward(ctx: Any, logits: VocabLogits) -> Tensor:
        view = ctx.kept = logits._view
        full = _gathered(view.local(), view)
        # Who gets it may write to it: it is no view, and not what the rows are.
        return full.clone() if view.axis is None or full._base is not None else full

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        view = _kept(ctx)
        return VocabGrad(view, _sources_of(grad, view))


class _Loss(torch.autograd.Function):
    """Cross entropy: two small all-reduces, none in the backward."""

    @staticmethod
    def forward(ctx: Any, logits: VocabLogits, target: Tensor, options: LossOptions) -> Tensor:
        view = logits._view
        flat = target.reshape(-1)
        loss = CrossEntropy(flat, view.vocab_size, view.axis, options, view.dtype)
        ctx.kept = view, loss
        for part in view.parts():
            loss.see(view.get(part), part)
        result = loss.finish()
        return result.view(target.shape) if result.dim() else result

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        view, loss = _kept(ctx)
        grad = grad.reshape(-1) if grad.dim() else grad
        source = GradientSource(view, lambda x, part: loss.gradient(x, part, grad))
        return VocabGrad(view, (source,)), None, None


def _sources_of(grad: Tensor, view: LogitsView) -> tuple[GradientSource, ...]:
    """What ``grad``, of ``view``'s logits, is made of; of a plain one this rank's classes."""
    if isinstance(grad, VocabGrad):
        return grad._sources
    flat = grad.movedim(view.at, -1).reshape(view.count, view.vocab_size)
    if view.axis is not None:
        flat = local_chunk(flat, 1, view.axis.size, view.axis.rank)
    return (GradientSource(view, lambda x, part: flat[part]),)


def _collect(
    rows: Any, sources: tuple[GradientSource, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs of ``rows``."""
    if isinstance(rows, DenseRows) and len(sources) == 1 and sources[0].view.index is None:
        (source,) = sources
        found = [pull_back(source, rows.get(part), part) for part in source.view.parts()]
        return (found[0] if len(found) == 1 else torch.cat(found),)
    sums = rows.start(needed)
    for source in sources:
        for part in source.view.parts():
            where = source.view.where(part)
            rows.add(sums, where, pull_back(source, rows.get(where), part))
    return tuple(
        total if total is None or given is None else total.to(given.dtype)
        for total, given in zip(sums, rows.inputs, strict=True)
    )


# ---- plain tensors of them ----


def _gathered(local: Tensor, view: LogitsView) -> Tensor:
    axis = view.axis
    whole = local if axis is None else gather_from_tp(local, -1, view.vocab_size, axis)
    return whole.movedim(-1, view.at)


def _plain_values(logits: VocabLogits) -> Tensor:
    if logits.is_settled():
        return logits.shared_full().detach()
    return _gathered(logits._view.local(), logits._view)


def _whole_gradient(grad: VocabGrad) -> Tensor:
    view, total = grad._view, None
    for source in grad._sources:
        for part in source.view.parts():
            where = source.view.where(part)
            x = run(view.ops, view.rows.get(where))
            found = pull_back(source, x, part, done=len(view.ops))
            if total is None:
                total = found.new_zeros(view.rows.count, found.shape[1])
            total.index_add_(0, source.view.index_of_rows().reshape(-1)[part], found)
    assert total is not None
    total = total[view.where(slice(None))]
    return _gathered(total.view(*view.lead, total.shape[1]), view).to(view.dtype)


def _dispatch_plain(func: Any, args: Any, kwargs: Any, kind: Any, of: Any) -> Any:
    """``func``, an operation, of plain tensors in place of those that are of ``kind``."""
    if func._schema.is_mutable:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(value, kind):
                raise StateError(
                    f"{func} would write to logits that are split over tp; write to a clone, or to "
                    "full_tensor()"
                )

    def plain(tensor: Tensor) -> Tensor:
        return of(tensor) if isinstance(tensor, kind) else tensor

    return func(*map_tensors(plain, args), **map_tensors(plain, kwargs or {}))


def _wrapper(cls: Any, view: LogitsView) -> Any:
    device = view.rows.inputs[0].device
    self = torch.Tensor._make_wrapper_subclass(cls, view.shape, dtype=view.dtype, device=device)
    self._view = view
    return self


def _product(sizes: tuple[int, ...]) -> int:
    return math.prod(sizes)
