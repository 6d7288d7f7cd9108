"""How attention's heads are shared by tensor-parallel ranks: what the fullest rank has.

The same arithmetic as ``tp/heads/align.py``, without torch; ``tests/planner/test_head_shares.py`` compares
the two.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

__all__ = ["HeadShare", "head_share", "rows_computed"]


class HeadShare(NamedTuple):
    """Heads of the fullest rank.

    Attributes:
        query: of queries. kv: of keys and values that it computes. paired: of keys and values that go into
            attention: one comes as often as query heads need it, where they need different numbers.
    """

    query: int
    kv: int
    paired: int


@lru_cache(maxsize=4096)
def head_share(heads: int, kv_heads: int, tp: int) -> HeadShare:
    """Of ``heads`` query heads and ``kv_heads`` of keys and values on ``tp`` ranks.

    Groups that attend to one key and value stay together, ceil(kv_heads / tp) of them; with fewer than
    ranks, query heads are shared, and each rank has the keys and values that its own need; with fewer query
    heads than ranks each computes all.
    """
    if heads < tp:
        return HeadShare(heads, kv_heads, kv_heads)
    if kv_heads >= tp:
        groups = -(-kv_heads // tp)
        return HeadShare(groups * (heads // kv_heads), groups, groups)
    group, first, wanted = heads // kv_heads, 0, []
    for rank in range(tp):
        mine = heads // tp + (rank < heads % tp)
        wanted.append([head // group for head in range(first, first + mine)])
        first += mine
    each = [set(kv) for kv in wanted]
    alike = len({kv.count(head) for kv, own in zip(wanted, each, strict=True) for head in own}) == 1
    query, span = max(map(len, wanted)), max(map(len, each))
    return HeadShare(query, span, span if alike else query)


def rows_computed(size: int, heads: tuple[int, int] | None, kv: bool, tp: int) -> int:
    """Of ``size`` features that ``tp`` divides, those that the fullest rank computes.

    Args:
        heads: (query, key and value heads) that they are made of, if they are; kv: whether of the latter.
    """
    if heads is None or tp == 1:
        return -(-size // tp)
    share = head_share(*heads, tp)
    return size * share.kv // heads[1] if kv else size * share.query // heads[0]
