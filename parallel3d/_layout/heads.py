"""How the ranks of an axis share an attention layer's heads: pure numbers, for tp, cp and the planner."""

from itertools import accumulate


def share_out(number: int, ranks: int) -> tuple[int, ...]:
    """Splits ``number`` evenly; the first ranks get one more."""
    return tuple(number // ranks + (rank < number % ranks) for rank in range(ranks))


def attended_heads(heads: int, kv_heads: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Returns for each rank, for each of its query heads, the key and value head that it attends to.

    Args:
        heads: query heads, shared as evenly as possible; a multiple of ``kv_heads``.
    """
    group, query = heads // kv_heads, share_out(heads, ranks)
    ends = zip(accumulate(query), query, strict=True)
    return tuple(tuple(n // group for n in range(end - number, end)) for end, number in ends)
