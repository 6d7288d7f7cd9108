"""Differences between ranks, and ranks themselves, in words."""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import timedelta

__all__ = ["describe", "excerpt", "name_ranks", "seconds"]

_MOST_LINES = 16  # a model in another dtype differs in every parameter


def describe(differences: Mapping[str, Mapping[str, list[int]]], world_size: int) -> str:
    """The odd ranks, then each setting on a line with its values, the commonest first."""
    odd: set[int] = set()
    lines = []
    for name, ranks_of in differences.items():
        # Ties go to the value of the lowest rank: ranks_of is in the order of first appearance.
        ordered = Counter({value: len(ranks) for value, ranks in ranks_of.items()}).most_common()
        common, count = ordered[0]
        if 2 * count > world_size:
            odd.update(rank for v, ranks in ranks_of.items() if v != common for rank in ranks)
        parts = [
            f"{excerpt(value, ordered[1][0] if value == common else common)} "
            f"on {name_ranks(ranks_of[value])}"
            for value, _ in ordered[:4]
        ]
        if len(ordered) > 4:
            parts.append(f"{len(ordered) - 4} other values on the rest")
        lines.append(f"\n  {name}: {'; '.join(parts)}")
    if not odd:
        head = "no value has a majority."
    elif len(odd) == 1:
        head = f"{name_ranks(odd)} differs from the majority."
    else:
        head = f"{name_ranks(odd)} differ from the majority."
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"\n  and {len(lines) - _MOST_LINES} more"]
    return head + "".join(lines)


def excerpt(value: str, other: str, width: int = 160) -> str:
    """``value``, or of a long one the part where it first differs from ``other``."""
    if len(value) <= width:
        return value
    same = next(
        (i for i, (a, b) in enumerate(zip(value, other, strict=False)) if a != b),
        min(len(value), len(other)),
    )
    start = max(0, min(same - width // 4, len(value) - width))
    end = start + width
    return f"{'...' if start else ''}{value[start:end]}{'...' if end < len(value) else ''}"


def name_ranks(ranks: Iterable[int], most: int = 8) -> str:
    """``rank 3`` or ``ranks 0-4, 7``; of many ranges the first ones."""
    ordered = sorted(ranks)
    ranges: list[tuple[int, int]] = []
    for rank in ordered:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:most]]
    rest = sum(last - first + 1 for first, last in ranges[most:])
    more = f" and {rest} more" if rest else ""
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(parts)}{more}"


def seconds(time: timedelta) -> str:
    return f"{time.total_seconds():g} s"
