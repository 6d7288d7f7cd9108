"""Experts over ``ep``: what a rank computes of them, and what it sends, as ``parallel3d.ep`` does.

Each rank of tp sends its own part of the tokens. A token goes to a rank once (a *row*), and the weights and
numbers of its experts there (*pairs*) with it; the rank sums their outputs and sends one row back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from parallel3d.ep.division import Division
from parallel3d.planner.model_spec import Matmul, UnitSpec
from parallel3d.planner.routing import PeakLoad, peak
from parallel3d.planner.workload import Local

_NUMBERS = 8  # bytes of a pair's expert and row
_COUNTS = 16  # bytes of the numbers of rows and of pairs in a message


class ExpertShare(NamedTuple):
    """What the fullest rank of ep has of one layer.

    Attributes:
        hidden: features of a token.
        experts: how many it has; chosen: how many a token goes through.
        tokens: that a rank sends: for each of a rank of data, one of tp's.
        rows, pairs: that come to it, for each of these.
        sent: rows that a rank sends, for each of these.
    """

    hidden: int
    experts: int
    chosen: int
    tokens: float
    rows: float
    pairs: float
    sent: float


@dataclass(frozen=True)
class ExpertExchange:
    """An all-to-all over ``ep`` of one layer and micro-batch.

    Attributes:
        way: "forward" or "backward".
        name: of what is sent.
        nbytes: that come to the fullest rank.
        copied: bytes that its packing and unpacking move.
    """

    way: str
    name: str
    nbytes: float
    copied: float = 0.0


def expert_matmuls(unit: UnitSpec) -> tuple[Matmul, ...]:
    """Those of which each token goes through some."""
    return tuple(matmul for matmul in unit.matmuls if matmul.experts is not None)


def share_of(unit: UnitSpec, local: Local) -> ExpertShare | None:
    """The fullest rank's share of the experts of ``unit``; None where ep is 1, or there are none."""
    matmuls = expert_matmuls(unit) if local.ep > 1 else ()
    if not matmuls or (routed := matmuls[0].experts) is None:
        return None
    found, even = (peak(r, *routed, local.ep) for r in (local.work.routing, "uniform"))
    held = Division(routed[0], local.ep).chunk
    return ExpertShare(
        matmuls[0].k,
        held,
        routed[1],
        local.tokens / local.tp,
        found.rows,
        found.pairs * routed[1],
        even.rows,
    )


def exchanges(unit: UnitSpec, local: Local) -> tuple[ExpertExchange, ...]:
    """The all-to-alls over ``ep`` of one layer and micro-batch, in their order."""
    if (own := share_of(unit, local)) is None:
        return ()
    itemsize = local.work.compute_itemsize
    row, pair = own.hidden * itemsize, own.tokens * own.pairs
    rows, sent = own.tokens * own.rows * row, own.tokens * own.sent * row
    # Rows are picked to be sent, and again for each pair; outputs are added up on both sides.
    picked, added = 2 * sent + 2 * pair * row, 3 * sent + 3 * pair * row
    return (
        ExpertExchange("forward", "counts", local.ep * _COUNTS),
        ExpertExchange("forward", "rows", rows, picked),
        ExpertExchange("forward", "weights", pair * itemsize),
        ExpertExchange("forward", "pairs", pair * _NUMBERS),
        ExpertExchange("forward", "outputs", rows, added),
        ExpertExchange("backward", "outputs", rows, picked),
        ExpertExchange("backward", "rows", rows, added),
        ExpertExchange("backward", "weights", pair * itemsize),
    )


def received_bytes(unit: UnitSpec, local: Local) -> float:
    """Bytes for each of a rank's tokens that the exchanges of one layer's forward bring."""
    if (own := share_of(unit, local)) is None:
        return 0.0
    itemsize = local.work.compute_itemsize
    rows = (own.rows + own.sent) * own.hidden * itemsize
    return (rows + own.pairs * (itemsize + _NUMBERS)) / local.tp


def load(unit: UnitSpec, local: Local) -> PeakLoad:
    """(rows, pairs) of the fullest rank beside what the tokens of a rank of data are without ep."""
    own = share_of(unit, local)
    if own is None:
        return PeakLoad(1.0, 1.0)
    return PeakLoad(own.rows / local.tp, own.pairs / own.chosen / local.tp)
