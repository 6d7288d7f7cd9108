"""Loss parallel: an output head that keeps its logits split, or computes them when needed; and the losses."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d._torch.autograd import functorch_is_active, untraced
from parallel3d._util.forwards import as_if, wrap_forward
from parallel3d.errors import Parallel3dError, PlanError
from parallel3d.tp.collectives import TpAxis, copy_to_tp, gather_from_tp
from parallel3d.tp.float8 import is_float8
from parallel3d.tp.forwards import TpState, take_input
from parallel3d.tp.lora import is_wrapper
from parallel3d.tp.overlap import linear
from parallel3d.tp.plan import ResolvedPlan
from parallel3d.tp.styles import Colwise
from parallel3d.tp.styles.base import ParamRule, StyleTraffic, is_plain
from parallel3d.tp.styles.casts import casts_weight
from parallel3d.tp.styles.linear import SplitStyle
from parallel3d.tp.vocab_parallel.rows import LossOptions
from parallel3d.tp.vocab_parallel.vocab_logits import (
    VocabLogits,
    lazy_logits,
    loss_of,
    sharded_logits,
)


@dataclass(frozen=True)
class LogitsHead(SplitStyle):
    """Style of a column-parallel output head that returns ``VocabLogits``: they have the plain logits' shape;
    cross entropy uses this rank's classes of them, and all other functions get them gathered.

    Attributes:
        head: the style that the plan gave the head.
        chunked: whether, in training, the loss and the backward compute logits in chunks of tokens.
    """

    head: Colwise
    chunked: bool = False

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        return self.head.plan(module, tp)

    def traffic(self, module: nn.Module, tp: int) -> tuple[StyleTraffic, ...]:
        # The loss reduces two numbers a token.
        loss = (StyleTraffic("all-reduce", "forward", 1),) * 2
        return *replace(self.head, output="shard").traffic(module, tp), *loss

    @property
    def ends(self) -> tuple[str, str]:
        return self.head.ends[0], ""

    def forward(self, tp: TpState, module: Any, /, input: Tensor) -> Tensor:
        """Returns VocabLogits of shape (..., out) for an input (..., in)."""
        x = take_input(input, self.head.input, self.head.sequence_dim, tp, read_only=True)
        if torch.compiler.is_compiling() or functorch_is_active():  # neither handles our subclass
            y = F.linear(x, module.weight, module.bias)
            return gather_from_tp(y, -1, module.out_features, tp.axis)
        return _logits(module, x, tp.axis, self.chunked)


def _chunked_linear(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a forward for a head that isn't split over tp: it returns logits that are computed in chunks
    when they are needed."""

    def forward(self: Any, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or functorch_is_active() or not torch.is_grad_enabled():
            return inner(self, input)
        return _logits(self, input, None, True)

    return as_if(forward, inner)


@untraced
def _logits(head: Any, x: Tensor, axis: TpAxis | None, chunked: bool) -> Tensor:
    # Without a backward the head's weight may be freed when its forward ends.
    if chunked and torch.is_grad_enabled():
        return lazy_logits(x, head.weight, head.bias, head.out_features, axis)
    return sharded_logits(linear(x, head.weight, head.bias), head.out_features, axis)


def chunk_whole_head(model: nn.Module, plan: ResolvedPlan | None) -> None:
    """Makes the output head of a model without tensor parallelism (tp has one rank) compute its logits in
    chunks when they are needed."""
    planned = plan.modules if plan is not None else ()
    names = [p.name for p in planned if isinstance(p.style, LogitsHead)]
    head = model.get_submodule(names[0] if names else find_head(model, None))
    wrap_forward(head, _chunked_linear, "chunked head")


def with_loss_parallel(plan: ResolvedPlan, model: nn.Module, *, chunked: bool) -> ResolvedPlan:
    """Returns ``plan`` with :class:`LogitsHead`, with ``chunked``, as the style of the output head."""
    modules = {planned.name: planned for planned in plan.modules}
    name = find_head(model, plan)
    style = LogitsHead(modules[name].style, chunked)  # type: ignore[arg-type]
    traffic = style.traffic(model.get_submodule(name), plan.tp_size) if plan.tp_size > 1 else ()
    modules[name] = replace(modules[name], style=style, traffic=traffic)
    return replace(plan, modules=tuple(modules.values()))


def find_head(model: nn.Module, plan: ResolvedPlan | None) -> str:
    """Returns the path of the model's output head.

    It is the result of the model's ``get_output_embeddings()`` (Hugging Face), else the linear layer that
    shares its weight with an embedding, else the one outside the repeated blocks that has as many outputs
    as an embedding has rows. With a plan it must be column-parallel there. Raises PlanError if there is none,
    or several, or if it is torchao's Float8Linear, or casts its weight in a forward of its own.
    """
    modules = dict(model.named_modules())
    split = {n for n, m in modules.items() if is_plain(m, nn.Linear)}
    if plan is not None:
        colwise = (planned for planned in plan.modules if isinstance(planned.style, Colwise))
        split = {one.name for one in colwise if all(p.rule.packing is None for p in one.params)}
    heads = {n: m for n, m in modules.items() if isinstance(m, nn.Linear) and n in split}
    method, own = getattr(model, "get_output_embeddings", None), None
    # transformers' base class raises for a model without a head.
    with suppress(AttributeError, NotImplementedError):
        own = method() if callable(method) else None
    if own is not None:
        candidates = [n for n, m in heads.items() if m is own]
    else:
        candidates = _heads_of_embeddings(modules, heads)
    if len(candidates) == 1:
        (name,), what, remedy = candidates, "", ""
        if is_float8(heads[name]):
            what, remedy = (
                "is torchao's Float8Linear",
                "keep it out of the conversion by module_filter_fn",
            )
        elif casts_weight(heads[name]):
            what, remedy = "casts its weight in a forward of its own", "use nn.Linear"
        if what:
            raise PlanError(
                f"loss_parallel: {name!r}, the model's output head, {what}, and its logits can't stay split; "
                f"{remedy}, or leave loss_parallel out"
            )
        return name
    if candidates:
        raise PlanError(
            f"loss_parallel: {' and '.join(map(repr, candidates))} may each be the output head; give the "
            "model a method get_output_embeddings() that returns the one whose logits the loss is of"
        )
    what = "linear layer" if plan is None else "linear layer with the style 'colwise_gather_output'"
    named = next((n for n, m in modules.items() if m is own), None)
    if own is not None and is_wrapper(own):
        raise PlanError(
            f"loss_parallel: the model's output head {named!r} is a layer of peft's, whose logits can't stay "
            "split; leave it out of the peft config, or leave loss_parallel out"
        )
    shown = f"{named!r} is the model's output head, but not a" if named else "there is no"
    raise PlanError(
        f"loss_parallel: {shown} {what} that puts out the vocabulary; with that style there "
        f"{'are ' + ', '.join(map(repr, heads)) if heads else 'is none'}. Give the head that style, or leave "
        "loss_parallel out"
    )


def _heads_of_embeddings(modules: dict[str, nn.Module], heads: dict[str, nn.Linear]) -> list[str]:
    """Returns the paths of those of ``heads`` that share their weight with an embedding or, if none does,
    that have as many outputs as an embedding has rows."""
    tables = [m for m in modules.values() if isinstance(m, nn.Embedding)]
    tied = [n for n, m in heads.items() if any(m.weight is t.weight for t in tables)]
    if tied:
        return tied
    sizes = {t.num_embeddings for t in tables}
    repeated = tuple(f"{n}." for n, m in modules.items() if isinstance(m, nn.ModuleList))
    return [n for n, m in heads.items() if m.out_features in sizes and not n.startswith(repeated)]


# The losses of logits that are split, and of logits that are never whole.


@untraced
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: TpAxis | None = None,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Returns ``F.cross_entropy`` of the whole logits, from each rank's chunk of them.

    Every tp rank gets the same loss, and the complete gradient of its chunk. It takes two all-reduces of at
    most four numbers a target, and none in the backward. It is computed in float32 (float64 for float64), in
    chunks of targets, and returned in the dtype of ``logits``.

    ``z_loss`` adds ``z_loss * log(Z)**2`` to the loss of each target, where Z is the sum of the exponentials
    of its logits, times its class weight (PaLM, arXiv 2204.02311, section 5: 1e-4; ST-MoE, arXiv 2202.08906,
    equation 5, for routers).

    Args:
        logits: (..., classes on this rank): the chunk of the vocabulary that ``torch.chunk`` gives the
            rank; chunks may differ, and may be empty. Or the ``VocabLogits`` of a model under loss parallel.
        target: (...), class ids of the whole vocabulary; the same on all tp ranks.
        axis: the tp axis; None: ``logits`` are whole.
        vocab_size: the number of classes; needed with an axis.
        ignore_index: class id of targets that don't count.
        label_smoothing: as in ``F.cross_entropy``.
        z_loss: its coefficient.
        weight: (vocab_size,) weights of the classes; not differentiable.
        reduction: ``"mean"`` over the targets that count (by their weights), ``"sum"`` or ``"none"``.

    Raises:
        Parallel3dError: invalid shapes or options.
        RuntimeError: a target outside the vocabulary (on an accelerator when it next synchronises).
        StateError: a backward with ``create_graph=True``.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, weight, reduction)
    _check_target(logits, target)
    if isinstance(logits, VocabLogits):
        if logits.is_settled():
            logits = logits.full_tensor()
        elif logits.holds_classes_last():
            return loss_of(logits, target, options)
        else:
            raise Parallel3dError("the classes must be the last dim of the logits")
    vocab_size = _vocabulary(logits.shape[-1], axis, vocab_size)
    return loss_of(sharded_logits(logits, vocab_size, axis), target, options)


@untraced
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    axis: TpAxis | None = None,
    *,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    chunk_tokens: int | None = None,
) -> Tensor:
    """Returns ``F.cross_entropy(F.linear(hidden, weight, bias), target)`` without holding all logits.

    Logits are computed in chunks of tokens, and again in the backward (one matmul more than the plain loss:
    8 instead of 6 operations a token and weight). Gradients of the parameters are summed in float32.

    Args:
        hidden: (..., features), whole: the same on all tp ranks; so is its gradient.
        weight: (classes on this rank, features): the rows that ``torch.chunk`` gives the rank.
        target: (...), class ids of the whole vocabulary.
        axis: the tp axis; None: ``weight`` is whole.
        bias: (classes on this rank,).
        vocab_size: the number of classes; needed with an axis.
        class_weight: ``weight`` of ``F.cross_entropy``, (vocab_size,).
        chunk_tokens: tokens in a chunk; by default so many that their logits have about as many elements as
            ``hidden``, but not less than 256.

    ``ignore_index``, ``label_smoothing``, ``z_loss``, ``reduction`` and the errors (``Parallel3dError``) are
    those of ``vocab_parallel_cross_entropy``.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, class_weight, reduction)
    _check_target(hidden, target)
    vocab_size = _vocabulary(weight.shape[0], axis, vocab_size)
    if chunk_tokens is not None and chunk_tokens < 1:
        raise Parallel3dError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
    if axis is not None:
        hidden = copy_to_tp(hidden, axis)
    logits = lazy_logits(hidden, weight, bias, vocab_size, axis, tokens=chunk_tokens)
    return loss_of(logits, target, options)


def _vocabulary(local: int, axis: TpAxis | None, given: int | None) -> int:
    if given is None and axis is not None and axis.size > 1:
        raise Parallel3dError("a loss over a tp axis needs vocab_size")
    if axis is None and given not in (None, local):
        raise Parallel3dError(
            f"vocab_size is {given}, but without an axis there are {local} classes"
        )
    return local if given is None else given


def _check_target(rows: Tensor, target: Tensor) -> None:
    if tuple(rows.shape[:-1]) != tuple(target.shape) or target.dtype is not torch.int64:
        raise Parallel3dError(
            f"target is {target.dtype} of shape {tuple(target.shape)}; it must be int64 class ids of the "
            f"shape {tuple(rows.shape[:-1])}"
        )
