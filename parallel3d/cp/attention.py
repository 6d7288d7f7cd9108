"""Attention of sequences that lie on the ranks of ``cp``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from parallel3d.cp.choose import Choice, choose
from parallel3d.cp.collectives import gather_flags
from parallel3d.cp.kinds import (
    autocast_off,
    cast_by_autocast,
    gathered_attention,
    ring_attention,
    ulysses_attention,
)
from parallel3d.cp.rules import MaskFunction, Rules
from parallel3d.cp.sequence import CpAxis, Kind, Sequence
from parallel3d.errors import Parallel3dError, WrongTypeError

_KINDS: dict[str, Callable[..., Tensor]] = {
    "ulysses": ulysses_attention,
    "gather": gathered_attention,
    "ring": ring_attention,
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: CpAxis,
    sequence: Sequence,
    *,
    causal: bool,
    window: int | tuple[int, int] | None = None,
    key_mask: Tensor | None = None,
    mask_function: MaskFunction | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    kind: Kind | None = None,
) -> Tensor:
    """Returns the attention of this rank's queries to the keys of all ranks of ``cp``.

    The result is that of ``F.scaled_dot_product_attention`` on the whole sequences. Documents of ``sequence``
    are respected, and no token attends to padding. A query that may attend to no key gives zeros. On an axis
    of one rank nothing is communicated. Autocast applies as it does to torch's function.

    Args:
        q: (B, Hq, rows, D): this rank's positions, in its order (``Sequence.parts``).
        k, v: (B, Hkv, rows, D) and (B, Hkv, rows, Dv); query head h attends to K/V head ``h // (Hq // Hkv)``.
        axis: the ranks of ``cp``.
        sequence: how the sequences lie on them.
        causal: whether a query sees no later key.
        window: query i sees key j only if ``i - window < j``; or (left, right): if ``i - left <= j <= i +
            right``.
        key_mask: (B, rows) bool: this rank's keys that may be attended to.
        mask_function: ``(b, h, q_index, kv_index)`` -> bool, on positions of the whole sequence, as mask
            functions of transformers; the arguments are index tensors that broadcast to (B, Hq, queries,
            keys).
        scale: factor of the scores; by default ``1 / sqrt(D)``.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sinks: (Hq,): an additional logit of each head in the softmax, without a value. Its gradient on a rank
            is a partial sum, to be summed over ``cp``.
        dropout_p: the probability that a weight becomes 0; the others are divided by ``1 - dropout_p``. Each
            rank draws from its own generator.
        kind: ``"ulysses"``, ``"gather"``, ``"ring"`` or ``"auto"``; by default that of ``axis``.

    Returns: (B, Hq, rows, Dv), this rank's positions.

    Raises:
        Parallel3dError: shapes that don't fit each other or ``sequence``, an unknown kind.
        PlanError: ``kind="ulysses"`` and fewer query heads than ranks.
    """
    _check(q, k, v, axis, sequence, key_mask, sinks)
    q, k, v = (cast_by_autocast(x) for x in (q, k, v))
    left, right = _bounds(causal, window)
    if not 0 <= dropout_p <= 1:
        raise Parallel3dError(f"attention: dropout_p={dropout_p!r}: must be from 0 to 1")
    if softcap is not None and softcap <= 0:
        raise Parallel3dError(f"attention: softcap={softcap!r}: must be positive, or None for none")
    rules = Rules(
        sequence,
        axis,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        left=left,
        right=right,
        documents=sequence.documents,
        key_mask=None if key_mask is None else gather_flags(key_mask, sequence, axis),
        mask_function=mask_function,
        softcap=softcap,
        dropout=dropout_p,
    )
    name = kind or axis.kind
    if name == "auto":
        name = chosen(q, k, axis, sequence, causal).kind
    if name not in _KINDS:
        kinds = ", ".join(map(repr, get_args(Kind)))
        raise Parallel3dError(f'attention: kind={name!r}: must be one of {kinds} or "auto"')
    with autocast_off(q):
        return _KINDS[name](q, k, v, sinks, rules)


_choose: Callable[..., Choice] = functools.cache(choose)


def chosen(q: Tensor, k: Tensor, axis: CpAxis, sequence: Sequence, causal: bool) -> Choice:
    """Returns what ``kind="auto"`` is for such a call of ``attention``."""
    return _choose(
        size=axis.size,
        batch=q.shape[0],
        length=sequence.padded,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        channels=q.shape[3],
        itemsize=q.element_size(),
        causal=causal,
        balanced=sequence.balanced,
    )


def _bounds(causal: bool, window: int | tuple[int, int] | None) -> tuple[int | None, int | None]:
    """How many keys before and after itself a query sees; None: all."""
    if window is None:
        return None, 0 if causal else None
    left, right = (window - 1, None) if isinstance(window, int) else window
    if left < 0 or (right is not None and right < 0):
        raise Parallel3dError(
            f"attention: window={window!r}: must be a positive number of keys, or (left, right), "
            "none negative"
        )
    return left, 0 if causal else right


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: CpAxis,
    sequence: Sequence,
    key_mask: Tensor | None,
    sinks: Tensor | None,
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise WrongTypeError(f"attention: {shapes}: each must be (batch, heads, rows, channels)")
    if sequence.size != axis.size:
        raise Parallel3dError(
            f"attention: the sequence lies on {sequence.size} ranks, the axis cp has {axis.size}"
        )
    rows = sequence.rows
    if not q.shape[2] == k.shape[2] == v.shape[2] == rows:
        raise Parallel3dError(
            f"attention: {shapes}: each must hold this rank's {rows} rows of the sequence of "
            f"{sequence.length} (padded {sequence.padded}) on cp={axis.size}; Sequence.cut returns them"
        )
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    if k.shape[0] != batch or v.shape[:2] != k.shape[:2] or k.shape[3] != q.shape[3]:
        raise Parallel3dError(f"attention: {shapes}: batch, K/V heads and channels must agree")
    if heads % kv_heads:
        raise Parallel3dError(
            f"attention: {heads} query heads, {kv_heads} K/V heads: the second must divide the first"
        )
    if key_mask is not None and (
        key_mask.dtype is not torch.bool or tuple(key_mask.shape) != (batch, rows)
    ):
        raise Parallel3dError(
            f"attention: key_mask {tuple(key_mask.shape)}, {key_mask.dtype}: must be bool, "
            f"({batch}, {rows}), this rank's keys"
        )
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise Parallel3dError(f"attention: sinks {tuple(sinks.shape)}: must be ({heads},)")
    documents: Any = sequence.documents
    if documents is not None and documents.shape[0] not in (1, batch):
        raise Parallel3dError(
            f"attention: documents of {documents.shape[0]} sequences, q of {batch}"
        )
