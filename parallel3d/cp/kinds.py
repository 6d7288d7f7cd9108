"""The kinds of attention: Ulysses, an all-gather of K and V, and the ring.

Each function takes this rank's q, k and v, and returns the attention of this rank's queries.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from parallel3d._torch.simulated import call_by_rank
from parallel3d._util.recompute import kept
from parallel3d.cp.choose import Share, share_heads
from parallel3d.cp.collectives import HeadLayout, Rotation, gather_positions, to_heads, to_positions
from parallel3d.cp.partial import Partial, add_blocks, gradients, sinks_gradient, wide
from parallel3d.cp.rules import Rules
from parallel3d.cp.sequence import Part

Masks = Tensor | None
Shares = tuple[Share, ...] | None


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rules: Rules
) -> Tensor:
    """All-gather of K and V: each rank computes its own queries with all keys.

    K and V are gathered in one call; their gradients are reduce-scattered in one. Under a causal mask each of
    this rank's parts is computed with the keys up to it and no others.
    """
    k, v = gather_positions((k, v), rules.sequence, rules.axis)
    return attend(q, k, v, sinks, rules)


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rules: Rules
) -> Tensor:
    """Ulysses: each rank computes some heads of the whole sequence, between two all-to-alls.

    One all-to-all brings this rank its heads of q, k and v at all positions, one brings the output back. A
    K/V head goes to the ranks whose query heads attend to it, and to no other.

    Raises:
        PlanError: there are fewer query heads than ranks.
    """
    sequence, axis, heads, kv_heads = rules.sequence, rules.axis, q.shape[1], k.shape[1]
    shares = share_heads(heads, kv_heads, axis.size)
    own = tuple((share.first, share.number) for share in shares)
    kv = tuple((share.kv_first, share.kv_number) for share in shares)
    q, k, v = to_heads((q, k, v), HeadLayout(sequence, (own, kv, kv)), axis)
    if _is_plain(rules, shares) and sinks is None:
        if not rules.causal:
            k, v = k[:, :, : rules.length], v[:, :, : rules.length]
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=rules.dropout,
            is_causal=rules.causal,
            scale=rules.scale,
            enable_gqa=heads != kv_heads,
        )
    else:
        out = attend(q, k, v, sinks, rules, shares)
    (out,) = to_positions((out,), HeadLayout(sequence, (own,)), axis)
    return out


def _is_plain(rules: Rules, shares: tuple[Share, ...]) -> bool:
    """Whether torch's own function computes it without a mask, on ranks with equal numbers of heads."""
    ordinary = not rules.dense and rules.softcap is None
    bounds = rules.left is None and rules.right in (None, 0)
    kinds = {(share.number, share.kv_number, share.kv_of) for share in shares}
    return ordinary and bounds and len(kinds) == 1 and shares[0].kv_of is None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rules: Rules) -> Tensor:
    """Ring attention: K and V travel round the ranks while each computes its queries with what it has.

    In step s a rank computes its queries with K and V of the rank s before it, while the next ones are on
    their way. Backward sends K and V round again, and their gradients after them. Blocks of which a causal
    mask leaves nothing are not computed.
    """
    return _Ring.apply(q, k, v, sinks, rules)


# ---- autocast: what comes in is cast, what is computed is not ----


def cast_by_autocast(x: Tensor) -> Tensor:
    """Returns ``x`` in autocast's dtype, as ``F.scaled_dot_product_attention`` takes it."""
    if not _is_on(x) or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Returns a context without autocast on the device of ``x``."""
    return torch.autocast(x.device.type, enabled=False) if _is_on(x) else nullcontext()


def _is_on(x: Tensor) -> bool:
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


# ---- keys that are all on this rank ----


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rules: Rules, shares: Shares = None
) -> Tensor:
    """Returns the attention of the queries to all keys.

    Args:
        q: (B, Hq, Q, D): this rank's positions; with ``shares`` all positions of this rank's heads.
        k, v: (B, Hkv, padded, D or Dv): all positions, with ``shares`` of the heads that they name.
        sinks: (all query heads,): a further logit of each head, which takes weight and has no value.
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
    """This rank's rules, where its queries lie, which heads they are, and the K/V head of each."""
    rules, shares = how
    if shares is None:
        return rules.of(*masks), rules.sequence.parts(rank), slice(None), None
    share = shares[rank]
    heads = slice(share.first, share.first + share.number)
    return rules.of(*masks, share.first), rules.sequence.whole(), heads, share.kv_of


# ---- the ring ----


class _Ring(torch.autograd.Function):
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
    """Returns the output, the scores' log-sum-exp, and of each step what dropout has kept, if it drops."""
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
    """Returns the result and log-sum-exp with a step added to them, and what dropout has kept."""
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
    """Returns ``dq`` with a step added to it, and the gradients of the step's K and V, flat."""
    (rules, *shapes), (grad, q, pair, out, lse, delta, dq) = how, state
    k, v = _unpack(pair, *shapes)
    places, whole = _parts(rules, rank, step), (out, lse, delta)
    own, dk, dv = gradients(grad, q, k, v, whole, drawn, rules.of(*masks), *places)
    dq = own.to(wide(q.dtype)) if dq is None else dq.add_(own)
    return dq, _pack(dk, dv)


def _sum(own: Tensor, arrived: Tensor | None, pair: Tensor) -> Tensor:
    return (own if arrived is None else own.add_(arrived)).to(pair.dtype)


def _parts(rules: Rules, rank: int, step: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Where the rank's queries lie, and the keys that it has in a step."""
    sequence = rules.sequence
    return sequence.parts(rank), sequence.parts((rank - step) % rules.axis.size)
