"""How attention's heads are shared by tensor-parallel ranks: what the fullest rank has."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from parallel3d._layout.heads import attended_heads
from parallel3d.fsdp.layout import ceil_div
from parallel3d.planner.model_spec import AttentionSpec


class HeadShare(NamedTuple):
    """Numbers of heads of the rank with the most heads.

    Attributes:
        query: query heads.
        kv: key and value heads that it computes.
        paired: key and value heads that go into attention. Where query heads need different numbers of them,
            each is repeated as often as query heads need it.
    """

    query: int
    kv: int
    paired: int


@lru_cache(maxsize=4096)
def head_share(heads: int, kv_heads: int, tp: int, fused: bool = False) -> HeadShare:
    """How ``heads`` query heads and ``kv_heads`` key and value heads are divided over ``tp`` ranks.

    Query heads that attend to one key and value head stay together: a rank has ceil(kv_heads / tp) such
    groups. With fewer key and value heads than ranks the query heads are divided, and each rank has the keys
    and values that its own need; but a ``fused`` matrix of queries, keys and values is then whole on each.
    With fewer query heads than ranks each rank computes all heads.
    """
    if heads < tp or (fused and kv_heads < tp):
        return HeadShare(heads, kv_heads, kv_heads)
    if kv_heads >= tp:
        groups = ceil_div(kv_heads, tp)
        return HeadShare(groups * (heads // kv_heads), groups, groups)
    attended = attended_heads(heads, kv_heads, tp)
    alike = len({own.count(head) for own in attended for head in own}) == 1
    query, span = len(attended[0]), max(len(set(own)) for own in attended)
    return HeadShare(query, span, span if alike else query)


def rows_computed(size: int, heads: tuple[int, int] | None, kv: bool, tp: int) -> int:
    """Returns how many of ``size`` features, split over ``tp`` ranks, the rank with most of them computes.

    Args:
        heads: (query heads, key and value heads) if the features are made of heads.
        kv: whether they are made of key and value heads.
    """
    if heads is None or tp == 1:
        return ceil_div(size, tp)
    share = head_share(*heads, tp)
    return size * share.kv // heads[1] if kv else size * share.query // heads[0]


def local_heads(attention: AttentionSpec, tp: int) -> HeadShare:
    """Heads of the fullest rank."""
    return head_share(attention.heads, attention.kv_heads, tp, attention.fused)
