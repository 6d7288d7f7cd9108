"""Attention of some queries to some keys, computed block by block.

``Rules`` say which keys a query may attend to and how scores are changed. ``plan_blocks`` divides queries and
keys into blocks: keys that no query may attend to are in none, and blocks with a mask are small, to keep the
mask small. A query's result over some keys and that over others are joined by the log-sum-exp of their
scores, without the scores themselves (the online softmax). In backward the log-sum-exp of all keys gives the
gradients of each block on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from parallel3d._torch.attention import fused_backward, fused_forward, fused_kernel
from parallel3d._torch.simulated import value_here
from parallel3d.cp.sequence import CpAxis, Part, Sequence

ELEMENTS = 1 << 26
"""Scores, or elements of a mask, that are in memory at once."""
QUERIES = 1024
"""Largest number of queries in a block that needs a mask, is small, or has a window."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key), index tensors that broadcast -> bool, as transformers' mask functions are."""


@dataclass(frozen=True, eq=False)
class Rules:
    """The masks and other changes of scores in one call of ``attention``, for positions of the whole
    sequence.

    Attributes:
        sequence, axis: how the sequences lie on the ranks, and the ranks.
        left: how many keys before its own position a query attends to, at most; None: all.
        right: how many after it; 0: causal; None: all.
        scale: factor of the scores.
        documents: (B, padded) integers; a query attends to keys with its own number.
        key_mask: (B, padded) bool: keys that may be attended to.
        mask_function: as in ``attention``; it is called with positions below the sequence's length only.
        head: number of this rank's first query head in the model, for ``mask_function``.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        dropout: the probability that a weight becomes 0.
        masks: cache of masks that serve several blocks: (first query's position - first key's, number of
            queries, number of keys) -> mask.
    """

    sequence: Sequence
    axis: CpAxis
    scale: float
    left: int | None = None
    right: int | None = None
    documents: Tensor | None = None
    key_mask: Tensor | None = None
    mask_function: MaskFunction | None = None
    head: int = 0
    softcap: float | None = None
    dropout: float = 0.0
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    @property
    def dense(self) -> bool:
        """Whether masks other than causal and window apply, which depend on more than positions."""
        return not (self.documents is None and self.key_mask is None and self.mask_function is None)

    @property
    def may_hide_all(self) -> bool:
        """Whether some query may attend to no key, of all keys or of those of one block."""
        return self.dense or self.left is not None or self.right not in (None, 0)

    @property
    def fusible(self) -> bool:
        """Whether fused attention kernels can be used: they know neither softcap nor our dropout."""
        return self.softcap is None and not self.dropout

    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns (``documents``, ``key_mask``), to give each simulated rank its own, see ``of``."""
        return self.documents, self.key_mask

    def of(self, documents: Tensor | None, key_mask: Tensor | None, head: int = 0) -> Rules:
        """Returns these rules with a rank's ``documents``, ``key_mask`` and number of its first head."""
        return replace(self, documents=documents, key_mask=key_mask, head=head)

    def mask(self, q_at: int, q_rows: int, k_at: int, k_rows: int, q: Tensor) -> Tensor:
        """Returns a bool mask, (B or 1, heads or 1, q_rows, k_rows), True where the query attends to the key.

        Args:
            q_at, q_rows: position of the first query, and number of queries.
            k_at, k_rows: position of the first key, and number of keys.
            q: the queries, (B, heads, ...), for sizes and device.
        """
        if self.dense:
            return self._mask(q_at, q_rows, k_at, k_rows, q)
        where = q_at - k_at, q_rows, k_rows
        if where not in self.masks:
            self.masks[where] = self._mask(q_at, q_rows, k_at, k_rows, q)
        return self.masks[where]

    def _mask(self, q_at: int, q_rows: int, k_at: int, k_rows: int, q: Tensor) -> Tensor:
        queries = torch.arange(q_at, q_at + q_rows, device=q.device)[:, None]
        keys = torch.arange(k_at, k_at + k_rows, device=q.device)[None, :]
        mask = keys >= 0  # those of padding are in no block, or come after every query
        if self.left is not None:
            mask = mask & (keys >= queries - self.left)
        if self.right is not None:
            mask = mask & (keys <= queries + self.right)
        mask = mask.expand(q_rows, k_rows)[None, None]
        if self.documents is not None:
            own = self.documents[:, q_at : q_at + q_rows, None]
            mask = mask & (own == self.documents[:, None, k_at : k_at + k_rows])[:, None]
        if self.key_mask is not None:
            mask = mask & self.key_mask[:, None, None, k_at : k_at + k_rows]
        if self.mask_function is not None:
            batch = torch.arange(q.shape[0], device=q.device)[:, None, None, None]
            heads = torch.arange(self.head, self.head + q.shape[1], device=q.device)
            last = self.sequence.length - 1
            allowed = self.mask_function(
                batch, heads[:, None, None], queries.clamp(max=last), keys.clamp(max=last)
            )
            mask = mask & value_here(allowed)
        return mask


# ---- blocks ----


class BlockForm(Enum):
    """Which scores of a block count."""

    FULL = "all of it"
    CAUSAL = "on and below the diagonal of a square"
    MASKED = "what the mask says"


class Block(NamedTuple):
    """A block of scores: consecutive queries and consecutive keys. ``q_row``, ``k_row``: index of the first
    in this rank's tensors; ``q_at``, ``k_at``: its position in the sequence; ``q_rows``, ``k_rows``: how
    many."""

    form: BlockForm
    q_row: int
    q_at: int
    q_rows: int
    k_row: int
    k_at: int
    k_rows: int


def plan_blocks(
    q_parts: Iterable[Part],
    k_parts: Iterable[Part],
    *,
    length: int,
    left: int | None,
    right: int | None,
    dense: bool,
    small: bool,
    elements: int,
) -> list[Block]:
    """Returns the blocks that cover all pairs of a query and a key that it may attend to.

    Args:
        q_parts, k_parts: where the queries and keys lie in the sequence.
        length: keys from this position on are padding, which without a causal mask must be left out.
        left, right: number of keys before and after its own position that a query attends to; None: all.
        dense: whether masks other than causal and window apply.
        small: whether every block must be small, because its scores are materialized.
        elements: largest number of scores in a small block, or of elements in a mask.
    """
    if dense or small or left is not None or right not in (None, 0):
        q_parts = [tile for part in q_parts for tile in _cut(part, min(QUERIES, elements))]
    k_parts = list(k_parts)
    found: list[Block] = []
    for q_row, q_at, q_rows in q_parts:
        for k_row, k_at, k_rows in k_parts:
            for form, first, last in _intervals(
                q_at, q_rows, k_at, k_rows, length, left, right, dense
            ):
                whole = Part(k_row + first - k_at, first, last - first)
                most = max(elements // q_rows, 1)
                cut = small or form is BlockForm.MASKED
                tiles = list(_cut(whole, most)) if cut else [whole]
                if form is BlockForm.CAUSAL and len(tiles) > 1:
                    form = BlockForm.MASKED
                for tile in tiles:
                    _append(found, Block(form, q_row, q_at, q_rows, *tile), merge=not small)
    return found


def _append(found: list[Block], block: Block, *, merge: bool) -> None:
    """Adds ``block`` to ``found``. With ``merge``, two blocks without a mask (FULL) become one if they have
    the same queries and consecutive keys, or the reverse; consecutive in this rank's tensors, not necessarily
    in the sequence."""
    last = found[-1] if found and merge else block
    if last is not block and last.form is block.form is BlockForm.FULL:
        same_queries = (last.q_row, last.q_rows) == (block.q_row, block.q_rows)
        if same_queries and last.k_row + last.k_rows == block.k_row:
            found[-1] = last._replace(k_rows=last.k_rows + block.k_rows)
            return
        same_keys = (last.k_row, last.k_rows) == (block.k_row, block.k_rows)
        if same_keys and last.q_row + last.q_rows == block.q_row:
            found[-1] = last._replace(q_rows=last.q_rows + block.q_rows)
            return
    found.append(block)


def _intervals(
    q_at: int,
    q_rows: int,
    k_at: int,
    k_rows: int,
    length: int,
    left: int | None,
    right: int | None,
    dense: bool,
) -> Iterator[tuple[BlockForm, int, int]]:
    """Yields (form, first, last): runs of key positions, first to last - 1, that some of the queries attend
    to. The arguments are as in ``Rules.mask`` and ``plan_blocks``."""
    q_end = q_at + q_rows
    first, last = k_at, k_at + k_rows
    if left is not None:
        first = max(first, q_at - left)
    if right is not None:
        last = min(last, q_end + right)
    if right != 0:
        last = min(last, length)
    if last <= first:
        return
    if dense:
        yield BlockForm.MASKED, first, last
        return
    # All queries see the keys from ``full`` to ``after``.
    full = first if left is None else min(max(first, q_end - 1 - left), last)
    after = last if right is None else max(min(last, q_at + right + (right > 0)), first)
    square = right == 0 and after == q_at and last == q_end and (left is None or left >= q_rows - 1)
    if after <= full or (not square and 2 * (after - full) < last - first):
        whole = square and first == after
        yield (BlockForm.CAUSAL if whole else BlockForm.MASKED), first, last
        return
    if first < full:
        yield BlockForm.MASKED, first, full
    yield BlockForm.FULL, full, after
    if after < last:
        yield (BlockForm.CAUSAL if square else BlockForm.MASKED), after, last


def _cut(part: Part, most: int) -> Iterator[Part]:
    row, at, rows = part
    for start in range(0, rows, most):
        yield Part(row + start, at + start, min(most, rows - start))


# ---- results over some of the keys ----


@dataclass
class Partial:
    """The attention of queries to some of their keys, to which other keys can be added.

    Attributes:
        out: (B, Hq, Q, Dv), the output over these keys.
        lse: (B, Hq, Q), natural log-sum-exp of the scores; -inf for a query that attended to no key.
        kept: for each block with dropout a flat bool tensor: which attention weights dropout has kept.
    """

    out: Tensor
    lse: Tensor
    kept: list[Tensor]

    def kept_by(self, rules: Rules) -> Tensor | None:
        """Returns ``kept`` as one flat tensor, to save for backward; None if ``rules`` have no dropout."""
        if not rules.dropout:
            return None
        return torch.cat(self.kept or [self.out.new_empty(0, dtype=torch.bool)])

    def add_sinks(self, sinks: Tensor) -> None:
        """Adds the sinks, (Hq,), to the softmax of each query: logits without a value."""
        lse = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[:, None])
        self.out.mul_(torch.exp(self.lse - lse)[..., None])
        self.lse = lse

    def join(self, rows: slice, out: Tensor, lse: Tensor, *, empty: bool) -> None:
        """Adds ``out`` and ``lse``, computed over further keys, to those of the queries ``rows``. ``empty``:
        one of the queries may have attended to no key."""
        old, before = self.lse[:, :, rows], self.out[:, :, rows]
        total = torch.logaddexp(old, lse)
        share = torch.exp(lse - (finite(total) if empty else total))
        before.lerp_(out.to(before.dtype), share[..., None])
        old.copy_(total)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which results and gradients of several blocks are added: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def finite(lse: Tensor) -> Tensor:
    """Returns ``lse`` with 0 instead of -inf, for queries that attend to no key: their weights are then
    ``exp(-inf)``, 0, not nan."""
    return lse.masked_fill(lse == float("-inf"), 0)


def blocks_of(
    q: Tensor, rules: Rules, q_parts: Iterable[Part], k_parts: Iterable[Part]
) -> list[Block]:
    """Returns the blocks for ``q`` under ``rules``, see ``plan_blocks``."""
    batch, heads = q.shape[:2]
    each = batch * (1 if rules.fusible and rules.mask_function is None else heads)
    return plan_blocks(
        q_parts,
        k_parts,
        length=rules.sequence.length,
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
    q_parts: Iterable[Part],
    k_parts: Iterable[Part],
) -> Partial:
    """Computes the attention of the queries to these keys, adds it to ``partial``, which may be changed in
    place, and returns the result; None stands for no keys so far.

    Args:
        q: (B, Hq, Q, D).
        k, v: (B, Hkv, K, D or Dv).
        q_parts, k_parts: where their rows lie in the sequence.
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
    """Returns the ``Partial`` of queries that have attended to no key yet."""
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
    q_parts: Iterable[Part],
    k_parts: Iterable[Part],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of ``q``, ``k`` and ``v`` for the attention to these keys, which may be some of
    all. Sums over several blocks are at least float32.

    Args:
        grad: the gradient of the output.
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
    """Returns the part of the sinks' gradient, (Hq,), that comes from these queries. ``delta``: ``(grad *
    out).sum(-1)``."""
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
    """Returns the attention weights ``exp(scores - lse)``, (B, Hq, Q, K); the log-sum-exp, which is computed
    over these keys if ``lse`` is None; and the derivative of the softcap, None without one."""
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
    """Returns ``a @ b``, (B, Hq, M, P), for (B, Hq, M, N) and (B, Hkv, N, P): each head of ``b`` serves a
    group of query heads."""
    if a.shape[1] == b.shape[1]:
        return a @ b
    grouped = rearrange(a, "b (kv group) m n -> b kv (group m) n", kv=b.shape[1]) @ b
    return rearrange(grouped, "b kv (group m) p -> b (kv group) m p", m=a.shape[2])


def _product_over_queries(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Returns ``a.mT @ b`` summed over each group of query heads: (B, Hq, Q, K) and (B, Hq, Q, D) -> (B,
    heads, K, D)."""
    if heads != a.shape[1]:
        a, b = (rearrange(x, "b (kv group) q d -> b kv (group q) d", kv=heads) for x in (a, b))
    return a.mT @ b
