"""Context parallelism: what attention sends over ``cp``, and what a rank computes and keeps of it.

Bytes, heads and the choice of "auto" are those of ``parallel3d.cp``. The parts of a sequence are balanced: a
rank has one from its head and one from its tail, so that all ranks compute equally many causal scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from parallel3d.cp.choose import bytes_per_layer, choose, share_heads
from parallel3d.planner.heads import HeadShare, local_heads
from parallel3d.planner.model_spec import AttentionSpec, ModelSpec
from parallel3d.planner.workload import Local

# Bytes an element that one more block of keys moves: the fp32 result is scaled, the block's bf16 result is
# scaled to fp32 and added; in backward the block's gradient of the queries is added to an fp32 one.
_JOINED, _ADDED = 26, 10
# How often a rank's packing and unpacking move the bytes of a collective.
_COPIES = {"all_to_all": 4, "all_gather": 2, "reduce_scatter": 2, "send": 0}


@dataclass(frozen=True)
class Exchange:
    """``count`` equal collectives over ``cp`` of one attention layer.

    Attributes:
        way: "forward" or "backward".
        operation: "all_to_all", "all_gather", "reduce_scatter" or "send".
        nbytes: bytes of one collective, as ``collective_time`` counts: of the gathered tensor, or of the
            tensor that the rank has.
    """

    way: str
    operation: str
    nbytes: float
    count: int

    @property
    def beside(self) -> bool:
        """Whether attention computes beside them."""
        return self.operation == "send"

    @property
    def copied(self) -> float:
        """Bytes that the packing and unpacking of one move."""
        return _COPIES[self.operation] * self.nbytes


@dataclass(frozen=True)
class AttentionShare:
    """What a rank computes of one attention layer.

    Attributes:
        heads: numbers of query heads, and of key and value heads.
        part: fraction of these heads' scores that the rank computes.
        length: tokens of the sequences that a kernel sees.
        joins: number of partial results, each over some of the keys, that are combined for a query.
    """

    heads: HeadShare
    part: float
    length: int
    joins: float = 0.0


class Kept(NamedTuple):
    """Numbers of elements that one attention layer stores for each token of a rank.

    Attributes:
        beyond: elements kept for backward in addition to those that are kept without ``cp``.
        received: elements in results of the collectives over ``cp``.
    """

    beyond: float
    received: float


def _numbers(attention: AttentionSpec, local: Local) -> dict[str, Any]:
    """What ``bytes_per_layer`` and ``choose`` take."""
    mine, work = local_heads(attention, local.tp), local.work
    return {
        "size": local.cp,
        "batch": local.micro_batch,
        "length": work.local_tokens(local.cp) * local.cp,
        "heads": mine.query,
        "kv_heads": mine.paired if mine.query % mine.paired == 0 else mine.query,
        "channels": attention.head_dim,
        "itemsize": work.compute_itemsize,
    }


def why_not_ulysses(attention: AttentionSpec, tp: int, cp: int) -> str | None:
    """Why all-to-alls can't share this layer's heads, in words; None if they can."""
    mine = local_heads(attention, tp).query
    return f"cp {cp} is more than the {mine} heads of a tp rank" if mine < cp else None


def chosen(model: ModelSpec, local: Local) -> str:
    """The kind of attention over ``cp`` that the workload names; of "auto" the one that the library takes."""
    every = [(u.count, a) for u in model.units for a in u.attention]
    if local.work.cp_attention != "auto" or not every:
        return local.work.cp_attention
    _, attention = max(every, key=lambda each: each[0])
    return choose(causal=attention.causal, **_numbers(attention, local)).kind


def share_of(attention: AttentionSpec, local: Local) -> AttentionShare:
    """The share of the fullest rank."""
    mine, work, cp = local_heads(attention, local.tp), local.work, local.cp
    if cp == 1:
        return AttentionShare(mine, 1.0, work.seq_len)
    if work.cp_attention == "ulysses":
        numbers = _numbers(attention, local)
        shares = share_heads(numbers["heads"], numbers["kv_heads"], cp)
        kv = max(share.kv_number for share in shares)
        return AttentionShare(HeadShare(max(s.number for s in shares), kv, kv), 1.0, work.seq_len)
    # A causal mask leaves a query the keys before its own part, and some of its part.
    diagonal = 2.0 if attention.causal else 1.0
    if work.cp_attention == "gather":
        return AttentionShare(mine, 1 / cp, work.seq_len, diagonal)
    return AttentionShare(mine, 1 / cp, work.local_tokens(cp), cp - 1 + diagonal)


def exchanges(attention: AttentionSpec, local: Local) -> tuple[Exchange, ...]:
    """The collectives over ``cp`` of one layer and micro-batch."""
    if (cp := local.cp) == 1:
        return ()
    kind: Any = local.work.cp_attention
    traffic = bytes_per_layer(kind, **_numbers(attention, local))
    calls = {
        "ulysses": (("all_to_all", 2), ("all_to_all", 2)),
        "gather": (("all_gather", 1), ("reduce_scatter", 1)),
        "ring": (("send", cp - 1), ("send", 2 * cp - 1)),
    }[kind]
    return tuple(
        Exchange(way, operation, nbytes / count, count)
        for way, (operation, count), nbytes in zip(
            ("forward", "backward"), calls, traffic[:2], strict=True
        )
    )


def kept(attention: AttentionSpec, local: Local) -> Kept:
    """What one layer's attention over ``cp`` keeps."""
    if (cp := local.cp) == 1:
        return Kept(0.0, 0.0)
    mine, dim = local_heads(attention, local.tp), attention.head_dim
    if local.work.cp_attention == "ulysses":
        pairs = max(cp * share_of(attention, local).heads.paired, mine.paired)
        # The result both as attention gives it and as it goes on; keys and values that several ranks need.
        beyond = mine.query + 2 * (pairs - mine.paired)
        return Kept(beyond * dim, (2 * mine.query + 2 * pairs) * dim)
    others = 2 * (cp - 1) * mine.paired * dim  # keys and values of the other ranks
    if local.work.cp_attention == "gather":
        return Kept(others, others + 2 * mine.paired * dim)
    return Kept(0.0, others)


def working_bytes(attention: AttentionSpec, local: Local) -> float:
    """Bytes for each of a rank's tokens that one layer's attention holds for a moment in backward."""
    work, cp = local.work, local.cp
    if cp == 1:
        return 0.0
    mine, itemsize, dim = (
        local_heads(attention, local.tp),
        work.compute_itemsize,
        attention.head_dim,
    )
    pair = 2 * mine.paired * dim
    if work.cp_attention == "ulysses":  # a sent and a received buffer
        return 2 * (mine.query * dim + pair) * itemsize
    queries = 4 * mine.query * dim  # their gradient in fp32
    if work.cp_attention == "gather":
        # Gradients of all keys and values, in fp32 and as they are reduced.
        return queries + cp * pair * (4 + itemsize)
    # An fp32 gradient; what comes and goes, and its gradients.
    return queries + pair * (4 + 4 * itemsize)


def joined_bytes(attention: AttentionSpec, local: Local) -> tuple[float, float]:
    """(forward, backward) bytes for each of a rank's tokens that joining results moves."""
    share = share_of(attention, local)
    elements = share.joins * share.heads.query * attention.head_dim
    return elements * _JOINED, elements * _ADDED
