"""Attention computed block by block: partial results that are joined by their log-sum-exp, and their
gradients.

A query's result over some keys and that over others are joined by the log-sum-exp of their scores, without
the scores themselves (the online softmax). In backward the log-sum-exp of all keys gives the gradients of
each block on its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from parallel3d._torch.attention import fused_backward, fused_forward, fused_kernel
from parallel3d.cp.blocks import Block, BlockForm, plan_blocks
from parallel3d.cp.rules import Rules

ELEMENTS = 1 << 26
"""Scores, or elements of a mask, that are in memory at once."""

Parts = Iterable[tuple[int, int, int]]


@dataclass
class Partial:
    """The attention of this rank's queries to the keys seen so far.

    Attributes:
        out: (B, Hq, Q, Dv).
        lse: (B, Hq, Q), natural log-sum-exp of the scores; -inf for a query that has seen no key.
        kept: for each block with dropout a flat bool tensor: which attention weights dropout has kept.
    """

    out: Tensor
    lse: Tensor
    kept: list[Tensor]

    def kept_by(self, rules: Rules) -> Tensor | None:
        """Returns what dropout has kept of all blocks, flat: their number differs by rank; None without
        it."""
        if not rules.dropout:
            return None
        return torch.cat(self.kept or [self.out.new_empty(0, dtype=torch.bool)])

    def add_sinks(self, sinks: Tensor) -> None:
        """Adds to the result over all keys a further logit of each head, which has no value."""
        lse = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[:, None])
        self.out.mul_(torch.exp(self.lse - lse)[..., None])
        self.lse = lse

    def join(self, rows: slice, out: Tensor, lse: Tensor, *, empty: bool) -> None:
        """Adds the result over further keys of the queries ``rows``.

        Args:
            empty: whether one of them may have seen no key, before and in this result.
        """
        old, before = self.lse[:, :, rows], self.out[:, :, rows]
        total = torch.logaddexp(old, lse)
        share = torch.exp(lse - (finite(total) if empty else total))
        before.lerp_(out.to(before.dtype), share[..., None])
        old.copy_(total)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results and gradients of several blocks are added: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def finite(lse: Tensor) -> Tensor:
    """``lse`` with 0 for a query that sees no key, all whose weights are then ``exp(-inf)``."""
    return lse.masked_fill(lse == float("-inf"), 0)


def blocks_of(q: Tensor, rules: Rules, q_parts: Parts, k_parts: Parts) -> list[Block]:
    """Returns the blocks of these queries and keys."""
    batch, heads = q.shape[:2]
    each = batch * (1 if rules.fusible and rules.mask_function is None else heads)
    return plan_blocks(
        q_parts,
        k_parts,
        length=rules.length,
        left=rules.left,
        right=rules.right,
        dense=rules.dense,
        small=not rules.fusible,
        elements=max(ELEMENTS // each, 1),
    )


def add_blocks(
    partial: Partial | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: Rules,
    q_parts: Parts,
    k_parts: Parts,
) -> Partial:
    """Returns ``partial`` with the attention of the queries to these keys added to it; it may be changed.

    Args:
        partial: None: over no keys.
        q: (B, Hq, Q, D), rows as ``q_parts`` says.
        k, v: (B, Hkv, K, D or Dv), rows as ``k_parts`` says.
    """
    begun = q.shape[2] if partial is not None else 0  # queries before this one have a result
    for block in blocks_of(q, rules, q_parts, k_parts):
        rows, keys = _rows(block)
        q_, k_, v_ = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        mask, kernel = _mask_and_kernel(block, q_, k_, v_, rules)
        keep = None
        if kernel is not None:
            causal = block.form is BlockForm.CAUSAL
            out, lse = fused_forward(kernel, q_, k_, v_, mask, causal, rules.scale)
        else:
            weights, lse, _ = _weights(q_, k_, mask, rules, None)
            if rules.dropout:
                keep = torch.rand_like(weights) >= rules.dropout
                weights = _dropped(weights, keep, rules)
            out = _product(weights.to(v.dtype), v_)
        if partial is None and block.q_rows == q.shape[2]:
            partial = Partial(out.to(wide(q.dtype)), lse, [])
        else:
            partial = _start(q, v) if partial is None else partial
            if block.q_row >= begun:
                partial.out[:, :, rows] = out
                partial.lse[:, :, rows] = lse
            else:
                partial.join(rows, out, lse, empty=rules.may_hide_all)
        begun = max(begun, block.q_row + block.q_rows)
        if keep is not None:
            partial.kept.append(keep.flatten())
    return _start(q, v) if partial is None else partial


def _start(q: Tensor, v: Tensor) -> Partial:
    """The result over no keys."""
    shape, dtype = (*q.shape[:3], v.shape[3]), wide(q.dtype)
    out = torch.zeros(shape, dtype=dtype, device=q.device)
    return Partial(out, out.new_full(shape[:3], float("-inf")), [])


def gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whole: tuple[Tensor, Tensor, Tensor],
    kept: Tensor | None,
    rules: Rules,
    q_parts: Parts,
    k_parts: Parts,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of ``q``, ``k`` and ``v`` by these keys' part of the attention.

    With several blocks the gradients are in the dtype in which the blocks' summands are added.

    Args:
        grad: gradient of the output.
        whole: the output and the log-sum-exp over all keys, and ``(grad * out).sum(-1)``.
        kept: what ``Partial.kept_by`` has returned for these blocks.
    """
    out, lse, delta = whole
    if rules.may_hide_all:
        lse = finite(lse)
    taken = 0
    grads: list[Tensor] = []
    for block in blocks_of(q, rules, q_parts, k_parts):
        rows, keys = _rows(block)
        q_, k_, v_ = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        mask, kernel = _mask_and_kernel(block, q_, k_, v_, rules)
        grad_, lse_ = grad[:, :, rows], lse[:, :, rows]
        if kernel is not None:
            causal = block.form is BlockForm.CAUSAL
            found = fused_backward(
                kernel, grad_, q_, k_, v_, out[:, :, rows], lse_, mask, causal, rules.scale
            )
        else:
            keep = None
            if kept is not None:
                shape = (*q_.shape[:3], block.k_rows)
                keep = kept.narrow(0, taken, math.prod(shape)).view(shape)
                taken += keep.numel()
            found = _plain_backward(grad_, q_, k_, v_, lse_, delta[:, :, rows], mask, keep, rules)
        if not grads and (block.q_rows, block.k_rows) == (q.shape[2], k.shape[2]):
            return found  # there is no other
        grads = grads or _zeros(q, k, v)
        for total, part, where in zip(grads, found, (rows, keys, keys), strict=True):
            total[:, :, where].add_(part)
    dq, dk, dv = grads or _zeros(q, k, v)
    return dq, dk, dv


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Returns the gradient of the sinks from these queries."""
    return -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)


def _zeros(*tensors: Tensor) -> list[Tensor]:
    return [torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in tensors]


def _rows(block: Block) -> tuple[slice, slice]:
    rows = slice(block.q_row, block.q_row + block.q_rows)
    return rows, slice(block.k_row, block.k_row + block.k_rows)


def _mask_and_kernel(
    block: Block, q: Tensor, k: Tensor, v: Tensor, rules: Rules
) -> tuple[Tensor | None, str | None]:
    masked = block.form is BlockForm.MASKED
    kernel = fused_kernel(q, k, v, masked=masked) if rules.fusible else None
    if masked or (block.form is BlockForm.CAUSAL and kernel is None):
        return rules.mask(block.q_at, block.q_rows, block.k_at, block.k_rows, q), kernel
    return None, kernel


# ---- without a fused kernel ----


def _weights(
    q: Tensor, k: Tensor, mask: Tensor | None, rules: Rules, lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns ``exp(scores - lse)``, (B, Hq, Q, K), ``lse`` of these keys unless one is given, and the
    derivative of the softcap, None without one."""
    scores = _product(q * rules.scale, k.mT).to(wide(q.dtype))
    slope = None
    if rules.softcap is not None:
        bent = torch.tanh(scores / rules.softcap)
        scores, slope = bent * rules.softcap, 1 - bent * bent
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if lse is None:
        lse = scores.logsumexp(-1)
    return torch.exp(scores - finite(lse)[..., None]), lse, slope


def _dropped(weights: Tensor, keep: Tensor, rules: Rules) -> Tensor:
    return weights * keep / (1 - rules.dropout) if rules.dropout < 1 else weights * 0


def _plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    rules: Rules,
) -> tuple[Tensor, Tensor, Tensor]:
    weights, _, slope = _weights(q, k, mask, rules, lse)
    from_values = _product(grad, v.mT).to(weights.dtype)
    used = weights
    if keep is not None:
        used, from_values = _dropped(weights, keep, rules), _dropped(from_values, keep, rules)
    grad_v = _product_over_queries(used.to(grad.dtype), grad, v.shape[1])
    change = weights * (from_values - delta[..., None])
    if slope is not None:
        change = change * slope
    change = (change * rules.scale).to(q.dtype)
    return _product(change, k), _product_over_queries(change, q, k.shape[1]), grad_v


def _product(a: Tensor, b: Tensor) -> Tensor:
    """(B, Hq, M, N) x (B, Hkv, N, P) -> (B, Hq, M, P): query heads in groups, one for each head of ``b``."""
    if a.shape[1] == b.shape[1]:
        return a @ b
    grouped = rearrange(a, "b (kv group) m n -> b kv (group m) n", kv=b.shape[1]) @ b
    return rearrange(grouped, "b kv (group m) p -> b (kv group) m p", m=a.shape[2])


def _product_over_queries(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """The sum over a group's queries of (B, Hq, Q, K)^T x (B, Hq, Q, D): (B, heads, K, D)."""
    if heads != a.shape[1]:
        a, b = (rearrange(x, "b (kv group) q d -> b kv (group q) d", kv=heads) for x in (a, b))
    return a.mT @ b
