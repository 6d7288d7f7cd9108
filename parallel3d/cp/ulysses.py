"""Ulysses: each rank computes some heads of the whole sequence, between two all-to-alls."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from parallel3d.cp.axis import CpAxis
from parallel3d.cp.collectives import HeadLayout, to_heads, to_positions
from parallel3d.cp.local import attend
from parallel3d.cp.rules import Rules
from parallel3d.cp.sequence import Sequence
from parallel3d.cp.shares import Share, share_heads


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    rules: Rules,
    sequence: Sequence,
    axis: CpAxis,
) -> Tensor:
    """Returns this rank's positions of the attention; arguments as ``attention`` has them.

    One all-to-all brings this rank its heads of q, k and v at all positions, one brings the output back. A
    K/V head goes to the ranks whose query heads attend to it, and to no other.

    Raises:
        PlanError: there are fewer query heads than ranks.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    shares = share_heads(heads, kv_heads, axis.size)
    own = tuple((share.first, share.number) for share in shares)
    kv = tuple((share.kv_first, share.kv_number) for share in shares)
    q, k, v = to_heads(
        (q, k, v), HeadLayout(sequence, (own, kv, kv), (heads, kv_heads, kv_heads)), axis
    )
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
        out = attend(q, k, v, sinks, rules, sequence, axis, shares)
    (out,) = to_positions((out,), HeadLayout(sequence, (own,), (heads,)), axis)
    return out


def _is_plain(rules: Rules, shares: tuple[Share, ...]) -> bool:
    """Whether torch's own function computes it without a mask, on ranks with equal numbers of heads."""
    ordinary = not rules.dense and rules.softcap is None
    bounds = rules.left is None and rules.right in (None, 0)
    kinds = {(share.number, share.kv_number, share.kv_of) for share in shares}
    return ordinary and bounds and len(kinds) == 1 and shares[0].kv_of is None
