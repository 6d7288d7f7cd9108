"""Attention of queries to keys that are all on this rank, as one autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel3d._torch.simulated import call_by_rank
from parallel3d.cp.autocast import autocast_off
from parallel3d.cp.axis import CpAxis
from parallel3d.cp.partial import Partial, add_blocks, gradients
from parallel3d.cp.rules import Rules
from parallel3d.cp.sequence import Part, Sequence
from parallel3d.cp.shares import Share


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    rules: Rules,
    sequence: Sequence,
    axis: CpAxis,
    shares: tuple[Share, ...] | None = None,
) -> Tensor:
    """Returns the attention of the queries to all keys.

    Args:
        q: (B, Hq, Q, D): this rank's positions; with ``shares`` all positions of this rank's heads.
        k, v: (B, Hkv, padded, D or Dv): all positions, with ``shares`` of the heads that they name.
        sinks: (all query heads,): a further logit of each head, which takes weight and has no value.
    """
    return _LocalAttend.apply(q, k, v, sinks, rules, sequence, axis, shares)


def with_sinks(partial: Partial, sinks: Tensor | None) -> None:
    """Adds the sinks to the result over all keys."""
    if sinks is None:
        return
    lse = torch.logaddexp(partial.lse, sinks.to(partial.lse.dtype)[:, None])
    partial.out.mul_(torch.exp(partial.lse - lse)[..., None])
    partial.lse = lse


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Returns the gradient of the sinks from these queries."""
    return -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)


class _LocalAttend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        rules: Rules,
        sequence: Sequence,
        axis: CpAxis,
        shares: tuple[Share, ...] | None,
    ) -> Tensor:
        ctx.how = how = rules, sequence, axis, shares
        out, lse, kept = call_by_rank(
            _forward, axis.rank, how, q, k, v, sinks, *rules.tensors(), random=bool(rules.dropout)
        )
        ctx.save_for_backward(q, k, v, sinks, out, lse, kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, kept = ctx.saved_tensors
        rules, _, axis, _ = ctx.how
        result = out, lse, kept
        with autocast_off(q):
            found = call_by_rank(
                _backward, axis.rank, ctx.how, grad, q, k, v, sinks, result, *rules.tensors()
            )
        return *found, None, None, None, None


def _forward(
    rank: int,
    how: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *masks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    rules, sequence, at, share = _own(rank, how, masks)
    if share is not None and share.kv_of is not None:
        k, v = k[:, share.kv_of], v[:, share.kv_of]
    partial = add_blocks(None, q, k, v, rules, at, sequence.whole())
    with_sinks(partial, _own_sinks(sinks, share))
    return partial.out.to(q.dtype), partial.lse, partial.kept_by(rules)


def _backward(
    rank: int,
    how: Any,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    result: tuple[Tensor, Tensor, Tensor | None],
    *masks: Tensor | None,
) -> tuple[Tensor | None, ...]:
    rules, sequence, at, share = _own(rank, how, masks)
    out, lse, kept = result
    delta = (grad * out).sum(-1, dtype=lse.dtype)
    kv_of = None if share is None else share.kv_of
    own_k, own_v = (k, v) if kv_of is None else (k[:, kv_of], v[:, kv_of])
    whole = out, lse, delta
    dq, dk, dv = gradients(grad, q, own_k, own_v, whole, kept, rules, at, sequence.whole())
    if kv_of is not None:  # the gradients of the heads that share one are summed
        index = torch.tensor(kv_of, device=q.device)
        dk, dv = (
            torch.zeros(x.shape, dtype=g.dtype, device=x.device).index_add_(1, index, g)
            for x, g in ((k, dk), (v, dv))
        )
    dsinks = None
    if sinks is not None:
        mine = slice(None) if share is None else slice(share.first, share.first + share.number)
        dsinks = torch.zeros_like(sinks)
        dsinks[mine] = sinks_gradient(sinks[mine], lse, delta)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _own(
    rank: int, how: Any, masks: tuple[Tensor | None, ...]
) -> tuple[Rules, Sequence, tuple[Part, ...], Share | None]:
    """This rank's rules, and where its queries lie."""
    rules, sequence, _, shares = how
    if shares is None:
        return rules.of(*masks), sequence, sequence.parts(rank), None
    share = shares[rank]
    return rules.of(*masks, share.first), sequence, sequence.whole(), share


def _own_sinks(sinks: Tensor | None, share: Share | None) -> Tensor | None:
    if sinks is None or share is None:
        return sinks
    return sinks[share.first : share.first + share.number]
