"""Attention of sequences that lie on the ranks of ``cp``: Ulysses, an all-gather of K and V, and the ring."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from parallel3d._torch.simulated import call_by_rank
from parallel3d._util.recompute import kept
from parallel3d.cp.blocks import (
    MaskFunction,
    Partial,
    Rules,
    add_blocks,
    gradients,
    sinks_gradient,
    wide,
)
from parallel3d.cp.choose import Choice, Share, choose, share_heads
from parallel3d.cp.collectives import (
    HeadLayout,
    Rotation,
    gather_flags,
    gather_positions,
    to_heads,
    to_positions,
)
from parallel3d.cp.sequence import CpAxis, Kind, Part, Sequence
from parallel3d.errors import Parallel3dError, WrongTypeError

Masks = Tensor | None
Shares = tuple[Share, ...] | None


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
    """Returns the kind of attention that ``kind="auto"`` picks for such tensors, and why; see ``choose``."""
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
    """Returns how many keys before and after its own position a query attends to; None: all."""
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


# ---- the kinds: each takes this rank's q, k and v, and returns the attention of this rank's queries ----


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rules: Rules
) -> Tensor:
    """The kind ``"gather"``: K and V are all-gathered, and each rank computes its own queries with all keys.

    K and V are gathered in one call; their gradients are reduce-scattered in one. Under a causal mask, keys
    after a query's chunk are left out of the computation.
    """
    k, v = gather_positions((k, v), rules.sequence, rules.axis)
    return attend(q, k, v, sinks, rules)


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rules: Rules
) -> Tensor:
    """The kind ``"ulysses"``: each rank computes some heads of the whole sequence, between two all-to-alls.

    The first all-to-all brings this rank its heads of q, k and v at all positions, the second returns the
    output. A K/V head goes to the ranks whose query heads attend to it, and to no other.

    Raises:
        PlanError: there are fewer query heads than ranks.
    """
    sequence, axis, heads, kv_heads = rules.sequence, rules.axis, q.shape[1], k.shape[1]
    shares = share_heads(heads, kv_heads, axis.size)
    own = tuple((share.first, share.number) for share in shares)
    kv = tuple((share.kv_first, share.kv_number) for share in shares)
    q, k, v = to_heads((q, k, v), HeadLayout(sequence, (own, kv, kv)), axis)
    if _is_plain(rules, shares) and sinks is None:
        if rules.right != 0:
            k, v = k[:, :, : sequence.length], v[:, :, : sequence.length]
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=rules.dropout,
            is_causal=rules.right == 0,
            scale=rules.scale,
            enable_gqa=heads != kv_heads,
        )
    else:
        out = attend(q, k, v, sinks, rules, shares)
    (out,) = to_positions((out,), HeadLayout(sequence, (own,)), axis)
    return out


def _is_plain(rules: Rules, shares: tuple[Share, ...]) -> bool:
    """Whether ``F.scaled_dot_product_attention`` can compute Ulysses' local attention: without a mask or
    softcap, with equal numbers of heads on all ranks."""
    ordinary = not rules.dense and rules.softcap is None
    bounds = rules.left is None and rules.right in (None, 0)
    kinds = {(share.number, share.kv_number, share.kv_of) for share in shares}
    return ordinary and bounds and len(kinds) == 1 and shares[0].kv_of is None


# ---- autocast: what comes in is cast, what is computed is not ----


def cast_by_autocast(x: Tensor) -> Tensor:
    """Returns ``x`` in autocast's dtype if that is on, as torch's attention casts its inputs."""
    if not _is_on(x) or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Returns a context in which autocast is off for the device of ``x``."""
    return torch.autocast(x.device.type, enabled=False) if _is_on(x) else nullcontext()


def _is_on(x: Tensor) -> bool:
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


# ---- keys that are all on this rank ----


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rules: Rules, shares: Shares = None
) -> Tensor:
    """Returns the attention of this rank's queries, where all keys are on this rank.

    Args:
        q: (B, Hq, Q, D): this rank's positions; with ``shares`` all positions of this rank's heads.
        k, v: (B, Hkv, padded, D or Dv): all positions, with ``shares`` of the heads that they name.
        sinks: (all query heads,): an additional logit of each head in the softmax, without a value.
        shares: each rank's heads in Ulysses; None: every rank has all heads.
    """
    return _LocalAttend.apply(q, k, v, sinks, rules, shares)


class _LocalAttend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        rules: Rules,
        shares: Shares,
    ) -> Tensor:
        ctx.how = how = rules, shares
        given, masks, random = (q, k, v, sinks), rules.tensors(), bool(rules.dropout)
        out, lse, drawn = call_by_rank(_forward, rules.axis.rank, how, given, *masks, random=random)
        ctx.save_for_backward(q, k, v, sinks, out, lse, drawn)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, *result = ctx.saved_tensors
        rules, given = ctx.how[0], (q, k, v, sinks)
        with autocast_off(q):
            found = call_by_rank(
                _backward, rules.axis.rank, ctx.how, grad, given, result, *rules.tensors()
            )
        return *found, None, None


def _forward(
    rank: int, how: Any, given: Any, *masks: Masks
) -> tuple[Tensor, Tensor, Tensor | None]:
    rules, at, heads, kv_of = _own(rank, how, masks)
    q, k, v, sinks = given
    if kv_of is not None:
        k, v = k[:, kv_of], v[:, kv_of]
    partial = add_blocks(None, q, k, v, rules, at, rules.sequence.whole())
    if sinks is not None:
        partial.add_sinks(sinks[heads])
    return partial.out.to(q.dtype), partial.lse, partial.kept_by(rules)


def _backward(
    rank: int, how: Any, grad: Tensor, given: Any, result: Any, *masks: Masks
) -> tuple[Tensor | None, ...]:
    rules, at, heads, kv_of = _own(rank, how, masks)
    (q, k, v, sinks), (out, lse, drawn) = given, result
    delta = (grad * out).sum(-1, dtype=lse.dtype)
    own_k, own_v = (k, v) if kv_of is None else (k[:, kv_of], v[:, kv_of])
    keys, whole = rules.sequence.whole(), (out, lse, delta)
    dq, dk, dv = gradients(grad, q, own_k, own_v, whole, drawn, rules, at, keys)
    if kv_of is not None:  # the gradients of the heads that share one are summed
        index = torch.tensor(kv_of, device=q.device)
        dk, dv = (
            torch.zeros(x.shape, dtype=g.dtype, device=x.device).index_add_(1, index, g)
            for x, g in ((k, dk), (v, dv))
        )
    dsinks = None
    if sinks is not None:
        dsinks = torch.zeros_like(sinks)
        dsinks[heads] = sinks_gradient(sinks[heads], lse, delta)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _own(
    rank: int, how: Any, masks: Any
) -> tuple[Rules, tuple[Part, ...], slice, tuple[int, ...] | None]:
    """Returns what rank ``rank`` needs in ``attend``: its rules, where its queries lie in the sequence, its
    query heads, and the K/V head of each (None: the usual groups). ``how``: (rules, shares) of the call."""
    rules, shares = how
    if shares is None:
        return rules.of(*masks), rules.sequence.parts(rank), slice(None), None
    share = shares[rank]
    heads = slice(share.first, share.first + share.number)
    return rules.of(*masks, share.first), rules.sequence.whole(), heads, share.kv_of


# ---- the ring ----


class _Ring(torch.autograd.Function):
    """The kind ``"ring"``: K and V travel from rank to rank while each rank computes its queries with those
    that it has.

    In step s a rank computes its queries with K and V of the rank s before it, while the next ones are on
    their way. Backward sends K and V round again, and their gradients after them. Blocks that a causal mask
    hides entirely are not computed.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rules: Rules
    ) -> Tensor:
        ctx.how = how = rules, k.shape, v.shape
        # Recomputed selectively, it sends nothing again: its results are kept.
        out, lse, *drawn = kept("ring", lambda: _go_round(q, k, v, sinks, how))
        ctx.save_for_backward(q, k, v, sinks, out, lse, *drawn)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, *drawn = ctx.saved_tensors
        how = ctx.how
        axis, masks = how[0].axis, how[0].tensors()
        with autocast_off(q):
            delta, dsinks = call_by_rank(_start_backward, grad, out, lse, sinks)
            pair, dq = call_by_rank(_pack, k, v), None
            of_pair: Rotation | None = None
            for step in range(axis.size):
                message = Rotation(pair, axis) if step + 1 < axis.size else None
                state = grad, q, pair, out, lse, delta, dq
                mine = drawn[step] if drawn else None
                dq, own = call_by_rank(_add_gradients, axis.rank, step, how, state, mine, *masks)
                arrived = None if of_pair is None else of_pair.wait()
                # What the ranks before this one have added to these keys' gradients comes after the keys.
                of_pair = Rotation(call_by_rank(_sum, own, arrived, pair), axis)
                pair = pair if message is None else message.wait()
        assert of_pair is not None
        dk, dv = call_by_rank(_unpack, of_pair.wait(), k.shape, v.shape)
        return call_by_rank(Tensor.to, dq, q.dtype), dk, dv, dsinks, None


def _go_round(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: Any
) -> tuple[Tensor, ...]:
    """Runs the ring's forward. Returns the output, the log-sum-exp of the scores and, with dropout, for each
    step which weights were kept."""
    axis, masks, random = how[0].axis, how[0].tensors(), bool(how[0].dropout)
    pair = call_by_rank(_pack, k, v)
    out = lse = None
    drawn = []
    for step in range(axis.size):
        message = Rotation(pair, axis) if step + 1 < axis.size else None
        state = q, pair, out, lse
        out, lse, keep = call_by_rank(_add, axis.rank, step, how, state, *masks, random=random)
        drawn.append(keep)
        pair = pair if message is None else message.wait()
    out, lse = call_by_rank(_finish, q, out, lse, sinks)
    return (out, lse, *drawn) if random else (out, lse)


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpack(
    pair: Tensor, k_shape: tuple[int, ...], v_shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    k, v = pair.split([math.prod(k_shape), math.prod(v_shape)])
    return k.view(k_shape), v.view(v_shape)


def _finish(q: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    partial = Partial(out, lse, [])
    if sinks is not None:
        partial.add_sinks(sinks)
    return partial.out.to(q.dtype), partial.lse


def _add(
    rank: int, step: int, how: Any, state: Any, *masks: Masks
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes step ``step`` of the ring's forward on rank ``rank``, and adds it to the result so far, in
    ``state``. Returns output, log-sum-exp, and which weights dropout has kept in this step (None without
    dropout)."""
    (rules, *shapes), (q, pair, out, lse) = how, state
    k, v = _unpack(pair, *shapes)
    before = None if out is None else Partial(out, lse, [])
    partial = add_blocks(before, q, k, v, rules.of(*masks), *_parts(rules, rank, step))
    return partial.out, partial.lse, partial.kept_by(rules)


def _start_backward(
    grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    delta = (grad * out).sum(-1, dtype=lse.dtype)
    return delta, None if sinks is None else sinks_gradient(sinks, lse, delta)


def _add_gradients(
    rank: int, step: int, how: Any, state: Any, drawn: Tensor | None, *masks: Masks
) -> tuple[Tensor, Tensor]:
    """Computes step ``step`` of the ring's backward on rank ``rank``. Returns ``dq`` so far, and the
    gradients of this step's K and V as one flat tensor. ``drawn``: which weights dropout had kept."""
    (rules, *shapes), (grad, q, pair, out, lse, delta, dq) = how, state
    k, v = _unpack(pair, *shapes)
    places, whole = _parts(rules, rank, step), (out, lse, delta)
    own, dk, dv = gradients(grad, q, k, v, whole, drawn, rules.of(*masks), *places)
    dq = own.to(wide(q.dtype)) if dq is None else dq.add_(own)
    return dq, _pack(dk, dv)


def _sum(own: Tensor, arrived: Tensor | None, pair: Tensor) -> Tensor:
    return (own if arrived is None else own.add_(arrived)).to(pair.dtype)


def _parts(rules: Rules, rank: int, step: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Returns where this rank's queries, and the keys that it has in ``step``, lie in the sequence."""
    sequence = rules.sequence
    return sequence.parts(rank), sequence.parts((rank - step) % rules.axis.size)


_KINDS: dict[str, Callable[..., Tensor]] = {
    "ulysses": ulysses_attention,
    "gather": gathered_attention,
    "ring": _Ring.apply,
}
