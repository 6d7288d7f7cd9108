"""Cross entropy of logits whose vocabulary is split over ``tp``, and of logits that are never whole."""

import torch
from torch import Tensor

from parallel3d._torch.autograd import untraced
from parallel3d.errors import Parallel3dError
from parallel3d.tp.collectives import TpAxis, copy_to_tp
from parallel3d.tp.vocab_parallel.rows import LossOptions
from parallel3d.tp.vocab_parallel.vocab_logits import (
    VocabLogits,
    lazy_logits,
    loss_of,
    sharded_logits,
)


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

    The other arguments, and the errors, are those of ``vocab_parallel_cross_entropy``.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, class_weight, reduction)
    _check_target(hidden, target)
    vocab_size = _vocabulary(weight.shape[0], axis, vocab_size)
    if chunk_tokens is not None and chunk_tokens < 1:
        raise Parallel3dError(f"chunk_tokens is {chunk_tokens}; it is at least 1")
    if axis is not None:
        hidden = copy_to_tp(hidden, axis)
    logits = lazy_logits(hidden, weight, bias, vocab_size, axis, tokens=chunk_tokens)
    return loss_of(logits, target, options)


def _vocabulary(local: int, axis: TpAxis | None, given: int | None) -> int:
    if given is None and axis is not None and axis.size > 1:
        raise Parallel3dError("a loss over a tp axis needs vocab_size")
    if axis is None and given not in (None, local):
        raise Parallel3dError(f"vocab_size is {given}, without an axis there are {local} classes")
    return local if given is None else given


def _check_target(rows: Tensor, target: Tensor) -> None:
    if tuple(rows.shape[:-1]) != tuple(target.shape) or target.dtype is not torch.int64:
        raise Parallel3dError(
            f"target is {target.dtype} of shape {tuple(target.shape)}; it must be int64 class ids of the "
            f"shape {tuple(rows.shape[:-1])}"
        )
