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
import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import enable_reentrant_dispatch

from parallel3d._layout.param_layout import local_chunk
from parallel3d._torch.autograd import (
    graph_is_kept,
    no_torch_function,
    torch_function_off,
    untraced,
)
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.errors import StateError
from parallel3d.tp.collectives import TpAxis, gather_from_tp
from parallel3d.tp.vocab_parallel.cross_entropy import CrossEntropy, LossOptions
from parallel3d.tp.vocab_parallel.rows import (
    DenseRows,
    GradientSource,
    LinearRows,
    LogitsView,
    pull_back,
    run,
)


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


# What functions do with ``VocabLogits``: the few that take them as they are, and all others.
#
# A handler gets the function it stands for and its arguments, and returns NotImplemented for those
# it can't take. What has no handler that can is done with the plain logits.


@untraced
def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` of arguments some of which are ``VocabLogits``: handled, asked of the tensor itself, or done
    with the plain logits."""
    given = [t for t in tensors_in((args, kwargs)) if isinstance(t, VocabLogits)]
    if not any(t.is_settled() for t in given):
        if func in OWN:
            with torch_function_off():
                return func(*args, **kwargs)
        if func in HANDLED:
            result = HANDLED[func](func, *args, **kwargs)
            if result is not NotImplemented:
                return result
    return _on_plain(func, args, kwargs, given)


def _on_plain(func: Any, args: Any, kwargs: Any, given: list[VocabLogits]) -> Any:
    """``func`` of the plain logits.

    They are kept only where something may write to them later: what ``func`` writes to, and what it
    returns a view of.
    """
    written = _written(func, args, kwargs)
    # In inference mode no tensor says that it is a view.
    keep = func in _EXPOSING or torch.is_inference_mode_enabled()
    plain: dict[int, Tensor] = {}

    def of(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, VocabLogits):
            return tensor
        if id(tensor) not in plain:
            shared = keep or any(tensor is t for t in written)
            plain[id(tensor)] = tensor.shared_full() if shared else tensor.full_tensor()
        return plain[id(tensor)]

    result = func(*map_tensors(of, args), **map_tensors(of, kwargs))
    for tensor in written:
        with torch_function_off():
            if tensor.requires_grad:
                tensor.register_hook(_refuse_plain)
    if written:
        by_plain = {id(plain[id(t)]): t for t in written}
        result = map_tensors(lambda t: by_plain.get(id(t), t), result)
    for tensor in given:
        full = plain.get(id(tensor))
        if tensor.is_settled() or full is None:
            continue
        if any(_shares(t, full) for t in tensors_in(result)):
            tensor.shared_full()
            return _on_plain(func, args, kwargs, given)
    return result


def _shares(tensor: Tensor, full: Tensor) -> bool:
    """Whether writing to ``tensor`` would write to ``full``."""
    base = full if full._base is None else full._base
    return tensor is full or tensor._base is base


def _refuse_plain(grad: Tensor) -> None:
    """Hook on logits that were written to: their own graph is that of before, which only ``_Full`` knows."""
    if not isinstance(grad, VocabGrad):
        raise StateError(
            "logits of a loss-parallel model were written to in place and then given to an autograd "
            "function that can't see it; write logits = logits * 2 in place of logits *= 2, or give it "
            "logits.full_tensor()"
        )


def _written(func: Any, args: Any, kwargs: Any) -> list[VocabLogits]:
    """The logits that ``func`` writes to, by its name."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _WRITING
    targets = (args[:1] if in_place else (), kwargs.get("out"))
    return [t for t in tensors_in(targets) if isinstance(t, VocabLogits)]


_EXPOSING = {Tensor.data.__get__, Tensor.numpy, Tensor.untyped_storage, Tensor.data_ptr}  # type: ignore[attr-defined]
_WRITING = {
    *("__setitem__", "__set__", "__delete__", "__iadd__", "__isub__", "__imul__", "__imatmul__"),
    *("__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__"),
}


def _named(names: str) -> list[Any]:
    """The functions of ``torch`` and the methods of Tensor that have these names."""
    found = [getattr(home, n, None) for n in names.split() for home in (torch, Tensor)]
    return [function for function in found if callable(function)]


_PROPERTIES = (
    *("shape", "ndim", "dtype", "device", "layout", "itemsize", "_version", "output_nr", "_base"),
    *("requires_grad", "is_leaf", "grad_fn", "grad", "retains_grad", "_backward_hooks"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested"),
)
OWN = {
    *_named(
        "size dim ndimension numel nelement element_size stride is_contiguous storage_offset get_device "
        "is_floating_point is_complex is_inference register_hook retain_grad backward __len__ __hash__"
    ),
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
    torch.autograd.backward,
    torch.autograd.grad,
}
"""What is asked of the tensor itself: its shape and its place in autograd's graph."""


# ---- the loss ----


def _cross_entropy(
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if not isinstance(input, VocabLogits) or isinstance(target, VocabLogits):
        return NotImplemented
    view = input._view
    fits = (
        view.at == 1
        and bool(view.lead)
        and target.dtype is torch.int64
        and tuple(target.shape) == view.lead
        and target.device == input.device
        and size_average is None
        and reduce is None
        and reduction in ("mean", "sum", "none")
        and 0.0 <= label_smoothing <= 1.0
    )
    if weight is not None:
        fits = fits and tuple(weight.shape) == (view.vocab_size,) and not weight.requires_grad
    if not fits:  # probabilities, or something the plain function refuses
        return NotImplemented
    if torch.is_autocast_enabled(input.device.type) and view.dtype.itemsize < 4:
        input = input.float()
    options = LossOptions(ignore_index, label_smoothing, 0.0, weight, reduction)
    return loss_of(input, target, options)


# ---- functions of single logits ----


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    found = list(tensors_in((args, kwargs)))
    logits = [t for t in found if isinstance(t, VocabLogits)]
    others = [t for t in found if not isinstance(t, VocabLogits)]
    if len(logits) != 1 or "out" in kwargs or any(t.dim() or t.requires_grad for t in others):
        return NotImplemented
    # What is applied later must not see what becomes of the others.
    args, kwargs = map_tensors(
        lambda t: t if isinstance(t, VocabLogits) else t.detach().clone(), (args, kwargs)
    )
    # The operation must not keep the logits, which refer to it.
    place = _Place()
    args, kwargs = _replaced(args, logits[0], place), _replaced(kwargs, logits[0], place)

    def op(x: Tensor) -> Tensor:
        return func(*_replaced(args, place, x), **_replaced(kwargs, place, x))

    return _after(logits[0], op)


class _Place:
    """Where the logits stood."""


def _replaced(values: Any, old: object, new: object) -> Any:
    if isinstance(values, dict):
        return {key: new if value is old else value for key, value in values.items()}
    return tuple(new if value is old else value for value in values)


def _after(logits: VocabLogits, op: Callable[[Tensor], Tensor]) -> Any:
    """``op`` of each of ``logits``."""
    with torch.no_grad():
        probe = op(torch.empty(0, dtype=logits._view.dtype, device=logits.device))
    if probe.device != logits.device or not probe.is_floating_point():
        return NotImplemented
    view = logits._view
    return next_logits(logits, replace(view, ops=(*view.ops, op), dtype=probe.dtype))


def _cast(func: Any, input: VocabLogits, *args: Any, **kwargs: Any) -> Any:
    if any(True for _ in tensors_in((args, kwargs))):
        return NotImplemented
    probe = torch.empty(0, dtype=input._view.dtype, device=input.device)
    cast = func(probe, *args, **kwargs)
    if cast is probe:
        return input
    return _after(input, lambda x: func(x, *args, **kwargs))


# ---- copies and views ----


def _detach(func: Any, input: VocabLogits) -> Any:
    with torch.no_grad():
        return next_logits(input, input._view).view_of(input, func)


def _clone(func: Any, input: VocabLogits, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return NotImplemented
    view = input._view
    index = None if view.index is None else view.index.contiguous()  # its strides are the copy's
    return next_logits(input, replace(view, index=index))


def _contiguous(func: Any, input: VocabLogits, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or input._view.at != len(input._view.lead):
        return NotImplemented
    return input if input._view.index is None else _clone(func, input)


def _with_lead(
    func: Any, input: VocabLogits, args: Any, kwargs: Any, index: Tensor | None, lead: Any
) -> VocabLogits:
    """``func(input, ...)``, a view, where ``index`` and ``lead`` say which rows it has."""
    view = replace(input._view, lead=tuple(lead), at=len(lead), index=index)
    made = next_logits(input, view)
    return made.view_of(input, lambda full: func(full, *args, **kwargs))


def _resized(func: Any, input: VocabLogits, *args: Any, **kwargs: Any) -> Any:
    """``view`` and ``reshape`` to sizes that end with the vocabulary."""
    view = input._view
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    whole = all(type(size) is int for size in sizes)
    if kwargs or not sizes or not whole or view.at != len(view.lead):
        return NotImplemented
    lead, classes = _filled(sizes, math.prod(view.shape))
    if classes != view.vocab_size or math.prod(lead) != math.prod(view.lead):
        return NotImplemented
    if view.index is None:
        return _with_lead(func, input, args, kwargs, None, lead)
    try:
        return _with_lead(func, input, args, kwargs, view.index.view(lead), lead)
    except RuntimeError:
        if func not in _RESHAPES:
            raise
    return next_logits(
        input, replace(view, lead=lead, at=len(lead), index=view.index.reshape(lead))
    )


_RESHAPES = _named("reshape")


def _filled(sizes: Iterable[int], total: int) -> tuple[tuple[int, ...], int]:
    """``sizes`` with the one that is -1 found, without the last; and the last."""
    sizes = list(sizes)
    if sizes.count(-1) == 1:
        rest = -math.prod(sizes)
        sizes[sizes.index(-1)] = total // rest if rest else 0
    return tuple(sizes[:-1]), sizes[-1]


def _flatten(func: Any, input: VocabLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    view = input._view
    dims = len(view.shape)
    start, end = start_dim % dims, end_dim % dims
    if view.at != dims - 1 or not start <= end < view.at:
        return NotImplemented
    lead = (*view.lead[:start], math.prod(view.lead[start : end + 1]), *view.lead[end + 1 :])
    return _resized(Tensor.reshape, input, *lead, view.vocab_size)


def _index(func: Any, input: VocabLogits, key: Any) -> Any:
    """Rows: the vocabulary, the last dim, is taken whole."""
    view = input._view
    key = key if isinstance(key, tuple) else (key,)
    of_rows = _without_vocabulary(key, len(view.lead))
    if of_rows is None or view.at != len(view.lead):
        return NotImplemented
    index = view.index_of_rows()[of_rows]
    if not all(type(size) is int for size in index.shape):
        return NotImplemented
    if any(isinstance(each, (Tensor, list)) for each in of_rows):  # a copy
        return next_logits(
            input, replace(view, lead=tuple(index.shape), at=index.dim(), index=index)
        )
    return _with_lead(func, input, (key,), {}, index, index.shape)


def _without_vocabulary(key: tuple[Any, ...], rows: int) -> tuple[Any, ...] | None:
    """What ``key`` says of the first ``rows`` dims; None if it says something of the last."""
    taken = [_dims_taken(each) for each in key]
    if None in taken or sum(each is Ellipsis for each in key) > 1:
        return None
    used = sum(n for n in taken if n is not None)
    kept: list[Any] = []
    dim = 0
    for each, n in zip(key, taken, strict=True):
        if each is Ellipsis:
            skipped = rows + 1 - used
            kept += [slice(None)] * min(skipped, rows - dim)
            dim += skipped
        elif dim == rows and not (isinstance(each, slice) and each == slice(None)):
            return None  # of the vocabulary
        elif dim + (n or 0) > rows + (dim == rows):
            return None  # of rows and vocabulary at once, or of dims there are not
        else:
            if dim < rows:
                kept.append(each)
            dim += n or 0
    return tuple(kept)


def _dims_taken(each: Any) -> int | None:
    """How many dims an index takes; None for one that is not handled."""
    if isinstance(each, (VocabLogits, bool)):
        return None
    if isinstance(each, Tensor):
        return each.dim() if each.dtype is torch.bool else 1
    if each is None or each is Ellipsis:
        return 0
    return 1 if isinstance(each, (int, slice, list)) else None


def _permuted(func: Any, input: VocabLogits, order: list[int], args: Any, kwargs: Any) -> Any:
    view = input._view
    rows = [dim - (dim > view.at) for dim in order if dim != view.at]
    same = rows == sorted(rows)
    index = view.index if same else view.index_of_rows().permute(rows)
    lead = tuple(view.lead[dim] for dim in rows)
    changed = replace(view, lead=lead, at=order.index(view.at), index=index)
    return next_logits(input, changed).view_of(input, lambda full: func(full, *args, **kwargs))


def _transpose(func: Any, input: VocabLogits, dim0: Any, dim1: Any) -> Any:
    order = list(range(len(input._view.shape)))
    if not (isinstance(dim0, int) and isinstance(dim1, int)):
        return NotImplemented
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(func, input, order, (dim0, dim1), {})


def _permute(func: Any, input: VocabLogits, *args: Any) -> Any:
    dims = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    count = len(input._view.shape)
    order = [operator.index(dim) % count for dim in dims]
    if sorted(order) != list(range(count)):
        return NotImplemented
    return _permuted(func, input, order, args, {})


_HANDLERS: dict[Callable[..., Any], list[Any]] = {
    _cross_entropy: [F.cross_entropy],
    _elementwise: _named(
        "add sub subtract mul multiply div divide true_divide rsub neg negative pow square sqrt exp log abs "
        "tanh sigmoid clamp clamp_min clamp_max __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ "
        "__truediv__ __rtruediv__ __div__ __rdiv__ __neg__ __pow__ nan_to_num"
    ),
    _cast: [getattr(Tensor, n) for n in ("float", "double", "half", "bfloat16", "to", "type")],
    _detach: _named("detach"),
    _clone: _named("clone"),
    _contiguous: [Tensor.contiguous],
    _resized: [Tensor.view, *_RESHAPES],
    _flatten: _named("flatten"),
    _index: [Tensor.__getitem__],
    _transpose: _named("transpose swapaxes swapdims"),
    _permute: _named("permute"),
}
HANDLED = {func: handler for handler, funcs in _HANDLERS.items() for func in funcs}
"""What a function does with ``VocabLogits``, by function."""
