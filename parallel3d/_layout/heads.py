"""How the ranks of an axis share an attention layer's heads: pure numbers, for tp, cp and the planner."""

from itertools import accumulate


def share_out(number: int, ranks: int) -> tuple[int, ...]:
    """Returns how many of ``number`` things each rank gets: equally many, the first ranks one more."""
    return tuple(number // ranks + (rank < number % ranks) for rank in range(ranks))


def attended_heads(heads: int, kv_heads: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Returns, for each rank, the index of the key and value head that each of its query heads attends to
    (grouped-query attention).

    Args:
        heads: number of query heads, a multiple of ``kv_heads``; the ranks share them by ``share_out``.
    """
    group, query = heads // kv_heads, share_out(heads, ranks)
    ends = zip(accumulate(query), query, strict=True)
    return tuple(tuple(n // group for n in range(end - number, end)) for end, number in ends)
