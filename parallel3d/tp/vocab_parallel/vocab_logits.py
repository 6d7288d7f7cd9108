"""VocabLogits: the output of a model's head under loss parallel, in place of the logits themselves.

It is a tensor subclass with the plain logits' shape, which holds this rank's classes only, or only the inputs
of the head. Cross entropy computes with these; views of rows and elementwise functions return VocabLogits
again; all other functions get the plain logits, gathered, and so compute the same as without loss parallel.

Autograd sees ordinary nodes on tensors of the plain shape, so hooks, ``retain_grad`` and functions that don't
know this class work. The gradients between the nodes of this file are lazy tensors, ``VocabGrad``: they are
computed chunk by chunk in the backward of the head.
"""

import functools
import math
from collections.abc import Callable
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
from parallel3d.tp.vocab_parallel.rows import (
    CrossEntropy,
    GradientSource,
    LogitsRows,
    LogitsView,
    LossOptions,
    pull_back,
    run,
)


def sharded_logits(local: Tensor, vocab_size: int, axis: TpAxis | None) -> "VocabLogits":
    """Returns VocabLogits for ``local``, (..., classes on this rank), this rank's chunk of the logits (that
    of ``torch.chunk``); without ``axis`` it has all classes."""
    lead = tuple(local.shape[:-1])
    flat = local.reshape(math.prod(lead), local.shape[-1])
    view = LogitsView(LogitsRows(flat.detach()), axis, vocab_size, lead, len(lead), local.dtype)
    return _Make.apply(view, flat, None, None)


def lazy_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    vocab_size: int,
    axis: TpAxis | None,
    *,
    tokens: int | None = None,
) -> "VocabLogits":
    """Returns VocabLogits for ``linear(hidden, weight, bias)``, which is computed when it is needed, in
    chunks of rows.

    Args:
        hidden: (..., features), equal on all ranks; its gradients are partial sums.
        weight, bias: rows of the head's weight and bias for this rank's classes; without ``axis`` for all.
        tokens: the number of rows in a chunk.
    """
    lead = tuple(hidden.shape[:-1])
    flat = hidden.reshape(math.prod(lead), hidden.shape[-1])
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    own_bias = None if bias is None else bias.detach()
    rows = LogitsRows(flat.detach(), weight.detach(), own_bias, dtype, tokens)
    view = LogitsView(rows, axis, vocab_size, lead, len(lead), dtype or hidden.dtype)
    return _Make.apply(view, flat, weight, bias)


def _next(logits: "VocabLogits", **changes: Any) -> "VocabLogits":
    """Returns new VocabLogits, made of ``logits`` by an autograd node, with ``changes`` of their view."""
    return _Step.apply(logits, replace(logits._view, **changes))


def loss_of(logits: "VocabLogits", target: Tensor, options: LossOptions) -> Tensor:
    """Returns the cross entropy of ``logits``; ``target`` has their shape without the vocabulary's dim."""
    return _Loss.apply(logits, target, options)


class VocabLogits(Tensor):
    """Logits whose vocabulary may be split over tp, or that are not computed yet; see the top of the file.
    Gathering is a collective of the tp group: all its ranks must do it, also in an evaluation. ``repr`` does
    not gather."""

    _view: LogitsView
    # The plain logits, once something may write to them: they then replace this tensor.
    _full: Tensor | None
    # The tensor that this is a view of, and the function that makes it: they share plain logits.
    _parent: "VocabLogits | None"
    _remake: Callable[[Tensor], Tensor] | None

    @staticmethod
    def __new__(cls, view: LogitsView) -> "VocabLogits":
        self = _wrapper(cls, view)
        self._full = self._parent = self._remake = None
        return self

    @untraced
    def full_tensor(self) -> Tensor:
        """Returns the plain logits, with a gradient. A collective of the tp group, unless they exist."""
        return self.shared_full() if self.is_settled() else _Full.apply(self)

    def holds_classes_last(self) -> bool:
        """Whether the vocabulary is the last dim."""
        return self._view.at == len(self._view.lead)

    def is_settled(self) -> bool:
        """Whether plain logits, which may have been written to, have replaced this tensor or its base."""
        return self._full is not None or (self._parent is not None and self._parent.is_settled())

    def shared_full(self) -> Tensor:
        """Returns the plain logits, which replace this tensor and its views in later operations."""
        if self._full is not None:
            return self._full
        # In the modes of this tensor, not the caller's: under no_grad the loss would lose its gradients.
        with torch.inference_mode(self.is_inference()), torch.set_grad_enabled(self.requires_grad):
            if self._parent is None or self._remake is None:
                self._full = _Full.apply(self)
            else:
                self._full = self._remake(self._parent.shared_full())
            return self._full

    def view_of(self, parent: "VocabLogits", remake: Callable[[Tensor], Tensor]) -> "VocabLogits":
        """Records that this tensor is a view of ``parent``: its plain logits are ``remake`` of the parent's,
        and share their memory."""
        self._parent, self._remake = parent, remake
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Returns shape and dtype, no values: if one rank alone prints, a collective would hang."""
        view = self._view
        over = "" if view.axis is None else f", vocabulary split over tp={view.axis.size}"
        return f"VocabLogits(shape={view.shape}, dtype={view.dtype}{over}; full_tensor() has the values)"

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Gives plain logits to operations without ``__torch_function__``: autograd's, and C++ code's."""
        if func is torch.ops.aten.detach.default and not args[0].is_settled():
            return VocabLogits(args[0]._view)
        return _dispatch_plain(func, args, kwargs, VocabLogits, _plain_values)


class VocabGrad(Tensor):
    """A gradient of ``VocabLogits`` that is computed when it is used, in chunks: a sum of
    ``GradientSource``s."""

    _view: LogitsView
    _sources: tuple[GradientSource, ...]

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, view: LogitsView, sources: tuple[GradientSource, ...]) -> "VocabGrad":
        """Makes a tensor of the shape of ``view``. The views of ``sources`` have the same rows, perhaps with
        more elementwise functions."""
        self = _wrapper(cls, view)
        self._sources = sources
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"VocabGrad(shape={self._view.shape}, dtype={self._view.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Keeps sums of gradients lazy; other operations get the computed gradient."""
        if func is torch.ops.aten.detach.default:
            return VocabGrad(args[0]._view, args[0]._sources)
        if func is torch.ops.aten.add.Tensor and not kwargs and len(args) == 2:
            a, b = args
            if isinstance(a, VocabGrad) and isinstance(b, VocabGrad) and a._view is b._view:
                return VocabGrad(a._view, a._sources + b._sources)
        with enable_reentrant_dispatch():  # it runs autograd through the functions of logits
            return _dispatch_plain(func, args, kwargs, VocabGrad, _whole_gradient)


# ---- the nodes ----


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``backward(ctx, kept, grad)`` as an autograd function's ``backward(ctx, grad)``. ``kept`` is
    ``ctx.kept`` of the forward, which is freed after the first backward. Raises StateError under
    ``create_graph=True``."""

    @functools.wraps(backward)
    def checked(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise StateError(
                "backward was called with create_graph=True through logits of loss_parallel, whose gradients "
                "can't be differentiated again; use loss_parallel=False"
            )
        kept = ctx.kept
        if kept is None:
            raise RuntimeError(
                "backward was called a second time through logits of loss_parallel; call the first with "
                "retain_graph=True"
            )
        if not graph_is_kept():
            ctx.kept = None
        return backward(ctx, kept, grad)

    return checked


class _Make(torch.autograd.Function):
    """The node that makes VocabLogits from the head's inputs, or from logits; computes their gradients."""

    @staticmethod
    def forward(ctx: Any, view: LogitsView, *inputs: Tensor | None) -> VocabLogits:
        ctx.kept = view
        ctx.save_for_backward(*inputs)  # so that autograd notices when they are written to
        return VocabLogits(view)

    @staticmethod
    @_once
    def backward(ctx: Any, view: LogitsView, grad: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias = ctx.saved_tensors
        rows = replace(view.rows, hidden=hidden, weight=weight, bias=bias)
        grads = _input_gradients(rows, _sources_of(grad, view), ctx.needs_input_grad[1:])
        if not graph_is_kept():
            view.rows.over.set()
        return None, *grads


class _Step(torch.autograd.Function):
    """The node that makes VocabLogits with another view of the same rows."""

    @staticmethod
    def forward(ctx: Any, logits: VocabLogits, view: LogitsView) -> VocabLogits:
        ctx.kept = logits._view, view
        return VocabLogits(view)

    @staticmethod
    @_once
    def backward(ctx: Any, views: tuple[LogitsView, LogitsView], grad: Tensor) -> tuple[Any, ...]:
        before, after = views
        return VocabGrad(before, _sources_of(grad, after)), None


class _Full(torch.autograd.Function):
    """The node that gathers VocabLogits into plain logits."""

    @staticmethod
    def forward(ctx: Any, logits: VocabLogits) -> Tensor:
        view = ctx.kept = logits._view
        full = _gathered(view.local(), view)
        # A caller may write to it: it is no view, and not the rows' own tensor.
        return full.clone() if view.axis is None or full._base is not None else full

    @staticmethod
    @_once
    def backward(ctx: Any, view: LogitsView, grad: Tensor) -> Tensor:
        return VocabGrad(view, _sources_of(grad, view))


class _Loss(torch.autograd.Function):
    """The node of the cross entropy: two small all-reduces in the forward, none in the backward."""

    @staticmethod
    def forward(ctx: Any, logits: VocabLogits, target: Tensor, options: LossOptions) -> Tensor:
        view = logits._view
        loss = CrossEntropy(target.reshape(-1), view.vocab_size, view.axis, options, view.dtype)
        ctx.kept = view, loss
        for part in view.parts():
            loss.see(view.get(part), part)
        result = loss.finish()
        return result.view(target.shape) if result.dim() else result

    @staticmethod
    @_once
    def backward(ctx: Any, kept: tuple[LogitsView, CrossEntropy], grad: Tensor) -> tuple[Any, ...]:
        view, loss = kept
        grad = grad.reshape(-1) if grad.dim() else grad
        source = GradientSource(view, lambda x, part: loss.gradient(x, part, grad))
        return VocabGrad(view, (source,)), None, None


def _sources_of(grad: Tensor, view: LogitsView) -> tuple[GradientSource, ...]:
    """Returns the sources of ``grad``, a gradient of the logits of ``view``; for a plain tensor one source
    that takes this rank's classes of it."""
    if isinstance(grad, VocabGrad):
        return grad._sources
    flat = grad.movedim(view.at, -1).reshape(view.count, view.vocab_size)
    if view.axis is not None:
        flat = local_chunk(flat, 1, view.axis.size, view.axis.rank)
    return (GradientSource(view, lambda x, part: flat[part]),)


def _input_gradients(
    rows: LogitsRows, sources: tuple[GradientSource, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    if rows.weight is None and len(sources) == 1 and sources[0].view.index is None:
        (source,) = sources
        parts = [pull_back(source, rows.get(part), part) for part in source.view.parts()]
        return parts[0] if len(parts) == 1 else torch.cat(parts), None, None
    sums = rows.start(needed)
    for source in sources:
        for part in source.view.parts():
            where = source.view.where(part)
            rows.add(sums, where, pull_back(source, rows.get(where), part))
    return tuple(
        total if total is None or x is None else total.to(x.dtype)
        for total, x in zip(sums, (rows.hidden, rows.weight, rows.bias), strict=True)
    )


# ---- plain tensors ----


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
            grad_part = pull_back(source, x, part, done=len(view.ops))
            if total is None:
                total = grad_part.new_zeros(view.rows.hidden.shape[0], grad_part.shape[1])
            total.index_add_(0, source.view.index_of_rows().reshape(-1)[part], grad_part)
    assert total is not None
    total = total[view.where(slice(None))]
    return _gathered(total.view(*view.lead, total.shape[1]), view).to(view.dtype)


def _dispatch_plain(func: Any, args: Any, kwargs: Any, kind: Any, of: Any) -> Any:
    """Calls the operation ``func`` with ``of(tensor)`` in place of tensors of class ``kind``."""
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
    device = view.rows.hidden.device
    self = torch.Tensor._make_wrapper_subclass(cls, view.shape, dtype=view.dtype, device=device)
    self._view = view
    return self


# Functions of ``VocabLogits``. A handler gets the function and its arguments, and returns NotImplemented for
# arguments that it doesn't take; these, and functions without a handler, get the plain logits.


@untraced
def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls ``func`` with arguments some of which are VocabLogits: with its handler; on the tensors as they
    are, for shape and autograd functions; or else with plain logits."""
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
    """Calls ``func`` with plain logits in place of the VocabLogits ``given``. If ``func`` writes to them or
    returns a view, they replace the VocabLogits in later operations too, so that writes are seen."""
    written = _written(func, args, kwargs)
    # In inference mode a tensor doesn't show that it is a view.
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
    """Hook on VocabLogits that were written to in place: raises StateError for a gradient that doesn't pass
    the node ``_Full``, because the VocabLogits' own graph doesn't know of the write."""
    if not isinstance(grad, VocabGrad):
        raise StateError(
            "logits of a loss-parallel model were written to in place and then given to an autograd "
            "function that can't see it; write logits = logits * 2 in place of logits *= 2, or give it "
            "logits.full_tensor()"
        )


def _written(func: Any, args: Any, kwargs: Any) -> list[VocabLogits]:
    """Returns the VocabLogits among the arguments that ``func`` writes to, as its name tells."""
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
    """Returns the functions of ``torch`` and methods of ``Tensor`` whose names the string ``names`` lists."""
    functions = [getattr(owner, n, None) for n in names.split() for owner in (torch, Tensor)]
    return [function for function in functions if callable(function)]


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
"""Functions of the tensor itself: its shape and its place in autograd's graph."""


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
    fits = view.at == 1 and bool(view.lead) and size_average is None and reduce is None
    fits &= target.dtype is torch.int64 and tuple(target.shape) == view.lead
    fits &= target.device == input.device
    fits &= reduction in ("mean", "sum", "none") and 0.0 <= label_smoothing <= 1.0
    if weight is not None:
        fits &= tuple(weight.shape) == (view.vocab_size,) and not weight.requires_grad
    if not fits:  # probabilities, or arguments that the plain function refuses
        return NotImplemented
    if torch.is_autocast_enabled(input.device.type) and view.dtype.itemsize < 4:
        input = input.float()
    options = LossOptions(ignore_index, label_smoothing, 0.0, weight, reduction)
    return loss_of(input, target, options)


# ---- elementwise functions ----


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = list(tensors_in((args, kwargs)))
    logits = [t for t in tensors if isinstance(t, VocabLogits)]
    others = [t for t in tensors if not isinstance(t, VocabLogits)]
    if len(logits) != 1 or "out" in kwargs or any(t.dim() or t.requires_grad for t in others):
        return NotImplemented
    # Copies, as the others may change before the function is applied; and a placeholder for the logits, which
    # the operation must not keep, as they refer to it.
    place = torch.empty(0)
    given = map_tensors(lambda t: place if t is logits[0] else t.detach().clone(), (args, kwargs))

    def op(x: Tensor) -> Tensor:
        args, kwargs = map_tensors(lambda t: x if t is place else t, given)
        return func(*args, **kwargs)

    return _after(logits[0], op)


def _after(logits: VocabLogits, op: Callable[[Tensor], Tensor]) -> Any:
    """Returns the VocabLogits after one more elementwise function ``op``; NotImplemented if that isn't
    floating-point."""
    with torch.no_grad():
        probe = op(torch.empty(0, dtype=logits._view.dtype, device=logits.device))
    if probe.device != logits.device or not probe.is_floating_point():
        return NotImplemented
    return _next(logits, ops=(*logits._view.ops, op), dtype=probe.dtype)


def _cast(func: Any, input: VocabLogits, *args: Any, **kwargs: Any) -> Any:
    if any(True for _ in tensors_in((args, kwargs))):
        return NotImplemented
    probe = torch.empty(0, dtype=input._view.dtype, device=input.device)
    if func(probe, *args, **kwargs) is probe:
        return input
    return _after(input, lambda x: func(x, *args, **kwargs))


# ---- copies and views ----


def _detach(func: Any, input: VocabLogits) -> Any:
    with torch.no_grad():
        return _next(input).view_of(input, func)


def _clone(func: Any, input: VocabLogits, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return NotImplemented
    index = input._view.index  # its strides are the copy's
    return _next(input, index=None if index is None else index.contiguous())


def _contiguous(func: Any, input: VocabLogits, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not input.holds_classes_last():
        return NotImplemented
    return input if input._view.index is None else _clone(func, input)


def _view(func: Any, input: VocabLogits, *args: Any, **kwargs: Any) -> Any:
    """Handler of functions that return a view (``reshape`` perhaps a copy): returns VocabLogits of the view's
    shape. NotImplemented if the classes don't stay in one dim."""
    view = input._view
    if any(isinstance(arg, torch.dtype) for arg in args):
        return NotImplemented
    # Without memory along the classes, where its stride is 0.
    whole = view.index_of_rows().unsqueeze(view.at).expand(view.shape)
    with torch.inference_mode(False):  # where a tensor shows that it is a view
        place = torch.empty_strided(whole.shape, whole.stride(), dtype=view.dtype, device="meta")
        try:
            made = func(place, *args, **kwargs)
        except RuntimeError:  # classes and rows in one dim, or what the plain logits refuse too
            return NotImplemented
    if made is place:
        return input
    if made._base is None:  # a copy, as no view has this shape
        even = view.index is None or view.index.is_contiguous()
        return NotImplemented if even else func(input.clone(), *args, **kwargs)
    places = zip(made.shape, made.stride(), strict=True)
    at = [dim for dim, (size, step) in enumerate(places) if (size, step) == (view.vocab_size, 0)]
    if len(at) != 1 or not all(type(size) is int for size in made.shape):
        return NotImplemented
    index = func(whole, *args, **kwargs).select(at[0], 0)
    if view.index is None and index.is_contiguous() and index.numel() == view.count:
        index = None  # all rows in order
    lead = tuple(size for dim, size in enumerate(made.shape) if dim != at[0])
    made = _next(input, lead=lead, at=at[0], index=index)
    return made.view_of(input, lambda full: func(full, *args, **kwargs))


def _index(func: Any, input: VocabLogits, key: Any) -> Any:
    """Handler of indexing: selects rows. NotImplemented if the index selects classes, or the classes aren't
    the last dim."""
    view = input._view
    key = key if isinstance(key, tuple) else (key,)
    of_rows = _without_vocabulary(key, len(view.lead))
    if of_rows is None or not input.holds_classes_last():
        return NotImplemented
    if not any(isinstance(item, (Tensor, list)) for item in of_rows):
        return _view(func, input, key)
    index = view.index_of_rows()[of_rows]  # a copy
    if not all(type(size) is int for size in index.shape):
        return NotImplemented
    return _next(input, lead=tuple(index.shape), at=index.dim(), index=index)


def _without_vocabulary(key: tuple[Any, ...], rows: int) -> tuple[Any, ...] | None:
    """Returns the part of an index for the first ``rows`` dims; None if it selects from the last dim."""
    dims = [n for item in key if (n := _indexed_dims(item)) is not None]
    ellipses = [i for i, item in enumerate(key) if item is Ellipsis] or [len(key)]
    skipped = rows + 1 - sum(dims)
    if len(dims) < len(key) or len(ellipses) > 1 or skipped < 0:
        return None
    at = ellipses[0]
    filled = (*key[:at], *(slice(None),) * skipped, *key[at + 1 :])
    last = filled[-1]
    return filled[:-1] if isinstance(last, slice) and last == slice(None) else None


def _indexed_dims(item: Any) -> int | None:
    """Returns the number of dims that one item of an index selects from; None if the item isn't handled."""
    if isinstance(item, (VocabLogits, bool)):
        return None
    if isinstance(item, Tensor):
        return item.dim() if item.dtype is torch.bool else 1
    if item is None or item is Ellipsis:
        return 0
    return 1 if isinstance(item, (int, slice, list)) else None


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
    _view: [Tensor.view, *_named("reshape flatten transpose swapaxes swapdims permute")],
    _index: [Tensor.__getitem__],
}
HANDLED = {func: handler for handler, funcs in _HANDLERS.items() for func in funcs}
"""Function -> its handler."""
