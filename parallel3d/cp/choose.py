"""Which heads each rank has in Ulysses, what each kind of attention communicates, and the choice of a kind:
numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from parallel3d._layout.heads import attended_heads
from parallel3d.errors import PlanError

if TYPE_CHECKING:  # the planner, which imports no torch, chooses too
    from parallel3d.cp.sequence import Kind

GATHERED = 256 << 20
"""Bytes of a layer's gathered K and V above which ``choose`` gathers no more."""


@dataclass(frozen=True)
class Share:
    """The heads that one rank has in Ulysses.

    Attributes:
        first, number: its first query head, and how many it has.
        kv_first, kv_number: the same of the K/V heads that these attend to.
        kv_of: for each of its query heads the index of the K/V head among the rank's own; None if the usual
            grouping holds (all K/V heads have equally many query heads, in order), as attention kernels
            expect.
    """

    first: int
    number: int
    kv_first: int
    kv_number: int
    kv_of: tuple[int, ...] | None


def share_heads(heads: int, kv_heads: int, size: int) -> tuple[Share, ...]:
    """Divides the heads of an attention over ``size`` ranks: query heads as evenly as possible, each rank
    with the K/V heads that they attend to. ``heads``, ``kv_heads``: numbers of heads that tensor parallelism
    leaves. Raises PlanError if there are fewer query heads than ranks."""
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


class Traffic(NamedTuple):
    """Bytes that one layer's attention communicates over ``cp``, on one rank.

    Attributes:
        forward, backward: bytes as ``record_collectives`` counts them: for each call the larger of its input
            and its output. Recomputation in backward communicates ``forward`` once more.
        sent: bytes that the rank sends in forward and backward together.
    """

    forward: int
    backward: int
    sent: int


def bytes_per_layer(
    kind: Kind,
    *,
    size: int,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    channels: int,
    value_channels: int | None = None,
    itemsize: int = 2,
    key_mask: bool = False,
) -> Traffic:
    """Returns the bytes that a layer's attention communicates.

    If ranks differ (Ulysses with heads that ``size`` does not divide), they are those of the rank with most.

    Args:
        kind: ``"ulysses"``, ``"gather"`` or ``"ring"``.
        size: ranks of ``cp``.
        batch: sequences.
        length: tokens of the padded sequence.
        heads, kv_heads: numbers of heads that tensor parallelism leaves to a rank.
        channels, value_channels: size of a head of q and k, and of v; by default the same.
        itemsize: bytes of an element.
        key_mask: whether a mask of keys is gathered too.

    Raises:
        PlanError: there are fewer query heads than ranks, for Ulysses.
    """
    if size == 1:
        return Traffic(0, 0, 0)
    values = channels if value_channels is None else value_channels
    rows = length // size
    cell = batch * rows * itemsize  # one channel of one head of this rank's positions
    flags = batch * length if key_mask else 0
    apart = (size - 1) / size
    if kind == "ulysses":
        shares = share_heads(heads, kv_heads, size)
        kv_sent = sum(share.kv_number for share in shares)
        out = heads * channels + kv_sent * (channels + values)
        each = [s.number * channels + s.kv_number * (channels + values) for s in shares]
        back = max(heads, *(size * s.number for s in shares)) * values
        total = (max(out, size * max(each)) + back) * cell
        return Traffic(total + flags, total, round(apart * (2 * total + flags)))
    pair = kv_heads * (channels + values) * cell  # K and V of this rank's positions
    if kind == "gather":
        return Traffic(size * pair + flags, size * pair, round(apart * (2 * size * pair + flags)))
    forward, backward = (size - 1) * pair, (2 * size - 1) * pair
    return Traffic(forward + flags, backward, forward + backward + round(apart * flags))


@dataclass(frozen=True)
class Choice:
    """A kind of attention, ``kind``, and a sentence that says why it was chosen, ``reason``."""

    kind: Kind
    reason: str


def choose(
    *,
    size: int,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    channels: int,
    itemsize: int = 2,
    causal: bool = True,
    balanced: bool = True,
) -> Choice:
    """Returns the kind of attention that ``"auto"`` chooses by heads, length and bytes.

    It is Ulysses, which computes whole sequences in one kernel, if ``size`` divides the query heads and
    Ulysses sends no more bytes than an all-gather. Otherwise it is an all-gather while the gathered K and V
    are small, and else the ring, which never holds the whole K and V and overlaps communication.

    Args:
        size, batch, length, heads, kv_heads, channels, itemsize: see ``bytes_per_layer``.
        causal: whether queries see no later keys.
        balanced: whether each rank has a head and a tail of the sequence.
    """
    numbers: dict[str, Any] = {"size": size, "batch": batch, "length": length, "heads": heads}
    numbers |= {"kv_heads": kv_heads, "channels": channels, "itemsize": itemsize}
    gathered = bytes_per_layer("gather", **numbers).sent
    whole = 2 * batch * length * kv_heads * channels * itemsize
    if heads % size == 0:
        ulysses = bytes_per_layer("ulysses", **numbers).sent
        if causal and not balanced:
            return Choice(
                "ulysses",
                "under a causal mask ranks with contiguous parts of the sequence have different work, but "
                f"for Ulysses, and cp={size} divides the {heads} heads",
            )
        if ulysses <= gathered:
            return Choice(
                "ulysses",
                f"cp={size} divides the {heads} heads, and Ulysses sends {_mb(ulysses)} a layer where an "
                f"all-gather of K and V sends {_mb(gathered)}",
            )
        other = f"an all-gather of K and V sends {_mb(gathered)} a layer where Ulysses sends {_mb(ulysses)}"
    else:
        other = f"cp={size} does not divide the {heads} heads"
    if whole <= GATHERED:
        return Choice("gather", f"{other}, and K and V of the whole sequence take {_mb(whole)}")
    return Choice(
        "ring",
        f"{other}, and K and V of the whole sequence would take {_mb(whole)} a layer, more than "
        f"{_mb(GATHERED)}",
    )


def _mb(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
