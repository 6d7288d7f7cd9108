"""Which heads each rank computes in Ulysses: pure numbers."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d._layout.heads import attended_heads
from parallel3d.errors import PlanError


@dataclass(frozen=True)
class Share:
    """One rank's heads.

    Attributes:
        first, number: its query heads.
        kv_first, kv_number: the K/V heads that these attend to.
        kv_of: of each of its query heads, which of its K/V heads; None where they are equal groups in order,
            as attention takes them.
    """

    first: int
    number: int
    kv_first: int
    kv_number: int
    kv_of: tuple[int, ...] | None


def share_heads(heads: int, kv_heads: int, size: int) -> tuple[Share, ...]:
    """Returns each rank's heads: query heads as evenly as possible, with the K/V heads that they attend to.

    Args:
        heads, kv_heads: of this rank, after tensor parallelism has taken its share.

    Raises:
        PlanError: there are fewer query heads than ranks.
    """
    if heads < size:
        raise PlanError(
            f'kind="ulysses" gives each of cp={size} ranks whole heads, and there are {heads} (after tp has '
            f'taken its share): use cp={heads} or less, or kind="gather" or "ring", which split no heads'
        )
    shares, first = [], 0
    for attended in attended_heads(heads, kv_heads, size):
        number, kv_first = len(attended), attended[0]
        kv_number = attended[-1] - kv_first + 1
        kv_of = tuple(head - kv_first for head in attended)
        each = number // kv_number
        equal = kv_of == tuple(i // each for i in range(number)) and number % kv_number == 0
        shares.append(Share(first, number, kv_first, kv_number, None if equal else kv_of))
        first += number
    return tuple(shares)
