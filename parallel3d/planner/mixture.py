"""Expert parallelism (ep): what a rank computes and sends for experts, modelled on ``parallel3d.ep``.

Each rank of tp sends its own part of the tokens. A token is sent to a rank once (a *row*), however many of
its experts that rank has, with a weight and an index for each of these (a *pair*). The rank sums the outputs
of the token's experts and sends one row back.
"""

from __future__ import annotations

from typing import NamedTuple

from parallel3d.ep.division import Division
from parallel3d.planner.context import Exchange
from parallel3d.planner.model_spec import UnitSpec
from parallel3d.planner.routing import PeakLoad, peak
from parallel3d.planner.workload import Local

_NUMBERS = 8  # bytes of a pair's expert and row
_COUNTS = 16  # bytes of the numbers of rows and of pairs in a message


class ExpertShare(NamedTuple):
    """What the rank with most tokens (the fullest rank) computes and sends for one layer of experts.

    Attributes:
        hidden: features of a token.
        experts, chosen: number of experts that it has, and that a token goes through.
        tokens: tokens that a rank sends, for each token of its data-parallel rank: 1 / tp of them.
        rows, pairs: rows and pairs that it receives, for each token that a rank sends.
        sent: rows that a rank sends, for each token that it sends.
    """

    hidden: int
    experts: int
    chosen: int
    tokens: float
    rows: float
    pairs: float
    sent: float


def share_of(unit: UnitSpec, local: Local) -> ExpertShare | None:
    """Returns the fullest rank's share of the experts of ``unit``; None without ep or experts."""
    first = next((matmul for matmul in unit.matmuls if matmul.experts is not None), None)
    if local.ep == 1 or first is None or (routed := first.experts) is None:
        return None
    found, even = (peak(r, *routed, local.ep) for r in (local.work.routing, "uniform"))
    held = Division(routed[0], local.ep).chunk
    return ExpertShare(
        first.k,
        held,
        routed[1],
        local.tokens / local.tp,
        found.rows,
        found.pairs * routed[1],
        even.rows,
    )


def exchanges(unit: UnitSpec, local: Local) -> tuple[Exchange, ...]:
    """Returns the all-to-alls over ``ep`` of one layer for one micro-batch, in their order."""
    if (own := share_of(unit, local)) is None:
        return ()
    itemsize = local.work.compute_itemsize
    row, pair = own.hidden * itemsize, own.tokens * own.pairs
    rows, sent = own.tokens * own.rows * row, own.tokens * own.sent * row
    # Rows are picked to be sent, and again for each pair; outputs are added up on both sides.
    picked, added = 2 * sent + 2 * pair * row, 3 * sent + 3 * pair * row
    return (
        Exchange("forward", "counts", local.ep * _COUNTS),
        Exchange("forward", "rows", rows, picked),
        Exchange("forward", "weights", pair * itemsize),
        Exchange("forward", "pairs", pair * _NUMBERS),
        Exchange("forward", "outputs", rows, added),
        Exchange("backward", "outputs", rows, picked),
        Exchange("backward", "rows", rows, added),
        Exchange("backward", "weights", pair * itemsize),
    )


def received_bytes(unit: UnitSpec, local: Local) -> float:
    """Returns the bytes that a rank receives in a layer's forward, by token of its data-parallel rank."""
    if (own := share_of(unit, local)) is None:
        return 0.0
    itemsize = local.work.compute_itemsize
    rows = (own.rows + own.sent) * own.hidden * itemsize
    return (rows + own.pairs * (itemsize + _NUMBERS)) / local.tp


def load(unit: UnitSpec, local: Local) -> PeakLoad:
    """Returns (rows, pairs) of the fullest rank, as multiples of what a data-parallel rank has without ep."""
    own = share_of(unit, local)
    if own is None:
        return PeakLoad(1.0, 1.0)
    return PeakLoad(own.rows / local.tp, own.pairs / own.chosen / local.tp)
